"""Messages that are changed while they are delivered."""

import pytest

from dtx.log.api import LogUnavailable
from dtx.log.changes import StoredMessage
from dtx.store.postgres import store
from dtx.store.postgres.consumers import QueueDelivery
from dtx.wire.amqp09 import properties
from tests.support.memory_log import Fault, MemoryLog
from tests.support.standalone import Client, OpenClient


def marked(_: QueueDelivery, message: StoredMessage) -> bytes:
    """The properties of the message with the header x-seen."""
    return properties.set_header(message.properties, b"x-seen", message.body)


async def test_every_next_consumer_gets_the_changed_message(
    open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages are changed, in several reads; consumed messages are skipped."""
    monkeypatch.setattr(store, "REVISED_OCTETS", 2)
    client = await open_client()
    queue = await client.declare()
    await client.publish(*[b"%d" % number for number in range(7)])
    sink = client.consume(queue, prefetch=6)
    await sink.wait(6)
    first, gone, *rest = sink.deliveries
    await client.submit(acked=[gone])
    await client.store.revise([first, gone, *rest], marked)
    queue.index.requeue([first, *rest], 0.0)
    await sink.wait(12)
    headers = [properties.read(message.properties).header(b"x-seen") for _, message in sink.got[6:]]
    assert [entry and entry.value for entry in headers] == [None, b"0", b"2", b"3", b"4", b"5"]
    await client.store.revise([gone], marked)


async def test_a_change_that_may_not_be_written_is_an_error() -> None:
    log = MemoryLog("rm")
    await log.open()
    client = await Client(log).open()
    queue = await client.declare()
    await client.publish(b"one")
    sink = client.consume(queue, prefetch=1)
    await sink.wait(1)
    log.faults.append(Fault.REFUSED)
    with pytest.raises(LogUnavailable):
        await client.store.revise(sink.deliveries, marked)
    queue.index.requeue(sink.deliveries, 0.0)
    await sink.wait(2)
    assert sink.got[0][1] == sink.got[1][1]
    await client.close()
    await log.close()
