"""The participants as a client has them: the queues behind dtx, and a bank. Both come back by themselves.

Whatever a participant raises while it works ends this client's session with it; what had not voted is rolled back by
its death, and what had is the recovery's.
"""

import contextlib
from typing import Final

import pika
import psycopg
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError

from dtx.client import XAER_NOTA, XAER_PROTO, Coordinator, XAException, XaFlag, XAResource, XARollback, Xid
from tests.evidence.soak.money import FORMAT_ID, Coin, Seen, xid_of
from tests.evidence.soak.ways import STRAIGHT, Way

BROKEN: Final = (
    AMQPError, AMQPConnectorException, XAException, psycopg.Error, OSError, ValueError, AttributeError
)  # fmt: skip
"""What a client sees when the other end dies. The last two are pika's: for a socket that is reset just after it was
connected, and for a server's close that comes while pika closes channels one by one."""
PATIENCE: Final = 15.0
"""Seconds for an answer of dtx; longer than what the nemesis holds back, shorter than the end of a round takes."""
_PREFETCH: Final = 3
_AMQP: Final = "?heartbeat=6&socket_timeout=5&stack_timeout=8&blocked_connection_timeout=20"
_POSTGRES: Final = "lock_timeout=1500 statement_timeout=15000 idle_in_transaction_session_timeout=20000"


class QueueSide:
    """dtx, on one connection.

    Args:
        url: of dtx.
        subscribes: the queue that it consumes from; ``None``: it gets from any.
    """

    def __init__(self, url: str, *, subscribes: str | None = None) -> None:
        self._url = url + _AMQP
        self._subscribes = subscribes
        self._connection: BlockingConnection | None = None
        self._xa: XAResource | None = None
        self._branch: XAResource | None = None
        """The one whose channel works for a branch: work on another channel would belong to none."""

    @property
    def xa(self) -> XAResource:
        """A channel; a new one where the last one has ended."""
        if self._xa is None or not self._xa.channel.is_open:
            self._xa = XAResource(self.connection.channel(), timeout=PATIENCE)
            if self._subscribes is not None:
                self._xa.select()
                self._xa.channel.basic_qos(prefetch_count=_PREFETCH)
        return self._xa

    @property
    def connection(self) -> BlockingConnection:
        """A connection; a new one where the last one has ended."""
        if self._connection is None or not self._connection.is_open:
            self._xa = None
            self._connection = BlockingConnection(pika.URLParameters(self._url))
        return self._connection

    def select(self) -> None:
        """Have branches on this channel; the first of all waits for dtx's own connection to the broker."""
        self.xa.select()

    def start(self, gtrid: str) -> None:
        """Begin a branch."""
        self._branch = self.xa
        self._branch.start(xid_of(gtrid))

    def take(self, queue: str) -> Seen | None:
        """Take a coin out of *queue*; ``None`` where there is none."""
        channel = self._channel
        if queue == self._subscribes:
            method, properties, body = next(channel.consume(queue, inactivity_timeout=0.1))
        else:
            method, properties, body = channel.basic_get(queue)
        if method is None or properties is None or body is None:
            return None
        channel.basic_ack(method.delivery_tag)
        return Seen(coin=Coin.of(body), dtx_id=dtx_id_of(properties))

    def put(self, queue: str, coin: Coin, way: Way = STRAIGHT) -> None:
        """Put a coin into *queue*, by the *way* of an exchange."""
        properties = pika.BasicProperties(delivery_mode=2, headers=way.headers(queue))
        self._channel.basic_publish(way.exchange, way.key(queue), coin.body, properties)

    @property
    def _channel(self) -> BlockingChannel:
        assert self._branch is not None, "work is done in a branch"
        return self._branch.channel

    def end(self, gtrid: str) -> None:
        """The work is done."""
        assert self._branch is not None, "what has ended has begun"
        self._branch.end(xid_of(gtrid))
        self._branch = None

    def prepare(self, gtrid: str) -> None:
        """Ask for the vote; returns when it is yes."""
        flag = self.xa.prepare(xid_of(gtrid))
        assert flag is XaFlag.OK, f"{gtrid} has work, and {flag.wire_name} says that there was none"

    def commit(self, gtrid: str) -> None:
        """Second phase."""
        self.xa.commit(xid_of(gtrid))

    def commit_in_one_phase(self, gtrid: str) -> None:
        """Have dtx decide; returns when it has committed."""
        self.xa.commit(xid_of(gtrid), one_phase=True)

    def rollback(self, gtrid: str) -> None:
        """Second phase."""
        self.xa.rollback(xid_of(gtrid))

    def roll_back_unprepared(self, gtrid: str) -> None:
        """Roll back what has not voted, whether it has ended or not; it may be gone already."""
        xid = xid_of(gtrid)
        with contextlib.suppress(XAER_NOTA, XAER_PROTO, XARollback):
            self.xa.end(xid, fail=True)
        with contextlib.suppress(XAER_NOTA):
            self.xa.rollback(xid)

    def coordinator(self) -> Coordinator:
        """For what others have left; to be closed."""
        return Coordinator(self.connection, timeout=PATIENCE)

    def close(self) -> None:
        """End the session; what has not voted is rolled back."""
        connection, self._connection, self._xa, self._branch = self._connection, None, None, None
        if connection is not None and connection.is_open:
            with contextlib.suppress(*BROKEN):
                connection.close()


class BankSide:
    """A database, on one connection.

    Args:
        url: of the database.
        name: who we are, for people.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._connection: psycopg.Connection | None = None

    @property
    def connection(self) -> psycopg.Connection:
        """A connection; a new one where the last one has ended."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=5,
                application_name=self._name,
                options=" ".join(f"-c {setting}" for setting in _POSTGRES.split()),
            )
        return self._connection

    def move(self, gtrid: str, account: str, delta: int) -> None:
        """Begin a branch in which an account changes; it is refused where that would make a debt."""
        self.connection.execute("BEGIN")
        self.connection.execute("UPDATE account SET balance = balance + %s WHERE name = %s", [delta, account])
        self.connection.execute("INSERT INTO entry VALUES (%s, %s)", [gtrid, delta])

    def prepare(self, gtrid: str) -> None:
        """Ask for the vote; returns when it is yes."""
        self.connection.execute(f"PREPARE TRANSACTION '{gtrid}'")

    def commit(self, gtrid: str) -> None:
        """Second phase.

        Raises:
            psycopg.errors.UndefinedObject: there is no such branch any more.
        """
        self.connection.execute(f"COMMIT PREPARED '{gtrid}'")

    def rollback(self, gtrid: str) -> None:
        """Second phase; raises like ``commit``."""
        self.connection.execute(f"ROLLBACK PREPARED '{gtrid}'")

    def give_up(self) -> None:
        """Roll back what has not voted."""
        self.connection.execute("ROLLBACK")

    def in_doubt(self, prefix: str) -> list[str]:
        """Branches of a slot that have voted."""
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
        return [gid for (gid,) in self.connection.execute(query, [prefix])]

    def has(self, gtrid: str) -> bool:
        """Whether a transfer is committed here."""
        return self.connection.execute("SELECT 1 FROM entry WHERE gtrid = %s", [gtrid]).fetchone() is not None

    def close(self) -> None:
        """End the session; what has not voted is rolled back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def dtx_id_of(properties: pika.BasicProperties) -> str:
    """A message's ``x-dtx-id``."""
    value = (properties.headers or {}).get("x-dtx-id", "")
    return value.decode() if isinstance(value, bytes) else str(value)


def belongs(xid: Xid, prefix: str) -> bool:
    """Whether a branch is of the transaction manager whose transfers begin with *prefix*."""
    return xid.format_id == FORMAT_ID and xid.gtrid.startswith(prefix.encode())
