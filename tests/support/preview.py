"""Other classes of the AMQP 0-9 preview as classes of pika: binding.query, exchange.query, execution.

Importing this module registers them with pika. Tables are raw entries here, which
:func:`dtx.wire.amqp09.tables.entries` reads.

The preview and RabbitMQ use the numbers 40.30 and 40.31 for different methods: exchange.query and exchange.bind, and
their answers. The content of a method frame shows which one it is: a query ends after its name, a bind does not, and
bind-ok has no arguments.
"""

from typing import Final, Self

from pika import amqp_object, spec

from dtx.wire.amqp09 import codec, methods, tables
from dtx.wire.amqp09.errors import syntax_error


class Method(amqp_object.Method):  # type: ignore[misc]  # pika has no types
    """A method whose fields :meth:`_read` sets and ``encode`` writes; all arguments must be consumed."""

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
        """Set the fields; return their end, which is after the end of *encoded* if it is truncated."""
        return offset


def bit_octet(encoded: bytes, offset: int) -> int:
    """The octet of bits at *offset*; 0 after the end, which ``decode`` detects later."""
    return encoded[offset] if offset < len(encoded) else 0


def _long_string(encoded: bytes, offset: int) -> tuple[bytes, int]:
    """The longstr (or table) at *offset*, and its end: after the end of *encoded* if it is truncated."""
    end = offset + 4 + int.from_bytes(encoded[offset : offset + 4], "big")
    return encoded[offset + 4 : end], end


class Binding(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """Class 130: the bindings of an exchange."""

    INDEX = 0x0082
    NAME = "Binding"

    class Query(Method):
        """Query the bindings of an exchange; an empty queue, key or table matches any."""

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
        """One bit for each missing or unmatched part; all are unset if the binding exists."""

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
    """The methods that the preview adds to class 40."""

    INDEX = 0x0028
    NAME = "Exchange"

    class Query(Method):
        """Query an exchange."""

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
        """The description of an exchange; type and arguments are empty if it is not found."""

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
    """Class 140: the progress of the server."""

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
    """40.31 before it is decoded: pika creates the object from the number only."""

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """Become exchange.bind-ok if there are no arguments, else exchange.query-ok.

        Raises:
            WireError: 502.
        """
        self.__class__ = spec.Exchange.BindOk if offset == len(encoded) else Exchange.QueryOk
        self.__init__()  # type: ignore[misc]  # of its new class
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
"""The methods, by class << 16 | method."""


def register() -> None:
    """Register the answers with pika's frame decoder. Done on import; idempotent."""
    spec.methods.update({method.INDEX: method for method in (Binding.QueryOk, _Answer, Execution.Complete)})


register()


def with_ticket(method: codec.Method, ticket: int) -> bytes:
    """The payload of a method with *ticket*, if the method has a ticket."""
    octets = method.encode()
    if not method.FACTS & codec.Fact.TICKET:
        return octets
    return octets[:4] + ticket.to_bytes(2, "big") + octets[6:]
