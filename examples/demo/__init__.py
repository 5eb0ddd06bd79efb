"""``python -m examples.demo``: money between a PostgreSQL table and a queue, with kill -9 during transactions."""
