"""Shows the progress of a long run on stderr: stages, tasks, rows, elapsed time and an estimate of the rest.

A terminal shows one line that changes. Other outputs get a new line every 15 seconds.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Self

from pyspark.sql import SparkSession
from rich.console import Console
from rich.text import Text

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 15.0


class StageProgress(NamedTuple):
    """Progress of the running stages: their number, their ended tasks, and all their tasks."""

    stages: int
    done: int
    tasks: int


class Progress:
    """Shows the progress of a session. Use as a context manager.

    Args:
        spark: the session; ``None``: show no stages.
        title: name of the command.
        console: the output; stderr if ``None``.
        every: seconds between two updates; ``None``: 0.5 on a terminal, else 15.
    """

    def __init__(
        self, spark: SparkSession | None, title: str, *, console: Console | None = None, every: float | None = None
    ) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._status = self._console.status(title) if self._console.is_terminal else None
        self._every = every or (_LOG_SECONDS if self._status is None else _TERMINAL_SECONDS)
        self._stages, self._stop_watching = _watch_stages(spark)
        self._doing = ""
        self._rows: int | None = None
        self._begun = time.monotonic()
        self._stage_begun: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._stop_watching()
        if self._status is not None:
            self._status.stop()

    def note(self, doing: str, rows: int | None = None) -> None:
        """Set the current step, in a few words, and the number of rows that are done."""
        self._doing, self._rows = doing, rows

    def print_line(self, line: str) -> None:
        """Print a permanent line above the line that changes."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            # the session is ending or its server is away: the run itself reports that
            with suppress(Exception):
                line = self.line(time.monotonic(), self._stages())
                if self._status is None:
                    self.print_line(line)
                else:
                    self._status.update(Text(line))

    def line(self, now: float, work: StageProgress) -> str:
        """Return the line to show at *now*, in seconds of the monotonic clock."""
        words = [self._title]
        if self._doing:
            words.append(self._doing)
        if self._rows is not None:
            words.append(f"{self._rows:,} rows")
        if work.tasks:
            words.append(f"{work.stages} stage{'' if work.stages == 1 else 's'}, {work.done} of {work.tasks} tasks")
        words.append(f"{_clock(now - self._begun)} elapsed")
        if not work.tasks or work.done == 0:
            self._stage_begun = now
        elif self._stage_begun is not None:
            left = (now - self._stage_begun) / work.done * (work.tasks - work.done)
            words.append(f"about {_clock(left)} for this stage")
        return " · ".join(words)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _watch_stages(spark: SparkSession | None) -> tuple[Callable[[], StageProgress], Callable[[], None]]:
    if spark is None:
        return lambda: StageProgress(0, 0, 0), lambda: None
    if hasattr(spark, "registerProgressHandler") and "connect" in type(spark).__module__:
        return _watch_remote_stages(spark)
    # The only use of a Spark API below DataFrames: without Connect there is no other way to see tasks. Only the
    # progress line depends on it.
    tracker = spark.sparkContext.statusTracker()

    def active_stages() -> StageProgress:
        found = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        running = [info for info in found if info is not None]
        done, tasks = sum(info.numCompletedTasks for info in running), sum(info.numTasks for info in running)
        return StageProgress(len(running), done, tasks)

    return active_stages, lambda: None


def _watch_remote_stages(spark: SparkSession) -> tuple[Callable[[], StageProgress], Callable[[], None]]:
    session: Any = spark
    state = StageProgress(0, 0, 0)

    def update(*, stages: Iterable[Any] | None, done: bool, **_: object) -> None:
        nonlocal state
        running = [] if done else [stage for stage in stages or () if not stage.done]
        ended, tasks = sum(stage.num_completed_tasks for stage in running), sum(stage.num_tasks for stage in running)
        state = StageProgress(len(running), ended, tasks)

    session.registerProgressHandler(update)
    return lambda: state, lambda: session.removeProgressHandler(update)
