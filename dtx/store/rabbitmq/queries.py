"""binding.query and exchange.query of the preview: RabbitMQ has no such methods, so dtx asks its management API.

dtx asks the API with its own credentials, which may read everything. So it first reads the permissions of the client.
They are checked before anything is looked up: a refusal does not tell whether the exchange or queue exists.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from dtx.auth.permissions import Patterns, Permission, allows
from dtx.store.facts import BindingFacts, ExchangeFacts, search
from dtx.store.rabbitmq.arguments import Plain, from_json, octets, to_table
from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.telemetry import get_logger
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import ReplyCode, XaError

if TYPE_CHECKING:
    from dtx.store.rabbitmq.commit_connection import CommitConnection

_log = get_logger(part="queries")
_T = TypeVar("_T")

_AT_ONCE: Final = 4
"""Requests for all clients that run at the same time; each has a thread while it waits."""
_DEFAULT: Final = ExchangeFacts(type=b"direct", durable=True)


class Queries:
    """Asks on behalf of clients.

    Args:
        commit_connection: returns that of a vhost, which checks that the management API belongs to its broker.
    """

    def __init__(self, commit_connection: "Callable[[str], CommitConnection]") -> None:
        self._commit_connection = commit_connection
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def exchange(self, vhost: str, user: str | None, name: bytes) -> ExchangeFacts:
        """exchange.query: "If not specified explicitly the default exchange is implied".

        Args:
            vhost: of the exchange.
            user: the user that asks; ``None`` when the login has no user name.
            name: of the exchange; empty for the default exchange.

        Raises:
            XaError: 403 without read permission on the exchange, 540 when the API gives no answer.
        """
        if not name:
            return _DEFAULT

        async def ask(about: _About) -> ExchangeFacts:
            about.require_read(name)
            return await about.exchange(name)

        return await self._ask("exchange.query", vhost, user, ask)

    async def binding(
        self, vhost: str, user: str | None, exchange: bytes, queue: bytes, key: bytes, arguments: dict[bytes, Plain]
    ) -> BindingFacts:
        """binding.query; see :func:`dtx.store.facts.search`.

        Args:
            vhost: of the exchange.
            user: the user that asks; ``None`` when the login has no user name.
            exchange: the source; empty for the default exchange.
            queue: the destination; empty for any.
            key: the routing key; empty for any.
            arguments: empty for any.

        Raises:
            XaError: 403 without read permission on the exchange, or without any permission on the queue; 540 when the
                API gives no answer.
        """

        async def ask(about: _About) -> BindingFacts:
            if exchange:
                about.require_read(exchange)
            # Each queue is bound to the default exchange by its name, so there a key is the name of a queue.
            for name in (queue, b"" if exchange else key):
                if name:
                    about.require_visible(name)
            if not exchange:
                return await about.default_binding(queue, key, arguments)
            return await about.binding(exchange, queue, key, arguments)

        return await self._ask("binding.query", vhost, user, ask)

    async def is_stream(self, vhost: str, queue: bytes) -> bool:
        """Whether an existing queue is a stream. No permissions are checked: the answer is not for clients.

        Raises:
            ManagementError: the API gives no answer.
        """
        about = _About(await self._commit_connection(vhost).management(), vhost, "")
        async with self._slots:
            return await about.is_stream(queue)

    async def _ask(self, method: str, vhost: str, user: str | None, ask: "Callable[[_About], Awaitable[_T]]") -> _T:
        try:
            if user is None:
                raise ManagementError("the login of this connection has no user name")
            about = _About(await self._commit_connection(vhost).management(), vhost, user)
            async with self._slots:
                await about.read_permissions()
                return await ask(about)
        except (ManagementError, WireError, LookupError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, ManagementError) else "its answer was not understood"
            _log.info("query refused", method=method, vhost=vhost, user=user, reason=reason)
            management = self._commit_connection(vhost).settings.management
            if management is not None:  # clients must not get its address
                reason = reason.replace(f" at {management.url}", "")
            raise XaError(
                ReplyCode.NOT_IMPLEMENTED,
                f"{method} needs the broker's management API: give it with --management, "
                f"with a user that has the tag administrator ({reason})",
            ) from None


class _About:
    """One question of one user.

    Args:
        management: of this broker.
        vhost: of the objects.
        user: the user that asks.
    """

    def __init__(self, management: Management, vhost: str, user: str) -> None:
        self._management = management
        self._vhost = vhost
        self._user = user
        self._may = Patterns("", "", "")

    async def _get(self, *path: str | bytes, columns: str = "") -> Any:
        """The answer; ``None`` if the object does not exist."""
        words = "/".join(quote(word, safe="") for word in path)
        try:
            return await self._management.get(f"{words}?columns={columns}" if columns else words)
        except ManagementError as error:
            if error.status == 404:
                return None
            raise

    async def read_permissions(self) -> None:
        """Read the permissions of the user in the vhost.

        Raises:
            ManagementError: the API gives no answer, or has no permissions of this user.
        """
        found = await self._get("permissions", self._vhost, self._user)
        if found is None:
            raise ManagementError("the broker has no permissions of this user")
        if (found["user"], found["vhost"]) != (self._user, self._vhost):
            raise LookupError(self._user)
        self._may = Patterns(found["configure"], found["write"], found["read"])

    def require_read(self, exchange: bytes) -> None:
        """Demand read permission on *exchange*: a user that may bind queues to it may query it.

        Raises:
            XaError: 403.
        """
        if not allows(self._may, Permission.READ, exchange):
            self._refuse("read access to exchange", exchange)

    def require_visible(self, queue: bytes) -> None:
        """Demand any permission on *queue*: a user with one may query it.

        Raises:
            XaError: 403.
        """
        if not any(allows(self._may, permission, queue) for permission in Permission):
            self._refuse("access to queue", queue)

    def _refuse(self, what: str, name: bytes) -> None:
        shown = name.decode("utf-8", "replace")
        raise XaError(
            ReplyCode.ACCESS_REFUSED, f"{what} '{shown}' in vhost '{self._vhost}' refused for user '{self._user}'"
        )

    async def exchange(self, name: bytes) -> ExchangeFacts:
        """The API's facts about an exchange that has a name."""
        found = await self._get("exchanges", self._vhost, name, columns="name,type,durable,arguments")
        if found is None:
            return ExchangeFacts(not_found=True)
        if octets(found["name"]) != name:
            raise LookupError(name)
        return ExchangeFacts(
            type=found["type"].encode(), durable=found["durable"] is True, arguments=to_table(found["arguments"])
        )

    async def _has_queue(self, name: bytes) -> bool:
        found = await self._get("queues", self._vhost, name, columns="name")
        if found is not None and octets(found["name"]) != name:
            raise LookupError(name)
        return found is not None

    async def is_stream(self, name: bytes) -> bool:
        """Whether a queue is a stream."""
        found = await self._get("queues", self._vhost, name, columns="name,type")
        if not isinstance(found, dict) or octets(str(found.get("name"))) != name:
            raise ManagementError("it does not give the type of a queue")
        return found.get("type") == "stream"

    async def binding(self, exchange: bytes, queue: bytes, key: bytes, arguments: dict[bytes, Plain]) -> BindingFacts:
        """The API's facts about a binding of an exchange that has a name."""
        lost = (await self.exchange(exchange)).not_found
        queue_lost = bool(queue) and not await self._has_queue(queue)
        found = None
        if not lost and not queue_lost:
            columns = "destination,destination_type,routing_key,arguments"
            found = await self._get("exchanges", self._vhost, exchange, "bindings", "source", columns=columns)
            lost = found is None  # deleted since the first answer
        if found is None:
            return BindingFacts(exchange_not_found=lost, queue_not_found=queue_lost)
        return search(
            found,
            (lambda each: each["destination_type"] == "queue" and octets(each["destination"]) == queue)
            if queue
            else None,
            (lambda each: octets(each["routing_key"]) == key) if key else None,
            (lambda each: from_json(each["arguments"]) == arguments) if arguments else None,
        )

    async def default_binding(self, queue: bytes, key: bytes, arguments: dict[bytes, Plain]) -> BindingFacts:
        """Facts about a binding of the default exchange: each queue is bound to it by its name, without arguments."""
        if queue and not await self._has_queue(queue):
            return BindingFacts(queue_not_found=True)
        matches = not key or (key == queue if queue else await self._has_queue(key))
        return BindingFacts(key_not_matched=not matches, args_not_matched=bool(arguments))
