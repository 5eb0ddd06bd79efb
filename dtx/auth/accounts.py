"""The users that may connect to a running dtx, and their permissions.

Theory of operation. All users of the resource manager are in memory, as one immutable :class:`Snapshot`. The database
counts changes. A login compares that number with the snapshot's and reads everything again if it differs. So a
changed password or a removed user takes effect from the next login on.

Permissions are checked in memory alone, on hot paths. :meth:`Accounts.watch` reads the number every
:data:`WATCH_SECONDS`, so an operator's change takes effect for open connections within that time. An :class:`Account`
is no copy: each call reads the current snapshot.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, NoReturn
from uuid import uuid4

import psycopg
from psycopg import IsolationLevel

from dtx import failpoint
from dtx.auth.login_throttle import TooManyWait, source_of
from dtx.auth.passwords import Verifier
from dtx.auth.permissions import Permission, allows, allows_topic, expand
from dtx.auth.users import EVERYTHING, LOOPBACK_USERS, VERSION, AccountEditor, Snapshot, User, snapshot
from dtx.db.connections import Dsn, connect, session_settings
from dtx.failpoint import Point
from dtx.log.api import LogError, LogUnavailable
from dtx.log.queries import Query
from dtx.telemetry import get_logger

WATCH_SECONDS: Final = 2.0
"""Seconds until a change of permissions takes effect for open connections: one short query each time."""

_GRACE: Final = 5.0
"""Seconds beyond a statement's own time-out."""
_VERSION: Final = Query(VERSION)
_EVERYTHING: Final = tuple(map(Query, EVERYTHING))

log: Final = get_logger()


class LoginRefused(Exception):
    """Unknown user, wrong password, too many waiting logins, or a user that may not connect from that address.

    The message may be sent to the peer.
    """


class Account:
    """A user that has logged in, in its current state: its permissions may change while it is connected.

    Args:
        accounts: that have its current state.
        name: of the user.
    """

    __slots__ = ("_accounts", "name")

    def __init__(self, accounts: "Accounts", name: str) -> None:
        self._accounts = accounts
        self.name: Final = name

    def __repr__(self) -> str:
        return f"Account({self.name!r})"

    @property
    def exists(self) -> bool:
        """False once the user has been removed. Its connections must be closed then, as in RabbitMQ."""
        return self._user is not None

    @property
    def tags(self) -> frozenset[str]:
        """The tags of the user: administrator, monitoring, impersonator."""
        user = self._user
        return frozenset() if user is None else user.tags

    @property
    def vhosts(self) -> tuple[str, ...]:
        """The virtual hosts that the user may enter, in the order of their names."""
        user = self._user
        return () if user is None else tuple(sorted(user.grants))

    def may_enter(self, vhost: str) -> bool:
        """Whether the user has any permission, even an empty one, in *vhost*: else connection.open gets 530."""
        user = self._user
        return user is not None and vhost in user.grants

    def may(self, vhost: str, permission: Permission, name: bytes) -> bool:
        """Whether the user has *permission* on the exchange or queue *name* in *vhost*; if not, 403.

        Args:
            vhost: the connection's.
            permission: configure, write or read.
            name: bytes of the name; empty for the default exchange.
        """
        user = self._user
        if user is None or (patterns := user.grants.get(vhost)) is None:
            return False
        return allows(patterns, permission, name)

    def may_use_topic(self, vhost: str, permission: Permission, exchange: bytes, key: bytes) -> bool:
        """Whether the user may use the routing key *key* at the topic exchange *exchange* in *vhost*; if not, 403.

        Args:
            vhost: the connection's.
            permission: write to publish, read to bind and unbind.
            exchange: bytes of the name.
            key: bytes of the routing key.
        """
        user = self._user
        if user is None:
            return False
        if not user.topics:
            return True
        patterns = user.topics.get((vhost, exchange.decode("utf-8", "surrogateescape")))
        return patterns is None or allows_topic(expand(patterns, user.name, vhost), permission, key)

    @property
    def _user(self) -> User | None:
        return self._accounts.users.users.get(self.name)


class Accounts:
    """The users of a resource manager.

    Args:
        url: the log's database.
        rm: name of the resource manager.
        timeout: seconds for one request to the database.
    """

    def __init__(self, url: str, rm: str, *, timeout: float = 10.0) -> None:
        self.users = Snapshot()
        """All users and virtual hosts, as last read."""
        self.logins = 0
        self.refused_logins = 0
        self._url = url
        self._dsn = Dsn(url)
        self._rm = rm
        self._timeout = timeout
        self._verifier = Verifier()
        self._connection: psycopg.AsyncConnection | None = None
        self._reading = asyncio.Lock()
        self._asked = 0
        self._answered = 0
        self._listeners: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Read the users; at the first start of a resource manager create guest and the virtual host ``/``.

        Raises:
            LogError: the tables are missing, or the database is not reachable.
        """
        failpoint.at(Point.ACCOUNTS_BEFORE)
        if await asyncio.to_thread(AccountEditor(self._url, self._rm).provision):
            log.info("first start: user guest with password guest may connect from this machine", rm=self._rm)
        failpoint.at(Point.ACCOUNTS_AFTER)
        await self.refresh()

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._verifier.close()
        await self._disconnect()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call *listener* after each change that was read: to close connections whose user or virtual host is gone."""
        self._listeners.append(listener)

    def has_vhost(self, vhost: str) -> bool:
        """Whether there is a virtual host of this name."""
        return vhost in self.users.vhosts

    async def authenticate(self, user: bytes, password: bytes, *, loopback: bool, peer: str = "") -> Account:
        """Log in a client with a password.

        Args:
            user: name, as in its SASL response.
            password: likewise.
            loopback: whether it connects from this machine.
            peer: its address, without a port. After failed logins, the next attempts from an address are delayed.

        Raises:
            LoginRefused: it may not connect, or too many logins of its address wait. An unknown user and a wrong
                password give the same answer in the same time.
            LogUnavailable: the users cannot be read from the database.
        """
        # shielded: a client that disconnects must not close the connection to the database
        await asyncio.shield(self.refresh())
        name = user.decode("utf-8", "surrogateescape")
        stored = self._stored(name)
        while True:
            try:
                right = await self._verifier.verify(user, password, stored, source=source_of(peer))
            except TooManyWait:
                self._refuse(user, peer, "too many logins wait", "login refused: too many logins of this address wait")
            before, stored = stored, self._stored(name)
            if stored == before:
                break  # otherwise the password was changed while this login waited for its turn
        if not right:
            reason = "unknown user" if stored is None else "wrong password"
            self._refuse(user, peer, reason, "login refused: unknown user or wrong password")
        return self._require_host(name, user, peer, loopback=loopback)

    async def admit(self, user: str, *, loopback: bool, peer: str = "") -> Account:
        """Log in a client that was identified by other means than a password.

        Args:
            user: name.
            loopback: whether it connects from this machine.
            peer: its address, without a port.

        Raises:
            LoginRefused: there is no such user, or it may not connect from there.
            LogUnavailable: the users cannot be read from the database.
        """
        await asyncio.shield(self.refresh())
        octets = user.encode("utf-8", "surrogateescape")
        if user not in self.users.users:
            self._refuse(octets, peer, "unknown user", "login refused: unknown user")
        return self._require_host(user, octets, peer, loopback=loopback)

    def _require_host(self, name: str, user: bytes, peer: str, *, loopback: bool) -> Account:
        if name in LOOPBACK_USERS and not loopback:
            self._refuse(user, peer, "not from this machine", f"user {name!r} can only connect from dtx's own machine")
        self.logins += 1
        return Account(self, name)

    def _stored(self, name: str) -> str | None:
        found = self.users.users.get(name)
        return None if found is None else found.password_hash

    def _refuse(self, user: bytes, peer: str, reason: str, message: str) -> NoReturn:
        self.refused_logins += 1
        log.warning("login refused", user=user, peer=peer, reason=reason)
        raise LoginRefused(message)

    async def watch(self) -> None:
        """Read changes regularly, until cancelled. While the database is not reachable, the last snapshot applies."""
        away = False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self.refresh()
            except LogError as error:
                if not away:
                    log.warning("cannot look for changes of users and permissions", reason=str(error))
                away = True
            else:
                away = False

    async def refresh(self) -> None:
        """Read changes. All changes that were committed before the call are in effect when it returns.

        Raises:
            LogUnavailable: the database is not reachable.
        """
        # Calls that wait here while another one reads share the next read: a thousand logins need few queries.
        self._asked += 1
        mine = self._asked
        async with self._reading:
            if self._answered >= mine:
                return
            upto = self._asked
            found = await self._read()
            self._answered = upto
            if found is not None:
                self.users = found
                for listener in self._listeners:
                    listener()

    async def _read(self) -> Snapshot | None:
        """The new snapshot, or ``None`` if nothing has changed. A connection that failed meanwhile is replaced once."""
        for attempt in (1, 2):
            fresh = self._connection is None
            try:
                async with asyncio.timeout(self._timeout + _GRACE):
                    return await self._read_once()
            except BaseException as error:
                await self._disconnect()
                if not isinstance(error, psycopg.Error | OSError):
                    raise
                if fresh or attempt == 2 or not isinstance(error, psycopg.OperationalError):
                    raise LogUnavailable(f"cannot read the users: {self._dsn.explain(error)}") from None
        raise AssertionError("unreachable")

    async def _read_once(self) -> Snapshot | None:
        connection = self._connection
        if connection is None:
            settings = session_settings("accounts", uuid4(), statement_timeout=self._timeout)
            connection = self._connection = await connect(self._dsn, settings, timeout=self._timeout)
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        (rows,) = await self._fetch(connection, _VERSION)
        if self._answered and [(self.users.version,)] == rows:
            return None
        async with connection.transaction():
            return snapshot(*await self._fetch(connection, *_EVERYTHING))

    async def _fetch(self, connection: psycopg.AsyncConnection, *queries: Query) -> list[list[Any]]:
        answers = []
        for query in queries:
            cursor = await connection.execute(query.sql, query.parameters({"rm": self._rm}))
            answers.append(await cursor.fetchall())
        return answers

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
