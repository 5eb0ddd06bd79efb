"""Declaring, binding and deleting exchanges, under RabbitMQ's rules; see :mod:`dtx.store.postgres.topology`."""

from dtx.log.changes import BindingRow, Define, DestinationKind
from dtx.store.postgres.arguments import ALTERNATE, check_equivalent, check_field, exchange_name
from dtx.store.postgres.exchanges import Exchange, Owner, Queue, describe
from dtx.store.postgres.graph import Changes, Graph
from dtx.store.postgres.matching import ExchangeType
from dtx.store.postgres.refusals import RESERVED, check_name, check_not_default, check_owner, failed, refused
from dtx.store.postgres.values import first_of_each, in_order, text
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.xa.codes import ReplyCode, XaError


class ExchangeRules(Graph):
    """The half of a virtual host that is about exchanges and bindings."""

    def _exchange(
        self,
        name: bytes,
        kind: ExchangeType,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: bytes,
    ) -> Exchange:
        alternate = exchange_name(first_of_each(arguments), ALTERNATE, describe("exchange", name, self.name))
        return Exchange(
            self.name,
            name,
            kind,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments,
            alternate=alternate,
        )

    def declare_exchange(
        self,
        name: bytes,
        kind: bytes,
        *,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: bytes = b"",
    ) -> Define | None:
        """exchange.declare, not passive; *arguments* as on the wire, without the length.

        Raises:
            XaError: 403 for the default exchange and a new name in ``amq.*``; 406 when one is there that differs.
            WireError: 503 for a type that does not exist: AMQP 0-9-1 has a connection exception for it, and RabbitMQ
                3 too; 502 when *arguments* are malformed.
        """
        try:
            wanted = ExchangeType(text(kind))
        except ValueError:
            raise WireError(HardCode.COMMAND_INVALID, f"unknown exchange type '{text(kind)}'") from None
        check_not_default(name)
        there = self.exchanges.get(name)
        if there is None:
            check_name("exchange", name)
            new = self._exchange(
                name, wanted, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
            )
            self._add_exchange(new)
            return Define(exchanges=(new.row,)) if durable else None
        check_field(wanted, there.kind, "type", there.where)
        check_field(durable, there.durable, "durable", there.where)
        check_field(auto_delete, there.auto_delete, "auto_delete", there.where)
        check_field(internal, there.internal, "internal", there.where)
        check_equivalent(arguments, there.arguments, there.where, (ALTERNATE,))
        return None

    def find_exchange(self, name: bytes) -> Exchange:
        """exchange.declare, passive.

        Raises:
            XaError: 403 for the default exchange, 404 when there is none of that name.
        """
        check_not_default(name)
        return self._existing(name)

    def _existing(self, name: bytes) -> Exchange:
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise XaError(ReplyCode.NOT_FOUND, f"no {describe('exchange', name, self.name)}")
        return exchange

    def publishable(self, name: bytes) -> Exchange:
        """The exchange that a client publishes to.

        Raises:
            XaError: 404 when there is none of that name, 403 when it is internal.
        """
        exchange = self._existing(name)
        if exchange.internal:
            raise refused(f"cannot publish to internal {exchange.where}")
        return exchange

    def delete_exchange(self, name: bytes, *, if_unused: bool = False) -> Define | None:
        """exchange.delete; one that is not there is no error, as in RabbitMQ.

        Raises:
            XaError: 403 for those that are always there and all of ``amq.*``, 406 when it is used and must not be.
        """
        check_not_default(name)
        if name.startswith(RESERVED):
            raise refused(f"deletion of system {describe('exchange', name, self.name)} not allowed")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return None
        if if_unused and exchange.bindings:
            raise failed(f"{exchange.where} in use")
        changes = Changes()
        self._drop_exchanges([exchange], changes)
        return changes.define()

    # -- bindings -----------------------------------------------------------------------------------------------------

    def binding(
        self, source: bytes, kind: DestinationKind, destination: bytes, routing_key: bytes, arguments: bytes
    ) -> BindingRow:
        """What names the binding that :meth:`bind` makes of the same arguments."""
        check_not_default(source)
        if kind is DestinationKind.EXCHANGE:
            check_not_default(destination)
        return BindingRow(self.name, source, kind, destination, routing_key, in_order(arguments))

    def bind(
        self,
        source: bytes,
        kind: DestinationKind,
        destination: bytes,
        routing_key: bytes,
        arguments: bytes = b"",
        owner: Owner | None = None,
    ) -> Define | None:
        """queue.bind and exchange.bind; what is bound so already stays as it is.

        Args:
            source: the exchange that messages come from.
            kind: what *destination* names.
            destination: where they go.
            routing_key: of the binding.
            arguments: of the binding, as on the wire, without the length.
            owner: the connection that asks.

        Raises:
            XaError: 403 for the default exchange, 404 when an end is not there, 405 for the exclusive queue of another,
                406 for an x-match that does not exist.
            WireError: 502 when *arguments* are malformed.
        """
        binding = self.binding(source, kind, destination, routing_key, arguments)
        start, end = self._existing(source), self.destination(kind, destination)
        if end is None:
            raise XaError(ReplyCode.NOT_FOUND, f"no {describe(kind, destination, self.name)}")
        if isinstance(end, Queue):
            check_owner(end, owner)
        if binding in start.bindings:
            return None
        self._link(binding, start, end)
        return Define(bindings=(binding,)) if start.durable and end.durable else None

    def unbind(
        self,
        source: bytes,
        kind: DestinationKind,
        destination: bytes,
        routing_key: bytes,
        arguments: bytes = b"",
        owner: Owner | None = None,
    ) -> Define | None:
        """queue.unbind and exchange.unbind; what is not there is no error, as in RabbitMQ. Arguments as :meth:`bind`.

        Raises:
            XaError: 403 for the default exchange, 405 for the exclusive queue of another.
            WireError: 502 when *arguments* are malformed.
        """
        binding = self.binding(source, kind, destination, routing_key, arguments)
        start = self.exchanges.get(source)
        if start is None or binding not in start.bindings:
            return None
        end = start.bindings[binding]
        if isinstance(end, Queue):
            check_owner(end, owner)
        changes = Changes()
        unused: list[Exchange] = []
        self._unlink(binding, start, end, unused, changes)
        self._drop_exchanges(unused, changes)
        return changes.define()
