"""Live updates of pages: one query of the state of dtx for all open pages, and an event to each page.

Events have no contents. They tell a page which kinds of data have changed, and the page requests itself again. So
permissions are checked in one place. Throughput and latency are computed from the counters that Prometheus reads.
"""

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from dtx.admin.api_context import ApiContext
from dtx.admin.forms import StatusForm
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem
from dtx.admin.rabbitmq_rows import View, resident
from dtx.admin.routes_read import status
from dtx.admin.web.history import READING_SECONDS, History
from dtx.auth.roles import OperatorRole
from dtx.log import pages
from dtx.log.pages import JournalFilter
from dtx.telemetry import Metrics, get_logger

BEAT_SECONDS: Final = 2.0
"""Seconds between two queries of the state."""
MOST_WATCHERS: Final = 100
"""Open pages at most. They count as requests under way, of which the API permits 200."""
_SAMPLES: Final = 12
"""Samples of a minute, and the one before it."""
_SHARE: Final = 20
"""Queries may take one twentieth of the time: if they take longer, there are fewer of them."""

_log = get_logger(part="admin")
SHOWN: Final = ("start", "prepare", "commit", "rollback", "forget", "recover")
"""Operations that the overview shows."""
_CALLS: Final = "dtx_operations"
_CALL_SECONDS: Final = "dtx_operation_seconds"
_LAG_SECONDS: Final = "dtx_event_loop_lag_seconds"
_SAMPLER: Final = Identity(name="dtx", role=OperatorRole.VIEWER, address="")
"""The identity that reads the numbers of the broker. They are shown to every operator."""
WINDOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment.

    Args:
        at: seconds of a monotonic clock.
        calls: number of calls by operation.
        buckets: number of calls that took at most that long, by operation and seconds.
        lag: number of delays of the event loop that were at most that long, by seconds.
        published: messages from publishers, in standalone mode.
        delivered: messages to consumers, in standalone mode.
    """

    at: float
    calls: dict[str, float]
    buckets: dict[str, dict[float, float]]
    lag: dict[float, float] = field(default_factory=dict)
    published: int | None = None
    delivered: int | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput and latency of one operation in the last minute.

    Args:
        operation: its name.
        per_second: calls a second.
        median: seconds, rounded up to the next bound of the histogram; ``None`` without calls.
        p99: likewise, for 99 % of the calls.
    """

    operation: str
    per_second: float
    median: float | None
    p99: float | None


def take(metrics: Metrics, now: float) -> Sample:
    """The counters now."""
    calls: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    lag: dict[float, float] = {}
    for family in metrics.registry.collect():
        if family.name == _LAG_SECONDS:
            lag = {float(each.labels["le"]): each.value for each in family.samples if each.name.endswith("_bucket")}
        if family.name not in (_CALLS, _CALL_SECONDS):
            continue
        for sample in family.samples:
            operation = sample.labels.get("operation", "")
            if sample.name == f"{_CALLS}_total":
                calls[operation] = calls.get(operation, 0.0) + sample.value
            elif sample.name == f"{_CALL_SECONDS}_bucket":
                buckets.setdefault(operation, {})[float(sample.labels["le"])] = sample.value
    return Sample(now, calls, buckets, lag)


def rates(samples: Sequence[Sample]) -> list[Rate]:
    """Throughput and latency of each operation in the last minute."""
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
            _quantile(first.buckets.get(operation, {}), last.buckets.get(operation, {}), 0.5),
            _quantile(first.buckets.get(operation, {}), last.buckets.get(operation, {}), 0.99),
        )
        for operation in SHOWN
    ]


def _quantile(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = counts.get(float("inf"), 0.0)
    if total <= 0:
        return None
    found = next(bound for bound, count in counts.items() if count >= share * total)
    return found if found != float("inf") else max(bound for bound in counts if bound != float("inf"))


def rates_between(before: Sample, after: Sample) -> dict[str, float | None]:
    """The series that are computed from two samples: rates a second, and the longest delay of the event loop."""
    passed = after.at - before.at
    done = sum(after.calls.get(name, 0.0) - before.calls.get(name, 0.0) for name in ("commit", "rollback"))

    def rate(first: int | None, last: int | None) -> float | None:
        return None if first is None or last is None else max(0, last - first) / passed

    return {
        "branches": max(0.0, done) / passed,
        "published": rate(before.published, after.published),
        "delivered": rate(before.delivered, after.delivered),
        "lag": _quantile(before.lag, after.lag, 1.0),
    }


@dataclass(slots=True)
class StatusSnapshot:
    """The result of one query of the state.

    Args:
        status: the state of dtx.
        marks: a digest for each kind of data, which differs after a change.
        at: seconds of the monotonic clock.
    """

    status: StatusForm
    marks: dict[str, str] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)


class LiveUpdates:
    """Queries the state of dtx while any page is open.

    Args:
        context: the context of the API.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.history: Final = History()
        self._watchers = 0
        self._beat: StatusSnapshot | None = None
        self._query_lock = asyncio.Lock()
        self._news = asyncio.Condition()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> list[Sample]:
        """Counters of the last minute, oldest first."""
        return list(self._samples)

    def begin(self) -> None:
        """Start; it runs until :meth:`close`."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dtx-pulse")

    async def close(self) -> None:
        """End all streams. Idempotent."""
        self._closed.set()
        async with self._news:
            self._news.notify_all()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def snapshot(self) -> StatusSnapshot:
        """The state of dtx, at most one second old: simultaneous callers share one query.

        Raises:
            LogError: the database cannot be used.
        """
        async with self._query_lock:
            if self._beat is None or time.monotonic() - self._beat.at >= BEAT_SECONDS / 2:
                self._beat = await self._query()
            return self._beat

    def require_room(self) -> None:
        """Check the limit of open pages; call it before :meth:`watch`.

        Raises:
            Problem: 503, the limit is reached.
        """
        if self._watchers >= MOST_WATCHERS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WATCHERS} pages with live updates are open already")

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events: one at once, and one after each further query; a comment if there is none for 10 s."""
        self._watchers += 1
        try:
            seen: StatusSnapshot | None = None
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
                if now - sampled >= READING_SECONDS - BEAT_SECONDS / 2:
                    sampled = now
                    await self._sample(now)
                if self._watchers:
                    await self._notify()
            except Exception as error:  # noqa: BLE001 - the next query updates the pages
                _log.warning("live update of pages failed", reason=str(error), kind=type(error).__name__)
            wait = max(BEAT_SECONDS, _SHARE * (time.monotonic() - now))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), wait)

    async def _sample(self, now: float) -> None:
        """Read all numbers of the series."""
        context, active = self._context, self._context.active
        if active is not None and not active.lease_valid():
            active = None
        sample = take(context.metrics, now)
        reading: dict[str, float | None] = {"memory": resident()}
        if active is not None:
            reading |= {"in_doubt": active.manager.quotas.in_doubt, "disk": active.manager.disk.free}
        if active is not None and active.own_broker is not None:
            broker = active.own_broker
            view = View(who=_SAMPLER, context=context, active=active, broker=broker, users=broker.accounts.users)
            totals = await view.totals()
            reading |= {"ready": totals.ready, "unacked": totals.unacked}
            counts = totals.counts
            sample = replace(sample, published=counts.numbers()["publish"], delivered=counts.deliver_get)
        if self._samples:
            reading |= rates_between(self._samples[-1], sample)
        self._samples.append(sample)
        self.history.add(now, reading)

    async def _notify(self) -> None:
        await self.snapshot()
        async with self._news:
            self._news.notify_all()

    async def _query(self) -> StatusSnapshot:
        context = self._context
        found = await status(context)
        lines = await context.read(
            lambda log: pages.journal_page(log, JournalFilter(rm=context.rm), latest_first=True, limit=1)
        )
        audit = await asyncio.to_thread(lambda: context.operator_log.audit_lines(limit=1))
        journal = str(lines[0].cursor) if lines else ""
        marks = {
            "always": str(time.monotonic()),
            "branches": _digest(found.branches, found.stuck, found.in_doubt_bytes, journal, found.active),
            "journal": _digest(journal),
            "audit": _digest([(line.id, line.result) for line in audit]),
        }
        return StatusSnapshot(found, marks)


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
