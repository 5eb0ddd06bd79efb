"""The longest pause of dtx: a client in its own process repeats a small request and measures each answer.

Other load on the machine also delays answers. So this measures elapsed time, and the processor time of the event loop's
thread between request and answer. That is the pause itself, or somewhat more if the client does not run at once.
"""

import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from benchmarks.support.amqp import RawConnection
from tests.support.raw import Address

_EVERY: Final = 0.002
_QUEUE: Final = b"bench-probe"


def _thread_seconds(pid: int) -> float:
    """Return the processor seconds of the first thread of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _ask(address: Address, pid: int, pipe: Connection) -> None:
    with RawConnection(address) as connection:
        connection.declare(_QUEUE)
        pipe.send(None)
        wall = busy = 0.0
        while True:
            began, used = time.perf_counter(), _thread_seconds(pid)
            connection.depth(_QUEUE)
            busy = max(busy, _thread_seconds(pid) - used)
            wall = max(wall, time.perf_counter() - began)
            if pipe.poll(_EVERY):
                if pipe.recv() is None:
                    return
                pipe.send((wall, busy))
                wall = busy = 0.0


class Probe:
    """Sends requests until it is closed. Use as a context manager.

    Args:
        address: of dtx.
        pid: of dtx.
    """

    def __init__(self, address: Address, pid: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_ask, args=(address, pid, theirs), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._pipe.recv()
        return self

    def worst(self) -> tuple[float, float]:
        """Return the longest wait since the last call, in seconds: elapsed, and of dtx's processor time."""
        self._pipe.send("worst")
        found: tuple[float, float] = self._pipe.recv()
        return found

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # the client has ended, since dtx has
            self._pipe.send(None)
        self._process.join(10)
