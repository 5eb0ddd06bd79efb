"""AMQP 0-9 and 0-9-1 with the dtx classes."""
