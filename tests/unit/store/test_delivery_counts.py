"""Quorum queues without a broker: how often a message has returned."""

from dtx.store.postgres.arguments import QueueArguments
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.properties import Property
from tests.unit.store.queue_rig import Rig, message


def test_a_returned_message_with_too_many_headers_is_delivered() -> None:
    """A dead letter may have more headers than a client may publish."""
    rig = Rig(QueueArguments(counts=True))
    headers = b"".join(tables.entry(b"%d" % number, b"S", b"") for number in range(4100))
    raw = properties.build({Property.HEADERS: headers})
    rig.put_message(message(1)._replace(properties=raw))
    for _ in range(2):
        delivery = rig.get().delivery
        rig.queue.requeue([delivery], rig.now)
        rig.run()
    assert rig.get().delivery.returns == 2
