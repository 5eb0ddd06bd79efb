"""A deleted queue leaves no reference cycles, because garbage collections are rare by design."""

import gc
from collections.abc import Iterator

import pytest

from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.cache import MessageCache
from dtx.store.postgres.queue import QueueIndex
from tests.unit.store.queue_rig import NOW, PLENTY, Channel, Rig

NAME = "queue 'short-lived' in vhost '/'"


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Objects are freed only by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def indexes() -> int:
    return sum(isinstance(found, QueueIndex) and found.name == NAME for found in gc.get_objects())


@pytest.mark.usefixtures("no_collections")
def test_the_index_of_a_deleted_queue_is_freed_at_once() -> None:
    rig = Rig()
    cache = MessageCache(PLENTY)
    rig.queue = QueueIndex(7, NAME, rig, cache, QueueArguments(), NOW)
    assert indexes() == 1
    channel = Channel()
    rig.put(1, 2, 3)
    rig.consumer(channel, prefetch=1)
    rig.ack(*channel.taken())
    rig.queue.close()
    channel.taken()
    rig.queue = Rig().queue
    assert indexes() == 0
    assert cache.used == 0
