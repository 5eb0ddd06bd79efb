"""The server's side of AMQP 1.0 connections, in both modes."""
