"""What a transaction manager counts, for Prometheus."""

from typing import Final
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of all transaction managers of a registry, told apart by their node.

    Args:
        registry: where they are exposed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transactions: Final = Counter(
            "dtx_tm_transactions",
            "Transactions that ended, by outcome (committed, rolled-back, heuristic, unknown).",
            ("node", "outcome"),
            registry=registry,
        )
        self.seconds: Final = Histogram(
            "dtx_tm_commit_seconds", "Seconds from commit to its end.", ("node",), buckets=_SECONDS, registry=registry
        )
        self.running: Final = Gauge("dtx_tm_running", "Transactions under way.", ("node",), registry=registry)
        self.heuristics: Final = Counter(
            "dtx_tm_heuristics", "Heuristic outcomes that were recorded.", ("node", "outcome"), registry=registry
        )
        self.recovered: Final = Counter(
            "dtx_tm_recovered_branches", "Branches that recovery completed.", ("node", "decision"), registry=registry
        )
        self.waiting: Final = Gauge(
            "dtx_tm_waiting_branches",
            "Branches left open by the last round of recovery.",
            ("node",),
            registry=registry,
        )
        self.unreachable: Final = Gauge(
            "dtx_tm_unreachable_resources",
            "Resources that the last round of recovery could not ask.",
            ("node",),
            registry=registry,
        )


_ALL: Final[WeakKeyDictionary[CollectorRegistry, Metrics]] = WeakKeyDictionary()


def metrics_of(registry: CollectorRegistry | None) -> Metrics:
    """The metrics of *registry*, ``None``: of the default one; made once."""
    where = REGISTRY if registry is None else registry
    known = _ALL.get(where)
    if known is None:
        known = _ALL[where] = Metrics(where)
    return known
