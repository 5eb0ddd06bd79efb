"""Branches per second through dtx, compared with PostgreSQL's own two-phase commit on the same machine.

Each branch publishes one persistent message to a durable classic queue: start, publish, end, prepare, commit. Each
request waits for the answer to the one before, except publish, which has no answer. For comparison, pgbench runs BEGIN,
INSERT of as many bytes, PREPARE TRANSACTION, COMMIT PREPARED, with as many clients, on an equal PostgreSQL. The rows
"broker" are AMQP transactions of the same message and a receipt, directly in RabbitMQ. A system with decisions in
PostgreSQL and messages in RabbitMQ needs at least both.

Every answer must be xa-ok. Afterwards the queue must hold the message of each committed branch exactly once. This
program starts RabbitMQ, both PostgreSQL, dtx and the load generator, which share the processors of this machine, and
removes them at the end. With --standalone there is no RabbitMQ: dtx stores the messages.
"""

import argparse
import os
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.support import pgbench
from benchmarks.support.amqp import RawConnection
from benchmarks.support.branch_player import BranchPlayer
from benchmarks.support.broker_player import BrokerPlayer
from benchmarks.support.dialogue import Cycle
from benchmarks.support.load import LoadError, Tally
from benchmarks.support.measuring import HEADS, WARM_UP_SECONDS, Rig, Row, count, measure, noise, verdict
from benchmarks.support.report import Table, machine, percentile
from benchmarks.support.servers import Servers
from benchmarks.support.streams import fill
from tests.support.postgres import PostgresServer
from tests.support.raw import Address

AIM_RATE = {False: (32, 2000), True: (32, 5000)}
"""Standalone or not: connections, and branches per second with them, on two processors."""
AIM_MEDIAN_MS = {False: (1, 1.5), True: (1, 1.0)}
"""Standalone or not: connections, and the median latency of a branch with them."""


def measure_dtx(rig: Rig, connections: int, first: int) -> Row:
    """Run the load on dtx.

    Args:
        rig: the servers.
        connections: number of clients.
        first: number of the first connection.

    Raises:
        LoadError: an answer was wrong, or the queue does not hold the committed messages.
    """
    options = rig.options
    cycle = Cycle(
        queue=b"bench-out",
        source=b"bench-in" if options.mode == "consume" else None,
        size=options.size,
        one_phase=options.one_phase,
        pipeline=options.pipeline,
    )
    prefilled = options.prefill or int(4000 * (options.seconds + WARM_UP_SECONDS))
    with RawConnection(rig.messages) as connection:
        connection.declare(cycle.queue)
        if cycle.source is not None:
            fill(connection, cycle.source, prefilled, cycle.size)
    row = measure(rig, partial(BranchPlayer, cycle), connections, first, f"branches-{connections}")
    verify(rig.messages, cycle, row.tally, prefilled)
    return row


def verify(broker: Address, cycle: Cycle, tally: Tally, prefilled: int) -> None:
    """Compare the queues with the committed branches, and remove them.

    Raises:
        LoadError: they differ.
    """
    with RawConnection(broker) as connection:
        count(connection, cycle.queue, tally)
        if cycle.source is not None:
            left = connection.depth(cycle.source)
            committed = sum(tally.committed.values())
            if left != prefilled - committed:
                raise LoadError(f"{committed} of {prefilled} messages were consumed and {left} are left")
            connection.delete(cycle.source)


def measure_broker(rig: Rig, connections: int) -> Row:
    """Run the broker's part of phase two without dtx.

    Raises:
        LoadError: an answer was wrong, or the queue does not hold the committed messages.
    """
    queue, receipts = b"bench-tx", b"bench-tx-receipts"
    with RawConnection(rig.messages) as connection:
        connection.declare(queue)
        connection.declare(receipts)
    play = partial(BrokerPlayer, queue, receipts, rig.options.size)
    row = measure(rig, play, connections, 0, f"broker-{connections}", rig.messages)
    with RawConnection(rig.messages) as connection:
        count(connection, queue, row.tally)
        connection.delete(receipts)
    return row


def measure_postgres(server: PostgresServer, directory: Path, clients: int, options: argparse.Namespace) -> Row:
    assert server.embedded.pid is not None
    result = pgbench.run(
        server.url,
        server.embedded.pid,
        directory,
        clients=clients,
        seconds=options.seconds,
        size=options.size,
        one_phase=options.one_phase,
    )
    return Row(tally=Tally(branches=array("d", result.latencies)), rate=result.rate, usage=result.usage)


def conclusions(
    dtx: dict[int, Row], postgres: dict[int, Row], broker: dict[int, Row], options: argparse.Namespace
) -> Iterator[str]:
    """Compare dtx with PostgreSQL, RabbitMQ and the aims, and warn if the machine was busy."""
    for connections, other in postgres.items():
        row = dtx[connections]
        yield (
            f"{connections} connections: {row.rate / other.rate:.0%} of pgbench's rate, "
            f"with {row.work / other.work:.1f} times its processor time for each branch"
        )
    for connections in postgres.keys() & broker.keys():
        medians = [percentile(rows[connections].tally.branches, 50) * 1e3 for rows in (dtx, broker, postgres)]
        yield (
            f"{connections} connections: {medians[0]:.2f} ms each, of which the broker's transaction takes "
            f"{medians[1]:.2f} and PostgreSQL's {medians[2]:.2f} ms by themselves"
        )
    if options.mode == "publish" and not options.one_phase and not options.pipeline:
        connections, aim = AIM_RATE[options.standalone]
        if connections in dtx:
            rate = dtx[connections].rate
            yield f"{connections} connections: {rate:,.0f} branches a second, aim {aim:,}: {verdict(rate >= aim)}"
        connections, limit = AIM_MEDIAN_MS[options.standalone]
        if connections in dtx:
            median = percentile(dtx[connections].tally.branches, 50) * 1e3
            yield f"{connections} connection: {median:.2f} ms each, aim {limit} ms: {verdict(median <= limit)}"
    yield from noise((*dtx.values(), *postgres.values(), *broker.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.branches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--connections", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N", help="numbers of clients")
    add("--seconds", type=int, default=5, help="measured time of each row, after a second of warming up (default 5)")
    add("--size", type=int, default=1024, help="bytes of the published message (default 1024)")
    add(
        "--mode",
        choices=("publish", "consume"),
        default="publish",
        help="consume: each branch also gets one message from another queue and acks it",
    )
    add("--one-phase", action="store_true", help="commit without prepare; pgbench then runs BEGIN, INSERT, COMMIT")
    add(
        "--pipeline",
        action="store_true",
        help="start, publish, end and prepare in one write, then commit, as a client that does not wait for answers",
    )
    add("--standalone", action="store_true", help="without a broker: dtx stores the messages in PostgreSQL")
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), help="number of load processes (default 2)")
    add("--prefill", type=int, default=0, help="number of messages to consume; default 4,000 for each second")
    add("--profile", type=Path, metavar="DIR", help="sample dtx with py-spy (pip install py-spy) into DIR")
    add("--no-pgbench", action="store_true", help="measure dtx alone, without pgbench and the broker's row")
    add("--dtx", nargs="+", default=[], metavar="WORD", help="options of dtx serve: --dtx=--commit-channels=32")
    options = parser.parse_args()
    if options.size < 8:
        parser.error("--size must be at least 8: each message carries the number of its branch")
    return options


def main() -> None:
    options = arguments()
    what = f"{options.mode} {options.size} bytes, {'one phase' if options.one_phase else 'two phases'}"
    what += ", standalone" if options.standalone else ""
    print(f"{what}{', pipelined' if options.pipeline else ''}; {options.seconds} s a row; {machine()}")
    most = max(options.connections)
    with Servers(tuple(options.dtx), standalone=options.standalone) as servers:
        postgres = servers.postgres("pg")
        service = servers.dtx(postgres)
        rig = Rig(servers=servers, postgres=postgres, service=service, options=options)
        other = None
        if not options.no_pgbench:
            other = servers.postgres("pgbench", prepared_transactions=most)
            pgbench.prepare_database(other.url)
            print(f"pgbench: {pgbench.find_pgbench()}")
        rows: dict[int, Row] = {}
        beside: dict[int, Row] = {}
        straight: dict[int, Row] = {}
        first = 0
        table = Table(("connections", 14), HEADS)
        try:
            for connections in options.connections:
                rows[connections] = measure_dtx(rig, connections, first)
                table.row(f"dtx {connections}", rows[connections].cells())
                first += connections
                if other is not None:
                    beside[connections] = measure_postgres(other, servers.directory, connections, options)
                    table.row(f"pgbench {connections}", beside[connections].cells())
                    if not options.standalone and options.mode == "publish":
                        straight[connections] = measure_broker(rig, connections)
                        table.row(f"broker {connections}", straight[connections].cells())
        except (LoadError, pgbench.PgbenchError) as error:
            log = service.log_path.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{error}\nthe log of dtx ends with:\n{log}") from None
    print("every answer was xa-ok, every committed message was in the queue exactly once")
    print("\n".join(conclusions(rows, beside, straight, options)))


if __name__ == "__main__":
    main()
