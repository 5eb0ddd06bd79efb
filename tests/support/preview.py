"""The other classes of the AMQP 0-9 preview as pika knows methods: binding.query, exchange.query, execution.

Importing this module registers them with pika, as :mod:`~dtx.wire.amqp09.methods` does with the dtx classes. Tables are
their raw entries here, which :func:`dtx.wire.amqp09.tables.entries` reads.

The preview and RabbitMQ gave the numbers 40.30 and 40.31 to different methods: exchange.query and exchange.bind, and
their answers. What a method frame holds tells which one it is: a query ends behind its name, a bind does not, and
bind-ok has no arguments at all.
"""

from typing import Final, Self

from pika import amqp_object, spec

from dtx.wire.amqp09 import codec, methods, tables
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

    def _read(self, encoded: bytes, offset: int) -> int:
        """Set the fields; where they end, which is past the end of *encoded* when it is truncated."""
        return offset


def bit_octet(encoded: bytes, offset: int) -> int:
    """The octet of bits at *offset*; 0 past the end, which is found out when the fields are through."""
    return encoded[offset] if offset < len(encoded) else 0


def _long_string(encoded: bytes, offset: int) -> tuple[bytes, int]:
    """The longstr (or table) at *offset*, and where it ends: past the end of *encoded* when it is truncated."""
    end = offset + 4 + int.from_bytes(encoded[offset : offset + 4], "big")
    return encoded[offset + 4 : end], end


class Binding(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """Class 130: what is bound to an exchange."""

    INDEX = 0x0082
    NAME = "Binding"

    class Query(Method):
        """Ask for the bindings of an exchange; an empty queue, key or table stands for any."""

        INDEX = methods.BindingQuery.KEY
        NAME = "Binding.Query"
        synchronous = True

        def __init__(
            self,
            exchange: bytes = b"",
            queue: bytes = b"",
            routing_key: bytes = b"",
            arguments: bytes = b"",
            ticket: int = 0,
        ) -> None:
            self.exchange = exchange
            self.queue = queue
            self.routing_key = routing_key
            self.arguments = arguments
            self.ticket = ticket

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            names = map(tables.put_short, (self.exchange, self.queue, self.routing_key))
            return [self.ticket.to_bytes(2, "big"), *names, tables.put_long(self.arguments)]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.ticket = int.from_bytes(encoded[offset : offset + 2], "big")
            self.exchange, offset = tables.short_string(encoded, offset + 2)
            self.queue, offset = tables.short_string(encoded, offset)
            self.routing_key, offset = tables.short_string(encoded, offset)
            self.arguments, offset = _long_string(encoded, offset)
            return offset

    class QueryOk(Method):
        """What is not there, bit by bit; all are unset where the binding of interest exists."""

        INDEX = methods.BindingQueryOk.KEY
        NAME = "Binding.QueryOk"

        def __init__(
            self,
            exchange_not_found: bool = False,
            queue_not_found: bool = False,
            queue_not_matched: bool = False,
            key_not_matched: bool = False,
            args_not_matched: bool = False,
        ) -> None:
            self.exchange_not_found = exchange_not_found
            self.queue_not_found = queue_not_found
            self.queue_not_matched = queue_not_matched
            self.key_not_matched = key_not_matched
            self.args_not_matched = args_not_matched

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            first = self.exchange_not_found | self.queue_not_found << 1 | self.queue_not_matched << 2
            return [bytes((first | self.key_not_matched << 3 | self.args_not_matched << 4,))]

        def _read(self, encoded: bytes, offset: int) -> int:
            octet = bit_octet(encoded, offset)
            self.exchange_not_found, self.queue_not_found = bool(octet & 1), bool(octet & 2)
            self.queue_not_matched, self.key_not_matched = bool(octet & 4), bool(octet & 8)
            self.args_not_matched = bool(octet & 16)
            return offset + 1


class Exchange(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """What the preview adds to class 40."""

    INDEX = 0x0028
    NAME = "Exchange"

    class Query(Method):
        """Ask for an exchange."""

        INDEX = methods.ExchangeBind.KEY
        NAME = "Exchange.Query"
        synchronous = True

        def __init__(self, exchange: bytes = b"", ticket: int = 0) -> None:
            self.exchange = exchange
            self.ticket = ticket

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [self.ticket.to_bytes(2, "big"), tables.put_short(self.exchange)]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.ticket = int.from_bytes(encoded[offset : offset + 2], "big")
            self.exchange, offset = tables.short_string(encoded, offset + 2)
            return offset

    class QueryOk(Method):
        """What an exchange is; type and arguments are empty where it is not found."""

        INDEX = methods.ExchangeBindOk.KEY
        NAME = "Exchange.QueryOk"

        def __init__(
            self, kind: bytes = b"", durable: bool = False, not_found: bool = False, arguments: bytes = b""
        ) -> None:
            self.kind = kind
            self.durable = durable
            self.not_found = not_found
            self.arguments = arguments

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            octet = bytes((self.durable | self.not_found << 1,))
            return [tables.put_short(self.kind), octet, tables.put_long(self.arguments)]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.kind, offset = tables.short_string(encoded, offset)
            octet = bit_octet(encoded, offset)
            self.durable, self.not_found = bool(octet & 1), bool(octet & 2)
            self.arguments, offset = _long_string(encoded, offset + 1)
            return offset


class Execution(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """Class 140: how far the server has come with what it was sent."""

    INDEX = 0x008C
    NAME = "Execution"

    class Flush(Method):
        """Ask for execution.complete."""

        INDEX = methods.ExecutionFlush.KEY
        NAME = "Execution.Flush"
        synchronous = True

    class Complete(Method):
        """All commands below the mark have been executed."""

        INDEX = methods.ExecutionComplete.KEY
        NAME = "Execution.Complete"

        def __init__(self, cumulative_execution_mark: int = 0) -> None:
            self.cumulative_execution_mark = cumulative_execution_mark

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [self.cumulative_execution_mark.to_bytes(4, "big")]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.cumulative_execution_mark = int.from_bytes(encoded[offset : offset + 4], "big")
            return offset + 4


class _Answer(spec.Exchange.BindOk):  # type: ignore[misc]  # pika has no types
    """40.31 before it is read: pika makes the object from the number alone."""

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """Become what the arguments say: exchange.bind-ok has none.

        Raises:
            WireError: 502.
        """
        self.__class__ = spec.Exchange.BindOk if offset == len(encoded) else Exchange.QueryOk
        self.__init__()  # type: ignore[misc]  # of the class that it is now
        return self.decode(encoded, offset)


METHODS: Final[dict[int, type[Method]]] = {
    method.INDEX: method
    for method in (
        Binding.Query,
        Binding.QueryOk,
        Exchange.Query,
        Exchange.QueryOk,
        Execution.Flush,
        Execution.Complete,
    )
}
"""Every method by class << 16 | method."""


def register() -> None:
    """Make pika's frame decoder know what a client is sent. Done on import; doing it again changes nothing."""
    spec.methods.update({method.INDEX: method for method in (Binding.QueryOk, _Answer, Execution.Complete)})


register()


def with_ticket(method: codec.Method, ticket: int) -> bytes:
    """The payload of a method, with its ticket, if it has one."""
    octets = method.encode()
    if not method.FACTS & codec.Fact.TICKET:
        return octets
    return octets[:4] + ticket.to_bytes(2, "big") + octets[6:]
