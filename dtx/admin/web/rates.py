"""Throughput and latency from the counters that Prometheus reads, over the last minutes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from dtx.telemetry import Metrics

SHOWN: Final = ("start", "prepare", "commit", "rollback", "forget", "recover")
"""The calls that a page tells of."""
_CALLS: Final = "dtx_operations"
_SECONDS: Final = "dtx_operation_seconds"
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
        if family.name not in (_CALLS, _SECONDS):
            continue
        for sample in family.samples:
            operation = sample.labels.get("operation", "")
            if sample.name == f"{_CALLS}_total":
                calls[operation] = calls.get(operation, 0.0) + sample.value
            elif sample.name == f"{_SECONDS}_bucket":
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
