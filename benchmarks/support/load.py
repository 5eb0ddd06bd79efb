"""The load generator: each process serves many connections with one epoll and as little Python as possible."""

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
"""Limit of time for an answer; after that the run fails."""
_READ_SIZE: Final = 65_536
_RUN: Final = secrets.token_bytes(8)


class LoadError(Exception):
    """An answer was wrong or did not come."""


@dataclass(slots=True)
class Tally:
    """The measurements of a run.

    Args:
        branches: seconds from the first write to commit-ok, for branches that ended within the measured time.
        prepares, commits: seconds of these calls alone.
        committed: the number of all committed branches of each connection, by its number.
    """

    branches: "array[float]" = field(default_factory=lambda: array("d"))
    prepares: "array[float]" = field(default_factory=lambda: array("d"))
    commits: "array[float]" = field(default_factory=lambda: array("d"))
    committed: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add the measurements of another process."""
        self.branches += other.branches
        self.prepares += other.prepares
        self.commits += other.commits
        self.committed |= other.committed

    def stamps(self) -> Iterator[int]:
        """Yield the numbers of all committed branches."""
        for connection, count in self.committed.items():
            yield from range(connection << 32, (connection << 32) + count)


class Player(Protocol):
    """A connection that does one branch after another.

    Args:
        socket: of the connection.
        number: of the connection.
        count: number of committed branches.
    """

    socket: socket.socket
    number: int
    count: int

    def begin(self) -> None:
        """Begin the next branch."""

    def hear(self, data: bytes) -> Phase | None:
        """Take received bytes; return the phase that they answer, ``None`` while the answer is not complete.

        Raises:
            LoadError: they are not the answer.
        """

    def go_on(self) -> bool:
        """Write the next step; return false if the branch has ended."""

    def close(self) -> None:
        """Close the connection in order."""


class Play(Protocol):
    """A picklable function that connects a player."""

    def __call__(self, address: Address, number: int, run: bytes) -> Player:
        """Open connection *number*; *run* has 8 bytes that are unique to this run.

        Raises:
            Refused, OSError: it cannot connect.
        """


def _run(players: Sequence[Player], begin: float, end: float) -> Tally:
    """Do branches on every connection until *end*, and measure those that end between *begin* and *end*."""
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
    """Run a load process: connect, report that, wait for the times, run, send the tally."""
    try:
        players = [play(address, number, run) for number in numbers]
        pipe.send(None)
        begin, end = pipe.recv()
        tally = _run(players, begin, end)
        for player in players:
            player.close()
        pipe.send(tally)
    except EOFError:
        return  # the parent process has ended
    except (LoadError, Refused, OSError) as error:
        pipe.send(error if isinstance(error, LoadError) else LoadError(f"{type(error).__name__}: {error}"))


class Load:
    """Connected clients that wait for the start. Use as a context manager.

    Args:
        address: of dtx or the broker.
        play: makes a client.
        connections: number of clients.
        processes: number of load processes.
        first: number of the first connection. A run must not use numbers of an earlier one, or its xids repeat.
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
        """Process ids of the load processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def wait_connected(self) -> None:
        """Return when all clients are connected.

        Raises:
            LoadError: a client could not connect.
        """
        for pipe in self._pipes:
            self._receive(pipe)

    def go(self, begin: float, end: float) -> None:
        """Start all clients, and measure between *begin* and *end*, in seconds of the monotonic clock."""
        for pipe in self._pipes:
            pipe.send((begin, end))

    def collect(self) -> Tally:
        """Wait for the end, and return all measurements.

        Raises:
            LoadError: an answer was wrong or did not come.
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
