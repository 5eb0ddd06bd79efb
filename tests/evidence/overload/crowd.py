"""A crowd of clients in several processes, each with an event loop and a source address."""

import asyncio
import multiprocessing
import resource
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, Self

import uvloop

from tests.evidence.overload.members import KINDS, Place
from tests.support.raw import Address

AT_ONCE: Final = 50
"""Limit of members of a process that connect at the same time."""
PATIENCE: Final = 180.0
"""Limit of seconds until all members of a process are in place."""


class CrowdError(Exception):
    """A member of the crowd had an error."""


async def _gather(pipe: Connection, server: Address, source: str, numbers: Mapping[str, range], every: float) -> None:
    """Run the members of one process: report when all are in place, and answer each request with the work done."""
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(AT_ONCE)
    done: Counter[str] = Counter()
    missing = {(kind, number) for kind, range_ in numbers.items() for number in range_}
    complete, told = asyncio.Event(), asyncio.Event()

    async def member(kind: str, number: int) -> None:
        await gate.acquire()

        def in_place() -> None:
            if (kind, number) in missing:
                missing.discard((kind, number))
                gate.release()
                if not missing:
                    complete.set()

        place = Place(server, source, number, every, in_place, lambda: done.update((kind,)))
        try:
            await KINDS[kind](place)
        except Exception as error:
            raise CrowdError(f"{kind} {number}: {type(error).__name__}: {error}") from error

    loop.add_reader(pipe.fileno(), told.set)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(member(*which)) for which in sorted(missing)]
        async with asyncio.timeout(PATIENCE):
            await complete.wait()
        pipe.send(None)
        while True:
            await told.wait()
            told.clear()
            if pipe.recv() is None:
                break
            pipe.send(done)
        loop.remove_reader(pipe.fileno())
        for task in tasks:
            task.cancel()


def _process(pipe: Connection, server: Address, source: str, numbers: Mapping[str, range], every: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_gather(pipe, server, source, numbers, every))
    except EOFError:
        return  # the parent process has ended
    except BaseExceptionGroup as group:
        first, *others = group.exceptions
        pipe.send(CrowdError(f"{first} (and {len(others)} others)"))


class Crowd:
    """Clients, in place after entering. Use as a context manager: at its end all connections are dropped.

    Args:
        url: of dtx.
        counts: number of clients of each kind.
        every: seconds between two pieces of work of an active member.
        processes: number of processes.
    """

    def __init__(self, url: str, counts: Mapping[str, int], *, every: float = 4.0, processes: int = 4) -> None:
        server = Address.of(url)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            numbers = {kind: range(index, count, processes) for kind, count in counts.items()}
            # an address has about 28,000 ports for connections
            arguments = theirs, server, f"127.0.0.{2 + index}", numbers, every
            self._processes.append(context.Process(target=_process, args=arguments, daemon=True))
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        try:
            for pipe in self._pipes:
                self._receive(pipe, PATIENCE + 30)
        except BaseException:
            self.leave()
            raise
        return self

    def done(self) -> "Counter[str]":
        """Return the number of pieces of work of each kind so far.

        Raises:
            CrowdError: a member had an error.
        """
        total: Counter[str] = Counter()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, and has sent the error
                pipe.send("done")
        for pipe in self._pipes:
            found = self._receive(pipe, 30)
            assert isinstance(found, Counter)
            total += found
        return total

    @staticmethod
    def _receive(pipe: Connection, seconds: float) -> object:
        if not pipe.poll(seconds):
            raise CrowdError(f"a process of the crowd says nothing for {seconds:g} s")
        try:
            found = pipe.recv()
        except EOFError:
            raise CrowdError("a process of the crowd has died") from None
        if isinstance(found, CrowdError):
            raise found
        return found

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Drop all connections at once: the processes are killed, and the kernel closes the sockets. Idempotent."""
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join(10)
