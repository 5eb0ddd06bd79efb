"""Alongside mode: messages are in RabbitMQ, and dtx is a proxy before it."""
