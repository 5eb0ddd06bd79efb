"""The scheduler of the simulation: an event loop without sockets, threads and clock.

Theory of operation. Every callback belongs to a :class:`Process`. Callbacks of one process run in their order (asyncio
promises that, and the code relies on it). The seed draws *which* process runs next. Time is a number that grows a
little with every callback, and jumps forward when no callback is ready. Events from outside a process (the network, the
database, a timer) come after a random delay, so that every order that is possible in reality can be drawn. A process
may be stopped and continued (SIGSTOP), may die between any two of its callbacks, and may have a wrong wall clock.

A *step* is one executed callback.
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
"""The wall clock at the beginning, in seconds since the epoch."""
_STEP: Final = 20e-6
"""Average duration of a callback in seconds."""
_TIDYING: Final = 100
"""Limit of awaits in the cleanup of a coroutine."""


class Stuck(Exception):
    """No callback can run any more, and the condition does not hold."""


class Process:
    """A simulated operating system process.

    Args:
        loop: the scheduler.
        name: for output.
    """

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.skew = 0.0
        """Error of its wall clock in seconds."""
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
        """Call *callback* in this process after *delay* seconds."""
        return self._loop.call_at(self._loop.now + delay, callback, *args, context=self.context)

    def adopt(self, task: "SimTask") -> None:
        """Add a task to this process."""
        if not self.alive:
            self._loop.graveyard.append(task)
            return
        self._tasks.append(task)
        if len(self._tasks) > 1000:
            self._tasks = [task for task in self._tasks if not task.done()]

    def pause(self) -> None:
        """Stop it, like SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """Continue it, like SIGCONT."""
        self.paused = False
        if self.ready:
            self._loop.has_work(self)

    def kill(self) -> None:
        """Kill it, like SIGKILL: none of its code runs any more, including cleanup."""
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
    """Return the running process."""
    return _PROCESS.get()


class SimTask(asyncio.Task[Any]):
    """A task that is hashed by its number: addresses, and with them the order in sets, differ between runs.

    Numbers start again with each loop, so that a seed gives the same run whatever ran before it.
    """

    def __new__(cls, *_args: object, loop: "SimLoop", **_kwargs: object) -> Self:
        """Make a task with the next number."""
        task = super().__new__(cls)
        task.number = next(loop.numbers)
        return task

    number: int

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """The scheduler with the interface of an event loop.

    Args:
        random: source of all random choices.
        step: average duration of a callback in seconds.
    """

    def __init__(self, random: Random, step: float = _STEP) -> None:
        super().__init__()
        self.random: Final = random
        self.now = 100.0
        """The true time in seconds; the monotonic clock of every process."""
        self.steps = 0
        self.graveyard: list[SimTask] = []
        """Tasks of dead processes: kept, so that none of their code runs, not even at garbage collection."""
        self.connect: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self.listen: Callable[..., Any] | None = None
        self.numbers = count(1)
        """The numbers of tasks."""
        self._step = 2 * step
        self._timers: list[tuple[float, float, int, events.TimerHandle]] = []
        self._sequence = count()
        self._runnable: list[Process] = []
        self._world = Process(self, "world")
        self.failures: list[str] = []
        """Unhandled exceptions: each one is a bug."""
        self.set_exception_handler(self._note_exception)
        self.set_task_factory(self._new_task)

    def _note_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "was destroyed but it is pending" not in context["message"]:
            self.failures.append(f"{context['message']}: {context.get('exception')!r}")

    def note_end(self, task: "asyncio.Task[Any]") -> None:
        """Record an exception of a task that no other one awaits."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append("".join(traceback.format_exception(error)[-4:]))

    def _new_task(self, _loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None) -> SimTask:
        context = context if context is not None else copy_context()
        task = SimTask(coro, loop=self, context=context)
        context.get(_PROCESS, self._world).adopt(task)
        return task

    # -- what asyncio asks of a loop

    def time(self) -> float:
        """Return the time in seconds."""
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> events.Handle:
        """Run *callback* after all callbacks that are ready in its process."""
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
        """Run *callback* at the time *when*; callbacks of the same time run in a random order."""
        handle = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self.random.random(), next(self._sequence), handle))
        return handle

    def in_world(self, delay: float, callback: Callable[..., object], *args: object) -> events.TimerHandle:
        """Call *callback* after *delay* seconds, whichever processes are dead by then."""
        return self.call_at(self.now + delay, callback, *args, context=self._world.context)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect on the simulated network."""
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
        """Make *process* runnable if it has ready callbacks."""
        if process.ready and process not in self._runnable:
            self._runnable.append(process)

    # -- running

    def run(self, until: Callable[[], bool], *, steps: int | None = None) -> None:
        """Run callbacks until *until* is true, or for that many *steps*.

        Raises:
            Stuck: no callback can run any more.
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
        """Discard all tasks that will never run, without warnings. Idempotent."""
        if self.is_closed():
            return
        events._set_running_loop(self)
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about coroutines whose cleanup awaits
            buried: set[SimTask] = set()
            # The end of a task may start another one; end that one too.
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
    """Close the coroutine of *task*, even if its cleanup awaits several times."""
    coroutine = task.get_coro()
    for _ in range(_TIDYING):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001 - no caller is interested in the error
            continue
        return


@contextmanager
def scheduler(random: Random, step: float = _STEP) -> Iterator[SimLoop]:
    """Make a scheduler, and discard its tasks at the end."""
    loop = SimLoop(random, step)
    try:
        yield loop
    finally:
        loop.cancel_attempt()
