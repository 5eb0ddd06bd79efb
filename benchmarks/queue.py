"""Queues of dtx in standalone mode, compared with classic queues of RabbitMQ.

Rounds alternate between both, so that other load on the machine affects both. In one round, each connection publishes
persistent messages with confirms, pipelined, to its own queue, and then consumes all of them with one ack each. This
program starts RabbitMQ, PostgreSQL and dtx, which share the processors of this machine with it.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from threading import Thread
from typing import Final

from benchmarks.support.amqp import PERSISTENT, RawConnection, message_frames
from benchmarks.support.processor import Meter
from benchmarks.support.report import Table, machine, percentile, spread
from benchmarks.support.servers import Servers
from benchmarks.support.streams import WINDOW, consume, ping_pong, publish
from tests.support.raw import Address, Refused

DTX: Final = "dtx"
RABBIT: Final = "rabbitmq"


def _publish(address: Address, queue: bytes, size: int, count: int, window: int) -> None:
    with RawConnection(address) as connection:
        connection.declare(queue)
        connection.select_confirms()
        publish(connection, message_frames(b"", queue, bytes(size)), count, window)


def _consume(address: Address, queue: bytes, size: int, count: int, window: int) -> None:
    with RawConnection(address) as connection:
        consume(connection, queue, size, PERSISTENT, count, window)
        if left := connection.depth(queue):
            raise Refused(f"{count} messages were consumed and acked, {left} are still in the queue")
        connection.delete(queue)


def _at_once(connections: int, work: Callable[[bytes], None]) -> float:
    """Return the seconds of *work* on *connections* at the same time, each with its own queue.

    Raises:
        Refused: a connection failed.
    """
    problems: list[Exception] = []

    def one(number: int) -> None:
        try:
            work(b"bench-queue-%d" % number)
        except (OSError, Refused) as problem:
            problems.append(problem)

    threads = [Thread(target=one, args=(number,)) for number in range(connections)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise Refused(str(problems[0]))
    return time.perf_counter() - began


def throughput(
    addresses: dict[str, Address], roots: dict[str, tuple[int, ...]], table: Table, options: argparse.Namespace
) -> list[str]:
    """Print a row for each direction, and return a sentence about the processor time."""
    size, window, connections = options.size, options.window, options.connections
    rates: dict[tuple[str, str], list[float]] = {}
    busy = dict.fromkeys(addresses, 0.0)
    for turn in range(options.rounds):
        for way in sorted(addresses, reverse=turn % 2 == 1):
            address = addresses[way]
            meter = Meter(roots)
            for what, work in (("publish", _publish), ("consume", _consume)):
                seconds = _at_once(
                    connections,
                    lambda queue, work=work, address=address: work(address, queue, size, options.count, window),  # type: ignore[misc]
                )
                rates.setdefault((what, way), []).append(connections * options.count / seconds)
            used = meter.read().busy
            busy[way] += used["dtx"] + used["postgres"] if way == DTX else used["broker"]
    for what in ("publish", "consume"):
        ours, theirs = rates[what, DTX], rates[what, RABBIT]
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        table.row(f"{what} {size:,}", [f"{median(ours):,.0f}", f"{median(theirs):,.0f}", spread(ratios)])
    messages = options.rounds * connections * options.count
    ours, theirs = (busy[way] / messages * 1e6 for way in (DTX, RABBIT))
    return [f"processor time of a message, in and out: {ours:.0f} µs dtx (with PostgreSQL), {theirs:.0f} µs RabbitMQ"]


def latency(addresses: dict[str, Address], options: argparse.Namespace) -> None:
    """Print the latency of single publishes."""
    table = Table(("one at a time", 20), ["p50 ms", "p90", "p99"])
    queue = b"bench-queue-latency"
    for way, address in addresses.items():
        with RawConnection(address) as connection:
            connection.declare(queue)
            connection.select_confirms()
            found = ping_pong(connection, message_frames(b"", queue, bytes(options.size)), options.pings)
            connection.delete(queue)
        table.row(way, [f"{percentile(found, percent) * 1e3:.3f}" for percent in (50, 90, 99)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=1024, metavar="OCTETS", help="bytes of each body (default 1024)")
    add("--connections", type=int, default=2, metavar="N", help="number of connections at the same time (default 2)")
    add("--count", type=int, default=10_000, help="messages of each connection in one round (default 10000)")
    add("--rounds", type=int, default=3, help="number of rounds over both (default 3)")
    add("--window", type=int, default=WINDOW, help=f"limit of unconfirmed publishes, and prefetch (default {WINDOW})")
    add("--pings", type=int, default=1000, help="number of publishes one at a time (default 1000)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    print(f"persistent messages, {options.connections} connections, window {options.window}; {machine()}")
    with Servers(standalone=True) as servers:
        postgres = servers.postgres("pg")
        service = servers.dtx(postgres)
        addresses = {DTX: Address.of(service.url()), RABBIT: servers.broker}
        roots: dict[str, tuple[int, ...]] = {
            "dtx": (service.pid,),
            "postgres": (postgres.embedded.pid or 0,),
            "broker": (servers.rabbitmq.pid,),
        }
        table = Table(("messages per second", 20), [DTX, RABBIT, "ratio by round            "])
        sentences = throughput(addresses, roots, table, options)
        print()
        latency(addresses, options)
        print()
        print("\n".join(sentences))


if __name__ == "__main__":
    main()
