"""The store as connections see it, and the removal of queues.

:class:`dtx.store.postgres.store.PostgresStore` implements :class:`StandaloneServer`.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol, cast

from dtx.log.api import LogError
from dtx.log.changes import Define, StoredMessage
from dtx.manager import BranchManager
from dtx.store.postgres.consumers import Consumer, QueueDelivery, Sink
from dtx.store.postgres.exchanges import Owner, Queue
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.recorder import Thing
from dtx.store.postgres.topology import DeletedQueues, VirtualHost
from dtx.store.slices import Slices
from dtx.store.work import HeldPublish, HeldWork
from dtx.telemetry import get_logger

_log = get_logger(part="connection")

Done = Callable[[LogError | None], None]
"""Called once, when a record is durable, or with the error if it is not or its outcome is not known."""


class StandaloneServer(Protocol):
    """Exchanges, queues and messages."""

    counts: BrokerCounts
    """What has happened to messages."""

    def virtual_host(self, name: str) -> VirtualHost:
        """The virtual host *name*, which must exist. It is created empty on first use."""

    def submit(
        self,
        vhost: str,
        publishes: Sequence[HeldPublish],
        acked: Sequence[QueueDelivery],
        done: Done,
        *,
        whole: bool = False,
    ) -> Sequence[int]:
        """Write publishes and acknowledgements in one transaction.

        Args:
            vhost: the virtual host of the connection.
            publishes: routed; each message is put into those of its queues that still exist.
            acked: settled in their indexes at once; the record removes their messages.
            done: see :data:`Done`; not called before this returns.
            whole: if a queue refuses one publish, nothing is written, and *done* is not called.

        Returns:
            Indexes of the publishes that a full queue refuses (x-overflow: reject-publish). They are put nowhere, or
            are dead letters of that queue.
        """

    async def dead_letters(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[StoredMessage], bytes]
    ) -> Sequence[HeldPublish | None]:
        """Make the dead letters that a branch publishes if it rejects *deliveries*.

        Args:
            deliveries: of queues with a dead letter exchange. They are unsettled until this returns.
            revised: returns the properties with which a message leaves its queue.

        Returns:
            The dead letters of the first deliveries (``None``: it has none): at least one, and as many as may be in
            memory at once.

        Raises:
            LogError: the messages could not be read.
        """

    def refusal(self, work: HeldWork) -> str | None:
        """The reason why a queue refuses publishes of a branch (x-overflow: reject-publish), or ``None``.

        Asked before the vote. After it, the publishes of the branch enter even full queues.
        """

    def define(self, define: Define) -> Awaitable[None]:
        """Make a change of the topology durable, in the order of the calls.

        No message is confirmed as durable before its queue is durable.

        Returns:
            Done when it is durable; a LogError if it is not, or its outcome is not known.
        """

    def defined(self, thing: Thing | None = None) -> Awaitable[None] | None:
        """Wait for an earlier :meth:`define`, perhaps of another client. One that the database refused is tried again.

        Args:
            thing: the object to wait for; ``None`` for all earlier definitions.

        Returns:
            As :meth:`define`; ``None`` if it is durable already.
        """

    def close_queues(self, queues: Sequence[Queue]) -> list[Consumer]:
        """Close the indexes of deleted queues, and remove their messages in the background.

        Returns:
            Their consumers, which the caller must inform.
        """

    async def revise(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[QueueDelivery, StoredMessage], bytes]
    ) -> None:
        """Change the properties of delivered messages. The next recipient gets them with the new properties.

        Args:
            deliveries: unsettled until this returns.
            revised: returns the new properties of a message.

        Raises:
            LogError: not all are changed, or the outcome is not known.
        """

    async def purge(self, queue: Queue) -> int:
        """Remove the ready messages. Returns their number when the removal is durable.

        Raises:
            LogError: the removal is not durable, or its outcome is not known.
        """


OWN_AT_ONCE: Final = 50
"""Exclusive queues that are removed in one step, which takes at most 1 ms."""


class ClientSink(Sink, Protocol):
    """The receiver of deliveries to consumers of clients."""

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* was deleted."""


def close_queues(broker: StandaloneServer, queues: Sequence[Queue]) -> None:
    """Remove the messages of deleted queues, and inform their consumers."""
    Slices(_failed).run(_notify(broker.close_queues(queues)))


def _notify(consumers: Sequence[Consumer]) -> Iterator[None]:
    for consumer in consumers:
        cast("ClientSink", consumer.sink).cancelled(consumer)
        yield


def _failed(error: Exception) -> None:
    _log.error("consumers may not be informed that their queue was deleted", exc_info=error)


def remove_own(broker: StandaloneServer, manager: BranchManager, vhost: VirtualHost, owner: Owner) -> Iterator[None]:
    """Remove the exclusive queues of a closed connection, in steps."""
    while (deleted := vhost.disconnected(owner, OWN_AT_ONCE)).queues:
        remove(broker, manager, deleted)
        yield


def remove(broker: StandaloneServer, manager: BranchManager, deleted: DeletedQueues) -> None:
    """Close queues that dtx has removed itself; the change of the topology is written in the background."""
    close_queues(broker, deleted.queues)
    if deleted.define is not None:
        manager.spawn(_note_deletion(broker.define(deleted.define)))


async def _note_deletion(written: Awaitable[None]) -> None:
    try:
        await written
    except LogError as error:
        _log.error("queues that are gone may come back at the next start", reason=str(error))
