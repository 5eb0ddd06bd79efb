"""The numbers of standalone mode for Prometheus, under RabbitMQ's names where they mean the same.

``/metrics`` has sums over all queues. ``/metrics/detailed`` has series of each queue, as in RabbitMQ. Their number
grows with that of the queues, so Prometheus reads them only where it is configured to. The labels ``protocol`` and
``queue_type`` of RabbitMQ are left out.
"""

import time
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dtx.admin.safe_text import exact_name
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.queue import Reason
from dtx.store.slices import SLICE_SECONDS


@dataclass(slots=True, kw_only=True)
class BrokerTotals:
    """The numbers of all objects and messages of the broker.

    Args:
        node, cluster: names of this dtx and its resource manager, as in the management API.
        connections, channels, consumers, exchanges, queues: of all virtual hosts.
        ready, unacked: messages.
        counts: what has happened to messages.
        disk_free: bytes; ``None`` where unknown.
        disk_limit: bytes below which the alarm of the disk is raised.
        alarms: ``disk`` and ``memory``, while they are raised.
        logins, refused_logins: with a user's password or certificate, at the ports for clients and at the API.
    """

    node: str = ""
    cluster: str = ""
    connections: int = 0
    channels: int = 0
    consumers: int = 0
    exchanges: int = 0
    queues: int = 0
    ready: int = 0
    unacked: int = 0
    counts: BrokerCounts = field(default_factory=BrokerCounts)
    disk_free: int | None = None
    disk_limit: int = 0
    alarms: Sequence[str] = ()
    logins: int = 0
    refused_logins: int = 0


_Number = Callable[[BrokerTotals], float | None]
_GAUGES: Final[tuple[tuple[str, str, _Number], ...]] = (
    ("connections", "Clients that have entered a virtual host.", lambda of: of.connections),
    ("channels", "Channels of clients in a virtual host.", lambda of: of.channels),
    ("consumers", "Consumers of queues.", lambda of: of.consumers),
    ("queues", "Queues.", lambda of: of.queues),
    ("queue_messages_ready", "Messages that wait for consumers.", lambda of: of.ready),
    ("queue_messages_unacked", "Messages that are delivered and not acknowledged.", lambda of: of.unacked),
    ("queue_messages", "Ready and unacknowledged messages.", lambda of: of.ready + of.unacked),
    (
        "disk_space_available_bytes",
        "Free bytes on the disk of data_dir; none with --database.",
        lambda of: of.disk_free,
    ),
    ("disk_space_available_limit_bytes", "Free bytes that raise the alarm.", lambda of: of.disk_limit),
    (
        "alarms_free_disk_space_watermark",
        "1 while clients that publish wait for free disk space.",
        lambda of: "disk" in of.alarms,
    ),
    (
        "alarms_memory_used_watermark",
        "1 while clients that publish wait because messages take --max-held-bytes.",
        lambda of: "memory" in of.alarms,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, _Number], ...]] = (
    ("auth_attempts", "Logins with a password or certificate.", lambda of: of.logins + of.refused_logins),
    ("auth_attempts_succeeded", "Logins that were accepted.", lambda of: of.logins),
    ("auth_attempts_failed", "Logins that were refused.", lambda of: of.refused_logins),
    ("global_messages_received", "Messages from publishers.", lambda of: of.counts.received),
    (
        "global_messages_routed",
        "Messages that are durable in a queue, once for each queue.",
        lambda of: of.counts.publish,
    ),
    (
        "global_messages_unroutable_returned",
        "Messages for no queue that returned to their publishers.",
        lambda of: of.counts.return_unroutable,
    ),
    (
        "global_messages_unroutable_dropped",
        "Messages for no queue that were dropped.",
        lambda of: of.counts.drop_unroutable,
    ),
    ("global_messages_delivered", "Messages for consumers and basic.get.", lambda of: of.counts.deliver_get),
    (
        "global_messages_delivered_consume_manual_ack",
        "Messages for consumers that acknowledge.",
        lambda of: of.counts.deliver,
    ),
    (
        "global_messages_delivered_consume_auto_ack",
        "Messages for consumers without acknowledgement.",
        lambda of: of.counts.deliver_no_ack,
    ),
    (
        "global_messages_delivered_get_manual_ack",
        "Messages for basic.get that must be acknowledged.",
        lambda of: of.counts.get,
    ),
    (
        "global_messages_delivered_get_auto_ack",
        "Messages for basic.get without acknowledgement.",
        lambda of: of.counts.get_no_ack,
    ),
    ("global_messages_get_empty", "Answers to basic.get without a message.", lambda of: of.counts.get_empty),
    ("global_messages_redelivered", "Messages that were delivered again.", lambda of: of.counts.redeliver),
    (
        "global_messages_acknowledged",
        "Acknowledged messages, and those that committed branches have consumed.",
        lambda of: of.counts.ack,
    ),
)
_REASONS: Final = {
    Reason.MAXLEN: "Messages beyond the length of their queue.",
    Reason.EXPIRED: "Messages whose time to live has ended.",
    Reason.REJECTED: "Messages that consumers rejected.",
    Reason.DELIVERY_LIMIT: "Messages that returned too often.",
}
_STRATEGIES: Final = {True: "at_least_once", False: "disabled"}
"""RabbitMQ's words for messages that become dead letters, and for messages that are dropped."""


def families(of: BrokerTotals) -> Iterator[Metric]:
    """The metrics at ``/metrics``."""
    identity = InfoMetricFamily("rabbitmq_identity", "The names of this dtx and its resource manager.")
    identity.add_metric([], {"rabbitmq_node": of.node, "rabbitmq_cluster": of.cluster})
    yield identity
    for name, text, number in _GAUGES:
        gauge = GaugeMetricFamily(f"rabbitmq_{name}", text)
        value = number(of)
        if value is not None:
            gauge.add_metric([], value)
        yield gauge
    for name, text, number in _COUNTERS:
        yield CounterMetricFamily(f"rabbitmq_{name}", text, number(of))
    for reason, text in _REASONS.items():
        name = f"rabbitmq_global_messages_dead_lettered_{reason}"
        counter = CounterMetricFamily(name, text, labels=["dead_letter_strategy"])
        for dead_letters, strategy in _STRATEGIES.items():
            counter.add_metric([strategy], of.counts.left.get((reason, dead_letters), 0))
        yield counter


class _Totals(Collector):
    def __init__(self, of: BrokerTotals) -> None:
        self._of = of

    def collect(self) -> Iterable[Metric]:
        return families(self._of)


def page(of: BrokerTotals) -> bytes:
    """The metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Totals(of))
    return generate_latest(registry)


# -- series of each queue

Detail = tuple[str, str, str, Callable[[Queue], int]]
DETAILS: Final[dict[str, tuple[Detail, ...]]] = {
    "queue_coarse_metrics": (
        ("queue_messages_ready", "gauge", "Messages that wait for consumers.", lambda of: of.index.ready),
        ("queue_messages_unacked", "gauge", "Unacknowledged messages.", lambda of: of.index.unacked),
        ("queue_messages", "gauge", "Ready and unacknowledged messages.", lambda of: of.index.ready + of.index.unacked),
    ),
    "queue_consumer_count": (("queue_consumers", "gauge", "Consumers.", lambda of: of.index.consumers),),
    "queue_delivery_metrics": (
        ("queue_get_ack_total", "counter", "Messages for basic.get, with ack.", lambda of: of.index.counts.get),
        ("queue_get_total", "counter", "Messages for basic.get, without ack.", lambda of: of.index.counts.get_no_ack),
        ("queue_get_empty_total", "counter", "Empty answers to basic.get.", lambda of: of.index.counts.get_empty),
        (
            "queue_messages_delivered_ack_total",
            "counter",
            "Messages for consumers, with ack.",
            lambda of: of.index.counts.deliver,
        ),
        (
            "queue_messages_delivered_total",
            "counter",
            "Messages for consumers, without ack.",
            lambda of: of.index.counts.deliver_no_ack,
        ),
        (
            "queue_messages_redelivered_total",
            "counter",
            "Messages that were delivered again.",
            lambda of: of.index.counts.redeliver,
        ),
        ("queue_messages_acked_total", "counter", "Acknowledged messages.", lambda of: of.index.counts.ack),
    ),
    "queue_publish_metrics": (
        ("queue_messages_published_total", "counter", "Published messages.", lambda of: of.index.counts.publish),
    ),
}
"""Metrics of each queue, by RabbitMQ's names of their families. The last family is dtx's own."""
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


async def detailed(queues: Sequence[Queue], wanted: Iterable[str]) -> AsyncIterator[bytes]:
    """The metrics of each queue in the text format of Prometheus, in pieces.

    Args:
        queues: to show.
        wanted: families; unknown ones are ignored, as in RabbitMQ.
    """
    for family in dict.fromkeys(wanted):
        prefix = "dtx_detailed" if family == "queue_publish_metrics" else "rabbitmq_detailed"
        for name, kind, text, number in DETAILS.get(family, ()):
            full = f"{prefix}_{name}"
            lines = [f"# HELP {full} {text}\n# TYPE {full} {kind}\n"]
            until = time.monotonic() + SLICE_SECONDS
            for queue in queues:
                vhost, label = (each.translate(_ESCAPES) for each in (queue.spec.vhost, exact_name(queue.name)))
                lines.append(f'{full}{{vhost="{vhost}",queue="{label}"}} {number(queue)}\n')
                if time.monotonic() >= until:
                    yield "".join(lines).encode()
                    lines.clear()
                    await sleep(0)
                    until = time.monotonic() + SLICE_SECONDS
            yield "".join(lines).encode()
