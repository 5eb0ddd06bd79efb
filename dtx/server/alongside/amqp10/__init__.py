"""The nodes of AMQP 1.0 in a broker: each AMQP 1.0 client has its own AMQP 0-9-1 connection to the broker."""
