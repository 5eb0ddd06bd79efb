"""The rights of one client: permissions, topic permissions, and checks of message properties."""

import re
from typing import Final

from dtx.auth.accounts import Account, Accounts
from dtx.auth.permissions import Permission
from dtx.auth.roles import Tag
from dtx.store.postgres.arguments import MAX_MILLISECONDS, text
from dtx.store.postgres.exchanges import describe
from dtx.store.postgres.matchers import ExchangeType
from dtx.store.postgres.topology import VirtualHost
from dtx.wire.amqp09.properties import BasicProperties, Property
from dtx.xa.codes import ReplyCode, XaError

_MAX_ALLOWED: Final = 1000
"""Granted permissions that a connection caches. Clients choose the names, so there is a limit."""
_EXPIRATION: Final = re.compile(rb"[+-]?[0-9]+")
"""The syntax of a number in RabbitMQ."""


class Access:
    """The rights of an account in a virtual host.

    Args:
        accounts: all accounts.
        account: has the permissions.
        vhost: the virtual host.
    """

    __slots__ = ("_accounts", "_allowed", "_users", "_vhost", "account")

    def __init__(self, accounts: Accounts, account: Account, vhost: VirtualHost) -> None:
        self.account = account
        self._accounts = accounts
        self._vhost = vhost
        self._allowed: set[tuple[Permission, bytes]] = set()
        """The permissions that were checked and granted."""
        self._users: object = None
        """The version of all users for which ``_allowed`` is valid."""

    def require(self, permission: Permission, kind: str, name: bytes) -> None:
        """Check that the account has a permission.

        Args:
            permission: needed on the exchange or queue.
            kind: ``exchange`` or ``queue``.
            name: its name; empty for the default exchange.

        Raises:
            XaError: 403, the account lacks it.
        """
        users = self._accounts.users
        if users is not self._users or len(self._allowed) > _MAX_ALLOWED:
            self._users = users
            self._allowed.clear()
        if (permission, name) in self._allowed:
            return
        vhost = self._vhost.name
        if not self.account.may(vhost, permission, name):
            what = describe(kind, name or b"amq.default", vhost)  # the name that permissions use
            user = self.account.name
            raise XaError(ReplyCode.ACCESS_REFUSED, f"{permission} access to {what} refused for user '{user}'")
        self._allowed.add((permission, name))

    def require_topic(self, permission: Permission, exchange: bytes, key: bytes) -> None:
        """Check that the account may use a routing key at a topic exchange. Other exchanges accept every key.

        Args:
            permission: write to publish, read to bind and unbind.
            exchange: its name.
            key: the routing key.

        Raises:
            XaError: 403, the account may not use it.
        """
        found = self._vhost.exchanges.get(exchange)
        if found is None or found.kind is not ExchangeType.TOPIC:
            return
        vhost = self._vhost.name
        if not self.account.may_use_topic(vhost, permission, exchange, key):
            what = describe("exchange", exchange, vhost)
            user = self.account.name
            raise XaError(
                ReplyCode.ACCESS_REFUSED, f"access to topic '{text(key)}' in {what} refused for user '{user}'"
            )

    def check_properties(self, view: BasicProperties) -> None:
        """Check the properties of a message as RabbitMQ does. Headers that do not parse would break consumers.

        Raises:
            XaError: 406, the expiration or the user id is not valid.
            WireError: 502, the headers are malformed.
        """
        spans = view.spans
        if Property.HEADERS in spans:
            view.headers  # noqa: B018 - raises if it is malformed
        if Property.EXPIRATION in spans:
            _check_expiration(view.expiration or b"")
        if Property.USER_ID in spans:
            user = text(view.user_id or b"")
            if user != self.account.name and Tag.IMPERSONATOR not in self.account.tags:
                raise XaError(
                    ReplyCode.PRECONDITION_FAILED,
                    f"user_id property set to '{user}' but authenticated user was '{self.account.name}'",
                )


def _check_expiration(value: bytes) -> None:
    if not _EXPIRATION.fullmatch(value) or not 0 <= int(value) <= MAX_MILLISECONDS:
        raise XaError(
            ReplyCode.PRECONDITION_FAILED,
            f"invalid expiration '{text(value)}': milliseconds in digits, {MAX_MILLISECONDS} at most",
        )
