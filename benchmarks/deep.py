"""Deep queues in standalone mode: their memory, their speed, and the delay of other clients.

A client publishes a backlog into one queue, far more than the cache of messages can hold, and consumes it again,
comparing each body. Then come operations on many messages or queues at once: purge and deletion of a deep queue,
branches of ten thousand messages, a queue of length one, very many queues. Meanwhile another client sends small
requests: its longest wait is the delay that an operation causes for all clients. This program starts PostgreSQL and
dtx.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Final, Self

import psycopg

from benchmarks.support import processor
from benchmarks.support.amqp import CHANNEL, RawConnection, message_frames
from benchmarks.support.pauses import Probe
from benchmarks.support.report import Table, machine
from benchmarks.support.servers import Servers
from dtx.client import Xid
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxRollback,
    DtxRollbackOk,
    DtxStart,
    DtxStartOk,
)
from dtx.wire.amqp09.tables import entry
from dtx.xa.codes import XaFlag
from tests.support.raw import Address, Refused
from tests.support.service import DtxService

_STAMP: Final = Struct(">Q")
_BATCH: Final = 500
_PREFETCH: Final = 1000
_BRANCH: Final = 10_000
_CONSUMER: Final = b"deep"
_SETTLED: Final = Struct(">4xQ")
AIM_SECONDS: Final = 0.1


class Bench:
    """One dtx, its probe, and the table of results. Use as a context manager.

    Args:
        service: the running dtx.
        options: of the command line.
    """

    def __init__(self, service: DtxService, options: argparse.Namespace) -> None:
        self.address = Address.of(service.url())
        self.options = options
        self.worst = 0.0
        self._service = service
        self._probe = Probe(self.address, service.pid)
        heads = ["seconds", "a second", "processor µs each", "resident MiB", "worst wait ms", "of that dtx ms"]
        self._table = Table(("what", 40), heads)

    def __enter__(self) -> Self:
        self._probe.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.__exit__()

    def restart(self) -> None:
        """Kill dtx and start it again."""
        self._probe.__exit__()
        self._service.kill9()
        began = time.monotonic()
        self._service.start()
        ready = time.monotonic() - began
        self._probe = Probe(self.address, self._service.pid)
        self._probe.__enter__()
        seconds = time.monotonic() - began
        self._table.row("killed and started again", [f"{ready:.2f}", "", "", self._resident(), "", ""])
        print(f"(answered the first client after {seconds:.2f} s)")

    def wait_removed(self) -> None:
        """Return when the database has no message any more."""
        assert self._service.database is not None
        with psycopg.connect(self._service.database, autocommit=True) as connection:
            while connection.execute("SELECT FROM dtx.message LIMIT 1").fetchone() is not None:
                time.sleep(0.2)

    def _resident(self) -> str:
        return f"{processor.resident(self._service.pid) / 2**20:.0f}"

    @contextmanager
    def measured(self, what: str, count: int) -> Iterator[None]:
        """Measure the block, which does *count* operations, and print a row."""
        self._probe.worst()
        began, used = time.monotonic(), processor.seconds(self._service.pid)
        yield
        seconds = time.monotonic() - began
        used = processor.seconds(self._service.pid) - used
        wall, busy = self._probe.worst()
        self.worst = max(self.worst, busy)
        self._table.row(
            what,
            [
                f"{seconds:.2f}",
                f"{count / seconds:,.0f}",
                f"{used / count * 1e6:.1f}",
                self._resident(),
                f"{wall * 1e3:.0f}",
                f"{busy * 1e3:.0f}",
            ],
        )


class Client(RawConnection):
    """A connection that publishes numbered messages and compares the received ones.

    Args:
        address: of dtx.
        size: of bodies, in bytes.
    """

    def __init__(self, address: Address, size: int) -> None:
        super().__init__(address)
        self._size = size
        self._confirmed = 0

    def messages(self, queue: bytes, first: int, count: int) -> bytes:
        """Return frames that publish messages numbered from *first* on."""
        rest = bytes(self._size - _STAMP.size)
        numbers = range(first, first + count)
        return b"".join(message_frames(b"", queue, _STAMP.pack(number) + rest) for number in numbers)

    def fill(self, queue: bytes, count: int) -> None:
        """Publish messages with confirms, some hundred at a time, into an existing queue."""
        self.select_confirms()
        for first in range(0, count, _BATCH):
            self.socket.sendall(self.messages(queue, first, min(_BATCH, count - first)))
            self.confirm(first - 3 * _BATCH)
        self.confirm(count)

    def confirm(self, count: int) -> None:
        """Wait until *count* messages are confirmed: dtx confirms in order."""
        while self._confirmed < count:
            self._confirmed = _SETTLED.unpack_from(self.read_method(CHANNEL, methods.BasicAck.KEY))[0]

    def consume(self, queue: bytes, count: int, *, prefetch: int, ack: bool) -> int:
        """Consume messages from the head on, numbered from 0, and return the tag of the last one.

        Raises:
            Refused: a message has another body, or came in another order.
        """
        self.call(methods.BasicQos(0, prefetch), methods.BasicQosOk)
        self.call(methods.BasicConsume(queue, _CONSUMER), methods.BasicConsumeOk)
        rest = bytes(self._size - _STAMP.size)
        for number, body in enumerate(self.bodies(count)):
            if body != _STAMP.pack(number) + rest:
                raise Refused(f"expected message {number} and got {body[:80].hex(' ')}")
            if ack and ((number + 1) % (prefetch // 4) == 0 or number + 1 == count):
                self.say(CHANNEL, methods.BasicAck(number + 1, multiple=True))
        return count

    def run(self, call: DtxCall, answer: type[Method]) -> None:
        """Send a dtx method.

        Raises:
            Refused: the answer is not xa-ok.
        """
        flags = self.call(call, answer)[-2:]
        if flags != XaFlag.OK.to_bytes(2, "big"):
            raise Refused(f"{call} was answered {flags.hex()}")


def backlog(bench: Bench) -> None:
    """Publish and consume a deep queue."""
    size, count = bench.options.size, bench.options.messages
    with Client(bench.address, size) as client:
        client.declare(b"deep")
        with bench.measured("publish", count):
            client.fill(b"deep", count)
    with Client(bench.address, size) as client, bench.measured("consume, ack in order", count):
        client.consume(b"deep", count, prefetch=_PREFETCH, ack=True)
        if client.depth(b"deep"):
            raise Refused("the queue should be empty")


def removals(bench: Bench) -> None:
    """Purge and delete deep queues."""
    size, count = bench.options.size, bench.options.messages
    with Client(bench.address, size) as client:
        client.declare(b"deep")
        client.fill(b"deep", count)
        with bench.measured("purge", count):
            client.call(methods.QueuePurge(b"deep"), methods.QueuePurgeOk)
        if client.depth(b"deep"):
            raise Refused("the queue should be empty")
    with Client(bench.address, size) as client:
        client.fill(b"deep", count)
        with bench.measured("delete", count):
            client.delete(b"deep")
            bench.wait_removed()


def branches(bench: Bench) -> None:
    """Commit and roll back large branches, and close a channel with many unacknowledged messages."""
    size = bench.options.size
    with Client(bench.address, size) as client:
        client.select_dtx()
        for name, outcome, answer in (
            ("commit", DtxCommit, DtxCommitOk),
            ("rollback", DtxRollback, DtxRollbackOk),
        ):
            client.declare(b"branch")
            xid = Xid(1, os.urandom(16), b"deep")
            client.run(DtxStart(xid=xid), DtxStartOk)
            with bench.measured("publish into a branch", _BRANCH):
                client.socket.sendall(client.messages(b"branch", 0, _BRANCH))
                client.run(DtxEnd(xid=xid), DtxEndOk)
            with bench.measured("prepare a branch that published", _BRANCH):
                client.run(DtxPrepare(xid=xid), DtxPrepareOk)
            with bench.measured(f"{name} of it", _BRANCH):
                client.run(outcome(xid=xid), answer)
    for name, outcome, answer in (
        ("rollback", DtxRollback, DtxRollbackOk),
        ("commit", DtxCommit, DtxCommitOk),
    ):
        with Client(bench.address, size) as client:
            client.select_dtx()
            client.consume(b"branch", _BRANCH, prefetch=_BRANCH, ack=False)
            xid = Xid(1, os.urandom(16), b"deep")
            with bench.measured("consume in a branch", _BRANCH):
                client.run(DtxStart(xid=xid), DtxStartOk)
                client.say(CHANNEL, methods.BasicAck(_BRANCH, multiple=True))
                client.run(DtxEnd(xid=xid), DtxEndOk)
            client.call(methods.BasicCancel(_CONSUMER), methods.BasicCancelOk)
            with bench.measured("prepare a branch that consumed", _BRANCH):
                client.run(DtxPrepare(xid=xid), DtxPrepareOk)
            with bench.measured(f"{name} of it", _BRANCH):
                client.run(outcome(xid=xid), answer)
            if client.depth(b"branch") != (_BRANCH if name == "rollback" else 0):
                raise Refused(f"the {name} has not done what it should have")
    with Client(bench.address, size) as client:
        client.declare(b"branch")
        client.fill(b"branch", _BRANCH)
    with Client(bench.address, size) as client:
        client.consume(b"branch", _BRANCH, prefetch=_BRANCH, ack=False)
        with bench.measured("end of a channel with unacknowledged", _BRANCH):
            client.close()
    with Client(bench.address, size) as client, bench.measured("get again", _BRANCH):
        client.consume(b"branch", _BRANCH, prefetch=_BRANCH, ack=True)


def flood(bench: Bench) -> None:
    """Publish to a queue of length one, and to one whose messages expire after 1 ms."""
    size, count = bench.options.size, bench.options.messages // 5
    length = entry(b"x-max-length", b"l", (1).to_bytes(8, "big"))
    life = entry(b"x-message-ttl", b"l", (1).to_bytes(8, "big"))
    for name, arguments in ((b"x-max-length 1", length), (b"x-message-ttl 1 ms", life)):
        with Client(bench.address, size) as client:
            client.call(methods.QueueDeclare(name, durable=True, arguments=arguments), methods.QueueDeclareOk)
            with bench.measured(f"publish, {name.decode()}", count):
                client.fill(name, count)
            client.delete(name)


def declarations(bench: Bench) -> None:
    """Declare very many queues, publish to each, and restart dtx."""
    count = bench.options.queues
    names = [b"many-%d" % number for number in range(count)]
    with Client(bench.address, bench.options.size) as client:
        with bench.measured("declare durable queues", count):
            for first in range(0, count, _BATCH):
                client.socket.sendall(
                    b"".join(
                        methods.QueueDeclare(name, durable=True, no_wait=True).frame(CHANNEL)
                        for name in names[first : first + _BATCH]
                    )
                )
                client.depth(names[min(first + _BATCH, count) - 1])
        with bench.measured("publish to each", count):
            client.select_confirms()
            frames = [message_frames(b"", name, bytes(bench.options.size)) for name in names]
            for first in range(0, count, _BATCH):
                client.socket.sendall(b"".join(frames[first : first + _BATCH]))
                client.confirm(min(first + _BATCH, count))
    bench.restart()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--messages", type=int, default=1_000_000, help="number of messages in one queue (default 1,000,000)")
    add("--size", type=int, default=200, help="bytes of each body (default 200)")
    add("--queues", type=int, default=100_000, help="number of declared queues (default 100,000)")
    add("--only", choices=sorted(_PARTS), nargs="*", default=list(_PARTS), help="parts to run (default all)")
    return parser.parse_args()


_PARTS = {
    "backlog": backlog,
    "removals": removals,
    "branches": branches,
    "flood": flood,
    "declarations": declarations,
}


def main() -> None:
    options = arguments()
    print(f"bodies of {options.size} bytes; {machine()}")
    with Servers(standalone=True) as servers:
        service = servers.dtx(servers.postgres("pg"))
        with Bench(service, options) as bench:
            for name in options.only:
                _PARTS[name](bench)
        verdict = "reached" if bench.worst <= AIM_SECONDS else "MISSED"
        print(f"\nthe longest piece of work: {bench.worst * 1e3:.0f} ms, aim {AIM_SECONDS * 1e3:.0f} ms: {verdict}")


if __name__ == "__main__":
    main()
