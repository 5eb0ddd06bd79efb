"""The scheduler of the simulation: an event loop without sockets, threads and clock.

Theory of operation. Everything that runs belongs to a :class:`Process`, as in reality: what one process has ready runs
in its order (asyncio promises that, and the code relies on it), while *which* process runs next is drawn by the seed.
Time is a number that grows a little with every callback and jumps when nobody has anything to do. What comes from
outside of a process (the network, the database, a timer) comes after a time that is drawn too, so that every order that
the real world could show can be drawn. A process may be stopped and continued (SIGSTOP), may die between any two of its
callbacks, and may have a wrong wall clock.

A *step* is one callback that has run.
"""

import asyncio
import gc
import heapq
import sys
import traceback
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

BEGINNING: Final = 1_800_000_000.0
"""The wall clock at the beginning, seconds since the epoch."""
_STEP: Final = 20e-6
"""Seconds that one callback takes, on average."""
_TIDYING: Final = 100
"""How often a coroutine may wait while it ends."""


class Stuck(Exception):
    """Nothing is left that could run, and what is waited for has not happened."""


class Process:
    """What runs as one process of an operating system.

    Args:
        loop: the scheduler.
        name: for people.
    """

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.skew = 0.0
        """Seconds by which its wall clock is wrong."""
        self.ready: deque[events.Handle] = deque()
        self.on_exit: list[Callable[[], None]] = []
        self._loop = loop
        self._tasks: list[SimTask] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run *work* in this process."""
        task = self._loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._loop.note_end)
        return task

    def call(self, delay: float, callback: Callable[..., object], *args: object) -> events.TimerHandle:
        """Call something in this process after *delay* seconds."""
        return self._loop.call_at(self._loop.now + delay, callback, *args, context=self.context)

    def adopt(self, task: "SimTask") -> None:
        """*task* runs in it."""
        if not self.alive:
            self._loop.graveyard.append(task)
            return
        self._tasks.append(task)
        if len(self._tasks) > 1000:
            self._tasks = [task for task in self._tasks if not task.done()]

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        if self.ready:
            self._loop.has_work(self)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more, not even what would tidy up."""
        if self.alive:
            self.alive = False
            self.ready.clear()
            self._loop.graveyard.extend(task for task in self._tasks if not task.done())
            self._tasks.clear()
            for hook in self.on_exit:
                hook()
            self.on_exit.clear()


_PROCESS: ContextVar[Process] = ContextVar("sim-process")


def current() -> Process:
    """The process that runs at the moment."""
    return _PROCESS.get()


class SimTask(asyncio.Task[Any]):
    """A task that is hashed by its number: addresses differ from run to run, and with them the order in sets.

    Numbers begin anew with each loop, so that a seed is the same run behind whatever came before it.
    """

    def __new__(cls, *_args: object, loop: "SimLoop", **_kwargs: object) -> Self:
        """A task with the next number."""
        task = super().__new__(cls)
        task.number = next(loop.numbers)
        return task

    number: int

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """The scheduler, as asyncio wants to see it.

    Args:
        random: whatever is left to chance.
        step: seconds that one callback takes, on average.
    """

    def __init__(self, random: Random, step: float = _STEP) -> None:
        super().__init__()
        self.random: Final = random
        self.now = 100.0
        """The true time, seconds; every process has the same monotonic clock."""
        self.steps = 0
        self.graveyard: list[SimTask] = []
        """Tasks of dead processes: kept, so that nothing of them runs, not even at garbage collection."""
        self.connect: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self.listen: Callable[..., Any] | None = None
        self.numbers = count(1)
        """Of tasks."""
        self._step = 2 * step
        self._timers: list[tuple[float, float, int, events.TimerHandle]] = []
        self._sequence = count()
        self._runnable: list[Process] = []
        self._world = Process(self, "world")
        self.failures: list[str] = []
        """What was told to the exception handler: a bug in whoever let it come that far."""
        self.set_exception_handler(self._note_exception)
        self.set_task_factory(self._new_task)

    def _note_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "was destroyed but it is pending" not in context["message"]:
            self.failures.append(f"{context['message']}: {context.get('exception')!r}")

    def note_end(self, task: "asyncio.Task[Any]") -> None:
        """A task that nobody waits for has ended: not with an error, if all is well."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append("".join(traceback.format_exception(error)[-4:]))

    def _new_task(self, _loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None) -> SimTask:
        context = context if context is not None else copy_context()
        task = SimTask(coro, loop=self, context=context)
        context.get(_PROCESS, self._world).adopt(task)
        return task

    # -- what asyncio asks of a loop

    def time(self) -> float:
        """Monotonic seconds."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> events.Handle:
        """Run *callback* when its process has run what was ready before."""
        handle = events.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """Run *callback* after *delay* seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """Run *callback* at the time *when*; what is due at the same time comes in an order that is drawn."""
        handle = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self.random.random(), next(self._sequence), handle))
        return handle

    def in_world(self, delay: float, callback: Callable[..., object], *args: object) -> events.TimerHandle:
        """Call something after *delay* seconds, whoever is dead by then."""
        return self.call_at(self.now + delay, callback, *args, context=self._world.context)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect by the simulated network."""
        assert self.connect is not None
        return await self.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Listen on the simulated network."""
        assert self.listen is not None
        return self.listen(protocol_factory, host, port, options.get("start_serving", True))

    def _enqueue(self, handle: events.Handle) -> None:
        process = handle._context.get(_PROCESS, self._world)  # type: ignore[attr-defined]
        if process.alive:
            if not process.ready and not process.paused:
                self._runnable.append(process)
            process.ready.append(handle)

    def has_work(self, process: Process) -> None:
        """*process* may run again."""
        if process.ready and process not in self._runnable:
            self._runnable.append(process)

    # -- running

    def run(self, until: Callable[[], bool], *, steps: int | None = None) -> None:
        """Run callbacks until *until* says so, or that many *steps* are done.

        Raises:
            Stuck: nothing can run any more.
        """
        limit = None if steps is None else self.steps + steps
        timers, runnable, random = self._timers, self._runnable, self.random
        previous = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while not until() and (limit is None or self.steps < limit):
                while timers and (timers[0][0] <= self.now or not runnable):
                    when, _, _, handle = heapq.heappop(timers)
                    if not handle._cancelled:
                        self.now = max(self.now, when)
                        self._enqueue(handle)
                if not runnable:
                    raise Stuck("nothing is left to run")
                index = int(random.random() * len(runnable)) if len(runnable) > 1 else 0
                self._run_one(runnable[index], index)
        finally:
            events._set_running_loop(previous)

    def _run_one(self, process: Process, index: int) -> None:
        if process.paused or not process.ready:
            del self._runnable[index]
            return
        handle = process.ready.popleft()
        if not handle._cancelled:
            self.steps += 1
            self.now += self.random.random() * self._step
            handle._run()
        if (not process.ready or process.paused) and process in self._runnable:
            self._runnable.remove(process)

    def cancel_attempt(self) -> None:
        """Let go of everything that will never run, without a word. Idempotent."""
        if self.is_closed():
            return
        events._set_running_loop(self)
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of coroutines that begin to tidy up, and never will
            buried: set[SimTask] = set()
            # What ends may begin something: that is buried too.
            while left := [task for task in (*self.graveyard, *_alive(self)) if task not in buried]:
                for task in left:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _end(task)
                buried.update(left)
            buried.clear()
            self.graveyard.clear()
            self._timers.clear()
            self._runnable.clear()
            gc.collect()
        sys.unraisablehook = hook
        events._set_running_loop(None)
        self.close()


def _alive(loop: SimLoop) -> list[SimTask]:
    return [task for task in asyncio.all_tasks(loop) if isinstance(task, SimTask)]


def _end(task: SimTask) -> None:
    """End the coroutine of *task*, however often it wants to wait."""
    coroutine = task.get_coro()
    for _ in range(_TIDYING):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001 - nobody is left who could want to know
            continue
        return


@contextmanager
def scheduler(random: Random, step: float = _STEP) -> Iterator[SimLoop]:
    """A scheduler that leaves nothing behind."""
    loop = SimLoop(random, step)
    try:
        yield loop
    finally:
        loop.cancel_attempt()
