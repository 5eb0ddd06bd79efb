"""dtx: the XA resource manager for AMQP 0-9."""

__version__ = "0.1.0"
