"""Counters, gauges and histograms for Prometheus.

On hot paths, labels are resolved once: to count costs an attribute and an addition. Bytes are counted for each read, so
they are plain integers that are read only by a scrape.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dtx.telemetry.traces import Traces

BRANCH_STATES: Final = (
    "active", "idle", "rollback-only", "timed-out", "taking", "taking-one-phase", "prepared", "committing",
    "rolling-back", "heuristic-committing", "heuristic-rolling-back", "heuristic",
)  # fmt: skip
EVENTS: Final = (
    "prepared", "timed-out", "stuck", "decided", "discarded", "redirected", "hazard", "heuristic", "repeated",
    "committed", "rolled-back", "read-only", "forgotten",
)  # fmt: skip
"""Events in the journal."""
OUTCOMES: Final = ("committed", "rolled-back", "mixed", "hazard")
"""Heuristic outcomes."""
FINDINGS: Final = ("happened", "never", "unknown")
"""Outcomes of units that were pending when a connection was lost, or dtx died."""
OPERATOR_ACTIONS: Final = ("commit", "rollback", "forget", "retry", "discard", "redirect")
COMMIT_CONNECTION_STATES: Final = ("up", "down", "blocked")
UNIT_STATES: Final = ("under-way", "waiting")
POLICY_ACTIONS: Final = ("alert", "commit", "rollback")
POLICY_RESULTS: Final = ("done", "refused")

_FAST_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
)  # fmt: skip
_GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Traffic:
    """Forwarded bytes. Only the thread of the event loop counts: ``traffic.to_broker += n``."""

    __slots__ = ("to_broker", "to_client")

    def __init__(self) -> None:
        self.to_broker = 0
        self.to_client = 0


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels, registry=registry)


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels, registry=registry)


class _RenamedGauge:
    """A gauge that is exported under its former name too, for one more version."""

    def __init__(
        self, registry: CollectorRegistry, name: str, former: str, text: str, states: Sequence[str] = ()
    ) -> None:
        labels = ("state",) if states else ()
        texts = {name: text, former: f"Deprecated: the former name of {name}."}
        gauges = [_gauge(registry, each, text, *labels) for each, text in texts.items()]
        self._gauges: Final = {state: [gauge.labels(state) for gauge in gauges] for state in states} or {"": gauges}

    def set(self, number: float, state: str = "") -> None:
        """Set it for the value of its label."""
        for gauge in self._gauges[state]:
            gauge.set(number)


class Metrics:
    """All metrics of one running service, in a registry of its own.

    A gauge is set (``connections.inc()``), or computed by a scrape (``oldest_in_doubt.set_function(...)``). Gauges that
    need all branches are set by a scrape, see :mod:`dtx.admin.api`.
    """

    def __init__(self) -> None:
        self.traces: Traces | None = None
        """Spans; ``None`` if traces are off."""
        registry = self.registry = CollectorRegistry()
        gauge, counter = partial(_gauge, registry), partial(_counter, registry)
        ProcessCollector(registry=registry)
        self.connections: Final = gauge("dtx_connections", "Client connections that are open.")
        self.connections_limit: Final = gauge("dtx_connections_limit", "Limit of dtx_connections (--max-connections).")
        self.channels: Final = gauge("dtx_channels", "Client channels that are open.")
        self.selected_channels: Final = gauge(
            "dtx_selected_channels", "Channels that selected distributed transactions."
        )
        self._branches = gauge("dtx_branches", "Transaction branches.", "state")
        self.branches: Final = {state: self._branches.labels(state) for state in BRANCH_STATES}
        """One gauge for each state of a branch."""
        self.stuck_branches: Final = gauge(
            "dtx_stuck_branches", "Decided branches that the broker refuses to complete."
        )
        self.oldest_in_doubt: Final = gauge(
            "dtx_in_doubt_oldest_seconds",
            "Time since the vote of the branch that has been prepared longest; 0 without one.",
        )
        self.in_doubt_bytes: Final = gauge("dtx_in_doubt_bytes", "Messages of branches that have voted, in bytes.")
        self.held_bytes: Final = gauge(
            "dtx_held_bytes", "Memory for messages of branches that have not voted, in bytes."
        )
        self.held_bytes_limit: Final = gauge("dtx_held_bytes_limit", "Limit of dtx_held_bytes (--max-held-bytes).")
        self.disk_alarm: Final = gauge("dtx_disk_alarm", "1 while clients that publish wait for free disk space.")
        self.disk_free: Final = gauge("dtx_disk_free_bytes", "Free bytes on the disk of data_dir; 0 with --database.")
        self.disk_free_limit: Final = gauge(
            "dtx_disk_free_limit_bytes", "Free bytes that raise the alarm (--disk-free-bytes); 0 with --database."
        )
        self._usage: Final = _Usage()
        self.usage_numbers: Final = self._usage.set
        """Set the usage of users and virtual hosts; see :class:`UsageNumbers`."""
        registry.register(self._usage)
        self.lease_held: Final = gauge("dtx_lease_held", "1 while this dtx is the active one.")
        self.lease_epoch: Final = gauge(
            "dtx_lease_epoch", "Epoch of the lease: grows with every takeover and reconnection."
        )
        self.log_queue: Final = gauge("dtx_log_queue", "Log records that wait for the database.")
        self.commit_connection_numbers: Final = _CommitConnections(registry).set
        """Set the metrics of commit connections; see :class:`CommitConnectionNumbers`."""
        self._operations: Final = _Operations(
            ("dtx_operations", "Calls of the dtx classes.", "answer"),
            ("dtx_operation_seconds", "Time from the last byte of a call to its answer."),
        )
        self.operation_done: Final = self._operations.done
        """Count one call of the dtx classes; see :meth:`_Operations.done`."""
        registry.register(self._operations)
        self.members: Final = gauge("dtx_members", "Active dtx that share the branches; 0 for a dtx that is alone.")
        self.takeovers: Final = counter("dtx_takeovers", "Members whose branches this one took.")
        self.branches_adopted: Final = counter(
            "dtx_branches_adopted", "Branches that this member took from others, also from those that had left."
        )
        self._hops: Final = _Operations(
            ("dtx_forwarded_requests", "Requests that this member sent to another one.", "result"),
            ("dtx_forwarded_request_seconds", "Time from a request to the answer of another member."),
        )
        self.request_forwarded: Final = self._hops.done
        """Count one request to another member; see :meth:`_Operations.done`."""
        registry.register(self._hops)
        self._lag: Final = _LoopLag()
        self.loop_lagged: Final = self._lag.seconds.observe
        """Count one measurement of the event loop, in seconds."""
        registry.register(self._lag)
        self._commits: Final = _Commits()
        self.log_committed: Final = self._commits.count
        """Count one group commit of the log; see :meth:`_Commits.count`."""
        registry.register(self._commits)
        self._journal: Final = _Journal()
        self.lines_written: Final = self._journal.written
        """Count lines of the journal."""
        registry.register(self._journal)
        findings = counter("dtx_unit_findings", "Outcomes of units whose answer was lost.", "found")
        self.unit_findings: Final = {finding: findings.labels(finding) for finding in FINDINGS}
        """One counter for each finding."""
        self.messages_replayed: Final = counter(
            "dtx_messages_replayed",
            "Messages that were sent again, because the outcome of an earlier unit is not known.",
        )
        self.copies_suppressed: Final = counter(
            "dtx_copies_suppressed", "Second copies of messages that consumers did not get."
        )
        self.replays_failed: Final = counter(
            "dtx_replays_failed",
            "Failed attempts to resume an unfinished branch; they are repeated.",
        )
        policies = counter("dtx_policy_actions", "Actions of policies.", "action", "result")
        self.policy_actions: Final = {
            (action, result): policies.labels(action, result) for action in POLICY_ACTIONS for result in POLICY_RESULTS
        }
        """One counter for each action and result."""
        self.overdue: Final = gauge(
            "dtx_policy_overdue_branches", "Prepared branches older than --alert-after; 0 without it."
        )
        units = counter("dtx_units", "Upstream transactions made for branches.", "result")
        self.units_applied: Final = units.labels("applied")
        self.units_failed: Final = units.labels("failed")
        self.units_repeated: Final = units.labels("repeated")
        orders = counter("dtx_operator_orders", "Orders of operators that were carried out.", "action")
        self.orders: Final = {action: orders.labels(action) for action in OPERATOR_ACTIONS}
        """One counter for each action of operators."""
        validations = counter("dtx_validations", "Publishes checked before the vote, by cache result.", "cache")
        self.validation_hits: Final = validations.labels("hit")
        self.validation_misses: Final = validations.labels("miss")
        self.traffic: Final = Traffic()
        registry.register(_TrafficCollector(self.traffic))

    def branches_taken(self, members: int, branches: int) -> None:
        """Count *branches* that were taken from *members* that are gone, and from those that had left."""
        self.takeovers.inc(members)
        self.branches_adopted.inc(branches)

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class CommitConnectionNumbers(Protocol):
    """The facts about a commit connection for metrics and operators."""

    problem: str | None
    """Why the commit connection is not working; ``None`` when it is."""

    @property
    def distrust(self) -> str | None:
        """Why receipts are not trusted; ``None`` when they are."""

    @property
    def blocked(self) -> bool:
        """Whether the broker accepts no publishes (memory or disk alarm)."""

    @property
    def channels(self) -> int:
        """The number of open channels: units at the same time."""

    @property
    def under_way(self) -> int:
        """The number of units that have a channel."""

    @property
    def waiting(self) -> int:
        """The number of units that wait for a channel."""

    @property
    def open_receipts(self) -> int:
        """The number of receipts that dtx may still need."""


class _CommitConnections:
    """Sums over all commit connections. Users can create virtual hosts, so there are no metrics for each connection."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(_RenamedGauge, registry)
        text = "Commit connections, one for each virtual host of the broker in use."
        self._states = gauge("dtx_commit_connections", "dtx_lanes", text, COMMIT_CONNECTION_STATES)
        text = "Commit connections whose receipts are not trusted."
        self._distrusted = gauge("dtx_commit_connections_without_receipts", "dtx_lanes_without_receipts", text)
        text = "Units of phase two that can be sent at the same time."
        self._channels = gauge("dtx_commit_channels", "dtx_lane_channels", text)
        text = "Units of phase two that are being sent, or wait for a channel."
        self._units = gauge("dtx_commit_connection_units", "dtx_lane_units", text, UNIT_STATES)
        self._receipts = _gauge(registry, "dtx_receipts_open", "Receipts in the broker that dtx may still need.")

    def set(self, numbers: "Iterable[CommitConnectionNumbers]") -> None:
        """Set the metrics from *numbers*, those of all commit connections."""
        connections = list(numbers)
        working = [connection for connection in connections if connection.problem is None]
        blocked = sum(connection.blocked for connection in working)
        self._states.set(len(working) - blocked, "up")
        self._states.set(blocked, "blocked")
        self._states.set(len(connections) - len(working), "down")
        self._distrusted.set(sum(connection.distrust is not None for connection in connections))
        self._channels.set(sum(connection.channels for connection in connections))
        self._units.set(sum(connection.under_way for connection in connections), "under-way")
        self._units.set(sum(connection.waiting for connection in connections), "waiting")
        self._receipts.set(sum(connection.open_receipts for connection in connections))


class WrittenLine(Protocol):
    """A line of the journal, for the counters."""

    @property
    def event(self) -> str:
        """One of :data:`EVENTS`."""


class UsageNumbers(Protocol):
    """The resources that one user or one virtual host uses."""

    @property
    def scope(self) -> str:
        """``user`` or ``vhost``."""

    @property
    def name(self) -> str:
        """Name of the user or virtual host."""

    @property
    def used(self) -> Mapping[str, int]:
        """Usage by resource."""

    @property
    def limits(self) -> Mapping[str, int]:
        """Quota by resource, for resources that have one."""


class _Usage(Collector):
    def __init__(self) -> None:
        self._usage: list[tuple[str, str, Mapping[str, int], Mapping[str, int]]] = []

    def set(self, usage: Iterable[UsageNumbers]) -> None:
        """Replace the numbers by *usage*."""
        self._usage = [(each.scope, each.name, each.used, each.limits) for each in usage]

    def collect(self) -> Iterable[Metric]:
        labels = ["scope", "name", "resource"]
        used = GaugeMetricFamily("dtx_usage", "Usage by user and virtual host.", labels=labels)
        quotas = GaugeMetricFamily("dtx_quota", "Limit of dtx_usage (--quota).", labels=labels)
        for scope, name, found, limits in self._usage:
            for resource, number in found.items():
                used.add_metric([scope, name, resource], number)
            for resource, number in limits.items():
                quotas.add_metric([scope, name, resource], number)
        yield used
        yield quotas


class _Journal(Collector):
    """Durable lines of the journal. Only the thread of the event loop counts them, twice for each branch."""

    def __init__(self) -> None:
        self._events = dict.fromkeys(EVENTS, 0)
        self._outcomes = dict.fromkeys(OUTCOMES, 0)

    def written(self, lines: Iterable[WrittenLine]) -> None:
        """Count *lines*."""
        events = self._events
        for line in lines:
            events[line.event] += 1
            if line.event == "heuristic":
                outcome = getattr(line, "outcome", None)
                if outcome is not None:
                    self._outcomes[outcome] += 1

    def collect(self) -> Iterable[Metric]:
        events = CounterMetricFamily("dtx_journal_lines", "Lines of the journal that were written.", labels=["event"])
        for event, count in self._events.items():
            events.add_metric([event], count)
        yield events
        text = "Branches that were completed heuristically."
        outcomes = CounterMetricFamily("dtx_heuristic_outcomes", text, labels=["outcome"])
        for outcome, count in self._outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes


class _Histogram:
    """A histogram for the thread of the event loop: that of the library takes a lock for each number.

    Args:
        bounds: greatest number of each bucket; one more bucket has greater numbers.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, number: float) -> None:
        self.counts[bisect_left(self._bounds, number)] += 1
        self.sum += number

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, other: "_Histogram") -> None:
        """Add the counts of *other*, which has the same bounds."""
        self.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Add it to *family* with *labels*."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self.counts), strict=True)), self.sum)


class _LoopLag(Collector):
    def __init__(self) -> None:
        self.seconds = _Histogram(_FAST_SECONDS)

    def collect(self) -> Iterable[Metric]:
        text = "Delay of a timer of the event loop, measured four times a second."
        family = HistogramMetricFamily("dtx_event_loop_lag_seconds", text)
        self.seconds.add_to(family)
        yield family


class _Commits(Collector):
    """Group commits of the log."""

    def __init__(self) -> None:
        self._sizes = _Histogram(_GROUP_SIZES)
        self._seconds = _Histogram(_FAST_SECONDS)

    def count(self, records: int, seconds: float) -> None:
        """Count one group commit of the log.

        Args:
            records: in the group.
            seconds: from BEGIN to the answer.
        """
        self._sizes.observe(records)
        self._seconds.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        sizes = HistogramMetricFamily("dtx_log_group_size", "Log records in one database commit.")
        self._sizes.add_to(sizes)
        yield sizes
        seconds = HistogramMetricFamily("dtx_log_commit_seconds", "Time of one database commit.")
        self._seconds.add_to(seconds)
        yield seconds


class _Operations(Collector):
    """Calls of the dtx classes, four times for each branch; or requests between members.

    Args:
        counts: name, text and second label of the metric that counts them.
        seconds: name and text of the metric of their times.
    """

    def __init__(self, counts: tuple[str, str, str], seconds: tuple[str, str]) -> None:
        self._counts = counts
        self._seconds = seconds
        self._done: dict[tuple[str, str], _Histogram] = {}
        """Durations by operation and answer."""

    def done(self, operation: str, answer: str, seconds: float) -> None:
        """Count one call.

        Args:
            operation: the method, for example ``prepare``.
            answer: the flag's name in the XML (``xa-ok``), or the reply code (``404``). Between members: ``done``,
                ``refused``, ``elsewhere``, ``unreachable`` or ``lost``.
            seconds: until its answer.
        """
        done = self._done.get((operation, answer))
        if done is None:
            done = self._done[str(operation), answer] = _Histogram(_FAST_SECONDS)
        done.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        name, text, answer = self._counts
        counts = CounterMetricFamily(name, text, labels=["operation", answer])
        times: dict[str, _Histogram] = {}
        for (operation, answer), done in self._done.items():
            counts.add_metric([operation, answer], done.count)
            times.setdefault(operation, _Histogram(_FAST_SECONDS)).add(done)
        yield counts
        seconds = HistogramMetricFamily(*self._seconds, labels=["operation"])
        for operation, of_it in times.items():
            of_it.add_to(seconds, [operation])
        yield seconds


class _TrafficCollector(Collector):
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("dtx_forwarded_bytes", "Forwarded bytes.", labels=["direction"])
        family.add_metric(["to-broker"], self._traffic.to_broker)
        family.add_metric(["to-client"], self._traffic.to_client)
        yield family
