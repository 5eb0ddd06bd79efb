"""Queues that go: their consumers hear of it, whatever they speak."""

from collections.abc import Awaitable, Iterator, Sequence
from typing import Final, Protocol, cast

from dtx.log.api import LogError
from dtx.manager import TransactionManager
from dtx.server.standalone.broker import Broker
from dtx.store.postgres.consumers import Consumer, Sink
from dtx.store.postgres.exchanges import Owner, Queue
from dtx.store.postgres.topology import Gone, VirtualHost
from dtx.store.slices import Slices
from dtx.telemetry import get_logger

_log = get_logger(part="connection")


OWN_AT_ONCE: Final = 50
"""Exclusive queues that go in one step, a millisecond or less."""


class ClientSink(Sink, Protocol):
    """What consumers of clients deliver to."""

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* is gone."""


def close_queues(broker: Broker, queues: Sequence[Queue]) -> None:
    """Queues are gone from the topology: so are their messages, and their consumers hear of it."""
    Slices(_failed).run(_tell(broker.close_queues(queues)))


def _tell(consumers: Sequence[Consumer]) -> Iterator[None]:
    for consumer in consumers:
        cast("ClientSink", consumer.sink).cancelled(consumer)
        yield


def _failed(error: Exception) -> None:
    _log.error("consumers may not hear of the end of their queue", exc_info=error)


def remove_own(broker: Broker, manager: TransactionManager, vhost: VirtualHost, owner: Owner) -> Iterator[None]:
    """The exclusive queues of a connection that is gone go with it, in steps."""
    while (gone := vhost.disconnected(owner, OWN_AT_ONCE)).queues:
        remove(broker, manager, gone)
        yield


def remove(broker: Broker, manager: TransactionManager, gone: Gone) -> None:
    """The same for queues that go by themselves, so nobody waits until that is durable."""
    close_queues(broker, gone.queues)
    if gone.define is not None:
        manager.spawn(_note_gone(broker.define(gone.define)))


async def _note_gone(written: Awaitable[None]) -> None:
    try:
        await written
    except LogError as error:
        _log.error("queues that are gone may come back at the next start", reason=str(error))
