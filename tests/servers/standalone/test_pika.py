"""The calls of the RabbitMQ tutorials and of the pika examples work without RabbitMQ."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pika
import pytest
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.adapters.select_connection import SelectConnection
from pika.exceptions import ChannelClosedByBroker, UnroutableError
from pika.exchange_type import ExchangeType

from tests.support.client import connected
from tests.support.service import DtxService

PATIENCE = 60.0
SetUp = Callable[[BlockingChannel], str]
Deliver = Callable[[BlockingChannel, Any, pika.BasicProperties, bytes], None]


class Program:
    """A consumer with its own thread and connection, like a program started in another terminal.

    Args:
        parameters: the parameters of its connection.
        set_up: declares its queue and returns the name.
        callback: called for each message.
        auto_ack: the argument of basic_consume.
    """

    def __init__(
        self, parameters: pika.ConnectionParameters, set_up: SetUp, callback: Deliver | None = None, *, auto_ack: bool
    ) -> None:
        self.bodies: list[bytes] = []
        self._parameters = parameters
        self._set_up = set_up
        self._callback = callback
        self._auto_ack = auto_ack
        self._news = threading.Condition()
        self.ready: Future[BlockingConnection] = Future()

    def run(self) -> None:
        """Consume until :meth:`stop`."""
        with BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            queue = self._set_up(channel)
            channel.basic_consume(queue=queue, on_message_callback=self._on_message, auto_ack=self._auto_ack)
            self._channel = channel
            self.ready.set_result(connection)
            channel.start_consuming()

    def _on_message(self, channel: BlockingChannel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        if self._callback is not None:
            self._callback(channel, method, properties, body)
        with self._news:
            self.bodies.append(body)
            self._news.notify_all()

    def wait(self, count: int) -> list[bytes]:
        """Wait for *count* messages; return all bodies in order."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.bodies) >= count, PATIENCE), self.bodies
            return list(self.bodies)

    def stop(self) -> None:
        """Stop the consumer, as CTRL-C does."""
        self.ready.result(PATIENCE).add_callback_threadsafe(self._channel.stop_consuming)


@pytest.fixture
def parameters(standalone: DtxService) -> pika.ConnectionParameters:
    """Defaults except for the address: user guest, virtual host /."""
    return pika.ConnectionParameters(host=standalone.host, port=standalone.port)


@pytest.fixture
def program(parameters: pika.ConnectionParameters) -> Iterator[Callable[..., Program]]:
    """Starts programs that end with the test."""
    started: list[tuple[Program, Future[None]]] = []
    with ThreadPoolExecutor(4) as threads:

        def start(set_up: SetUp, callback: Deliver | None = None, *, auto_ack: bool = False) -> Program:
            made = Program(parameters, set_up, callback, auto_ack=auto_ack)
            running = threads.submit(made.run)
            started.append((made, running))
            made.ready.result(PATIENCE)
            return made

        yield start
        for made, running in started:
            made.stop()
            running.result(PATIENCE)


@pytest.fixture
def channel(parameters: pika.ConnectionParameters) -> Iterator[BlockingChannel]:
    with BlockingConnection(parameters) as connection:
        yield connection.channel()


# -- tutorials one to six ----------------------------------------------------------------------------------------------


def test_one_hello_world(program: Callable[..., Program], channel: BlockingChannel) -> None:
    def declare(channel: BlockingChannel) -> str:
        channel.queue_declare(queue="hello")
        return "hello"

    receive = program(declare, auto_ack=True)
    declare(channel)
    channel.basic_publish(exchange="", routing_key="hello", body="Hello World!")
    channel.connection.close()
    assert receive.wait(1) == [b"Hello World!"]


def test_two_work_queues(program: Callable[..., Program], channel: BlockingChannel) -> None:
    """Fair dispatch: a busy worker gets no more messages until it has acknowledged."""
    declare = {"queue": "task_queue", "durable": True}
    free, release = threading.Event(), threading.Event()

    def set_up(channel: BlockingChannel) -> str:
        channel.queue_declare(**declare)
        channel.basic_qos(prefetch_count=1)
        return "task_queue"

    def work(channel: BlockingChannel, method: Any, _properties: pika.BasicProperties, body: bytes) -> None:
        if body == b"a hard one......":
            free.set()
            assert release.wait(PATIENCE)
        channel.basic_ack(delivery_tag=method.delivery_tag)

    def send(message: str) -> None:
        properties = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
        channel.basic_publish(exchange="", routing_key="task_queue", body=message, properties=properties)

    channel.queue_declare(**declare)
    first = program(set_up, work)
    send("a hard one......")
    assert free.wait(PATIENCE)
    second = program(set_up, work)
    for number in range(5):
        send(f"{number}.")
    assert second.wait(5) == [f"{number}.".encode() for number in range(5)]
    release.set()
    assert first.wait(1) == [b"a hard one......"]


def test_two_a_dead_workers_task_goes_to_another(
    parameters: pika.ConnectionParameters, program: Callable[..., Program], channel: BlockingChannel
) -> None:
    channel.queue_declare(queue="task_queue", durable=True)
    channel.basic_publish(exchange="", routing_key="task_queue", body="a task")
    with BlockingConnection(parameters) as dying:
        method, _, body = next(iter(dying.channel().consume("task_queue")))
        assert (body, method.redelivered) == (b"a task", False)
    again: list[bool] = []

    def work(channel: BlockingChannel, method: Any, _properties: pika.BasicProperties, _body: bytes) -> None:
        again.append(method.redelivered)
        channel.basic_ack(delivery_tag=method.delivery_tag)

    assert program(lambda _: "task_queue", work).wait(1) == [b"a task"]
    assert again == [True]


def test_two_a_durable_queue_cannot_be_declared_otherwise(channel: BlockingChannel) -> None:
    channel.queue_declare(queue="task_queue", durable=True)
    with pytest.raises(ChannelClosedByBroker, match="inequivalent arg 'durable'") as raised:
        channel.queue_declare(queue="task_queue")
    assert raised.value.reply_code == 406


def temporary(exchange: str, kind: str, *keys: str) -> SetUp:
    """An exclusive queue bound with *keys*, deleted when its program ends."""

    def set_up(channel: BlockingChannel) -> str:
        channel.exchange_declare(exchange=exchange, exchange_type=kind)
        queue = str(channel.queue_declare(queue="", exclusive=True).method.queue)
        for key in keys or (None,):
            channel.queue_bind(exchange=exchange, queue=queue, routing_key=key)
        return queue

    return set_up


def test_three_publish_subscribe(program: Callable[..., Program], channel: BlockingChannel) -> None:
    channel.exchange_declare(exchange="logs", exchange_type="fanout")
    channel.basic_publish(exchange="logs", routing_key="", body="info: nobody listens yet")
    receivers = [program(temporary("logs", "fanout"), auto_ack=True) for _ in range(2)]
    channel.basic_publish(exchange="logs", routing_key="", body="info: Hello World!")
    assert [receiver.wait(1) for receiver in receivers] == [[b"info: Hello World!"]] * 2


def test_four_routing(program: Callable[..., Program], channel: BlockingChannel) -> None:
    errors = program(temporary("direct_logs", "direct", "error"), auto_ack=True)
    everything = program(temporary("direct_logs", "direct", "info", "warning", "error"), auto_ack=True)
    for severity in ("info", "debug", "warning", "error"):
        channel.basic_publish(exchange="direct_logs", routing_key=severity, body=severity)
    assert everything.wait(3) == [b"info", b"warning", b"error"]
    assert errors.wait(1) == [b"error"]


def test_five_topics(program: Callable[..., Program], channel: BlockingChannel) -> None:
    patterns = (["#"], ["kern.*"], ["*.critical"], ["kern.*", "*.critical"])
    receivers = [program(temporary("topic_logs", "topic", *keys), auto_ack=True) for keys in patterns]
    for key in ("kern.critical", "anonymous.info", "kern.info", "cron.critical", "kern.disk.critical", "kern"):
        channel.basic_publish(exchange="topic_logs", routing_key=key, body=key)
    expected = [
        [b"kern.critical", b"anonymous.info", b"kern.info", b"cron.critical", b"kern.disk.critical", b"kern"],
        [b"kern.critical", b"kern.info"],
        [b"kern.critical", b"cron.critical"],
        [b"kern.critical", b"kern.info", b"cron.critical"],
    ]
    assert [got.wait(len(wanted)) for got, wanted in zip(receivers, expected, strict=True)] == expected


def fibonacci(number: int) -> int:
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


def test_six_remote_procedure_call(
    parameters: pika.ConnectionParameters, program: Callable[..., Program], channel: BlockingChannel
) -> None:
    def serve(channel: BlockingChannel) -> str:
        channel.queue_declare(queue="rpc_queue")
        channel.basic_qos(prefetch_count=1)
        return "rpc_queue"

    def on_request(channel: BlockingChannel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        assert properties.reply_to is not None
        channel.basic_publish(
            exchange="",
            routing_key=properties.reply_to,
            properties=pika.BasicProperties(correlation_id=properties.correlation_id),
            body=str(fibonacci(int(body))),
        )
        channel.basic_ack(delivery_tag=method.delivery_tag)

    program(serve, on_request)
    callback_queue = channel.queue_declare(queue="", exclusive=True).method.queue
    answers: dict[str, bytes] = {}

    def on_response(_: BlockingChannel, _method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        assert properties.correlation_id is not None
        answers[properties.correlation_id] = body

    channel.basic_consume(queue=callback_queue, on_message_callback=on_response, auto_ack=True)
    for number, expected in ((1, b"1"), (10, b"55"), (15, b"610")):
        correlation_id = str(uuid.uuid4())
        channel.basic_publish(
            exchange="",
            routing_key="rpc_queue",
            properties=pika.BasicProperties(reply_to=callback_queue, correlation_id=correlation_id),
            body=str(number),
        )
        while correlation_id not in answers:
            channel.connection.process_data_events(time_limit=PATIENCE)
        assert answers[correlation_id] == expected


# -- examples of pika --------------------------------------------------------------------------------------------------


def test_delivery_confirmations(channel: BlockingChannel) -> None:
    channel.queue_declare(queue="test", durable=True, exclusive=False, auto_delete=False)
    channel.confirm_delivery()
    for number in range(10):
        channel.basic_publish(
            exchange="",
            routing_key="test",
            body=f"{number}".encode(),
            properties=pika.BasicProperties(content_type="text/plain", delivery_mode=pika.DeliveryMode.Persistent),
            mandatory=True,
        )
    assert channel.queue_purge("test").method.message_count == 10


def test_an_unroutable_mandatory_message_is_returned(channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as raised:
        channel.basic_publish(exchange="", routing_key="nowhere", body=b"Hello World!", mandatory=True)
    (returned,) = raised.value.messages
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
    assert returned.body == b"Hello World!"
    channel.basic_publish(exchange="", routing_key="nowhere", body=b"Hello World!")


def test_the_confirm_reports_a_missing_exchange(channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_publish(exchange="test", routing_key="test", body=b"Hello World!", mandatory=True)
    assert raised.value.reply_code == 404


def test_transactions(channel: BlockingChannel) -> None:
    queue = channel.queue_declare(queue="", exclusive=True).method.queue
    other = channel.connection.channel()
    channel.tx_select()
    channel.basic_publish("", queue, b"discarded")
    channel.tx_rollback()
    channel.basic_publish("", queue, b"committed")
    assert other.basic_get(queue)[0] is None
    channel.tx_commit()
    assert other.basic_get(queue, auto_ack=True)[2] == b"committed"
    assert other.basic_get(queue)[0] is None


def test_basic_get(channel: BlockingChannel) -> None:
    queue = channel.queue_declare(queue="", exclusive=True).method.queue
    assert channel.basic_get(queue) == (None, None, None)
    for body in ("one", "two"):
        channel.basic_publish("", queue, body, pika.BasicProperties(content_type="text/plain", headers={"n": 1}))
    method, properties, body = channel.basic_get(queue)
    assert method is not None
    assert properties is not None
    assert (method.message_count, method.redelivered, body) == (1, False, b"one")
    assert (properties.content_type, properties.headers) == ("text/plain", {"n": 1})
    channel.basic_ack(method.delivery_tag)


def test_consume_is_a_generator_that_ends_with_cancel(channel: BlockingChannel) -> None:
    """Cancel requeues the messages that were fetched and not returned by the generator."""
    queue = channel.queue_declare(queue="", exclusive=True).method.queue
    for number in range(10):
        channel.basic_publish("", queue, f"{number}")
    got = []
    for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE):
        got.append(body)
        channel.basic_ack(method.delivery_tag)
        if method.delivery_tag == 4:
            break
    channel.cancel()
    assert got == [b"0", b"1", b"2", b"3"]
    rest = iter(lambda: channel.basic_get(queue, auto_ack=True)[2], None)
    assert list(rest) == [f"{number}".encode() for number in range(4, 10)]
    # without a message the generator yields None
    assert next(iter(channel.consume(queue, inactivity_timeout=0.1))) == (None, None, None)
    assert channel.cancel() == 0


def test_heartbeat_and_blocked_timeouts(parameters: pika.ConnectionParameters) -> None:
    asked = pika.ConnectionParameters(
        host=parameters.host, port=parameters.port, heartbeat=600, blocked_connection_timeout=300
    )
    connection = BlockingConnection(asked)
    assert connection._impl.params.heartbeat == 600
    channel = connection.channel()
    channel.basic_publish("", "my-alphabet-queue", "abc")
    connection.close()


def test_a_client_lives_by_its_heartbeats(parameters: pika.ConnectionParameters) -> None:
    """AMQP 0-9-1, 4.2.7: both sides send heartbeats; without those of dtx, pika closes after two seconds."""
    asked = pika.ConnectionParameters(host=parameters.host, port=parameters.port, heartbeat=1)
    with BlockingConnection(asked) as connection:
        connection.process_data_events(time_limit=4)
        assert connection.channel().is_open


def test_direct_reply_to(channel: BlockingChannel) -> None:
    """Server and client on one channel."""
    said: list[bytes] = []

    def on_request(channel: BlockingChannel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        said.append(body)
        assert properties.reply_to is not None
        channel.basic_publish("", routing_key=properties.reply_to, body="Polo")
        channel.basic_ack(delivery_tag=method.delivery_tag)

    def on_reply(channel: BlockingChannel, _method: Any, _properties: pika.BasicProperties, body: bytes) -> None:
        said.append(body)
        channel.close()

    channel.queue_declare(queue="rpc.server.queue", exclusive=True, auto_delete=True)
    channel.basic_consume("rpc.server.queue", on_request)
    channel.basic_consume("amq.rabbitmq.reply-to", on_reply, auto_ack=True)
    asking = pika.BasicProperties(reply_to="amq.rabbitmq.reply-to")
    channel.basic_publish(exchange="", routing_key="rpc.server.queue", body="Marco", properties=asking)
    channel.start_consuming()
    assert said == [b"Marco", b"Polo"]


def test_a_connection_by_url(standalone: DtxService) -> None:
    query = "?connection_attempts=3&heartbeat=3600&blocked_connection_timeout=60"
    with connected(standalone.url() + query) as connection:
        assert connection.channel().is_open


def test_a_consumer_is_notified_of_a_cancel_by_the_server(channel: BlockingChannel) -> None:
    """RabbitMQ, Consumer Cancel Notification."""
    queue = channel.queue_declare(queue="", exclusive=True).method.queue
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    tag = channel.basic_consume(queue, lambda *_: None)
    channel.connection.channel().queue_delete(queue)
    while not cancelled:
        channel.connection.process_data_events(time_limit=PATIENCE)
    assert cancelled == [tag]


class Consumer:
    """The steps of pika's asynchronous consumers, each in the callback of the previous one: exchange, queue, binding,
    qos, consume, cancel, close of the channel, close of the connection.

    Args:
        wanted: the number of messages after which it stops.
        ended: called when its connection is closed.
    """

    def __init__(self, wanted: int, ended: Callable[[], None]) -> None:
        self.steps: list[str] = []
        self.bodies: list[bytes] = []
        self._wanted = wanted
        self._ended = ended
        self._channel: Any = None

    def on_open(self, connection: Any) -> None:
        self._connection = connection
        connection.channel(on_open_callback=self._on_channel)

    def on_closed(self, _connection: Any, reason: Exception) -> None:
        self.steps.append(f"closed {getattr(reason, 'reply_code', reason)}")
        self._ended()

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(lambda *_: self._connection.close())
        self._step("exchange", channel.exchange_declare, self._on_exchange, "message", ExchangeType.topic)

    def _step(self, name: str, ask: Callable[..., Any], then: Callable[[Any], None], *words: Any, **more: Any) -> None:
        def done(frame: Any) -> None:
            self.steps.append(name)
            then(frame)

        ask(*words, callback=done, **more)

    def _on_exchange(self, _: Any) -> None:
        self._step("queue", self._channel.queue_declare, self._on_queue, queue="text", durable=True)

    def _on_queue(self, _: Any) -> None:
        self._step("bind", self._channel.queue_bind, self._on_bound, "text", "message", routing_key="example.text")

    def _on_bound(self, _: Any) -> None:
        self._step("qos", self._channel.basic_qos, self._on_qos, prefetch_count=1)

    def _on_qos(self, _: Any) -> None:
        self._tag = self._channel.basic_consume("text", self._on_message)
        for number in range(self._wanted):
            self._channel.basic_publish("message", "example.text", f"{number}", pika.BasicProperties(app_id="example"))

    def _on_message(self, channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        assert properties.app_id == "example"
        self.bodies.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(self.bodies) == self._wanted:
            self._step("cancel", channel.basic_cancel, lambda _: channel.close(), self._tag)


STEPS = ["exchange", "queue", "bind", "qos", "cancel", "closed 200"]
BODIES = [f"{number}".encode() for number in range(5)]


def test_an_asynchronous_consumer_on_select(parameters: pika.ConnectionParameters) -> None:
    connection = SelectConnection(parameters)
    consumer = Consumer(5, connection.ioloop.stop)
    connection.add_on_open_callback(consumer.on_open)
    connection.add_on_close_callback(consumer.on_closed)
    with contextlib.closing(connection.ioloop):
        connection.ioloop.start()
    assert (consumer.steps, consumer.bodies) == (STEPS, BODIES)


async def test_an_asynchronous_consumer_on_asyncio(parameters: pika.ConnectionParameters) -> None:
    ended = asyncio.Event()
    consumer = Consumer(5, ended.set)
    AsyncioConnection(
        parameters,
        on_open_callback=consumer.on_open,
        on_close_callback=consumer.on_closed,
        custom_ioloop=asyncio.get_running_loop(),
    )
    async with asyncio.timeout(PATIENCE):
        await ended.wait()
    assert (consumer.steps, consumer.bodies) == (STEPS, BODIES)


async def test_an_asynchronous_publisher_counts_its_confirms(parameters: pika.ConnectionParameters) -> None:
    """Confirms may be grouped: ``multiple`` covers all earlier ones."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()
    closed = asyncio.Event()
    count = 200

    def on_confirm(frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        if frame.method.delivery_tag == count and not done.done():
            done.set_result(frame.method.delivery_tag)

    def publish(channel: Any, queue: str) -> None:
        for number in range(count):
            channel.basic_publish("", queue, f"{number}", pika.BasicProperties(delivery_mode=2))

    def on_channel(channel: Any) -> None:
        channel.confirm_delivery(
            on_confirm,
            callback=lambda _: channel.queue_declare(
                "", exclusive=True, callback=lambda frame: publish(channel, frame.method.queue)
            ),
        )

    connection = AsyncioConnection(
        parameters,
        on_open_callback=lambda connection: connection.channel(on_open_callback=on_channel),
        on_close_callback=lambda *_: closed.set(),
        custom_ioloop=loop,
    )
    async with asyncio.timeout(PATIENCE):
        assert await done == count
        connection.close()
        await closed.wait()
