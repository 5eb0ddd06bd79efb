"""The load of branches: processes that each serve many connections with one epoll and as little Python as possible."""

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
from typing import Final, Protocol, Self

from benchmarks.support.dialogue import Phase
from tests.support.raw import Address, Refused

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


class Player(Protocol):
    """One connection in its endless row of branches.

    Args:
        socket: of the connection.
        number: of the connection.
        count: branches that it has committed.
    """

    socket: socket.socket
    number: int
    count: int

    def begin(self) -> None:
        """Write what begins the next branch."""

    def hear(self, data: bytes) -> Phase | None:
        """Take what was read; the step that it answers, ``None`` while the answer is not whole.

        Raises:
            LoadError: it is no answer.
        """

    def go_on(self) -> bool:
        """Write the next step; false where the branch has ended."""

    def close(self) -> None:
        """Close the connection in order."""


class Play(Protocol):
    """How a connection is made; picklable."""

    def __call__(self, address: Address, number: int, run: bytes) -> Player:
        """Connect connection *number*; *run* distinguishes this run from any other, 8 octets.

        Raises:
            Refused, OSError: it cannot.
        """


def _run(players: Sequence[Player], begin: float, end: float) -> Tally:
    """Branch after branch on every connection until *end*; those that end from *begin* to *end* are measured."""
    tally = Tally()
    measured = {Phase.PREPARE: tally.prepares.append, Phase.COMMIT: tally.commits.append}
    branches = tally.branches.append
    clock = time.monotonic
    began: dict[int, float] = {}
    sent: dict[int, float] = {}
    with select.epoll() as epoll:
        by_descriptor = {}
        for player in players:
            descriptor = player.socket.fileno()
            by_descriptor[descriptor] = player
            epoll.register(descriptor, select.EPOLLIN)
            began[descriptor] = sent[descriptor] = clock()
            player.begin()
        active = len(players)
        while active:
            ready = epoll.poll(PATIENCE_SECONDS)
            if not ready:
                raise LoadError(f"{active} connections had no answer within {PATIENCE_SECONDS:g} s")
            for descriptor, _ in ready:
                player = by_descriptor[descriptor]
                phase = player.hear(player.socket.recv(_READ_SIZE))
                if phase is None:
                    continue
                now = clock()
                if begin <= now < end and phase is not Phase.WORK:
                    measured[phase](now - sent[descriptor])
                sent[descriptor] = now
                if player.go_on():
                    continue
                if begin <= now < end:
                    branches(now - began[descriptor])
                if now < end:
                    began[descriptor] = now
                    player.begin()
                else:
                    active -= 1
    tally.committed = {player.number: player.count for player in players}
    return tally


def _process(pipe: Connection, address: Address, play: Play, numbers: Sequence[int], run: bytes) -> None:
    """The life of one load process: connect, say so, run when told, tell."""
    try:
        players = [play(address, number, run) for number in numbers]
        pipe.send(None)
        begin, end = pipe.recv()
        tally = _run(players, begin, end)
        for player in players:
            player.close()
        pipe.send(tally)
    except EOFError:
        return  # whoever started us is gone
    except (LoadError, Refused, OSError) as error:
        pipe.send(error if isinstance(error, LoadError) else LoadError(f"{type(error).__name__}: {error}"))


class Load:
    """Connected clients, waiting to be told to go. Use as a context manager.

    Args:
        address: of dtx.
        play: makes a client.
        connections: how many clients.
        processes: on which they are spread.
        first: number of the first connection; what was committed with a number must never be committed again.
    """

    def __init__(self, address: Address, play: Play, connections: int, processes: int, *, first: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for index in range(min(processes, connections)):
            ours, theirs = context.Pipe()
            numbers = range(first + index, first + connections, processes)
            process = context.Process(target=_process, args=(theirs, address, play, numbers, _RUN), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        """The load processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def wait_connected(self) -> None:
        """Return when all clients are ready to begin.

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
