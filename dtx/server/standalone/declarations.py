"""Methods that declare, delete and query exchanges, queues and bindings.

Each needs the permissions that RabbitMQ requires ("Access Control", table of operations). Durable changes are answered
when they are durable.
"""

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol

from dtx.auth.permissions import Permission
from dtx.log.changes import Define, DestinationKind
from dtx.server.standalone.client import VirtualHostUser
from dtx.server.standalone.direct_replies import REPLY_TO
from dtx.store.postgres.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE, first_of_each
from dtx.store.postgres.exchanges import describe
from dtx.store.postgres.recorder import Thing
from dtx.store.postgres.topology import binding_facts, check_not_default, exchange_facts
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import (
    AccessRequest,
    AccessRequestOk,
    BindingQuery,
    BindingQueryOk,
    ExchangeBind,
    ExchangeBindOk,
    ExchangeDeclare,
    ExchangeDeclareOk,
    ExchangeDelete,
    ExchangeDeleteOk,
    ExchangeQuery,
    ExchangeQueryOk,
    ExchangeUnbind,
    ExchangeUnbindOk,
    QueueBind,
    QueueBindOk,
    QueueDeclare,
    QueueDeclareOk,
    QueueDelete,
    QueueDeleteOk,
    QueuePurge,
    QueuePurgeOk,
    QueueUnbind,
    QueueUnbindOk,
)
from dtx.xa.codes import ReplyCode, XaError

SERVER_NAMED: Final = b"amq.gen-" + b"x" * 22
"""The name in permission checks of queues that the server names: a prefix and length as generated names have."""
_TICKET: Final = 1
"""The ticket that access.request grants until the channel closes. Each method still checks its permissions."""
_Simple = ExchangeDeclare | ExchangeDelete | ExchangeBind | ExchangeUnbind | QueueBind | QueueUnbind
_OK: Final[dict[type[Method], Callable[[], Method]]] = {
    ExchangeDeclare: ExchangeDeclareOk,
    ExchangeDelete: ExchangeDeleteOk,
    ExchangeBind: ExchangeBindOk,
    ExchangeUnbind: ExchangeUnbindOk,
    QueueBind: QueueBindOk,
    QueueUnbind: QueueUnbindOk,
}


class AnswerOrder(Protocol):
    """The order of a channel's work and answers; see :class:`~dtx.server.standalone.answer_order.ChannelOrder`."""

    number: int

    def send(self, frame: bytes) -> None:
        """Send whole frames to the client. Empty *frame*: send nothing."""

    def after_writes(self, act: Callable[[], None], key: int) -> None:
        """Call *act* when all earlier writes of the connection are durable or have failed."""

    def run(self, work: Coroutine[Any, Any, bytes], key: int) -> None:
        """Run *work*, which returns the answer frame."""


class Declarations:
    """The topology methods of one channel.

    Args:
        client: the owner of the channel.
        order: the order of the channel.
    """

    __slots__ = ("_client", "_order", "last_queue", "ticket")

    def __init__(self, client: VirtualHostUser, order: AnswerOrder) -> None:
        self._client = client
        self._order = order
        self.last_queue = b""
        """The queue that the channel declared last; an empty name in a method means this queue."""
        self.ticket: int | None = None
        """The ticket that access.request returned."""

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

    def access_request(self, asked: AccessRequest) -> None:  # noqa: ARG002 - later methods check permissions
        """access.request."""
        self.ticket = _TICKET
        self._order.send(AccessRequestOk(_TICKET).frame(self._order.number))

    def check_ticket(self, name: str, ticket: int) -> None:
        """Check the ticket of a method of the preview: "a valid ticket should be provided".

        Valid are the ticket that access.request gave to this channel, and 0 if tickets are not required.

        Args:
            name: the name of the method.
            ticket: its first argument.

        Raises:
            XaError: 403 (the rule's on-failure="access-refused").
        """
        if ticket != self.ticket and (ticket or self._client.parts.limits.require_tickets):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"{name} with ticket {ticket}, which this channel was not given: send access.request first",
            )

    # -- exchanges

    def exchange_declare(self, asked: ExchangeDeclare) -> None:
        """exchange.declare."""
        vhost, require = self._client.vhost, self._client.require
        name = _name(asked.exchange)
        define = None
        if asked.passive:
            vhost.find_exchange(name)
        else:
            check_not_default(name)
            require(Permission.CONFIGURE, "exchange", name)
            alternate = _exchange_in(asked.arguments, ALTERNATE) if name not in vhost.exchanges else None
            if alternate is not None:
                require(Permission.READ, "exchange", name)
                require(Permission.WRITE, "exchange", alternate)
            define = vhost.declare_exchange(
                name,
                asked.kind,
                durable=asked.durable,
                auto_delete=asked.auto_delete,
                internal=asked.internal,
                arguments=asked.arguments,
            )
        self._answer(asked, define, vhost.exchanges[name].key)

    def exchange_delete(self, asked: ExchangeDelete) -> None:
        """exchange.delete."""
        name = _name(asked.exchange)
        check_not_default(name)
        self._client.require(Permission.CONFIGURE, "exchange", name)
        define = self._client.vhost.delete_exchange(name, if_unused=asked.if_unused)
        self._answer(asked, define)

    def exchange_query(self, asked: ExchangeQuery) -> None:
        """exchange.query of the preview."""
        name = asked.exchange
        if name:
            self._client.require(Permission.READ, "exchange", name)
        facts = exchange_facts(self._client.vhost, name)
        answer = ExchangeQueryOk(facts.type, facts.durable, facts.not_found, facts.arguments)
        self._order.send(answer.frame(self._order.number))

    def bind(self, asked: ExchangeBind | ExchangeUnbind | QueueBind | QueueUnbind) -> None:
        """exchange.bind, exchange.unbind, queue.bind or queue.unbind."""
        vhost, require = self._client.vhost, self._client.require
        destination, source, routing_key = _name(asked.destination), _name(asked.source), asked.routing_key
        kind = DestinationKind.EXCHANGE
        if isinstance(asked, QueueBind | QueueUnbind):
            kind = DestinationKind.QUEUE
            if not destination:
                destination = self.queue_name(destination)
                routing_key = routing_key or destination
        require(Permission.WRITE, kind, destination)
        if kind is DestinationKind.EXCHANGE:
            check_not_default(destination)
        check_not_default(source)
        require(Permission.READ, "exchange", source)
        self._client.access.require_topic(Permission.READ, source, routing_key)
        binds = isinstance(asked, QueueBind | ExchangeBind)
        act = vhost.bind if binds else vhost.unbind
        define = act(source, kind, destination, routing_key, asked.arguments, self._client)
        binding = vhost.binding(source, kind, destination, routing_key, asked.arguments) if binds else None
        self._answer(asked, define, binding)

    def binding_query(self, asked: BindingQuery) -> None:
        """binding.query of the preview."""
        if asked.exchange:
            self._client.require(Permission.READ, "exchange", asked.exchange)
        # The default exchange binds each queue by its name, so there a routing key is a queue name.
        for name in (asked.queue, b"" if asked.exchange else asked.routing_key):
            if name:
                self._check_visible(name)
        facts = binding_facts(self._client.vhost, asked.exchange, asked.queue, asked.routing_key, asked.arguments)
        answer = BindingQueryOk(
            facts.exchange_not_found,
            facts.queue_not_found,
            facts.queue_not_matched,
            facts.key_not_matched,
            facts.args_not_matched,
        )
        self._order.send(answer.frame(self._order.number))

    def _check_visible(self, queue: bytes) -> None:
        """Check that the account has any permission on *queue*; otherwise it may not learn whether that exists.

        Raises:
            XaError: 403.
        """
        who, account = self._client.who, self._client.account
        if not any(account.may(who.vhost, permission, queue) for permission in Permission):
            what = describe("queue", queue, who.vhost)
            raise XaError(ReplyCode.ACCESS_REFUSED, f"access to {what} refused for user '{who.user}'")

    # -- queues

    def queue_declare(self, asked: QueueDeclare) -> None:
        """queue.declare. The answer counts messages, so for an existing queue it waits for earlier publishes."""
        name = _name(asked.queue)
        if name.startswith(REPLY_TO):
            self._declare_reply_queue(name, asked.no_wait)
            return
        if asked.passive:
            self._count(name, asked.no_wait)
            return
        vhost, require = self._client.vhost, self._client.require
        require(Permission.CONFIGURE, "queue", name or SERVER_NAMED)
        letters = _exchange_in(asked.arguments, DEAD_LETTER_EXCHANGE) if name not in vhost.queues else None
        if letters is not None:
            require(Permission.READ, "queue", name or SERVER_NAMED)
            require(Permission.WRITE, "exchange", letters)
        declared = vhost.declare_queue(
            name,
            self._client,
            durable=asked.durable,
            exclusive=asked.exclusive,
            auto_delete=asked.auto_delete,
            arguments=asked.arguments,
        )
        queue = declared.queue
        if declared.created:
            answer = partial(self._found, queue.name, asked.no_wait)
            self._durably(declared.define, answer, QueueDeclare.KEY, queue.spec.id)
        else:
            self._count(queue.name, asked.no_wait)

    def _declare_reply_queue(self, name: bytes, no_wait: bool) -> None:
        """Declare the pseudo-queue of direct replies, or an address of a reply consumer.

        As in RabbitMQ, the answer only tells whether it exists, even without the passive flag.
        """
        if not self._client.parts.direct.exists(self._client.vhost.name, name):
            self._client.vhost.find_queue(name, self._client)  # raises 404
        self.last_queue = name
        if not no_wait:
            self._order.send(QueueDeclareOk(name, 0, 1).frame(self._order.number))

    def _count(self, name: bytes, no_wait: bool) -> None:
        """Answer with the message and consumer counts of a queue, after earlier publishes."""

        def act() -> None:
            queue = self._client.vhost.find_queue(name, self._client)
            self._durably(None, partial(self._found, name, no_wait), QueueDeclare.KEY, queue.spec.id)

        self._order.after_writes(act, QueueDeclare.KEY)

    def _found(self, name: bytes, no_wait: bool) -> bytes:
        queue = self._client.vhost.find_queue(name, self._client)
        self.last_queue = queue.name
        index = queue.index
        now = self._client.now()
        index.serve(now)
        index.touch(now)
        if no_wait:
            return b""
        return QueueDeclareOk(queue.name, index.ready, index.consumers).frame(self._order.number)

    def queue_purge(self, asked: QueuePurge) -> None:
        """queue.purge. It also removes messages that the client published before."""
        name = self.queue_name(asked.queue)
        self._client.require(Permission.READ, "queue", name)
        self._client.vhost.find_queue(name, self._client)
        self._order.after_writes(
            lambda: self._order.run(self._purge(name, asked.no_wait), QueuePurge.KEY), QueuePurge.KEY
        )

    async def _purge(self, name: bytes, no_wait: bool) -> bytes:
        queue = self._client.vhost.find_queue(name, self._client)
        queue.index.serve(self._client.now())
        purged = await self._client.broker.purge(queue)
        return b"" if no_wait else QueuePurgeOk(purged).frame(self._order.number)

    def queue_delete(self, asked: QueueDelete) -> None:
        """queue.delete. It also deletes messages that the client published before."""
        name = self.queue_name(asked.queue)
        self._client.require(Permission.CONFIGURE, "queue", name)
        self._order.after_writes(lambda: self._delete(name, asked), QueueDelete.KEY)

    def _delete(self, name: bytes, asked: QueueDelete) -> None:
        vhost = self._client.vhost
        queue = vhost.queues.get(name)
        if queue is not None:
            queue.index.serve(self._client.now())
        messages = 0 if queue is None else queue.index.ready
        deleted = vhost.delete_queue(name, self._client, if_unused=asked.if_unused, if_empty=asked.if_empty)
        self._client.close_queues(deleted.queues)
        answer = b"" if asked.no_wait else QueueDeleteOk(messages).frame(self._order.number)
        self._durably(deleted.define, lambda: answer, QueueDelete.KEY, None)

    # -- answers

    def _answer(self, asked: _Simple, define: Define | None, thing: Thing | None = None) -> None:
        """Answer a method whose answer has no arguments."""
        answer = b"" if asked.no_wait else _OK[type(asked)]().frame(self._order.number)
        self._durably(define, lambda: answer, asked.KEY, thing)

    def _durably(self, define: Define | None, answer: Callable[[], bytes], key: int, thing: Thing | None) -> None:
        """Answer when a change is durable.

        Args:
            define: the change to write; ``None`` if another client has made it, perhaps just now.
            answer: makes the frame.
            key: class << 16 | method that is answered.
            thing: without *define*, the object that must be durable; ``None`` for all earlier changes.
        """
        broker = self._client.broker
        written = broker.define(define) if define is not None else broker.defined(thing)
        if written is None:
            self._order.send(answer())
        else:
            self._order.run(_after(written, answer), key)


async def _after(written: Awaitable[None], answer: Callable[[], bytes]) -> bytes:
    await written
    return answer()


def _name(name: bytes) -> bytes:
    """Remove line ends from a name, as RabbitMQ does."""
    return name.translate(None, b"\r\n")


def _exchange_in(arguments: bytes, key: bytes) -> bytes | None:
    """The exchange that the argument *key* names, if it is a string."""
    entry = first_of_each(arguments).get(key)
    return entry.value if entry is not None and entry.kind == b"S" else None
