"""The cost of dtx for clients without transactions: AMQP through dtx, compared with the same directly to RabbitMQ.

Rounds alternate between the ways, so that other load on the machine affects all of them. Each ratio compares two parts
of one round. One round publishes persistent messages to a durable classic queue with confirms, pipelined, and then
consumes all of them with one ack each. The latency is that of one publish at a time, each waiting for its confirm. This
program starts RabbitMQ, PostgreSQL and dtx, which share the processors of this machine with it. If all processors are
busy, any additional process in between costs throughput. The third way, a relay that does not parse the bytes, shows
this share of the cost. On Linux, the fourth way leaves all bytes in the kernel: this is the least that any process in
between can cost.
"""

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from benchmarks.support.amqp import PERSISTENT, TRANSIENT, RawConnection, message_frames
from benchmarks.support.processor import Meter, Usage
from benchmarks.support.relay import Relay
from benchmarks.support.report import Table, machine, percentile, spread
from benchmarks.support.servers import Servers
from benchmarks.support.streams import WINDOW, consume, ping_pong, publish
from tests.support.raw import Address, Refused

QUEUE: Final = b"bench-passthrough"
DIRECT: Final = "direct"
RELAY: Final = "relay"
KERNEL: Final = "kernel"
THROUGH: Final = "dtx"
TARGETS: Final = {1024: 0.80, 65_536: 0.90}
TARGET_ADDED_MS: Final = 0.3
Roots = dict[str, tuple[int, ...]]
"""Process ids by name."""
_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Limit of bytes in a queue in one round."""


@dataclass(slots=True)
class Phase:
    """Rates and processor time of publishing, or of consuming, by way; one value for each round."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    """Messages per second."""
    processor: dict[str, list[Usage]] = field(default_factory=dict)

    def add(self, way: str, rate: float, usage: Usage) -> None:
        """Add the values of one round."""
        self.rates.setdefault(way, []).append(rate)
        self.processor.setdefault(way, []).append(usage)

    def ratios(self, way: str) -> list[float]:
        """Return the ratio of *way* to direct for each round."""
        return [mine / direct for mine, direct in zip(self.rates[way], self.rates[DIRECT], strict=True)]

    def costs(self, way: str, count: int) -> str:
        """Return the processor time of each message, and its share of all processors, as text."""
        usages = self.processor[way]
        parts = {name: median(usage.busy[name] for usage in usages) / count * 1e6 for name in usages[0].busy}
        total = sum(cost for name, cost in parts.items() if name != "others")
        available = median(usage.elapsed for usage in usages) * len(os.sched_getaffinity(0))
        other = median(usage.busy["others"] - usage.busy["client"] for usage in usages) / available
        share = total * count / 1e6 / available
        named = ", ".join(f"{name} {cost:.0f}" for name, cost in parts.items() if name != "others" and cost >= 1)
        return f"{total:.0f} µs ({named}), {share:.0%} of all processors; {other:.0%} went to others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways, and the messages.

    Args:
        addresses: by way.
        properties: of each message.
        window: limit of unconfirmed publishes, and prefetch.
    """

    addresses: dict[str, Address]
    properties: bytes
    window: int

    def order(self, turn: int) -> list[str]:
        """Return all ways; each turn begins with another one."""
        ways = list(self.addresses)
        first = turn % len(ways)
        return ways[first:] + ways[:first]


def measured(work: Callable[[], object], roots: Roots) -> Usage:
    """Return the usage of *work*; "others" includes this process, whose part is also there as "client"."""
    meter, own = Meter(roots), time.process_time()
    work()
    client = time.process_time() - own
    usage = meter.read()
    return Usage(elapsed=usage.elapsed, busy={"client": client, **usage.busy})


def publish_and_consume(ways: Ways, way: str, size: int, count: int, roots: Roots) -> tuple[Usage, Usage]:
    """Return the usage of publishing and of consuming *count* messages."""
    message = message_frames(b"", QUEUE, bytes(size), ways.properties)
    with RawConnection(ways.addresses[way]) as connection:
        connection.declare(QUEUE)
        connection.select_confirms()
        publishing = measured(lambda: publish(connection, message, count, ways.window), roots)
    with RawConnection(ways.addresses[way]) as connection:
        consuming = measured(lambda: consume(connection, QUEUE, size, ways.properties, count, ways.window), roots)
        left = connection.depth(QUEUE)
        if left:
            raise Refused(f"{count} messages were consumed and acked, {left} are still in the queue")
        connection.delete(QUEUE)
    return publishing, consuming


def throughput(ways: Ways, size: int, options: argparse.Namespace, roots: Roots, table: Table) -> list[str]:
    """Print the rows of one size, and return sentences about its targets."""
    # a short round directly to the broker tells how many messages fill a round
    first = max(200, 2_000_000 // size)
    rate = first / publish_and_consume(ways, DIRECT, size, first, roots)[0].elapsed
    count = int(min(max(rate * options.seconds, 200), _LIMIT_BYTES // size))
    phases = {"publish": Phase(), "consume": Phase()}
    for turn in range(options.rounds):
        for way in ways.order(turn):
            usages = publish_and_consume(ways, way, size, count, roots)
            for phase, usage in zip(phases.values(), usages, strict=True):
                phase.add(way, count / usage.elapsed, usage)
    sentences = []
    for name, phase in phases.items():
        cells = [f"{median(phase.rates[way]):,.0f}" for way in ways.addresses]
        others = [way for way in ways.addresses if way != DIRECT]
        table.row(f"{name} {size:,}", cells + [spread(phase.ratios(way)) for way in others])
        ratio = median(phase.ratios(THROUGH))
        beside = ", ".join(f"{way} {median(phase.ratios(way)):.0%}" for way in others if way != THROUGH)
        verdict = ""
        if size in TARGETS:
            verdict = f", aim {TARGETS[size]:.0%}: {'reached' if ratio >= TARGETS[size] else 'MISSED'}"
        sentences.append(f"{name} of {size:,} bytes: {ratio:.0%} of direct{verdict} ({beside})")
        sentences += [f"  {way:6} processor time a message: {phase.costs(way, count)}" for way in ways.addresses]
    return sentences


def latency(ways: Ways, options: argparse.Namespace) -> list[str]:
    """Print the latency of single publishes, in short turns by way, and return a sentence about its target."""
    message = message_frames(b"", QUEUE, bytes(options.sizes[0]), ways.properties)
    found: dict[str, list[float]] = {way: [] for way in ways.addresses}
    connections = {way: RawConnection(address) for way, address in ways.addresses.items()}
    try:
        for connection in connections.values():
            connection.declare(QUEUE)
            connection.select_confirms()
        for turn in range(options.pings // 50):
            for way in ways.order(turn):
                found[way] += ping_pong(connections[way], message, 50, published=turn * 50)
        connections[DIRECT].delete(QUEUE)
    finally:
        for connection in connections.values():
            connection.close()
    table = Table(("one at a time", 20), ["p50 ms", "p90", "p99"])
    for way, latencies in found.items():
        table.row(way, [f"{percentile(latencies, percent) * 1e3:.3f}" for percent in (50, 90, 99)])
    added = (percentile(found[THROUGH], 50) - percentile(found[DIRECT], 50)) * 1e3
    verdict = "reached" if added <= TARGET_ADDED_MS else "MISSED"
    return [f"dtx adds {added:.3f} ms to the median latency of a confirm, aim {TARGET_ADDED_MS} ms: {verdict}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.passthrough",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[1024, 65_536], metavar="OCTETS", help="sizes of bodies (1024 65536)")
    add("--rounds", type=int, default=5, help="number of rounds over all ways (default 5)")
    add("--seconds", type=float, default=1.5, help="about the time of publishing on one way in one round (default 1.5)")
    add("--window", type=int, default=WINDOW, help=f"limit of unconfirmed publishes, and prefetch (default {WINDOW})")
    add("--pings", type=int, default=2000, help="number of publishes one at a time, for each way (default 2000)")
    add("--transient", action="store_true", help="messages that the broker does not write: shows dtx, not the disk")
    options = parser.parse_args()
    if options.window < 4:
        parser.error("--window must be at least 4")
    return options


def main() -> None:
    options = arguments()
    kind = "transient" if options.transient else "persistent"
    print(f"{kind} messages, window {options.window}, {options.rounds} rounds; {machine()}")
    with Servers() as servers, ExitStack() as stack:
        relays = {RELAY: stack.enter_context(Relay(servers.broker))}
        if hasattr(os, "splice"):
            relays[KERNEL] = stack.enter_context(Relay(servers.broker, in_kernel=True))
        service = servers.dtx(servers.postgres("pg"))
        between = {way: relay.address for way, relay in relays.items()}
        ways = Ways(
            addresses={DIRECT: servers.broker, **between, THROUGH: Address.of(service.url())},
            properties=TRANSIENT if options.transient else PERSISTENT,
            window=options.window,
        )
        roots: Roots = {"dtx": (service.pid,), "broker": (servers.rabbitmq.pid,)}
        roots |= {way: (relay.pid,) for way, relay in relays.items()}
        sentences = []
        names = list(ways.addresses)
        columns = [*names, *(f"{way} ratio by round".ljust(20) for way in names if way != DIRECT)]
        table = Table(("messages per second", 20), columns)
        for size in options.sizes:
            sentences += throughput(ways, size, options, roots, table)
        print()
        sentences += latency(ways, options)
        print()
        print("\n".join(sentences))


if __name__ == "__main__":
    main()
