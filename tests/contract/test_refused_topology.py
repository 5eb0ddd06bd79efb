"""Topology that a constraint of the database refuses stays refused until the conflicting row is removed."""

import pytest

from dtx.log.api import LogConflict, LogUnavailable
from dtx.log.changes import Define, QueueRow
from tests.support.standalone import Client, OpenClient


async def in_the_way(client: Client) -> QueueRow:
    """Write a queue to the log without the store, so that declaring its name conflicts; return its row."""
    await client.declare("q")
    (row,) = (await client.log.load_definitions()).queues
    gone = client.host.delete_queue(b"q", object())
    client.store.close_queues(gone.queues)
    await client.store.define(gone.define)
    await client.log.write(Define(queues=[row]))
    return row


async def test_a_refused_queue_can_be_declared_again(
    open_client: OpenClient,
) -> None:
    client = await open_client()
    row = await in_the_way(client)
    with pytest.raises(LogConflict):
        await client.declare("q")
    queue = client.host.queues[b"q"]
    with pytest.raises(LogUnavailable, match="the database does not have the queue yet"):
        await client.publish(b"lost at a restart")
    again = client.store.defined(queue.spec.id)
    assert again is not None
    with pytest.raises(LogConflict):
        await again
    await client.log.write(Define(removed_queues=[row.id]))
    again = client.store.defined(queue.spec.id)
    assert again is not None
    await again
    assert client.store.defined(queue.spec.id) is None
    await client.publish(b"kept")
    after = await open_client()
    assert await after.consume(after.host.queues[b"q"]).wait(1) == [b"kept"]


async def test_others_are_defined_behind_a_refused_one(client: Client) -> None:
    await in_the_way(client)
    with pytest.raises(LogConflict):
        await client.declare("q")
    assert client.store.defined() is None, "no definition is being written"
    await client.declare("other")
    await client.publish(b"1", key="other")
    names = {queue.name for queue in (await client.log.load_definitions()).queues}
    assert names == {b"q", b"other"}


async def test_a_refused_queue_can_be_deleted(client: Client) -> None:
    row = await in_the_way(client)
    with pytest.raises(LogConflict):
        await client.declare("q")
    gone = client.host.delete_queue(b"q", object())
    client.store.close_queues(gone.queues)
    await client.store.define(gone.define)
    left = (await client.log.load_definitions()).queues
    assert list(left) == [row], "the conflicting row must stay"
