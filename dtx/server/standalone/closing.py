"""Queues that go: their consumers hear of it, whatever they speak."""

from collections.abc import Awaitable, Sequence
from typing import Protocol, cast

from dtx.log.api import LogError
from dtx.manager import TransactionManager
from dtx.server.standalone.broker import Broker
from dtx.store.postgres.consumers import Consumer, Sink
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.topology import Gone
from dtx.telemetry import get_logger

_log = get_logger(part="connection")


class ClientSink(Sink, Protocol):
    """What consumers of clients deliver to."""

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of *consumer* is gone."""


def close_queues(broker: Broker, queues: Sequence[Queue]) -> None:
    """Queues are gone from the topology: so are their messages, and their consumers hear of it."""
    for consumer in broker.close_queues(queues):
        cast("ClientSink", consumer.sink).cancelled(consumer)


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
