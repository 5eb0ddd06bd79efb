"""Well-behaved clients, each in its own process, and their waiting times."""

import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final, Self

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxSelect,
    DtxSelectOk,
    DtxStart,
    DtxStartOk,
)
from dtx.xa.xid import Xid
from tests.evidence.overload.members import BODY, new_xid
from tests.support.raw import logged_in, message

QUEUE: Final = b"overload-healthy"
BESIDE: Final = b"overload-beside"
ANSWERS: Final = {
    "start": DtxStartOk.KEY,
    "end": DtxEndOk.KEY,
    "prepare": DtxPrepareOk.KEY,
    "commit": DtxCommitOk.KEY,
}
REQUESTS: Final = tuple(ANSWERS)
_PAUSE: Final = 0.01


@dataclass
class Waits:
    """Waiting times in seconds.

    Args:
        branches: of each branch, from start to commit-ok.
        requests: by name, of each request in the branches, from its first byte to its answer.
    """

    branches: list[float] = field(default_factory=list)
    requests: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in REQUESTS})


def calls(xid: Xid) -> tuple[DtxCall, ...]:
    """Return the requests of a branch in order; the publish comes before end."""
    return DtxStart(xid=xid), DtxEnd(xid=xid), DtxPrepare(xid=xid), DtxCommit(xid=xid, one_phase=False)


def percentile(values: list[float], percent: float) -> float:
    """Return the value that *percent* of *values* do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _run(pipe: Connection, url: str) -> None:
    with logged_in(url) as peer:
        peer.socket.settimeout(120)
        peer.say(1, DtxSelect().encode())
        peer.wait(DtxSelectOk.KEY)
        pipe.send(None)
        waits = Waits()
        while True:
            xid = new_xid()
            began = last = time.perf_counter()
            for name, call in zip(REQUESTS, calls(xid), strict=True):
                if name == "end":
                    peer.send_raw(message(1, QUEUE, BODY))
                peer.say(1, call.encode())
                peer.wait(ANSWERS[name])
                now = time.perf_counter()
                waits.requests[name].append(now - last)
                last = now
            waits.branches.append(last - began)
            if pipe.poll(_PAUSE):
                if pipe.recv() is None:
                    return
                pipe.send(waits)
                waits = Waits()


def _run_beside(pipe: Connection, url: str) -> None:
    with logged_in(url) as peer:
        peer.socket.settimeout(120)
        peer.say(1, methods.TxSelect().encode())
        peer.wait(methods.TxSelectOk.KEY)
        pipe.send(None)
        waits = Waits()
        while True:
            began = time.perf_counter()
            peer.send_raw(message(1, BESIDE, BODY))
            peer.say(1, methods.TxCommit().encode())
            peer.wait(methods.TxCommitOk.KEY)
            waits.branches.append(time.perf_counter() - began)
            if pipe.poll(_PAUSE):
                pipe.recv()
                pipe.send(waits)
                waits = Waits()


class Healthy:
    """A client that does one branch after another, with a short pause between them. Use as a context manager.

    Args:
        url: of dtx; with *beside* of its broker: then the client does AMQP transactions of the broker.
    """

    def __init__(self, url: str, *, beside: bool = False) -> None:
        self.committed = 0
        """Number of reported branches."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_beside if beside else _run, args=(theirs, url), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._pipe.recv()
        return self

    def waits(self, seconds: float = 0.0) -> Waits:
        """Return the waiting times since the last call; with *seconds*, of the next *seconds*."""
        if seconds:
            self._ask()
            time.sleep(seconds)
        return self._ask()

    def _ask(self) -> Waits:
        self._pipe.send("waits")
        found = self._pipe.recv()
        assert isinstance(found, Waits)
        self.committed += len(found.branches)
        return found

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop the client. Idempotent."""
        self._process.kill()
        self._process.join(10)
