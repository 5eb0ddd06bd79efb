"""The load of branches: processes that each serve many connections with one epoll and as little Python as possible."""

import contextlib
import multiprocessing
import secrets
import select
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, Self

from benchmarks.support.amqp import Address, RawConnection, Refused
from benchmarks.support.dialogue import Cycle, Dialogue, Phase, got_tag, is_answer
from dtx.wire.amqp09 import content, keys
from dtx.wire.amqp09.errors import FrameError, WireError
from dtx.wire.amqp09.frames import FrameSplitter

PATIENCE_SECONDS: Final = 60.0
"""How long an answer may take before the run has failed."""
_READ_SIZE: Final = 65_536
_RUN: Final = secrets.token_bytes(8)


class LoadError(Exception):
    """An answer was not what it had to be, or did not come."""


@dataclass(slots=True)
class Tally:
    """What was measured.

    Args:
        branches: seconds from the first write to commit-ok, of branches that ended within the window.
        prepares, commits: seconds of these calls alone.
        committed: for each connection, by its number, how many branches it committed in all.
    """

    branches: "array[float]" = field(default_factory=lambda: array("d"))
    prepares: "array[float]" = field(default_factory=lambda: array("d"))
    commits: "array[float]" = field(default_factory=lambda: array("d"))
    committed: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Put another process's numbers to these."""
        self.branches += other.branches
        self.prepares += other.prepares
        self.commits += other.commits
        self.committed |= other.committed

    def stamps(self) -> Iterator[int]:
        """The numbers of all branches that were committed."""
        for connection, count in self.committed.items():
            yield from range(connection << 32, (connection << 32) + count)


class _Client:
    """One connection in its endless row of branches."""

    __slots__ = ("began", "buffer", "count", "dialogue", "number", "raw", "sent", "socket", "step")

    def __init__(self, address: Address, cycle: Cycle, number: int, run: bytes) -> None:
        self.raw = RawConnection(address)
        self.raw.select_dtx()
        self.socket: socket.socket = self.raw.socket
        self.dialogue = Dialogue(cycle, run)
        self.number = number
        self.count = 0
        self.step = 0
        self.buffer = b""
        self.began = self.sent = 0.0

    def begin(self, now: float) -> None:
        """Start the next branch."""
        self.dialogue.stamp((self.number << 32) + self.count)
        self.step = 0
        self.began = self.sent = now
        self.socket.sendall(self.dialogue.writes[0])

    def failure(self, data: bytes) -> LoadError:
        """What *data*, which is no answer, says."""
        waited = self.dialogue.steps[self.step].phase.name.lower()
        where = f"connection {self.number}, branch {self.count}, step {self.step} ({waited})"
        if not data:
            return LoadError(f"{where}: the connection was closed without a word")
        with contextlib.suppress(WireError, FrameError):
            buffer, frames = FrameSplitter(0).feed(data)
            for key, _, start, end in frames:
                if key in {keys.CHANNEL_CLOSE, keys.CONNECTION_CLOSE}:
                    closed = content.close(buffer[start + 7 : end - 1])
                    return LoadError(f"{where}: {closed.reply_code} {closed.reply_text.decode(errors='replace')}")
                if key == keys.BASIC_GET_EMPTY:
                    return LoadError(f"{where}: the queue ran dry, give a larger --prefill")
        return LoadError(f"{where}: answered {data[:80].hex(' ')}")


def _run(clients: list[_Client], begin: float, end: float) -> Tally:
    """Branch after branch on every connection until *end*; those that end from *begin* to *end* are measured."""
    tally = Tally()
    measured = {Phase.PREPARE: tally.prepares.append, Phase.COMMIT: tally.commits.append}
    branches = tally.branches.append
    clock = time.monotonic
    with select.epoll() as epoll:
        by_descriptor = {}
        for client in clients:
            by_descriptor[client.socket.fileno()] = client
            epoll.register(client.socket.fileno(), select.EPOLLIN)
            client.begin(clock())
        active = len(clients)
        while active:
            ready = epoll.poll(PATIENCE_SECONDS)
            if not ready:
                raise LoadError(f"{active} connections had no answer within {PATIENCE_SECONDS:g} s")
            for descriptor, _ in ready:
                client = by_descriptor[descriptor]
                step = client.dialogue.steps[client.step]
                data = client.socket.recv(_READ_SIZE)
                if step.delivery or data != step.answer:
                    data = _rest(client, data)
                    if not data:
                        continue
                now = clock()
                if begin <= now < end and step.phase is not Phase.WORK:
                    measured[step.phase](now - client.sent)
                client.step += 1
                if client.step < len(client.dialogue.steps):
                    client.sent = now
                    client.socket.sendall(client.dialogue.writes[client.step])
                    continue
                client.count += 1
                if begin <= now < end:
                    branches(now - client.began)
                if now < end:
                    client.begin(now)
                else:
                    active -= 1
    tally.committed = {client.number: client.count for client in clients}
    return tally


def _rest(client: _Client, data: bytes) -> bytes:
    """A whole answer that came in pieces or holds a delivery; nothing while it is not whole.

    Raises:
        LoadError: it cannot become the answer.
    """
    step = client.dialogue.steps[client.step]
    if not data:
        raise client.failure(data)
    data = client.buffer + data
    if is_answer(data, step):
        client.buffer = b""
        if step.delivery:
            tag = got_tag(data, len(step.answer))
            assert tag is not None
            client.dialogue.acknowledge(tag)
        return data
    known = min(len(data), len(step.answer))
    is_other = data[:known] != step.answer[:known]
    is_other |= bool(step.delivery) and len(data) >= known + 11 and got_tag(data, known) is None
    if is_other or len(data) >= len(step.answer) + step.delivery:
        raise client.failure(data[known:] if data[:known] == step.answer[:known] else data)
    client.buffer = data
    return b""


def _process(pipe: Connection, address: Address, cycle: Cycle, numbers: Sequence[int], run: bytes) -> None:
    """The life of one load process: connect, say so, run when told, tell."""
    try:
        clients = [_Client(address, cycle, number, run) for number in numbers]
        pipe.send(None)
        begin, end = pipe.recv()
        tally = _run(clients, begin, end)
        for client in clients:
            client.raw.close()
        pipe.send(tally)
    except EOFError:
        return  # whoever started us is gone
    except (LoadError, Refused, OSError) as error:
        pipe.send(error if isinstance(error, LoadError) else LoadError(f"{type(error).__name__}: {error}"))


class Load:
    """Connected clients, waiting to be told to go. Use as a context manager.

    Args:
        address: of dtx.
        cycle: what is done in each branch.
        connections: how many clients.
        processes: on which they are spread.
        first: number of the first connection; what was committed with a number must never be committed again.
    """

    def __init__(self, address: Address, cycle: Cycle, connections: int, processes: int, *, first: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for index in range(min(processes, connections)):
            ours, theirs = context.Pipe()
            numbers = range(first + index, first + connections, processes)
            process = context.Process(target=_process, args=(theirs, address, cycle, numbers, _RUN), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        """The load processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def wait_connected(self) -> None:
        """Return when all clients have selected dtx.

        Raises:
            LoadError: one could not.
        """
        for pipe in self._pipes:
            self._receive(pipe)

    def go(self, begin: float, end: float) -> None:
        """Start all clients; what happens between *begin* and *end*, of the monotonic clock, is measured."""
        for pipe in self._pipes:
            pipe.send((begin, end))

    def collect(self) -> Tally:
        """Wait for the end.

        Raises:
            LoadError: an answer was not what it had to be.
        """
        tally = Tally()
        for pipe in self._pipes:
            result = self._receive(pipe)
            assert isinstance(result, Tally)
            tally.add(result)
        return tally

    @staticmethod
    def _receive(pipe: Connection) -> object:
        try:
            found = pipe.recv()
        except EOFError:
            raise LoadError("a load process died") from None
        if isinstance(found, LoadError):
            raise found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()
