"""What keeps pages up to date: one look at dtx for all who watch, and a line to each when something has changed.

A page gets no contents from here. It is told which of the things that it may show have changed, and asks for itself
again; so there is one way to make a page, and one place where it is judged who may see it. Throughput and latency are
those of the counters that Prometheus reads, over the last minutes.
"""

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from typing import Final

from dtx.admin.api_context import ApiContext
from dtx.admin.forms import StatusForm
from dtx.admin.problems import Problem
from dtx.admin.routes_read import status
from dtx.log import pages
from dtx.log.pages import JournalFilter
from dtx.telemetry import Metrics, get_logger

BEAT_SECONDS: Final = 2.0
"""How old what a page shows may be."""
MOST_WATCHERS: Final = 100
"""Of the 200 requests that the API answers at a time: pages that watch leave room for others."""
_SAMPLE_SECONDS: Final = 5.0
_SAMPLES: Final = 121
"""Ten minutes."""
_SHARE: Final = 20
"""A look may take the twentieth part of the time: where it takes longer, beats are rarer."""

_log = get_logger(part="admin")
SHOWN: Final = ("start", "prepare", "commit", "rollback", "forget", "recover")
"""The calls that a page tells of."""
_CALLS: Final = "dtx_operations"
_CALL_SECONDS: Final = "dtx_operation_seconds"
WINDOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment.

    Args:
        at: seconds of a clock that only grows.
        calls: how many there have been, by operation.
        buckets: how many took so long at most, by operation and seconds.
    """

    at: float
    calls: dict[str, float]
    buckets: dict[str, dict[float, float]]


@dataclass(frozen=True, slots=True)
class Rate:
    """How one operation has gone in the last minute.

    Args:
        operation: which.
        per_second: how many.
        median, p99: seconds, as the next bound of the histogram; ``None`` where there was none.
    """

    operation: str
    per_second: float
    median: float | None
    p99: float | None


def take(metrics: Metrics, now: float) -> Sample:
    """The counters now."""
    calls: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in metrics.registry.collect():
        if family.name not in (_CALLS, _CALL_SECONDS):
            continue
        for sample in family.samples:
            operation = sample.labels.get("operation", "")
            if sample.name == f"{_CALLS}_total":
                calls[operation] = calls.get(operation, 0.0) + sample.value
            elif sample.name == f"{_CALL_SECONDS}_bucket":
                buckets.setdefault(operation, {})[float(sample.labels["le"])] = sample.value
    return Sample(now, calls, buckets)


def rates(samples: Sequence[Sample]) -> list[Rate]:
    """How each operation has gone in the last minute."""
    if len(samples) < 2:
        return [Rate(operation, 0.0, None, None) for operation in SHOWN]
    last = samples[-1]
    first = next(sample for sample in samples if last.at - sample.at <= WINDOW_SECONDS)
    if first is last:
        first = samples[-2]
    return [
        Rate(
            operation,
            (last.calls.get(operation, 0.0) - first.calls.get(operation, 0.0)) / (last.at - first.at),
            _quantile(first, last, operation, 0.5),
            _quantile(first, last, operation, 0.99),
        )
        for operation in SHOWN
    ]


def _quantile(first: Sample, last: Sample, operation: str, share: float) -> float | None:
    before = first.buckets.get(operation, {})
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(last.buckets.get(operation, {}).items())}
    total = counts.get(float("inf"), 0.0)
    if total <= 0:
        return None
    found = next(bound for bound, count in counts.items() if count >= share * total)
    return found if found != float("inf") else max(bound for bound in counts if bound != float("inf"))


def endings(samples: Sequence[Sample]) -> list[float]:
    """Commits and rollbacks a second, between each sample and the next."""
    found = []
    for before, after in pairwise(samples):
        count = sum(after.calls.get(name, 0.0) - before.calls.get(name, 0.0) for name in ("commit", "rollback"))
        found.append(max(0.0, count) / (after.at - before.at))
    return found


def curve(values: Sequence[float], width: int, height: int, most: int) -> str:
    """The points of a line for SVG, the latest value at the right end.

    Args:
        values: oldest first.
        width: of the picture.
        height: likewise.
        most: how many values fill it.
    """
    top = max([*values, 1.0])
    step = width / max(1, most - 1)
    start = width - step * (len(values) - 1)
    return " ".join(
        f"{start + step * index:.1f},{height - value / top * height:.1f}" for index, value in enumerate(values)
    )


@dataclass(slots=True)
class Beat:
    """What was seen last.

    Args:
        status: how dtx is.
        marks: of things that change, what differs whenever they have.
        at: when, by the clock that only grows.
    """

    status: StatusForm
    marks: dict[str, str] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class Pulse:
    """Looks, as long as anybody watches.

    Args:
        context: what is looked at.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self._watchers = 0
        self._beat: Beat | None = None
        self._looking = asyncio.Lock()
        self._news = asyncio.Condition()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> list[Sample]:
        """Counters of the last ten minutes, oldest first."""
        return list(self._samples)

    def begin(self) -> None:
        """Go on until :meth:`close`."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dtx-pulse")

    async def close(self) -> None:
        """Let all who watch go. Idempotent."""
        self._closed.set()
        async with self._news:
            self._news.notify_all()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> Beat:
        """How dtx is, as of a moment ago: all who ask share one look.

        Raises:
            LogError: the database does not say.
        """
        async with self._looking:
            if self._beat is None or time.monotonic() - self._beat.at >= BEAT_SECONDS / 2:
                self._beat = await self._see()
            return self._beat

    def require_room(self) -> None:
        """Before :meth:`watch`.

        Raises:
            Problem: 503, too many watch.
        """
        if self._watchers >= MOST_WATCHERS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WATCHERS} pages are watching already")

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events: one at once, and one whenever something has changed."""
        self._watchers += 1
        try:
            seen: Beat | None = None
            while not self._closed.is_set():
                beat = self._beat
                if beat is not None and beat is not seen:
                    seen = beat
                    yield f"event: beat\ndata: {json.dumps(beat.marks)}\n\n".encode()
                else:
                    yield b": alive\n\n"
                async with self._news:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 5 * BEAT_SECONDS)
        finally:
            self._watchers -= 1

    async def _run(self) -> None:
        sampled = float("-inf")
        while not self._closed.is_set():
            now = time.monotonic()
            try:
                if now - sampled >= _SAMPLE_SECONDS:
                    sampled = now
                    self._samples.append(take(self._context.metrics, now))
                if self._watchers:
                    await self._tell()
            except Exception as error:  # noqa: BLE001 - whatever one look failed of, pages are kept up to date by the next
                _log.warning("pages could not be brought up to date", reason=str(error), kind=type(error).__name__)
            wait = max(BEAT_SECONDS, _SHARE * (time.monotonic() - now))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), wait)

    async def _tell(self) -> None:
        await self.look()
        async with self._news:
            self._news.notify_all()

    async def _see(self) -> Beat:
        context = self._context
        found = await status(context)
        lines = await context.read(
            lambda log: pages.journal_page(log, JournalFilter(rm=context.rm), latest_first=True, limit=1)
        )
        audit = await asyncio.to_thread(lambda: context.trail.trail(limit=1))
        journal = str(lines[0].cursor) if lines else ""
        marks = {
            "always": str(time.monotonic()),
            "branches": _digest(found.branches, found.stuck, found.in_doubt_bytes, journal, found.active),
            "journal": _digest(journal),
            "audit": _digest([(line.id, line.result) for line in audit]),
        }
        return Beat(found, marks)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
