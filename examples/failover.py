"""A client that outlives the active dtx: it goes on with the standby, and every message comes in exactly once.

Give it the addresses of all dtx that have the same --rm and --database, and a file for what it has decided:

    python examples/failover.py --decisions sent.log amqp://app:app@host-a:5673/ amqp://app:app@host-b:5673/

It sends the numbers from 1 on, each in a branch of its own. Kill whatever you like, this program too: started again
with the same file it goes on where it was. What it does is what every transaction manager has to do:

- The decision is on disk before the branch is told. A branch that is not in the file will never be committed.
- After every new connection it recovers first: what is in doubt and decided is committed, the rest is rolled back.
- An attempt that was broken off has an xid that is never used again: should it turn up late as prepared, that is found
  by the next recovery, and it is not mistaken for its successor.
- Only the active dtx listens. A standby refuses connections, so the next address is tried.
"""

import argparse
import itertools
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import pika
from pika.exceptions import AMQPError

from dtx.client import XAER_NOTA, XAER_RMFAIL, Coordinator, XAException, XAHeuristic, XAResource, Xid

FORMAT_ID: Final = 0x0FA170  # ours: a transaction manager recognises its own branches by it
QUEUE: Final = "numbers"
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)
PAUSE: Final = 0.25
"""Seconds between two rounds over all addresses."""
HEARTBEAT: Final = 5
"""Seconds: a machine that has vanished is noticed after two of them."""


class Decisions:
    """The transaction manager's log: one line for each branch that commits.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        # The last line of a program that was killed may not be whole; then nobody was told of it.
        self._xids = {xid for xid in lines if xid.endswith(";")}
        self._file = path.open("a")
        if lines:
            self._file.write("\n")

    def commit(self, xid: Xid) -> None:
        """Decide. When this returns, the decision is on disk."""
        self._file.write(f"{xid};\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._xids.add(f"{xid};")

    def __contains__(self, xid: Xid) -> bool:
        return f"{xid};" in self._xids

    def numbers(self) -> set[int]:
        """The numbers that were sent."""
        return {int(Xid.parse(line.rstrip(";")).gtrid) for line in self._xids}


class Sender:
    """Sends numbers.

    Args:
        urls: of the active dtx and its standbys, in any order.
        decisions: made so far.
    """

    def __init__(self, urls: list[str], decisions: Decisions) -> None:
        self._urls = urls
        self._decisions = decisions

    def run(self, count: int) -> None:
        """Send 1 to *count*, and return when all of them are in the queue."""
        while True:
            with suppress(AMQPError, XAException, OSError), closing(self._connect()) as connection:
                self._recover(connection)
                self._send(connection, count)
                self._recover(connection)  # whatever earlier connections have left behind
                return
            print("the connection is lost, or was refused: going on with another one", flush=True)
            time.sleep(PAUSE)

    def _connect(self) -> pika.BlockingConnection:
        """To whichever dtx is active, as soon as one is."""
        for url in itertools.cycle(self._urls):
            parameters = pika.URLParameters(url)
            parameters.heartbeat = HEARTBEAT
            parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 2 * HEARTBEAT
            # ValueError: what pika makes of a socket that is reset at once
            with suppress(AMQPError, OSError, ValueError):
                connection = pika.BlockingConnection(parameters)
                print(f"connected to {parameters.host}:{parameters.port}", flush=True)
                return connection
            time.sleep(PAUSE)
        raise AssertionError("there is no address")

    def _recover(self, connection: pika.BlockingConnection) -> None:
        """Commit what was decided, roll back the rest."""
        with Coordinator(connection) as coordinator:
            for xid in self._in_doubt(coordinator):
                decided = xid in self._decisions
                print(f"{xid} is in doubt: {'decided, so it is committed' if decided else 'rolled back'}", flush=True)
                try:
                    (coordinator.commit if decided else coordinator.rollback)(xid)
                except XAER_NOTA:
                    pass  # it has ended while we asked
                except XAHeuristic as error:  # stays until somebody forgets it: people have to know first
                    print(f"{xid}: an operator was faster: {error}", flush=True)

    def _in_doubt(self, coordinator: Coordinator) -> Iterator[Xid]:
        """Ours: those that other transaction managers have under way are none of our business."""
        return (xid for xid in coordinator.recover() if xid.format_id == FORMAT_ID)

    def _send(self, connection: pika.BlockingConnection, count: int) -> None:
        xa = XAResource(connection.channel())
        connection.channel().queue_declare(QUEUE, durable=True)
        sent = self._decisions.numbers()
        for number in range(1, count + 1):
            if number in sent:
                continue
            xid = Xid(FORMAT_ID, b"%d" % number, uuid.uuid4().bytes)
            xa.start(xid)
            xa.channel.basic_publish("", QUEUE, b"%d" % number, PERSISTENT)
            xa.end(xid)
            xa.prepare(xid)  # raises unless dtx has promised that it can commit
            self._decisions.commit(xid)
            try:
                xa.commit(xid)
            except XAER_RMFAIL:
                print(f"{xid}: decided, not done yet; recovery sees to it", flush=True)
                raise
            print(f"sent {number}", flush=True)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python examples/failover.py", description="Send numbers, whoever dies.")
    parser.add_argument("urls", nargs="+", metavar="URL", help="of each dtx")
    parser.add_argument("--decisions", type=Path, required=True, metavar="FILE", help="what was decided")
    parser.add_argument("--count", type=int, default=100, help="how many numbers")
    words = parser.parse_args()
    Sender(words.urls, Decisions(words.decisions)).run(words.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
