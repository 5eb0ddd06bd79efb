"""Transactions per second of AMQP 1.0 clients, compared with AMQP 0-9 branches that commit in one phase.

Each transaction is declare, one durable message to a queue, discharge. In one row each request waits for the answer to
the one before. In the other (pipelined), message, discharge and the next declare go in one write. The same follows with
AMQP 0-9: start, publish, end, commit in one phase; pipelined: start, publish and end in one write.

Every answer is compared byte for byte with the expected one. Afterwards the queue must hold the message of each
committed transaction exactly once. This program starts all servers, which share the processors of this machine with the
load, and removes them at the end.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.support.amqp import RawConnection
from benchmarks.support.branch_player import BranchPlayer
from benchmarks.support.dialogue import Cycle
from benchmarks.support.load import LoadError, Play
from benchmarks.support.measuring import HEADS, Rig, Row, count, measure, noise, verdict
from benchmarks.support.report import Table, machine
from benchmarks.support.servers import Servers
from benchmarks.support.transaction_player import Postings, TransactionPlayer

QUEUE: Final = "bench"
AIM: Final = (32, 3000)
"""Connections, and transactions per second of AMQP 1.0 with them, on two processors, without a broker."""

Key = tuple[str, bool, int]
"""Protocol, whether pipelined, connections."""


def play(protocol: str, pipeline: bool, size: int) -> Play:
    """Return the factory for clients of *protocol*."""
    if protocol == "1.0":
        return partial(TransactionPlayer, Postings(queue=QUEUE, size=size, pipeline=pipeline))
    return partial(BranchPlayer, Cycle(queue=QUEUE.encode(), size=size, one_phase=True, pipeline=pipeline))


def run(rig: Rig, key: Key, first: int) -> Row:
    """Measure one row.

    Raises:
        LoadError: an answer was wrong, or the queue does not hold the committed messages.
    """
    protocol, pipeline, connections = key
    with RawConnection(rig.messages) as connection:
        connection.declare(QUEUE.encode())
    name = f"amqp-{protocol}-{connections}{'-pipelined' if pipeline else ''}"
    row = measure(rig, play(protocol, pipeline, rig.options.size), connections, first, name)
    with RawConnection(rig.messages) as connection:
        count(connection, QUEUE.encode(), row.tally)
    return row


def conclusions(rows: dict[Key, Row], standalone: bool) -> Iterator[str]:
    """Compare the protocols with each other and with the aim."""
    for (protocol, pipeline, connections), row in rows.items():
        other = rows.get(("0-9", pipeline, connections))
        if protocol == "1.0" and other is not None:
            how = ", pipelined" if pipeline else ""
            yield (
                f"{connections} connections{how}: AMQP 1.0 does {row.rate / other.rate:.0%} of the rate of AMQP 0-9, "
                f"with {row.work / other.work:.2f} times the processor time for each transaction"
            )
    connections, aim = AIM
    best = max((row.rate for key, row in rows.items() if key[0] == "1.0" and key[2] == connections), default=None)
    if standalone and best is not None:
        yield f"{connections} connections: {best:,.0f} transactions a second, aim {aim:,}: {verdict(best >= aim)}"
    yield from noise(rows.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.amqp10", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--connections", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="numbers of clients")
    add("--protocols", nargs="+", default=["1.0", "0-9"], choices=("1.0", "0-9"), help="protocols (default: both)")
    add("--seconds", type=int, default=5, help="measured time of each row, after a second of warming up (default 5)")
    add("--size", type=int, default=1024, help="bytes of the message (default 1024)")
    add("--pipeline", choices=("both", "yes", "no"), default="both", help="pipelined, or not (default: both)")
    add("--broker", action="store_true", help="alongside RabbitMQ; otherwise dtx stores the messages in PostgreSQL")
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), help="number of load processes (default 2)")
    add("--profile", type=Path, metavar="DIR", help="sample dtx with py-spy (pip install py-spy) into DIR")
    add("--dtx", nargs="+", default=[], metavar="WORD", help="further options for dtx serve")
    options = parser.parse_args()
    if options.size < 8:
        parser.error("--size must be at least 8: each message carries the number of its transaction")
    options.standalone = not options.broker
    return options


def main() -> None:
    options = arguments()
    where = "without a broker" if options.standalone else "alongside RabbitMQ"
    print(f"{options.size} bytes in each transaction, {where}; {options.seconds} s a row; {machine()}")
    rows: dict[Key, Row] = {}
    with Servers(tuple(options.dtx), standalone=options.standalone) as servers:
        postgres = servers.postgres("pg")
        service = servers.dtx(postgres)
        rig = Rig(servers=servers, postgres=postgres, service=service, options=options)
        table = Table(("protocol, clients", 22), HEADS)
        first = 0
        try:
            for connections in options.connections:
                for pipeline in (False, True):
                    if options.pipeline == ("no" if pipeline else "yes"):
                        continue
                    for protocol in options.protocols:
                        key = protocol, pipeline, connections
                        rows[key] = run(rig, key, first)
                        how = " pipelined" if pipeline else ""
                        table.row(f"{protocol} {connections}{how}", rows[key].cells())
                        first += connections
        except LoadError as error:
            log = service.log_path.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{error}\nthe log of dtx ends with:\n{log}") from None
    print("every answer was what it must be, every committed message was in the queue exactly once")
    print("\n".join(conclusions(rows, options.standalone)))


if __name__ == "__main__":
    main()
