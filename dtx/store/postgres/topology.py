"""Declares, binds and deletes the objects of a virtual host by RabbitMQ's rules. Pure, in memory.

Every operation does the whole request, or raises and does nothing. It returns its changes of durable objects as a
:class:`~dtx.log.changes.Define`, for the log: the client is answered when that is written. ``None`` in its place means
that nothing durable changed. It also returns deleted queues: the caller handles their consumers and messages.

Errors have RabbitMQ's codes and texts. 403 is for the broker's own objects, and 404 for missing objects. 405 is for the
exclusive queue of another connection, and 406 for a declaration that differs. The caller checks permissions.
"""

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from secrets import token_bytes
from typing import Final

from dtx.log.changes import BindingRow, Define, DestinationKind, ExchangeRow, QueueRow
from dtx.store.facts import BindingFacts, ExchangeFacts, search
from dtx.store.postgres.arguments import (
    ALTERNATE,
    check_equivalent,
    check_field,
    exchange_name,
    first_of_each,
    in_order,
    queue_arguments,
    text,
)
from dtx.store.postgres.exchanges import Changes, Exchange, Graph, Owner, Queue, QueueSpec, describe
from dtx.store.postgres.matchers import ExchangeType
from dtx.store.postgres.queue import QueueIndex
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.xa.codes import RefusalCause, ReplyCode, XaError

RESERVED: Final = b"amq."
"""Prefix of the server's own names."""


def refused(reason: str) -> XaError:
    """An access-refused (403)."""
    return XaError(ReplyCode.ACCESS_REFUSED, reason)


def failed(reason: str, cause: RefusalCause | None = None) -> XaError:
    """A precondition-failed (406)."""
    return XaError(ReplyCode.PRECONDITION_FAILED, reason, cause=cause)


def check_not_default(name: bytes) -> None:
    """Refuse (403) the default exchange."""
    if not name:
        raise refused("operation not permitted on the default exchange")


def check_name(kind: str, name: bytes) -> None:
    """Refuse (403) a new name in ``amq.*``."""
    if name.startswith(RESERVED):
        raise refused(f"{kind} name '{text(name)}' contains reserved prefix 'amq.*'")


def check_owner(queue: Queue, owner: Owner | None, *, strict: bool = False) -> None:
    """Refuse (405) the exclusive queue of another connection than *owner*.

    Args:
        queue: the queue.
        owner: the connection; ``None`` for a declaration that is not exclusive.
        strict: refuse a queue that is not exclusive as well, if *owner* is given.
    """
    if queue.owner is owner or (queue.owner is None and not strict):
        return
    raise XaError(
        ReplyCode.RESOURCE_LOCKED,
        f"cannot obtain exclusive access to locked {queue.spec.where}. It could be originally declared on another "
        "connection or the exclusive property value does not match that of the original declaration.",
    )


def _check_quorum(where: str, *, durable: bool, exclusive: bool, auto_delete: bool) -> None:
    """Refuse (406) the properties that a quorum queue of RabbitMQ cannot have."""
    for name, has in (("non-durable", not durable), ("exclusive-owner", exclusive), ("auto-delete", auto_delete)):
        if has:
            raise failed(f"invalid property '{name}' for {where} of queue type quorum")


_GENERATED: Final = b"amq.gen-"


@dataclass(frozen=True, slots=True)
class DeclaredQueue:
    """The answer to queue.declare.

    Args:
        queue: the existing or new queue.
        created: whether it is new.
        define: for the log.
    """

    queue: Queue
    created: bool
    define: Define | None


@dataclass(frozen=True, slots=True)
class DeletedQueues:
    """Deleted queues.

    Args:
        queues: the caller cancels their consumers, and removes their messages.
        define: for the log.
    """

    queues: tuple[Queue, ...] = ()
    define: Define | None = None


class VirtualHost(Graph):
    """A virtual host.

    Args:
        name: its name.
        index: makes the index of a new queue.
        entropy: returns as many random bytes as its argument.
    """

    def __init__(
        self, name: str, index: Callable[[QueueSpec], QueueIndex], entropy: Callable[[int], bytes] = token_bytes
    ) -> None:
        super().__init__(name, index)
        self._entropy = entropy

    def restore(
        self, exchanges: Iterable[ExchangeRow], queues: Iterable[QueueRow], bindings: Iterable[BindingRow]
    ) -> Define | None:
        """Load the rows of this virtual host, before any other operation.

        Returns:
            For the log, the removal of bindings whose source or destination does not exist.

        Raises:
            XaError: invalid arguments in a row.
        """
        for row in exchanges:
            self._add_exchange(
                self._exchange(
                    row.name,
                    ExchangeType(row.type),
                    durable=True,
                    auto_delete=row.auto_delete,
                    internal=row.internal,
                    arguments=row.arguments,
                )
            )
        for queue in queues:
            self._add_queue(
                self._spec(
                    queue.name, queue.id, durable=True, auto_delete=queue.auto_delete, arguments=queue.arguments
                ),
                None,
            )
        changes = Changes()
        for binding in bindings:
            source = self.exchanges.get(binding.source)
            destination = self.destination(binding.destination_kind, binding.destination)
            if source is None or destination is None:
                changes.removed_bindings.append(binding)
            else:
                self._link(binding, source, destination)
        return changes.define()

    # -- exchanges ----------------------------------------------------------------------------------------------------

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
            XaError: 403 for the default exchange and a new name in ``amq.*``; 406 when the existing exchange differs.
            WireError: 503 for an unknown type: a connection exception in AMQP 0-9-1, and in RabbitMQ 3 too; 502 when
                *arguments* are malformed.
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
            XaError: 403 for the default exchange, 404 when there is no exchange of that name.
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
            XaError: 404 when there is no exchange of that name, 403 when it is internal.
        """
        exchange = self._existing(name)
        if exchange.internal:
            raise refused(f"cannot publish to internal {exchange.where}")
        return exchange

    def delete_exchange(self, name: bytes, *, if_unused: bool = False) -> Define | None:
        """exchange.delete. A missing exchange is no error, as in RabbitMQ.

        Raises:
            XaError: 403 for the default exchange and names in ``amq.*``; 406 when it has bindings and *if_unused*.
        """
        check_not_default(name)
        if name.startswith(RESERVED):
            raise refused(f"deletion of system {describe('exchange', name, self.name)} not allowed")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return None
        if if_unused and exchange.bindings:
            raise failed(f"{exchange.where} in use", RefusalCause.IN_USE)
        changes = Changes()
        self._drop_exchanges([exchange], changes)
        return changes.define()

    # -- bindings -----------------------------------------------------------------------------------------------------

    def binding(
        self, source: bytes, kind: DestinationKind, destination: bytes, routing_key: bytes, arguments: bytes
    ) -> BindingRow:
        """The key of the binding that :meth:`bind` makes with the same arguments.

        Raises:
            XaError: 403 for the default exchange.
            WireError: 502 when *arguments* are malformed.
        """
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
        """queue.bind and exchange.bind. Does nothing if the binding exists.

        Args:
            source: name of the source exchange.
            kind: of *destination*.
            destination: name of the destination.
            routing_key: of the binding.
            arguments: of the binding, as on the wire, without the length.
            owner: the connection that requests it.

        Raises:
            XaError: 403 for the default exchange, 404 when source or destination does not exist, 405 for the exclusive
                queue of another connection, 406 for an unknown x-match.
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
        """queue.unbind and exchange.unbind. A missing binding is no error, as in RabbitMQ. Arguments as :meth:`bind`.

        Raises:
            XaError: 403 for the default exchange, 405 for the exclusive queue of another connection.
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

    # -- queues -------------------------------------------------------------------------------------------------------

    def _spec(
        self,
        name: bytes,
        number: int,
        *,
        durable: bool,
        exclusive: bool = False,
        auto_delete: bool,
        arguments: bytes,
    ) -> QueueSpec:
        return QueueSpec(
            vhost=self.name,
            id=number,
            name=name,
            durable=durable and not exclusive,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
            settings=queue_arguments(arguments, describe("queue", name, self.name)),
        )

    def declare_queue(
        self,
        name: bytes,
        owner: Owner,
        *,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: bytes = b"",
    ) -> DeclaredQueue:
        """queue.declare, not passive.

        Args:
            name: empty for a generated name: ``amq.gen-`` and 128 random bits.
            owner: the connection that requests it.
            durable: whether it survives a restart. An exclusive queue is never durable, whatever the request says.
            exclusive: whether it belongs to *owner*, and is deleted by :meth:`disconnected`.
            auto_delete: whether the caller is to delete it with its last consumer, by :meth:`remove_queue`.
            arguments: as on the wire, without the length.

        Raises:
            XaError: 403 for a new name in ``amq.*``. 405 for the exclusive queue of another connection. 406 for invalid
                arguments, or a declaration that differs from the existing queue. 540 for a stream.
            WireError: 502 when *arguments* are malformed.
        """
        there = self.queues.get(name)
        if there is not None:
            where = there.spec.where
            check_owner(there, owner if exclusive else None, strict=True)
            check_field(durable and not exclusive, there.durable, "durable", where)
            check_field(auto_delete, there.spec.auto_delete, "auto_delete", where)
            check_equivalent(arguments, there.spec.arguments, where)
            return DeclaredQueue(there, created=False, define=None)
        check_name("queue", name)
        name = name or _GENERATED + urlsafe_b64encode(self._entropy(16)).rstrip(b"=")
        number = int.from_bytes(self._entropy(8), "big") >> 2
        spec = self._spec(
            name, number, durable=durable, exclusive=exclusive, auto_delete=auto_delete, arguments=arguments
        )
        if spec.settings.counts:
            _check_quorum(spec.where, durable=durable, exclusive=exclusive, auto_delete=auto_delete)
        queue = self._add_queue(spec, owner if exclusive else None)
        return DeclaredQueue(queue, created=True, define=Define(queues=(spec.row,)) if spec.durable else None)

    def find_queue(self, name: bytes, owner: Owner) -> Queue:
        """queue.declare, passive; also used for every other method that names a queue.

        Raises:
            XaError: 404 when there is no queue of that name, 405 for the exclusive queue of another connection.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise XaError(ReplyCode.NOT_FOUND, f"no {describe('queue', name, self.name)}")
        check_owner(queue, owner)
        return queue

    def delete_queue(
        self, name: bytes, owner: Owner, *, if_unused: bool = False, if_empty: bool = False
    ) -> DeletedQueues:
        """queue.delete. A missing queue is no error, as in RabbitMQ.

        Raises:
            XaError: 405 for the exclusive queue of another connection; 406 when it has ready messages and *if_empty*,
                or consumers and *if_unused*.
        """
        queue = self.queues.get(name)
        if queue is None:
            return DeletedQueues()
        check_owner(queue, owner)
        if if_empty and queue.index.ready:
            raise failed(f"{queue.spec.where} not empty", RefusalCause.NOT_EMPTY)
        if if_unused and queue.index.consumers:
            raise failed(f"{queue.spec.where} in use", RefusalCause.IN_USE)
        return self.remove_queue(queue)

    def remove_queue(self, queue: Queue) -> DeletedQueues:
        """Delete *queue*: it was unused for too long, or its last consumer has ended. Idempotent."""
        return self._remove([queue] if self.queues.get(queue.name) is queue else [])

    def disconnected(self, owner: Owner, most: int | None = None) -> DeletedQueues:
        """Delete the exclusive queues of a connection that has ended, at most *most* of them. Idempotent."""
        return self._remove(list(islice(self._owned.get(owner, ()), most)))

    def _remove(self, queues: list[Queue]) -> DeletedQueues:
        changes = Changes()
        for queue in queues:
            self._drop_queue(queue, changes)
        return DeletedQueues(tuple(queues), changes.define())


def exchange_facts(vhost: VirtualHost, name: bytes) -> ExchangeFacts:
    """exchange.query: "If not specified explicitly the default exchange is implied"."""
    exchange = vhost.exchanges.get(name)
    if exchange is None:
        return ExchangeFacts(not_found=True)
    return ExchangeFacts(type=exchange.kind.encode(), durable=exchange.durable, arguments=exchange.arguments)


def _bound(vhost: VirtualHost, exchange: bytes) -> list[BindingRow]:
    """The bindings of *exchange* as source. The default exchange has one to each queue, with its name as key."""
    if exchange:
        return list(vhost.exchanges[exchange].bindings)
    return [BindingRow(vhost.name, exchange, DestinationKind.QUEUE, name, name) for name in vhost.queues]


def binding_facts(
    vhost: VirtualHost, exchange: bytes, queue: bytes, routing_key: bytes, arguments: bytes
) -> BindingFacts:
    """binding.query; see :func:`dtx.store.facts.search`.

    Args:
        vhost: the virtual host.
        exchange: the source; empty for the default exchange.
        queue: the destination; empty for any.
        routing_key: empty for any.
        arguments: as on the wire, without the length; empty for any.

    Raises:
        WireError: 502 when *arguments* are malformed.
    """
    wanted = in_order(arguments)
    exchange_found = exchange in vhost.exchanges
    queue_found = not queue or queue in vhost.queues
    if not exchange_found or not queue_found:
        return BindingFacts(exchange_not_found=not exchange_found, queue_not_found=not queue_found)
    return search(
        _bound(vhost, exchange),
        (lambda each: each.destination_kind is DestinationKind.QUEUE and each.destination == queue) if queue else None,
        (lambda each: each.routing_key == routing_key) if routing_key else None,
        (lambda each: each.arguments == wanted) if wanted else None,
    )
