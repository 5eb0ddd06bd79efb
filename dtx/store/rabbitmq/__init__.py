"""Alongside mode: messages live in RabbitMQ, dtx stands before it."""
