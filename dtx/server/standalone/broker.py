"""What connections ask of the store, and queues that go.

:class:`dtx.store.postgres.store.PostgresStore` is such a store.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Protocol, cast

from dtx.log.api import LogError
from dtx.log.changes import Define, StoredMessage
from dtx.manager import TransactionManager
from dtx.store.postgres.consumers import Consumer, QueueDelivery, Sink
from dtx.store.postgres.exchanges import Owner, Queue
from dtx.store.postgres.recorder import Thing
from dtx.store.postgres.topology import Gone, VirtualHost
from dtx.store.slices import Slices
from dtx.store.work import HeldPublish, HeldWork
from dtx.telemetry import get_logger

_log = get_logger(part="connection")

Done = Callable[[LogError | None], None]
"""Called once, when a record is durable, or with the error when it is not or nobody knows."""


class StandaloneServer(Protocol):
    """Exchanges, queues and messages."""

    def virtual_host(self, name: str) -> VirtualHost:
        """The virtual host of that name, which users may enter; empty the first time."""

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
            vhost: of the connection.
            publishes: routed; each message is put into those of its queues that are still there.
            acked: settled in their indexes from now on; their messages leave.
            done: see there; not called before this returns.
            whole: when a queue refuses one publish, nothing at all happens, and *done* is not called.

        Returns:
            Indexes of the publishes that a full queue refuses (x-overflow: reject-publish); they are put nowhere.
        """

    async def dead_letters(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[StoredMessage], bytes]
    ) -> Sequence[HeldPublish | None]:
        """What a branch publishes that rejects *deliveries*, of queues with a dead letter exchange; ``None``: nothing.

        Args:
            deliveries: not settled, and they stay so until this returns.
            revised: the properties with which a message leaves its queue.

        Returns:
            Of as many as are reasonable to have in memory at once, from the first on, and at least one.

        Raises:
            LogError: the messages could not be read.
        """

    def refusal(self, work: HeldWork) -> str | None:
        """Why a queue would not take what a branch has published to it (x-overflow: reject-publish).

        It is asked before the vote: what a branch has voted for comes into its queues, however full they are then.
        """

    def define(self, define: Define) -> Awaitable[None]:
        """Make a change of the topology durable, in the order of the calls.

        Nobody hears of a message that it is durable before its queue is.

        Returns:
            Done when it is durable; a LogError when it is not, or nobody knows.
        """

    def defined(self, thing: Thing | None = None) -> Awaitable[None] | None:
        """What is in memory may not be durable yet: somebody else has just asked for it.

        Args:
            thing: which; all that was ever asked for when none is named.

        Returns:
            As :meth:`define`; ``None`` when it is durable.
        """

    def close_queues(self, queues: Sequence[Queue]) -> list[Consumer]:
        """Queues are gone: close their indexes, and have their messages removed; their consumers, to be told."""

    async def revise(
        self, deliveries: Sequence[QueueDelivery], revised: Callable[[QueueDelivery, StoredMessage], bytes]
    ) -> None:
        """Change the properties of messages that are handed out; whoever gets them next, gets them so.

        Args:
            deliveries: not settled, and they stay so until this returns.
            revised: the new properties of a message.

        Raises:
            LogError: not all are changed, or nobody knows.
        """

    async def purge(self, queue: Queue) -> int:
        """Remove what is ready; how many messages. Returns when that is durable.

        Raises:
            LogError: it is not, or nobody knows.
        """


OWN_AT_ONCE: Final = 50
"""Exclusive queues that go in one step, a millisecond or less."""


class ClientSink(Sink, Protocol):
    """What consumers of clients deliver to."""

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* is gone."""


def close_queues(broker: StandaloneServer, queues: Sequence[Queue]) -> None:
    """Queues are gone from the topology: so are their messages, and their consumers hear of it."""
    Slices(_failed).run(_tell(broker.close_queues(queues)))


def _tell(consumers: Sequence[Consumer]) -> Iterator[None]:
    for consumer in consumers:
        cast("ClientSink", consumer.sink).cancelled(consumer)
        yield


def _failed(error: Exception) -> None:
    _log.error("consumers may not hear of the end of their queue", exc_info=error)


def remove_own(
    broker: StandaloneServer, manager: TransactionManager, vhost: VirtualHost, owner: Owner
) -> Iterator[None]:
    """The exclusive queues of a connection that is gone go with it, in steps."""
    while (gone := vhost.disconnected(owner, OWN_AT_ONCE)).queues:
        remove(broker, manager, gone)
        yield


def remove(broker: StandaloneServer, manager: TransactionManager, gone: Gone) -> None:
    """The same for queues that go by themselves, so nobody waits until that is durable."""
    close_queues(broker, gone.queues)
    if gone.define is not None:
        manager.spawn(_note_gone(broker.define(gone.define)))


async def _note_gone(written: Awaitable[None]) -> None:
    try:
        await written
    except LogError as error:
        _log.error("queues that are gone may come back at the next start", reason=str(error))
