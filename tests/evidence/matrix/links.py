"""The work of an AMQP 1.0 client in a case of the kill matrix."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, LiteralString

import psycopg

from dtx.client import Xid
from dtx.server.amqp10.transactions import LOCAL_FORMAT
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Accepted,
    Declared,
    DeliveryState,
    Rejected,
    Role,
    TransactionalState,
)
from tests.evidence.matrix.stages import MatrixStage
from tests.servers.amqp10.raw import Raw

CONSUMED: Final = 2
"""Number of messages from each source."""
_COMMITTED: Final = """
SELECT DISTINCT format_id, gtrid, bqual FROM dtx.journal WHERE format_id = %s AND event = 'committed'
"""
_STUCK: Final = "SELECT format_id, gtrid, bqual FROM dtx.branch WHERE format_id = %s AND stuck IS NOT NULL"


class Links:
    """A connection with a control link and a transaction.

    Args:
        raw: the open connection.
        global_id: of the branch to work for; ``None``: a local transaction.
    """

    def __init__(self, raw: Raw, global_id: bytes | None) -> None:
        self._raw = raw
        self._session = raw.begin()
        self._control = raw.control(self._session)
        self._txn_id = raw.declare(self._session, self._control, global_id)

    def work(self, sources: Sequence[str], published: Mapping[str, Sequence[bytes]], *, acquires: bool = False) -> None:
        """Consume from each source, and publish.

        Args:
            sources: queues.
            published: bodies, by queue.
            acquires: messages are also delivered in the transaction.
        """
        raw, session = self._raw, self._session
        retired = TransactionalState(txn_id=self._txn_id, outcome=ACCEPTED)
        for queue in sources:
            link, _ = raw.receiver(session, queue, 0, name=f"from {queue}")
            link.grant(CONSUMED, properties={"txn-id": self._txn_id} if acquires else None)
            taken = [raw.take() for _ in range(CONSUMED)]
            states = {(TransactionalState(txn_id=self._txn_id),)} if acquires else {()}
            assert {one.states for one in taken} == states, taken
            session.dispose(Role.RECEIVER, [one.delivery_id for one in taken], retired, settled=True)
        for queue, bodies in published.items():
            link = raw.sender(session, queue, name=f"to {queue}")
            for body in bodies:
                payload = message.head(message.Header(durable=True)) + message.data(body)
                number = link.send(body, payload, state=TransactionalState(txn_id=self._txn_id))
                outcome = raw.outcome(session, number)
                assert isinstance(outcome, TransactionalState), outcome
                assert isinstance(outcome.outcome, Accepted), outcome

    def promote(self, global_id: bytes) -> None:
        """Let the local transaction work for a branch."""
        outcome = self._raw.promote(self._session, self._control, self._txn_id, global_id)
        assert isinstance(outcome, Declared), outcome

    def discharge(self) -> DeliveryState | None:
        """End the transaction, and return the answer of the coordinator."""
        return self._raw.discharge(self._session, self._control, self._txn_id)


@contextlib.contextmanager
def links(stage: MatrixStage, global_id: bytes | None = None) -> Iterator[Links]:
    """Open a client with a transaction.

    Raises:
        ConnectionError: dtx is gone, or gave an unexpected answer.
    """
    try:
        with Raw(stage.dtx, hostname=f"vhost:{stage.vhost}") as raw:
            yield Links(raw.opened(), global_id)
    except AssertionError as error:
        raise ConnectionError(str(error)) from error


def is_rolled_back(outcome: DeliveryState | None) -> bool:
    """Whether the answer to a discharge means a rollback, and not an unknown outcome."""
    return isinstance(outcome, Rejected) and outcome.error is not None and "transaction:" in outcome.error.condition


def committed(database: str) -> set[Xid]:
    """Return the local transactions of AMQP 1.0 clients that are committed in the journal."""
    return _local(database, _COMMITTED)


def stuck(database: str) -> set[Xid]:
    """Return the local transactions that are stuck in phase two."""
    return _local(database, _STUCK)


def _local(database: str, query: LiteralString) -> set[Xid]:
    with psycopg.connect(database) as connection:
        return {Xid(f, bytes(g), bytes(b)) for f, g, b in connection.execute(query, (LOCAL_FORMAT,))}
