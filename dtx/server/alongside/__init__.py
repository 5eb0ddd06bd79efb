"""Alongside mode: a transparent AMQP proxy in front of a broker, which adds the two dtx classes."""
