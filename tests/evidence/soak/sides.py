"""The participants in a client's view: the queues behind dtx, and a bank. Both reconnect automatically.

An error of a participant ends this client's session with it. The end of the session rolls back a branch that has not
voted; recovery completes a branch that has.
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
"""The errors of a client whose server dies. ValueError and AttributeError are pika's: for a socket that is reset just
after connecting, and for a close from the server while pika closes channels one by one.
"""
PATIENCE: Final = 15.0
"""Limit of seconds for an answer of dtx: longer than the faults last, shorter than the end of a round may take."""
_PREFETCH: Final = 3
_AMQP: Final = "?heartbeat=6&socket_timeout=5&stack_timeout=8&blocked_connection_timeout=20"
_POSTGRES: Final = "lock_timeout=1500 statement_timeout=15000 idle_in_transaction_session_timeout=20000"


class QueueSide:
    """dtx.

    Args:
        url: of dtx.
        subscribes: the queue that it consumes from; ``None``: it gets messages of any queue.
        apart: whether it uses further connections for the first and the second phase.
    """

    def __init__(self, url: str, *, subscribes: str | None = None, apart: bool = False) -> None:
        self._phases = (QueueSide(url), QueueSide(url)) if apart else (self, self)
        self._url = url + _AMQP
        self._subscribes = subscribes
        self._connection: BlockingConnection | None = None
        self._xa: XAResource | None = None
        self._branch: XAResource | None = None
        """The resource of the current branch: work on another channel would belong to no branch."""

    @property
    def xa(self) -> XAResource:
        """The resource; with a new channel if the last one has ended."""
        if self._xa is None or not self._xa.channel.is_open:
            self._xa = XAResource(self.connection.channel(), timeout=PATIENCE)
            if self._subscribes is not None:
                self._xa.select()
                self._xa.channel.basic_qos(prefetch_count=_PREFETCH)
        return self._xa

    @property
    def connection(self) -> BlockingConnection:
        """The connection; a new one if the last one has ended."""
        if self._connection is None or not self._connection.is_open:
            self._xa = None
            self._connection = BlockingConnection(pika.URLParameters(self._url))
        return self._connection

    def select(self) -> None:
        """Select dtx on the channel; the first select waits for dtx's own connection to the broker."""
        self.xa.select()

    def start(self, gtrid: str) -> None:
        """Start a branch."""
        self._branch = self.xa
        self._branch.start(xid_of(gtrid))

    def take(self, queue: str) -> Seen | None:
        """Take a coin from *queue*; ``None`` if there is none."""
        channel = self._channel
        if queue == self._subscribes:
            # the broker cancels a consumer whose queue loses its node; the next call consumes again
            cancelled = None, None, None
            method, properties, body = next(channel.consume(queue, inactivity_timeout=0.1), cancelled)
        else:
            method, properties, body = channel.basic_get(queue)
        if method is None or properties is None or body is None:
            return None
        channel.basic_ack(method.delivery_tag)
        return Seen(
            coin=Coin.of(body),
            dtx_id=dtx_id_of(properties),
            copy=copy_of(properties),
            redelivered=bool(method.redelivered),
        )

    def put(self, queue: str, coin: Coin, way: Way = STRAIGHT) -> None:
        """Publish a coin to *queue* through the exchange of *way*."""
        properties = pika.BasicProperties(delivery_mode=2, headers=way.headers(queue))
        self._channel.basic_publish(way.exchange, way.key(queue), coin.body, properties)

    @property
    def _channel(self) -> BlockingChannel:
        assert self._branch is not None, "work is done outside of a branch"
        return self._branch.channel

    def end(self, gtrid: str) -> None:
        """End the work of the branch."""
        assert self._branch is not None, "the branch was not started"
        self._branch.end(xid_of(gtrid))
        self._branch = None

    def prepare(self, gtrid: str) -> None:
        """Prepare; return if the vote is yes."""
        flag = self._phases[0].xa.prepare(xid_of(gtrid))
        assert flag is XaFlag.OK, f"{gtrid} has work, and {flag.wire_name} says that there was none"

    def commit(self, gtrid: str) -> None:
        """Commit in the second phase."""
        self._phases[1].xa.commit(xid_of(gtrid))

    def commit_in_one_phase(self, gtrid: str) -> None:
        """Let dtx decide; return if it has committed."""
        self._phases[1].xa.commit(xid_of(gtrid), one_phase=True)

    def rollback(self, gtrid: str) -> None:
        """Roll back in the second phase."""
        self._phases[1].xa.rollback(xid_of(gtrid))

    def roll_back_unprepared(self, gtrid: str) -> None:
        """Roll back a branch without a vote, ended or not; it may have ended already."""
        xid = xid_of(gtrid)
        with contextlib.suppress(XAER_NOTA, XAER_PROTO, XARollback):
            self.xa.end(xid, fail=True)
        with contextlib.suppress(XAER_NOTA):
            self._phases[1].xa.rollback(xid)

    def coordinator(self) -> Coordinator:
        """Return a coordinator for branches of others; the caller closes it."""
        return Coordinator(self.connection, timeout=PATIENCE)

    def close(self) -> None:
        """End the session; dtx rolls back a branch without a vote."""
        connection, self._connection, self._xa, self._branch = self._connection, None, None, None
        if connection is not None and connection.is_open:
            with contextlib.suppress(*BROKEN):
                connection.close()
        for phase in self._phases:
            if phase is not self:
                phase.close()


class BankSide:
    """A database, on one connection.

    Args:
        url: of the database.
        name: of the client, for messages.
    """

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._connection: psycopg.Connection | None = None

    @property
    def connection(self) -> psycopg.Connection:
        """The connection; a new one if the last one has ended."""
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
        """Start a branch that changes an account; the database refuses a negative balance."""
        self.connection.execute("BEGIN")
        self.connection.execute("UPDATE account SET balance = balance + %s WHERE name = %s", [delta, account])
        self.connection.execute("INSERT INTO entry VALUES (%s, %s)", [gtrid, delta])

    def prepare(self, gtrid: str) -> None:
        """Prepare; return if the vote is yes."""
        self.connection.execute(f"PREPARE TRANSACTION '{gtrid}'")

    def commit(self, gtrid: str) -> None:
        """Commit in the second phase.

        Raises:
            psycopg.errors.UndefinedObject: the branch no longer exists.
        """
        self.connection.execute(f"COMMIT PREPARED '{gtrid}'")

    def rollback(self, gtrid: str) -> None:
        """Roll back in the second phase; raises like ``commit``."""
        self.connection.execute(f"ROLLBACK PREPARED '{gtrid}'")

    def give_up(self) -> None:
        """Roll back a branch without a vote."""
        self.connection.execute("ROLLBACK")

    def in_doubt(self, prefix: str) -> list[str]:
        """Return the prepared branches of a slot."""
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
        return [gid for (gid,) in self.connection.execute(query, [prefix])]

    def has(self, gtrid: str) -> bool:
        """Whether a transfer is committed here."""
        return self.connection.execute("SELECT 1 FROM entry WHERE gtrid = %s", [gtrid]).fetchone() is not None

    def close(self) -> None:
        """End the session; the database rolls back a branch without a vote."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def dtx_id_of(properties: pika.BasicProperties) -> str:
    """Return the ``x-dtx-id`` of a message."""
    value = (properties.headers or {}).get("x-dtx-id", "")
    return value.decode() if isinstance(value, bytes) else str(value)


def copy_of(properties: pika.BasicProperties) -> str:
    """Return the headers by which dtx distinguishes the copies of a message, as text."""
    headers = properties.headers or {}
    key = headers.get("x-dtx-put-back", headers.get("x-dtx-id", ""))
    return f"{key}, attempt {headers.get('x-dtx-attempt', 1)}"


def belongs(xid: Xid, prefix: str) -> bool:
    """Whether a branch belongs to the transaction manager whose transfers begin with *prefix*."""
    return xid.format_id == FORMAT_ID and xid.gtrid.startswith(prefix.encode())
