"""Messages that a broker has sent for a client of AMQP 1.0 that does not receive them."""

from dtx.wire.amqp10.performatives import ACCEPTED, Role
from tests.conftest import ServiceFactory
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import connected
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode

COUNT = 100
SIZE = 128 << 10
KEPT = 1 << 20


def test_messages_without_memory_stay_in_their_queue(dtx_service: ServiceFactory, rabbitmq: RabbitNode) -> None:
    """A client has much credit and no window: dtx keeps what it may, and does not prefetch more large messages."""
    service = dtx_service("--max-kept-bytes", str(KEPT), broker=rabbitmq.url())
    with connected(service.url()) as connection:
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=False, auto_delete=False).method.queue
        for number in range(COUNT):
            channel.basic_publish("", queue, b"%03d" % number + bytes(SIZE - 3))

        def ready() -> int:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

        wait_until(lambda: ready() == COUNT)
        with Raw(service, window=0) as idle, Raw(service) as busy:
            session = idle.opened().begin()
            idle.receiver(session, queue, credit=2 * COUNT)
            idle.flush()
            wait_until(lambda: ready() < COUNT)
            fair = busy.opened().begin()
            busy.receiver(fair, queue, credit=COUNT)
            left = COUNT - 2 * (KEPT // SIZE) - 2
            for _ in range(left):
                taken = busy.take()
                assert len(body(taken)) == SIZE
                fair.dispose(Role.RECEIVER, [taken.delivery_id], ACCEPTED, settled=True)
                busy.flush()
        channel.queue_delete(queue)
