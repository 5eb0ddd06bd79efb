"""Exchanges, queues and bindings, as a channel's client declares, deletes and asks for them.

Each is judged by the permissions that RabbitMQ asks for ("Access Control", table of operations), and answered when it
is durable, if it is to be.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from dtx.auth.permissions import Permission
from dtx.log.changes import Define, DestinationKind
from dtx.server.standalone.direct import REPLY_TO
from dtx.store.postgres.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE, first_of_each
from dtx.store.postgres.exchanges import describe
from dtx.store.postgres.recording import Thing
from dtx.store.postgres.topology import binding_facts, check_not_default, exchange_facts
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.server.standalone.channel import Channel

SERVER_NAMED: Final = b"amq.gen-" + b"x" * 22
"""Stands for the name that the server would choose, where permissions are judged: as long, and begun as that one."""
_TICKET: Final = 1
"""What access.request grants, for as long as the channel lives: what may be done is judged with every method."""
_TICKET_OCTETS: Final = slice(4, 6)
_BINDINGS: Final = {
    each.KEY: each for each in (methods.ExchangeBind, methods.ExchangeUnbind, methods.QueueBind, methods.QueueUnbind)
}


class Declaring:
    """The topology, as one channel changes it.

    Args:
        channel: whose it is.
    """

    __slots__ = ("_channel", "_connection", "last_queue", "ticket")

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        self._connection = channel.connection
        self.last_queue = b""
        """The queue that the channel declared last: what an empty name stands for."""
        self.ticket: int | None = None
        """The ticket that access.request was answered with."""

    def queue_name(self, name: bytes) -> bytes:
        """The queue that a method names.

        Raises:
            XaError: 404, it is empty, and the channel has declared none.
        """
        if name:
            return name
        if not self.last_queue:
            raise XaError(ReplyCode.NOT_FOUND, "no previously declared queue")
        return self.last_queue

    def access_request(self, payload: bytes) -> None:
        """access.request."""
        methods.AccessRequest.decode(payload)
        self.ticket = _TICKET
        self._channel.answer(methods.AccessRequestOk(_TICKET))

    def check_ticket(self, name: str, payload: bytes) -> None:
        """Judge the ticket of a method of the preview: "a valid ticket should be provided".

        That is the one that access.request gave to this channel, or 0 where none is required.

        Args:
            name: of the method.
            payload: of its frame.

        Raises:
            XaError: 403 (the rule's on-failure="access-refused").
        """
        ticket = int.from_bytes(payload[_TICKET_OCTETS], "big")
        if ticket != self.ticket and (ticket or self._connection.limits.require_tickets):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"{name} with ticket {ticket}, which this channel was not given: send access.request first",
            )

    # -- exchanges

    def exchange_declare(self, payload: bytes) -> None:
        """exchange.declare."""
        asked = methods.ExchangeDeclare.decode(payload)
        vhost, demand = self._connection.vhost, self._connection.demand
        name = _name(asked.exchange)
        define = None
        if asked.passive:
            vhost.find_exchange(name)
        else:
            check_not_default(name)
            demand(Permission.CONFIGURE, "exchange", name)
            alternate = _exchange_in(asked.arguments, ALTERNATE) if name not in vhost.exchanges else None
            if alternate is not None:
                demand(Permission.READ, "exchange", name)
                demand(Permission.WRITE, "exchange", alternate)
            define = vhost.declare_exchange(
                name,
                asked.kind,
                durable=asked.durable,
                auto_delete=asked.auto_delete,
                internal=asked.internal,
                arguments=asked.arguments,
            )
        self._answer(methods.ExchangeDeclare.KEY, define, asked.no_wait, vhost.exchanges[name].key)

    def exchange_delete(self, payload: bytes) -> None:
        """exchange.delete."""
        asked = methods.ExchangeDelete.decode(payload)
        name = _name(asked.exchange)
        check_not_default(name)
        self._connection.demand(Permission.CONFIGURE, "exchange", name)
        define = self._connection.vhost.delete_exchange(name, if_unused=asked.if_unused)
        self._answer(methods.ExchangeDelete.KEY, define, asked.no_wait)

    def exchange_bind_or_query(self, payload: bytes) -> None:
        """exchange.bind, or the preview's exchange.query, which has the same number."""
        if not methods.is_query(payload):
            self._bind(payload, methods.ExchangeBind.KEY)
            return
        self.check_ticket("exchange.query", payload)
        name = methods.ExchangeQuery.decode(payload).exchange
        if name:
            self._connection.demand(Permission.READ, "exchange", name)
        facts = exchange_facts(self._connection.vhost, name)
        self._channel.answer(
            methods.ExchangeQueryOk(
                facts.type, durable=facts.durable, not_found=facts.not_found, arguments=facts.arguments
            )
        )

    def exchange_unbind(self, payload: bytes) -> None:
        """exchange.unbind."""
        self._bind(payload, methods.ExchangeUnbind.KEY)

    def queue_bind(self, payload: bytes) -> None:
        """queue.bind."""
        self._bind(payload, methods.QueueBind.KEY)

    def queue_unbind(self, payload: bytes) -> None:
        """queue.unbind."""
        self._bind(payload, methods.QueueUnbind.KEY)

    def _bind(self, payload: bytes, key: int) -> None:
        asked = _BINDINGS[key].decode(payload)
        vhost, demand = self._connection.vhost, self._connection.demand
        destination, source, routing_key = _name(asked.destination), _name(asked.source), asked.routing_key
        kind = DestinationKind.EXCHANGE
        if key in (methods.QueueBind.KEY, methods.QueueUnbind.KEY):
            kind = DestinationKind.QUEUE
            if not destination:
                destination = self.queue_name(destination)
                routing_key = routing_key or destination
        demand(Permission.WRITE, kind, destination)
        if kind is DestinationKind.EXCHANGE:
            check_not_default(destination)
        check_not_default(source)
        demand(Permission.READ, "exchange", source)
        self._connection.demand_topic(Permission.READ, source, routing_key)
        act = vhost.bind if key in (methods.QueueBind.KEY, methods.ExchangeBind.KEY) else vhost.unbind
        define = act(source, kind, destination, routing_key, asked.arguments, self._connection)
        binding = vhost.binding(source, kind, destination, routing_key, asked.arguments) if act == vhost.bind else None
        self._answer(key, define, asked.no_wait, binding)

    def binding_query(self, payload: bytes) -> None:
        """binding.query of the preview."""
        self.check_ticket("binding.query", payload)
        asked = methods.BindingQuery.decode(payload)
        if asked.exchange:
            self._connection.demand(Permission.READ, "exchange", asked.exchange)
        # To the default exchange each queue is bound by its name, so there a key is the name of one.
        for name in (asked.queue, b"" if asked.exchange else asked.routing_key):
            if name:
                self._demand_sight(name)
        facts = binding_facts(self._connection.vhost, asked.exchange, asked.queue, asked.routing_key, asked.arguments)
        self._channel.answer(
            methods.BindingQueryOk(
                exchange_not_found=facts.exchange_not_found,
                queue_not_found=facts.queue_not_found,
                queue_not_matched=facts.queue_not_matched,
                key_not_matched=facts.key_not_matched,
                args_not_matched=facts.args_not_matched,
            )
        )

    def _demand_sight(self, queue: bytes) -> None:
        """Who may do anything at all with a queue, may learn of it; who may not, not even whether it is there.

        Raises:
            XaError: 403.
        """
        who, account = self._connection.who, self._connection.account
        if not any(account.may(who.vhost, permission, queue) for permission in Permission):
            what = describe("queue", queue, who.vhost)
            raise XaError(ReplyCode.ACCESS_REFUSED, f"access to {what} refused for user '{who.user}'")

    # -- queues

    def queue_declare(self, payload: bytes) -> None:
        """queue.declare: with the number of messages, so behind what was published before it."""
        asked = methods.QueueDeclare.decode(payload)
        name = _name(asked.queue)
        if name.startswith(REPLY_TO):
            self._declare_reply_queue(name, asked.no_wait)
            return
        if asked.passive:
            self._count(name, asked.no_wait)
            return
        vhost, demand = self._connection.vhost, self._connection.demand
        demand(Permission.CONFIGURE, "queue", name or SERVER_NAMED)
        letters = _exchange_in(asked.arguments, DEAD_LETTER_EXCHANGE) if name not in vhost.queues else None
        if letters is not None:
            demand(Permission.READ, "queue", name or SERVER_NAMED)
            demand(Permission.WRITE, "exchange", letters)
        declared = vhost.declare_queue(
            name,
            self._connection,
            durable=asked.durable,
            exclusive=asked.exclusive,
            auto_delete=asked.auto_delete,
            arguments=asked.arguments,
        )
        queue = declared.queue
        if declared.created:
            answer = partial(self._found, queue.name, asked.no_wait)
            self._durably(declared.define, answer, methods.QueueDeclare.KEY, queue.spec.id)
        else:
            self._count(queue.name, asked.no_wait)

    def _declare_reply_queue(self, name: bytes, no_wait: bool) -> None:
        """The pseudo-queue of direct replies, or the address of somebody who may wait for one: declared or not, passive
        or not, this only tells whether it is there, as RabbitMQ has it.
        """
        if not self._connection.direct.exists(self._connection.vhost.name, name):
            self._connection.vhost.find_queue(name, self._connection)  # which says 404
        self.last_queue = name
        if not no_wait:
            self._channel.answer(methods.QueueDeclareOk(name, message_count=0, consumer_count=1))

    def _count(self, name: bytes, no_wait: bool) -> None:
        """Answer with the numbers of a queue, behind what was published before."""

        def act() -> None:
            queue = self._connection.vhost.find_queue(name, self._connection)
            self._durably(None, partial(self._found, name, no_wait), methods.QueueDeclare.KEY, queue.spec.id)

        self._channel.after_writes(act, methods.QueueDeclare.KEY)

    def _found(self, name: bytes, no_wait: bool) -> bytes:
        queue = self._connection.vhost.find_queue(name, self._connection)
        self.last_queue = queue.name
        index = queue.index
        now = self._connection.now()
        index.serve(now)
        index.touch(now)
        if no_wait:
            return b""
        return methods.QueueDeclareOk(queue.name, index.ready, index.consumers).frame(self._channel.number)

    def queue_purge(self, payload: bytes) -> None:
        """queue.purge: also what was published before it."""
        asked = methods.QueuePurge.decode(payload)
        name = self.queue_name(asked.queue)
        self._connection.demand(Permission.READ, "queue", name)
        self._connection.vhost.find_queue(name, self._connection)
        self._channel.after_writes(
            lambda: self._channel.run(self._purge(name, asked.no_wait), methods.QueuePurge.KEY), methods.QueuePurge.KEY
        )

    async def _purge(self, name: bytes, no_wait: bool) -> bytes:
        queue = self._connection.vhost.find_queue(name, self._connection)
        queue.index.serve(self._connection.now())
        purged = await self._connection.broker.purge(queue)
        return b"" if no_wait else methods.QueuePurgeOk(purged).frame(self._channel.number)

    def queue_delete(self, payload: bytes) -> None:
        """queue.delete: with what was published before it."""
        asked = methods.QueueDelete.decode(payload)
        name = self.queue_name(asked.queue)
        self._connection.demand(Permission.CONFIGURE, "queue", name)
        self._channel.after_writes(lambda: self._delete(name, asked), methods.QueueDelete.KEY)

    def _delete(self, name: bytes, asked: methods.QueueDelete) -> None:
        vhost = self._connection.vhost
        queue = vhost.queues.get(name)
        if queue is not None:
            queue.index.serve(self._connection.now())
        messages = 0 if queue is None else queue.index.ready
        gone = vhost.delete_queue(name, self._connection, if_unused=asked.if_unused, if_empty=asked.if_empty)
        self._connection.close_queues(gone.queues)
        number = self._channel.number
        answer = b"" if asked.no_wait else methods.QueueDeleteOk(messages).frame(number)
        self._durably(gone.define, lambda: answer, methods.QueueDelete.KEY, None)

    # -- answers

    def _answer(self, key: int, define: Define | None, no_wait: bool, thing: Thing | None = None) -> None:
        """Answer a method that has an answer without arguments."""
        frame = b"" if no_wait else _OK[key]().frame(self._channel.number)
        self._durably(define, lambda: frame, key, thing)

    def _durably(self, define: Define | None, answer: Callable[[], bytes], key: int, thing: Thing | None) -> None:
        """Answer when it is durable.

        Args:
            define: what is to be written; nothing where somebody else has asked for the same, perhaps just now.
            answer: makes the frame.
            key: the method that is answered.
            thing: what must be there then; nothing where something must be gone.
        """
        broker = self._connection.broker
        written = broker.define(define) if define is not None else broker.defined(thing)
        if written is None:
            self._channel.send(answer())
        else:
            self._channel.run(_after(written, answer), key)


async def _after(written: Awaitable[None], answer: Callable[[], bytes]) -> bytes:
    await written
    return answer()


_OK: Final = {
    methods.ExchangeDeclare.KEY: methods.ExchangeDeclareOk,
    methods.ExchangeDelete.KEY: methods.ExchangeDeleteOk,
    methods.ExchangeBind.KEY: methods.ExchangeBindOk,
    methods.ExchangeUnbind.KEY: methods.ExchangeUnbindOk,
    methods.QueueBind.KEY: methods.QueueBindOk,
    methods.QueueUnbind.KEY: methods.QueueUnbindOk,
}


def _name(name: bytes) -> bytes:
    """A name as RabbitMQ takes it: without line ends."""
    return name.translate(None, b"\r\n")


def _exchange_in(arguments: bytes, key: bytes) -> bytes | None:
    """The exchange that an argument names, if it does."""
    entry = first_of_each(arguments).get(key)
    return entry.value if entry is not None and entry.kind == b"S" else None
