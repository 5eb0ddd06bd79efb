"""The server's side of a connection where dtx itself keeps the messages."""
