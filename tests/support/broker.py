"""The two modes, and access to messages without the connections under test: in RabbitMQ or in a standalone dtx."""

import contextlib
import secrets
from typing import Any, Final, Literal, Protocol

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.auth.users import AccountEditor
from tests.support.queues import QueueAccess, Taken
from tests.support.service import DtxService

Mode = Literal["alongside", "standalone"]
MODES: Final[tuple[Mode, ...]] = ("alongside", "standalone")
only_alongside = pytest.mark.parametrize("mode", ["alongside"], indirect=True)
"""Runs a test only in alongside mode."""
only_standalone = pytest.mark.parametrize("mode", ["standalone"], indirect=True)
"""Runs a test only in standalone mode."""


class Broker(Protocol):
    """Operations without the connections under test. :class:`tests.support.rabbitmq.RabbitNode` implements it."""

    def mend(self) -> None:
        """Repair the state that an earlier test left."""

    def channel(self, vhost: str = ..., user: str = ...) -> contextlib.AbstractContextManager[BlockingChannel]:
        """A channel of a new connection."""

    def count(self, queue: str, vhost: str = ...) -> int:
        """How many messages are ready in *queue*."""

    def take_all(self, queue: str, vhost: str = ...) -> list[Taken]:
        """Take every ready message out of *queue*."""

    def add_vhost(self, name: str | None = None) -> str:
        """Make a virtual host that guest may use; returns its name."""

    def delete_vhost(self, name: str) -> None:
        """Remove it."""

    def add_user(
        self, name: str, password: str | None = ..., *, configure: str = ..., write: str = ..., read: str = ...
    ) -> str:
        """Make a user with permissions on ``/``; returns its URL there. The password is the name unless given."""

    def delete_user(self, name: str) -> None:
        """Remove a user."""


class StandaloneBroker(QueueAccess):
    """A service without a broker, on its own database.

    Args:
        service: must run when this is used.
    """

    def __init__(self, service: DtxService) -> None:
        assert service.database is not None
        self.service = service
        self._users = AccountEditor(service.database, "dtx")

    def mend(self) -> None:
        """Do nothing: tests leave nothing to repair."""

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        """The URL for *user*; the password is the name unless given."""
        return self.service.url(user, password, vhost)

    def add_vhost(self, name: str | None = None) -> str:
        """Make a virtual host that guest may use; returns its name."""
        name = name or f"t-{secrets.token_hex(5)}"
        self._users.add_vhost(name)
        self._users.grant("guest", name, configure=".*", write=".*", read=".*")
        return name

    def delete_vhost(self, name: str) -> None:
        """Remove the access of guest to it; the virtual host stays."""
        self._users.revoke("guest", name)

    def add_user(
        self,
        name: str,
        password: str | None = None,
        *,
        tags: str = "",
        configure: str = ".*",
        write: str = ".*",
        read: str = ".*",
        **_more: Any,
    ) -> str:
        """Make a user with permissions on ``/``; returns its URL there. The password is the name unless given."""
        self._users.add_user(name, (name if password is None else password).encode(), tags.split())
        self._users.grant(name, "/", configure=configure, write=write, read=read)
        return self.service.url(name, password)

    def delete_user(self, name: str) -> None:
        """Remove a user."""
        self._users.remove_user(name)
