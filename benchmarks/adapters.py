"""Transactions a second through each adapter at 1 and 16 threads, beside the blocking client alone.

Each transaction publishes one message to a dtx without a broker (an embedded PostgreSQL keeps it), in two phases. The
adapters do the same work by other ways: what one costs is the difference to "wire", which sends the same methods and
keeps no decision. The transaction manager's have two dtx each, for a single one commits in one phase without its log.

Run: python -m benchmarks.adapters [--seconds 5]
"""

import argparse
import asyncio
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pika
import transaction

from dtx.client import XAResource, Xid, aio
from dtx.client.tm import DtxResource, TransactionManager
from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncTransactionManager
from dtx.client.tpc import TwoPhaseConnection
from dtx.client.zope import join
from tests.support.postgres import PostgresServer
from tests.support.service import DtxService

BODY = bytes(100)
PERSISTENT = pika.BasicProperties(delivery_mode=2)
_numbers = itertools.count(1)


def new_xid(bqual: bytes = b"q") -> Xid:
    """An xid that nobody has used."""
    return Xid(7, os.urandom(8) + next(_numbers).to_bytes(8, "big"), bqual)


@contextmanager
def channel_of(url: str) -> Iterator[Any]:
    """A channel of its own connection."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        yield connection.channel()
    finally:
        connection.close()


@contextmanager
def wire(urls: list[str]) -> Iterator[Callable[[], None]]:
    """start, publish, end, prepare, commit, with nothing around it; at every dtx of *urls*."""
    with ExitStack() as stack:
        channels = [stack.enter_context(channel_of(url)) for url in urls]
        resources = [XAResource(channel) for channel in channels]

        def one() -> None:
            xid = new_xid()
            for xa in resources:
                xa.start(xid)
                xa.channel.basic_publish("", "q", BODY, PERSISTENT)
            for xa in resources:
                xa.end(xid)
            for xa in resources:
                xa.prepare(xid)
            for xa in resources:
                xa.commit(xid)

        yield one


@contextmanager
def pep249(urls: list[str]) -> Iterator[Callable[[], None]]:
    """``dtx.client.tpc``, one dtx."""
    with channel_of(urls[0]) as channel:
        connection = TwoPhaseConnection(channel)

        def one() -> None:
            connection.tpc_begin(new_xid())
            channel.basic_publish("", "q", BODY, PERSISTENT)
            connection.tpc_prepare()
            connection.tpc_commit()

        yield one


def threads(number: int, seconds: float, made: Callable[[], Any]) -> float:
    """Transactions a second of so many threads, each with what *made* gives it."""
    counts = [0] * number
    ready, go = threading.Barrier(number + 1), threading.Event()
    end = [0.0]

    def work(position: int) -> None:
        with made() as one:
            one()
            ready.wait()
            go.wait()
            while time.perf_counter() < end[0]:
                one()
                counts[position] += 1

    workers = [threading.Thread(target=work, args=(position,)) for position in range(number)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    end[0] = began + seconds
    go.set()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began)


async def tasks(number: int, seconds: float, one: Callable[[], Any]) -> float:
    """Transactions a second of so many tasks."""
    await asyncio.gather(*(one() for _ in range(number)))
    began = time.perf_counter()
    count = 0

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < began + seconds:
            await one()
            count += 1

    await asyncio.gather(*(work() for _ in range(number)))
    return count / (time.perf_counter() - began)


def through_tm(urls: list[str], log: str, number: int, seconds: float) -> float:
    """``dtx.client.tm``."""
    resources = [DtxResource(f"q{position}", url) for position, url in enumerate(urls)]
    with TransactionManager(node="bench", log=log, resources=resources, recover_every=None) as tm:

        @contextmanager
        def made() -> Iterator[Callable[[], None]]:
            def one() -> None:
                with tm.transaction() as tx:
                    for resource in resources:
                        tx.enlist(resource).basic_publish("", "q", BODY, PERSISTENT)

            yield one

        return threads(number, seconds, made)


def through_zope(urls: list[str], log: str, number: int, seconds: float) -> float:
    """``dtx.client.zope``, one dtx."""
    with TransactionManager(node="bench", log=log, resources=[DtxResource("q", urls[0])], recover_every=None) as tm:

        @contextmanager
        def made() -> Iterator[Callable[[], None]]:
            def one() -> None:
                with transaction.manager:
                    join(tm, "q").basic_publish("", "q", BODY, PERSISTENT)

            yield one

        return threads(number, seconds, made)


async def through_aio(urls: list[str], number: int, seconds: float) -> float:
    """``dtx.client.aio``: so many channels, each of its own connection, one dtx."""
    connections = [await aio_pika.connect(urls[0]) for _ in range(number)]
    free: list[Any] = []
    for connection in connections:
        channel = await connection.channel(publisher_confirms=False)
        free.append((aio.XAResource(channel), channel))

    async def one() -> None:
        xa, channel = free.pop()
        xid = new_xid()
        await xa.start(xid)
        await channel.default_exchange.publish(aio_pika.Message(BODY, delivery_mode=2), "q")
        await xa.end(xid)
        await xa.prepare(xid)
        await xa.commit(xid)
        free.append((xa, channel))

    rate = await tasks(number, seconds, one)
    for connection in connections:
        await connection.close()
    return rate


async def through_async_tm(urls: list[str], log: str, number: int, seconds: float) -> float:
    """``dtx.client.tm.asynchronous``."""
    resources = [AsyncDtxResource(f"q{position}", url) for position, url in enumerate(urls)]
    async with AsyncTransactionManager(node="bench", log=log, resources=resources, recover_every=None) as tm:

        async def one() -> None:
            async with tm.transaction() as tx:
                for resource in resources:
                    channel = await tx.enlist(resource)
                    await channel.default_exchange.publish(aio_pika.Message(BODY, delivery_mode=2), "q")

        return await tasks(number, seconds, one)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    seconds: float = parser.parse_args().seconds
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer("bench"))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = []
        for _ in range(2):
            service = stack.enter_context(DtxService(database=server.create_database()))
            urls.append(service.url())
            with channel_of(service.url()) as channel:
                channel.queue_declare("q", durable=True, arguments={"x-max-length": 1000})
        logs = (str(directory / f"tm{number}.db") for number in itertools.count())
        print(f"{'transactions a second':40} {'1 thread':>10} {'16 threads':>11}")
        measurements: list[tuple[str, Callable[[int], float]]] = [
            ("wire, one dtx", lambda n: threads(n, seconds, lambda: wire(urls[:1]))),
            ("dtx.client.tpc, one dtx", lambda n: threads(n, seconds, lambda: pep249(urls))),
            ("dtx.client.aio, one dtx (tasks)", lambda n: asyncio.run(through_aio(urls, n, seconds))),
            ("dtx.client.zope, one dtx", lambda n: through_zope(urls, next(logs), n, seconds)),
            ("wire, two dtx", lambda n: threads(n, seconds, lambda: wire(urls))),
            ("dtx.client.tm, two dtx", lambda n: through_tm(urls, next(logs), n, seconds)),
            ("dtx.client.tm, two dtx (tasks)", lambda n: asyncio.run(through_async_tm(urls, next(logs), n, seconds))),
        ]
        for name, measure in measurements:
            print(f"{name:40} {measure(1):10.0f} {measure(16):11.0f}", flush=True)


if __name__ == "__main__":
    main()
