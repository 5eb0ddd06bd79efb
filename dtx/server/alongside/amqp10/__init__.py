"""The nodes of AMQP 1.0 in a broker: a client of AMQP 1.0 works through a connection of AMQP 0-9-1 of its own."""
