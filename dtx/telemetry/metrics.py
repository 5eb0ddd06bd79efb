"""Counters, gauges and histograms, ready for Prometheus.

What the hot path touches is resolved to a child once: counting costs an attribute and an addition. Bytes are counted
for each chunk read, so they are plain integers that are only looked at when somebody asks for the numbers.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BRANCH_STATES: Final = (
    "active",
    "idle",
    "rollback-only",
    "taking",
    "prepared",
    "committing",
    "rolling-back",
    "heuristic-committing",
    "heuristic-rolling-back",
    "heuristic",
)
OPERATOR_ACTIONS: Final = ("commit", "rollback", "forget", "retry", "discard", "redirect")
UnitResult = Literal["applied", "failed", "repeated"]

_FAST_SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
_GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Traffic:
    """Bytes passed on, counted by the event loop's thread alone: ``traffic.to_broker += n``."""

    __slots__ = ("to_broker", "to_client")

    def __init__(self) -> None:
        self.to_broker = 0
        self.to_client = 0


class Metrics:
    """All numbers of one running service, in a registry of its own.

    A gauge is set (``connections.inc()``), or asked when needed (``oldest_in_doubt.set_function(...)``).
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.connections: Final = Gauge("dtx_connections", "Client connections that are open.", registry=registry)
        self.channels: Final = Gauge("dtx_channels", "Client channels that are open.", registry=registry)
        self.selected_channels: Final = Gauge(
            "dtx_selected_channels", "Channels that selected distributed transactions.", registry=registry
        )
        self._branches = Gauge("dtx_branches", "Transaction branches.", ["state"], registry=registry)
        self.branches: Final = {state: self._branches.labels(state) for state in BRANCH_STATES}
        """One gauge for each state of a branch."""
        self.stuck_branches: Final = Gauge(
            "dtx_stuck_branches", "Decided branches that the broker refuses to complete.", registry=registry
        )
        self.oldest_in_doubt: Final = Gauge(
            "dtx_in_doubt_oldest_seconds", "Age of the oldest prepared branch; 0 without one.", registry=registry
        )
        self.lease_held: Final = Gauge("dtx_lease_held", "1 while this dtx is the active one.", registry=registry)
        self._operations: Final = _Operations()
        self.operation_done: Final = self._operations.done
        """Count one call of the dtx classes, see there."""
        registry.register(self._operations)
        self._group_size = Histogram(
            "dtx_log_group_size", "Log records in one database commit.", buckets=_GROUP_SIZES, registry=registry
        )
        self._commit_seconds = Histogram(
            "dtx_log_commit_seconds", "Time of one database commit.", buckets=_FAST_SECONDS, registry=registry
        )
        units = Counter("dtx_units", "Upstream transactions made for branches.", ["result"], registry=registry)
        self.units_applied: Final = units.labels("applied")
        self.units_failed: Final = units.labels("failed")
        self.units_repeated: Final = units.labels("repeated")
        orders = Counter(
            "dtx_operator_orders", "Orders of operators that were carried out.", ["action"], registry=registry
        )
        self.orders: Final = {action: orders.labels(action) for action in OPERATOR_ACTIONS}
        """One counter for each action of operators."""
        validations = Counter(
            "dtx_validations", "Publishes judged before the vote, by cache result.", ["cache"], registry=registry
        )
        self.validation_hits: Final = validations.labels("hit")
        self.validation_misses: Final = validations.labels("miss")
        self.traffic: Final = Traffic()
        registry.register(_TrafficCollector(self.traffic))

    def log_committed(self, records: int, seconds: float) -> None:
        """Count one group commit of the log: how many records, how long from BEGIN to the answer."""
        self._group_size.observe(records)
        self._commit_seconds.observe(seconds)

    def render(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self.registry)


class _Operations(Collector):
    """Calls of the dtx classes, counted by the event loop's thread alone, four times for each branch."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._times: dict[str, tuple[list[int], list[float]]] = {}
        """By operation, how many were at most as long as each of _FAST_SECONDS (the last one: longer), and the sum."""

    def done(self, operation: str, answer: str, seconds: float) -> None:
        """Count one.

        Args:
            operation: the method, for example ``prepare``.
            answer: the flag's name in the XML (``xa-ok``), or the reply code (``404``).
            seconds: from the call's last octet to its answer.
        """
        key = operation, answer
        self._counts[key] = self._counts.get(key, 0) + 1
        times = self._times.get(operation)
        if times is None:
            times = self._times[str(operation)] = [0] * (len(_FAST_SECONDS) + 1), [0.0]
        times[0][bisect_left(_FAST_SECONDS, seconds)] += 1
        times[1][0] += seconds

    def collect(self) -> Iterable[Metric]:
        counts = CounterMetricFamily("dtx_operations", "Calls of the dtx classes.", labels=["operation", "answer"])
        for (operation, answer), count in self._counts.items():
            counts.add_metric([str(operation), answer], count)
        yield counts
        text = "Time from a call's last octet to its answer."
        seconds = HistogramMetricFamily("dtx_operation_seconds", text, labels=["operation"])
        bounds = [*(str(float(bound)) for bound in _FAST_SECONDS), "+Inf"]
        for operation, (numbers, (total,)) in self._times.items():
            seconds.add_metric([operation], list(zip(bounds, accumulate(numbers), strict=True)), total)
        yield seconds


class _TrafficCollector(Collector):
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("dtx_forwarded_bytes", "Octets passed on.", labels=["direction"])
        family.add_metric(["to-broker"], self._traffic.to_broker)
        family.add_metric(["to-client"], self._traffic.to_client)
        yield family
