"""The command ``dtx`` with a watch on its event loop, which measures the longest step of the loop.

It measures the processor time of the loop's thread between two turns of the watch: other load on the machine changes it
little, and it includes all work without a turn for other tasks.
"""

import asyncio
import contextlib
import faulthandler
import gc
import mmap
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dtx.server import service as served
from dtx.wire.amqp09 import methods
from tests.support.postgres import PostgresServer
from tests.support.processes import unmeasured
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

MOST_MILLISECONDS: Final = 50
"""The limit on a processor that counts to :data:`_COUNT` within :data:`_COUNT_MILLISECONDS`. On a slower or busy
processor both times may be longer.
"""
_COUNT: Final = 20_000
_COUNT_MILLISECONDS: Final = 0.6
_LONGEST: Final = "loop-longest"
"""File in the directory of the process: seconds of the longest step, and milliseconds of a count after it."""
_PAIR: Final = struct.Struct("dd")
_WHERE: Final = "loop-where"
_BEAT: Final = 0.002
_EVERYTHING: Final = 2
"""The oldest generation of the garbage collector."""
_LONG: Final = 0.02


class _Watch:
    def __init__(self) -> None:
        with Path(_LONGEST).open("w+b") as file:
            file.write(bytes(_PAIR.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _PAIR.size)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._used = time.thread_time()
        self._began = time.monotonic()
        self._seen: list[str] = []
        gc.callbacks.append(self._collected)
        threading.Thread(target=self._look, daemon=True).start()
        self._beat()

    def _beat(self) -> None:
        used = time.thread_time()
        gap, self._used = used - self._used, used
        seen, self._seen = self._seen, []
        self._began = time.monotonic()
        longest, _ = _PAIR.unpack(self._memory[:])
        if gap > longest:
            self._memory[:] = _PAIR.pack(gap, _counting() if gap > _LONG else 0.0)
            Path(_WHERE).write_text("\n".join(seen[-8:]))
        self._loop.call_later(_BEAT, self._beat)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            took = time.thread_time() - self._collecting
            if info["generation"] == _EVERYTHING:
                self._used += took  # rare, and not part of a request: see dtx.server.memory
            self._seen.append(f"garbage of generation {info['generation']} was collected: {1000 * took:.1f} ms")

    def _look(self) -> None:
        """Record the stack of the loop when a step takes long."""
        while True:
            time.sleep(_LONG / 4)
            if time.monotonic() - self._began > _LONG:
                self._seen.append(self._stack())

    def _stack(self) -> str:
        """The stack of the loop, read in C: reading running frames from Python crashes the interpreter."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            _, _, rest = file.read().partition(f"Thread 0x{self._thread:016x} (most recent call first):\n")
        stack, _, _ = rest.partition("\n\n")
        return "\n".join(reversed(stack.splitlines()[:8]))


class WatchedService(DtxService):
    """A service whose event loop is watched."""

    def command(self) -> list[str]:
        """The command line, with this module in place of ``dtx``."""
        words = super().command()
        return [*words[:2], "tests.support.loop_watch", *words[3:]]

    def start(self, *, wait: bool = True) -> None:
        """Start it without coverage, which would make each step two or three times as long."""
        with unmeasured():
            super().start(wait=wait)

    def reset(self) -> None:
        """Reset the measurement."""
        with (self.directory / _LONGEST).open("r+b") as file:
            file.write(bytes(_PAIR.size))

    @property
    def longest(self) -> float:
        """The longest step since the last reset, in seconds of processor time."""
        return self._measured()[0]

    @property
    def counting(self) -> float:
        """The duration of the count after that step, in milliseconds."""
        return self._measured()[1]

    def _measured(self) -> tuple[float, float]:
        seconds, counting = _PAIR.unpack((self.directory / _LONGEST).read_bytes())
        return seconds, counting

    @property
    def where(self) -> str:
        """The stacks of the loop during that step."""
        return (self.directory / _WHERE).read_text()


@contextlib.contextmanager
def not_held(service: WatchedService) -> Iterator[None]:
    """Check that the requests in this block do not hold the event loop."""
    service.reset()
    yield
    with logged_in(service.url()):  # usually closed connections have ended by then
        pass
    longest = service.longest * 1000
    most = MOST_MILLISECONDS * slowness(service.counting)
    print(f"LONGEST {longest:.1f} ms of {most:.0f} ms")
    assert longest < most, f"the event loop was held for {longest:.0f} ms, not at most {most:.0f}:\n{service.where}"


def slowness(counting: float = 0.0) -> float:
    """The factor by which the processor is slower than a usual one, now or when a count took *counting* ms."""
    return max(1.0, max(counting, _counting()) / _COUNT_MILLISECONDS)


def _counting() -> float:
    """The duration of a count, in milliseconds of processor time."""
    began, total = time.thread_time(), 0
    for number in range(_COUNT):
        total += number
    return (time.thread_time() - began) * 1000


@pytest.fixture(scope="module")
def watched(postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service for one module, so that no other load is measured."""
    database = postgres.create_database()
    with WatchedService(database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def service(watched: WatchedService) -> Iterator[WatchedService]:
    """The service of ``watched``; the test fails if its event loop was held."""
    with not_held(watched):
        yield watched


# -- helpers that fill a service ---------------------------------------------------------------------------------------


def a_queue(peer: RawClient, *, durable: bool = False, arguments: bytes = b"") -> bytes:
    """A fresh queue, declared on channel 1."""
    queue = f"long-{secrets.token_hex(6)}".encode()
    ask(peer, methods.QueueDeclare(queue, durable=durable, arguments=arguments).encode(), methods.QueueDeclareOk.KEY)
    return queue


def ask(peer: RawClient, payload: bytes, answer: int, channel: int = 1) -> bytes:
    """Send a method and wait for its answer; return the payload."""
    peer.say(channel, payload)
    return peer.wait(answer, channel=channel).payload


def take(peer: RawClient, count: int, wanted: int = methods.BasicDeliver.KEY) -> None:
    """Read *count* frames with key *wanted*; skip others."""
    for _ in range(count):
        peer.wait(wanted)


def fill(peer: RawClient, queue: bytes, count: int, channel: int = 9) -> None:
    """Publish *count* messages and wait for their confirms."""
    peer.open(channel)
    ask(peer, methods.ConfirmSelect.HEAD + b"\x00", methods.ConfirmSelectOk.KEY, channel)
    one = message(channel, queue, b"x")
    for start in range(0, count, 5000):
        peer.send_raw(one * min(5000, count - start))
        left = range(start + 1, min(start + 5000, count) + 1)
        while left:
            payload = peer.wait(methods.BasicAck.KEY, channel=channel).payload
            if int.from_bytes(payload[4:12], "big") == left[-1]:
                break
    ask(peer, methods.ChannelClose(200, b"").encode(), methods.ChannelCloseOk.KEY, channel)


def _main() -> None:
    from dtx.cli import main

    serve = served.serve

    async def watched(*words: Any) -> int:
        _Watch()
        return await serve(*words)

    setattr(served, "serve", watched)  # noqa: B010 - mypy knows it as a function
    main()


if __name__ == "__main__":
    _main()
