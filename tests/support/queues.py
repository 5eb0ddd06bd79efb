"""Access to the messages of queues over AMQP, on any server."""

import contextlib
from collections.abc import Iterator

import pika
from pika.adapters.blocking_connection import BlockingChannel

Taken = tuple[bytes, pika.BasicProperties, bool]
"""Body, properties, redelivered."""


class QueueAccess:
    """Access through connections to :meth:`url`."""

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        """The URL for *user*."""
        raise NotImplementedError

    @contextlib.contextmanager
    def channel(self, vhost: str = "/", user: str = "guest") -> Iterator[BlockingChannel]:
        """A channel of a new connection."""
        connection = pika.BlockingConnection(pika.URLParameters(self.url(user, vhost=vhost)))
        try:
            yield connection.channel()
        finally:
            if connection.is_open:
                connection.close()

    def count(self, queue: str, vhost: str = "/") -> int:
        """How many messages are ready in *queue* now, without unacknowledged ones."""
        with self.channel(vhost) as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def take_all(self, queue: str, vhost: str = "/") -> list[Taken]:
        """Take every ready message out of *queue*."""
        with self.channel(vhost) as channel:
            return take_all(channel, queue)


def take_all(channel: BlockingChannel, queue: str) -> list[Taken]:
    """Take every ready message out of *queue*."""
    taken: list[Taken] = []
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return taken
        taken.append((body, properties, bool(method.redelivered)))
