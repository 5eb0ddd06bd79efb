"""A client that uses pika, for dialogues that RabbitMQ and dtx must answer in the same way."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Self

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, NackError, UnroutableError

PATIENCE: Final = 60.0
"""Seconds to wait for an event before the test fails."""
_POLL_SECONDS: Final = 0.02


class Got(NamedTuple):
    """A message that a consumer has received."""

    body: str
    method: Any
    properties: pika.BasicProperties

    @property
    def headers(self) -> dict[str, Any]:
        """The headers of the message."""
        return self.properties.headers or {}

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """The x-death of the message, without the times."""
        return [{key: value for key, value in death.items() if key != "time"} for death in self.headers["x-death"]]


class Dialogue:
    """A connection with a channel in confirm mode for publishing, and one for everything else.

    Args:
        url: the URL of the broker.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = pika.BlockingConnection(pika.URLParameters(url))
        self.channel = self.connection.channel()
        self._publisher: BlockingChannel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AMQPConnectionError):  # the broker may have been killed
            if self.connection.is_open:
                self.connection.close()

    def another(self) -> BlockingChannel:
        """One more channel."""
        return self.connection.channel()

    def queue(self, name: str = "", **arguments: Any) -> str:
        """Declare an exclusive queue; ``max_length=3`` is ``x-max-length``."""
        table = {"x-" + key.replace("_", "-"): value for key, value in arguments.items()}
        return str(self.channel.queue_declare(name or unique(), exclusive=True, arguments=table).method.queue)

    def exchange(self, kind: str, *, name: str = "", **arguments: Any) -> str:
        """Declare an exchange that is deleted with its last binding."""
        name = name or unique()
        table = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.exchange_declare(name, kind, auto_delete=True, arguments=table)
        return name

    def grave(self, **arguments: Any) -> str:
        """A queue for dead letters of any key, bound to a fanout exchange of the same name."""
        name = self.queue(**arguments)
        self.exchange("fanout", name=name)
        self.channel.queue_bind(name, name)
        return name

    def publish(
        self, queue: str, *bodies: str, exchange: str = "", mandatory: bool = False, **properties: Any
    ) -> list[bool]:
        """Publish, and wait for the confirms; return whether each was accepted (False: basic.nack)."""
        if self._publisher is None or not self._publisher.is_open:
            self._publisher = self.connection.channel()
            self._publisher.confirm_delivery()
        return [self._publish_one(self._publisher, exchange, queue, body, mandatory, properties) for body in bodies]

    def _publish_one(
        self, channel: BlockingChannel, exchange: str, key: str, body: str, mandatory: bool, properties: dict[str, Any]
    ) -> bool:
        try:
            channel.basic_publish(exchange, key, body.encode(), pika.BasicProperties(**properties), mandatory=mandatory)
        except NackError:
            return False
        return True

    def returned(self, key: str, body: str, *, exchange: str = "", **properties: Any) -> Got:
        """Publish a message that must be returned; return it."""
        channel = self.another()
        channel.confirm_delivery()
        with pytest.raises(UnroutableError) as caught:
            channel.basic_publish(exchange, key, body.encode(), pika.BasicProperties(**properties), mandatory=True)
        channel.close()
        (message,) = caught.value.messages
        return Got(message.body.decode(), message.method, message.properties)

    def closed(self, channel: BlockingChannel) -> int:
        """Wait until the broker closes *channel*; return the code."""
        codes: list[int] = []

        def note(_: object, reason: Exception) -> None:
            codes.append(int(getattr(reason, "reply_code", 0)))

        channel._impl.add_on_close_callback(note)  # the blocking channel reports it only when it is used
        self.until(lambda: bool(codes), "the channel closed")
        return codes[0]

    def publish_refused(self, exchange: str, key: str, **properties: Any) -> int:
        """The code with which the broker refuses a publish; 0 if it accepts it."""

        def publish(channel: BlockingChannel) -> None:
            channel.confirm_delivery()
            channel.basic_publish(exchange, key, b"", pika.BasicProperties(**properties))

        return self.refused(publish)

    def exists(self, queue: str) -> bool:
        """Whether the default exchange routes to the queue; this does not count as use of the queue."""
        probe = self.connection.channel()
        probe.confirm_delivery()
        try:
            # With an expiration of 0 the probe expires at once; a queue that takes it has no consumer.
            probe.basic_publish("", queue, b"probe", pika.BasicProperties(expiration="0"), mandatory=True)
        except UnroutableError:
            return False
        finally:
            probe.close()
        return True

    def count(self, queue: str) -> int:
        """The number of ready messages."""
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def get(self, queue: str, *, ack: bool = False) -> Got | None:
        """basic.get."""
        method, properties, body = self.channel.basic_get(queue, auto_ack=ack)
        return None if method is None else Got(body.decode(), method, properties)

    def take(self, queue: str) -> Got:
        """basic.get of a message, which must exist; it stays unacknowledged."""
        got = self.get(queue)
        assert got is not None, "the queue is empty"
        return got

    def drain(self, queue: str) -> list[str]:
        """Take all ready messages out of *queue*; return the bodies."""
        return [got.body for got in iter(lambda: self.get(queue, ack=True), None)]

    def receive(self, queue: str, count: int = 1) -> list[Got]:
        """Consume exactly *count* messages; there must not be more."""
        found: list[Got] = []
        self.collect(found, queue, auto_ack=True)
        self.until(lambda: len(found) >= count, f"{count} messages in {queue}")
        self.channel.basic_cancel(self._tag)
        assert len(found) == count, [got.body for got in found]
        return found

    def receive_on_another(self, queue: str, *bodies: str) -> None:
        """As :meth:`receive`, on another channel, so that the prefetch of the first does not apply."""
        channel, found = self.another(), list[Got]()
        self.collect(found, queue, channel=channel, auto_ack=True)
        self.until(lambda: len(found) >= len(bodies), f"{len(bodies)} messages in {queue}")
        channel.close()
        assert [got.body for got in found] == list(bodies)

    def collect(self, found: list[Got], queue: str, *, channel: BlockingChannel | None = None, **options: Any) -> str:
        """Consume into *found*; return the consumer tag."""

        def came(_: BlockingChannel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
            found.append(Got(body.decode(), method, properties))

        self._tag = str((channel or self.channel).basic_consume(queue, came, **options))
        return self._tag

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Process events until *condition* holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            self.connection.process_data_events(_POLL_SECONDS)

    def refused(self, ask: Callable[[BlockingChannel], object]) -> int:
        """The code with which the broker closes the channel of *ask*; 0 if it does not."""
        channel = self.connection.channel()
        try:
            ask(channel)
        except ChannelClosedByBroker as error:
            return int(error.reply_code)
        channel.close()
        return 0


def unique() -> str:
    """A unique name."""
    return f"dialogue-{secrets.token_hex(6)}"


def connected(url: str) -> Iterator[Dialogue]:
    """A dialogue with the server at *url*, for fixtures."""
    with Dialogue(url) as dialogue:
        yield dialogue
