"""AMQP 1.0 as bytes in, events and bytes out (OASIS AMQP 1.0, parts 1 to 5); nothing here opens a socket."""
