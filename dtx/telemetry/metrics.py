"""Counters, gauges and histograms, ready for Prometheus.

What the hot path touches is resolved to a child once: counting costs an attribute and an addition. Bytes are counted
for each chunk read, so they are plain integers that are only looked at when somebody asks for the numbers.
"""

from collections.abc import Callable, Iterable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

BRANCH_STATES: Final = (
    "active",
    "idle",
    "rollback-only",
    "taking",
    "prepared",
    "committing",
    "rolling-back",
    "heuristic",
)
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
        self._operations = Counter(
            "dtx_operations", "Calls of the dtx classes.", ["operation", "answer"], registry=registry
        )
        self._seconds = Histogram(
            "dtx_operation_seconds",
            "Time from a call's last octet to its answer.",
            ["operation"],
            buckets=_FAST_SECONDS,
            registry=registry,
        )
        self._answered: dict[tuple[str, str], Callable[[], None]] = {}
        self._timed: dict[str, Callable[[float], None]] = {}
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
        validations = Counter(
            "dtx_validations", "Publishes judged before the vote, by cache result.", ["cache"], registry=registry
        )
        self.validation_hits: Final = validations.labels("hit")
        self.validation_misses: Final = validations.labels("miss")
        self.traffic: Final = Traffic()
        registry.register(_TrafficCollector(self.traffic))

    def operation_done(self, operation: str, answer: str, seconds: float) -> None:
        """Count one call of the dtx classes.

        Args:
            operation: the method, for example ``prepare``.
            answer: the flag's name in the XML (``xa-ok``), or the reply code (``404``).
            seconds: from the call's last octet to its answer.
        """
        count = self._answered.get((operation, answer))
        if count is None:
            count = self._answered[operation, answer] = self._operations.labels(operation, answer).inc
        count()
        observe = self._timed.get(operation)
        if observe is None:
            observe = self._timed[operation] = self._seconds.labels(operation).observe
        observe(seconds)

    def log_committed(self, records: int, seconds: float) -> None:
        """Count one group commit of the log: how many records, how long from BEGIN to the answer."""
        self._group_size.observe(records)
        self._commit_seconds.observe(seconds)

    def render(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self.registry)


class _TrafficCollector(Collector):
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("dtx_forwarded_bytes", "Octets passed on.", labels=["direction"])
        family.add_metric(["to-broker"], self._traffic.to_broker)
        family.add_metric(["to-client"], self._traffic.to_client)
        yield family
