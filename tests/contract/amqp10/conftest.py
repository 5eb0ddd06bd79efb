"""Clients of AMQP 1.0."""

from tests.support.amqp10 import channel, client, queue

__all__ = ["channel", "client", "queue"]
