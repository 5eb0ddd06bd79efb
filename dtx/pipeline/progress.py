"""What a long run is at: stages, tasks, rows, and how long it may still take; on stderr, so that results stay clean.

On a terminal one line that changes; else a line now and then, for logs.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 15.0


class StageProgress(NamedTuple):
    """How far the stages are that run now.

    Args:
        stages: how many run.
        done, tasks: tasks of these that have ended, and all.
    """

    stages: int
    done: int
    tasks: int


class Progress:
    """Shows what a session is at. Use as a context manager.

    Args:
        spark: the session; ``None``: there is none, or it tells nothing.
        title: what runs.
        console: where it is shown; stderr if ``None``.
        every: seconds between two looks; ``None``: as suits the console.
    """

    def __init__(
        self, spark: "SparkSession | None", title: str, *, console: Console | None = None, every: float | None = None
    ) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._status = self._console.status(title) if self._console.is_terminal else None
        self._every = every or (_LOG_SECONDS if self._status is None else _TERMINAL_SECONDS)
        self._look, self._unhook = _looker(spark)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._unhook()
        if self._status is not None:
            self._status.stop()

    def note(self, doing: str, rows: int | None = None) -> None:
        """Say what it is at now.

        Args:
            doing: in a few words.
            rows: that have been done.
        """
        self._doing, self._rows = doing, rows

    def tell(self, line: str) -> None:
        """Say something that stays, above what changes."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            # a session that is ending, or a server that is away: the run itself says so
            with suppress(Exception):
                self._show(self.line(time.monotonic(), self._look()))

    def line(self, now: float, work: StageProgress) -> str:
        """The line that is shown at *now*, in seconds of the monotonic clock."""
        words = [self._title]
        if self._doing:
            words.append(self._doing)
        if self._rows is not None:
            words.append(f"{self._rows:,} rows")
        if work.tasks:
            words.append(f"{work.stages} stage{'' if work.stages == 1 else 's'}, {work.done} of {work.tasks} tasks")
        words.append(f"{_clock(now - self._begun)} gone")
        if not work.tasks or work.done == 0:
            self._stage_begun = now
        elif self._stage_begun is not None:
            left = (now - self._stage_begun) / work.done * (work.tasks - work.done)
            words.append(f"about {_clock(left)} for this stage")
        return " · ".join(words)

    def _show(self, line: str) -> None:
        if self._status is None:
            self.tell(line)
        else:
            self._status.update(Text(line))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _looker(spark: "SparkSession | None") -> tuple[Callable[[], StageProgress], Callable[[], None]]:
    if spark is None:
        return lambda: StageProgress(0, 0, 0), lambda: None
    if hasattr(spark, "registerProgressHandler") and "connect" in type(spark).__module__:
        return _remote(spark)
    # The one place that looks behind DataFrames: without Connect there is no other way to see tasks, and nothing but
    # this line on stderr depends on it.
    tracker = spark.sparkContext.statusTracker()

    def look() -> StageProgress:
        found = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        running = [info for info in found if info is not None]
        return _sum((info.numCompletedTasks, info.numTasks) for info in running)

    return look, lambda: None


def _remote(spark: "SparkSession") -> tuple[Callable[[], StageProgress], Callable[[], None]]:
    session: Any = spark
    state = StageProgress(0, 0, 0)

    def hear(*, stages: Iterable[Any] | None, done: bool, **_: object) -> None:
        nonlocal state
        running = [stage for stage in stages or () if not stage.done]
        state = (
            StageProgress(0, 0, 0) if done else _sum((stage.num_completed_tasks, stage.num_tasks) for stage in running)
        )

    session.registerProgressHandler(hear)
    return lambda: state, lambda: session.removeProgressHandler(hear)


def _sum(stages: Iterable[tuple[int, int]]) -> StageProgress:
    counted = list(stages)
    return StageProgress(len(counted), sum(done for done, _ in counted), sum(tasks for _, tasks in counted))
