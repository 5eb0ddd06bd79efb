"""``python -m examples.demo``: money between a PostgreSQL table and a RabbitMQ queue, and a kill -9 in between."""
