"""Transactions per second through each adapter with 1 and 16 threads, compared with the raw wire.

Each transaction publishes one persistent message of 100 bytes to a standalone dtx, in two phases. "Raw wire" writes
frames that were encoded before, and compares the answers with the expected ones: this is the limit of dtx itself. The
column after each rate has its share of the raw wire's rate. The rows of the transaction manager have two dtx in each
transaction, because it commits with one dtx in one phase without its log. They are compared with the client with two
dtx, which stores no decision.

Python's threads share one processor: 16 of them show the limit of one process. Load generators, dtx and PostgreSQL
share the processors of this machine. If Java or C cannot be compiled, a line says so.

Run: python -m benchmarks.adapters [--seconds 5], which takes three minutes.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aio_pika
import pika
import pytest
import transaction

from benchmarks.support.branch_player import BranchPlayer
from benchmarks.support.dialogue import Cycle
from benchmarks.support.load import Load
from benchmarks.support.report import Table, machine
from dtx.client import XAResource, Xid, aio
from dtx.client.tm import DtxResource, TransactionManager
from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncTransactionManager
from dtx.client.tpc import TwoPhaseConnection
from dtx.client.zope import join
from tests.servers.interop.c.programs import Driver
from tests.servers.interop.java_programs import Java, compiled
from tests.support.postgres import PostgresServer
from tests.support.raw import Address
from tests.support.service import DtxService

BODY = bytes(100)
PERSISTENT = pika.BasicProperties(delivery_mode=2)
T = TypeVar("T")
_numbers = itertools.count(1)


def new_xid(bqual: bytes = b"q") -> Xid:
    return Xid(7, os.urandom(8) + next(_numbers).to_bytes(8, "big"), bqual)


@contextmanager
def channel_of(url: str) -> Iterator[Any]:
    """Open a channel on a new connection."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        yield connection.channel()
    finally:
        connection.close()


@contextmanager
def client(urls: list[str]) -> Iterator[Callable[[], None]]:
    """``dtx.client.XAResource`` alone: start, publish, end, prepare, commit at every dtx of *urls*."""
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
    """Return transactions per second of *number* threads, each with its own function from *made*."""
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
    """Return transactions per second of *number* tasks."""
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
    """``dtx.client.aio``: *number* channels, each with its own connection, one dtx."""
    connections = [await aio_pika.connect(urls[0]) for _ in range(number)]
    free: list[Any] = []
    for connection in connections:
        channel = await connection.channel(publisher_confirms=False)
        free.append((aio.AioXAResource(channel), channel))

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
    resources = [AsyncDtxResource(f"q{position}", url) for position, url in enumerate(urls)]
    async with AsyncTransactionManager(node="bench", log=log, resources=resources, recover_every=None) as tm:

        async def one() -> None:
            async with tm.transaction() as tx:
                for resource in resources:
                    channel = await tx.enlist(resource)
                    await channel.default_exchange.publish(aio_pika.Message(BODY, delivery_mode=2), "q")

        return await tasks(number, seconds, one)


def through_raw_wire(url: str, number: int, seconds: float, first: int) -> float:
    """Encoded frames, written by two load processes."""
    cycle = Cycle(queue=b"q", size=len(BODY))
    with Load(Address.of(url), partial(BranchPlayer, cycle), number, 2, first=first) as load:
        load.wait_connected()
        begin = time.monotonic() + 1
        load.go(begin, begin + seconds)
        return len(load.collect().branches) / seconds


def through_java(java: Java, url: str, number: int, seconds: float) -> float:
    """``DtxXAResource`` in its own process."""
    command = java.command("Load", url, "q", str(number), str(seconds), quick=False)
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def through_c(driver: Driver, url: str, number: int, seconds: float) -> float:
    """The XA switch in a C program; the time includes connecting."""

    def run(branches: int) -> float:
        gtrid = os.urandom(6).hex()
        return float(driver("main", "crowd", "commit", number, branches, "q", gtrid, f"url={url}"))

    few = 20
    return number * (branches := max(few, int(seconds / run(few) * few))) / run(branches)


def compiled_or_not(stack: ExitStack, name: str, make: Callable[[], AbstractContextManager[T]]) -> T | None:
    """Compile a program in another language; print a line if that fails."""
    try:
        return stack.enter_context(make())
    except (pytest.skip.Exception, AssertionError, subprocess.CalledProcessError) as reason:
        print(f"{name} is not measured: {str(reason).strip() or type(reason).__name__}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement (default 5)")
    seconds: float = parser.parse_args().seconds
    print(machine())
    with ExitStack() as stack:
        java = compiled_or_not(stack, "Java", compiled)
        driver = compiled_or_not(stack, "C", Driver)
        server = stack.enter_context(PostgresServer("bench"))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = []
        for _ in range(2):
            service = stack.enter_context(DtxService(database=server.create_database()))
            urls.append(service.url())
            with channel_of(service.url()) as channel:
                channel.queue_declare("q", durable=True, arguments={"x-max-length": 1000})
        logs = (str(directory / f"tm{number}.db") for number in itertools.count())
        firsts = itertools.count(1, 100)
        measurements: list[tuple[str, Callable[[int], float]]] = [
            ("raw wire", lambda n: through_raw_wire(urls[0], n, seconds, next(firsts))),
            ("dtx.client.XAResource", lambda n: threads(n, seconds, lambda: client(urls[:1]))),
            ("dtx.client.tpc", lambda n: threads(n, seconds, lambda: pep249(urls))),
            ("dtx.client.aio (tasks)", lambda n: asyncio.run(through_aio(urls, n, seconds))),
            ("dtx.client.zope", lambda n: through_zope(urls, next(logs), n, seconds)),
        ]
        if java is not None:
            measurements.append(("Java", lambda n: through_java(java, urls[0], n, seconds)))
        if driver is not None:
            measurements.append(("C (XA switch)", lambda n: through_c(driver, urls[0], n, seconds)))
        report("one dtx in each transaction", measurements)
        report(
            "two dtx in each transaction",
            [
                ("dtx.client.XAResource", lambda n: threads(n, seconds, lambda: client(urls))),
                ("dtx.client.tm", lambda n: through_tm(urls, next(logs), n, seconds)),
                (
                    "dtx.client.tm.asynchronous (tasks)",
                    lambda n: asyncio.run(through_async_tm(urls, next(logs), n, seconds)),
                ),
            ],
        )


def report(title: str, measurements: Sequence[tuple[str, Callable[[int], float]]]) -> None:
    """Measure and print a row for each, with its share of the first one."""
    table = Table((f"{title}, a second", 42), ["1 thread", "share", "16 threads", "share"])
    first: dict[int, float] = {}
    for name, measure in measurements:
        cells = []
        for number in (1, 16):
            rate = measure(number)
            cells += [f"{rate:,.0f}", f"{rate / first.setdefault(number, rate):.0%}"]
        table.row(name, cells)


if __name__ == "__main__":
    main()
