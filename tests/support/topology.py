"""Virtual hosts of standalone mode without a store: no store serves the indexes of their queues."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from pika import data

from dtx.log.changes import StoredMessage
from dtx.store.postgres.cache import MessageCache
from dtx.store.postgres.consumers import Consumer, QueueDelivery
from dtx.store.postgres.exchanges import Queue, QueueSpec
from dtx.store.postgres.queue import Letter, QueueIndex, Reason
from dtx.store.postgres.topology import VirtualHost
from dtx.xa.codes import ReplyCode, XaError

VHOST = "v"


def table(values: Mapping[str, Any] | None = None) -> bytes:
    """A field table as on the wire, without its length."""
    pieces: list[bytes] = []
    data.encode_table(pieces, values or {})
    return b"".join(pieces)[4:]


class Nobody:
    """A host of queues that does nothing."""

    def schedule(self, queue: QueueIndex) -> None: ...

    def handed_out(self, queue: QueueIndex) -> None: ...

    def fetch(self, queue: QueueIndex, positions: list[int]) -> None: ...

    def drop(self, queue: QueueIndex, positions: list[int]) -> None: ...

    def dead_letter(self, queue: QueueIndex, letters: list[Letter], reason: Reason) -> None: ...


class Idle:
    """A channel that takes nothing."""

    @property
    def full(self) -> bool:
        return True

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None: ...


def idle_index(spec: QueueSpec) -> QueueIndex:
    """The index of a queue without a store."""
    return QueueIndex(spec.id, spec.where, Nobody(), MessageCache(0), spec.settings, 0.0)


def virtual_host() -> VirtualHost:
    """An empty virtual host."""
    return VirtualHost(VHOST, idle_index)


@contextmanager
def refused(code: ReplyCode, reason: str) -> Iterator[None]:
    """Expect an XaError with exactly this code and reason."""
    with pytest.raises(XaError) as error:
        yield
    assert (error.value.code, error.value.reason) == (code, reason)


def names(queues: tuple[Queue, ...]) -> list[str]:
    """The names of *queues*, in alphabetical order."""
    return sorted(queue.name.decode() for queue in queues)
