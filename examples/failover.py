"""A client that continues with the standby if the active dtx fails. Each message arrives exactly once.

Its arguments are the addresses of all dtx with the same --rm and --database, and a file for its decisions:

    python examples/failover.py --decisions sent.log amqp://app:app@host-a:5673/ amqp://app:app@host-b:5673/

It sends the numbers from 1 on, each in its own branch. You can kill any process, and this program too: after a restart
with the same file, it continues. It follows the rules for every transaction manager:

- The decision is on disk before the branch gets it. A branch that is not in the file is never committed.
- Recovery comes first on every new connection: it commits branches in doubt that are decided, and rolls the others
  back.
- Each attempt has a new xid. If an old attempt appears late as a prepared branch, the next recovery completes it, and
  it cannot be confused with the new attempt.
- Only the active dtx listens. A standby refuses connections, so the client tries the next address.
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

FORMAT_ID: Final = 0x0FA170  # identifies the branches of this transaction manager
QUEUE: Final = "numbers"
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)
PAUSE: Final = 0.25
"""Seconds between two rounds over all addresses."""
HEARTBEAT: Final = 5
"""Seconds. The loss of a machine is detected after two of them."""


class Decisions:
    """The transaction manager's log: one line for each branch that commits.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        # After a kill, the last line may be incomplete; then no branch has got that decision.
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
        urls: URLs of the active dtx and its standbys, in any order.
        decisions: the log.
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
                self._recover(connection)  # branches of earlier connections
                return
            print("the connection was lost or refused: trying the next address", flush=True)
            time.sleep(PAUSE)

    def _connect(self) -> pika.BlockingConnection:
        """Connect to the active dtx, as soon as there is one."""
        for url in itertools.cycle(self._urls):
            parameters = pika.URLParameters(url)
            parameters.heartbeat = HEARTBEAT
            parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 2 * HEARTBEAT
            # ValueError: pika raises it if the socket is reset at once
            with suppress(AMQPError, OSError, ValueError):
                connection = pika.BlockingConnection(parameters)
                print(f"connected to {parameters.host}:{parameters.port}", flush=True)
                return connection
            time.sleep(PAUSE)
        raise AssertionError("there is no address")

    def _recover(self, connection: pika.BlockingConnection) -> None:
        """Commit the branches in doubt that are decided, and roll the others back."""
        with Coordinator(connection) as coordinator:
            for xid in self._in_doubt(coordinator):
                decided = xid in self._decisions
                print(f"{xid} is in doubt: {'decided, so it is committed' if decided else 'rolled back'}", flush=True)
                try:
                    (coordinator.commit if decided else coordinator.rollback)(xid)
                except XAER_NOTA:
                    pass  # it has ended since the scan
                except XAHeuristic as error:  # not forgotten here: an operator must see it first
                    print(f"{xid}: an operator has decided: {error}", flush=True)

    def _in_doubt(self, coordinator: Coordinator) -> Iterator[Xid]:
        """The branches in doubt of this transaction manager; branches of others must not be touched."""
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
            xa.prepare(xid)  # raises unless dtx guarantees that it can commit
            self._decisions.commit(xid)
            try:
                xa.commit(xid)
            except XAER_RMFAIL:
                print(f"{xid}: decided but not completed; recovery completes it", flush=True)
                raise
            print(f"sent {number}", flush=True)


def main() -> int:
    """Run the client."""
    parser = argparse.ArgumentParser(
        prog="python examples/failover.py", description="Send numbers, also after failures."
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="URL of each dtx")
    parser.add_argument("--decisions", type=Path, required=True, metavar="FILE", help="log of decisions")
    parser.add_argument("--count", type=int, default=100, help="count of numbers to send")
    words = parser.parse_args()
    Sender(words.urls, Decisions(words.decisions)).run(words.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
