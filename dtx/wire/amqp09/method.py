"""What the methods share that pika is taught: see :mod:`~dtx.wire.amqp09.methods`."""

from typing import Self

from pika import amqp_object

from dtx.wire.amqp09.errors import syntax_error


class Method(amqp_object.Method):  # type: ignore[misc]  # pika has no types
    """Reads to the end of its arguments and never past it; fields are set by :meth:`_read`, written by ``encode``."""

    INDEX: int
    NAME: str
    synchronous = False

    def encode(self) -> list[bytes]:
        """The arguments, for pika to join."""
        return []

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """Read the arguments from *offset* to the end of *encoded*.

        Raises:
            WireError: 502.
        """
        end = self._read(encoded, offset)
        if end != len(encoded):
            what = "truncated" if end > len(encoded) else f"followed by {len(encoded) - end} octets"
            raise syntax_error(f"{self.NAME} is {what}")
        return self

    def _read(self, encoded: bytes, offset: int) -> int:  # noqa: ARG002
        """Set the fields; where they end, which is past the end of *encoded* when it is truncated."""
        return offset


def bit_octet(encoded: bytes, offset: int) -> int:
    """The octet of bits at *offset*; 0 past the end, which is found out when the fields are through."""
    return encoded[offset] if offset < len(encoded) else 0
