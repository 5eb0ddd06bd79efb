"""The server's side of an AMQP 1.0 connection where dtx itself keeps the messages."""
