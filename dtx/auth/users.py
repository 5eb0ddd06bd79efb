"""Users, their permissions and virtual hosts: the tables, their contents as one value, and changes to them.

Operators change them with ``dtx user`` and ``dtx vhost``, while dtx runs or not; no lease is needed. Triggers count
every change in ``account_version``, whatever its origin. So a running dtx detects a change by reading one number.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Select,
    Table,
    Text,
    bindparam,
    delete,
    func,
    literal,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from dtx.auth.passwords import hash_password
from dtx.auth.permissions import BadPattern, Patterns, TopicPatterns, check_pattern, expand
from dtx.auth.roles import Tag
from dtx.db import columns
from dtx.db.columns import metadata
from dtx.db.connections import Dsn, LogError, engine, explained
from dtx.log.tables import branch, exchange, queue

MAX_NAME: Final = 255
"""Bytes of a name: the wire carries it as a short string."""
MAX_PASSWORD: Final = 1024
"""Bytes of a password: SASL responses must fit the smallest frame."""


# The wire carries names as short strings: 255 bytes.
_NAME: Final = "octet_length(name) BETWEEN 1 AND 255"

vhost: Final = Table(
    "vhost",
    metadata,
    columns.word("rm"),
    columns.word("name"),
    PrimaryKeyConstraint("rm", "name", name="vhost_pkey"),
    CheckConstraint(_NAME, name="vhost_name_check"),
)

account: Final = Table(
    "account",
    metadata,
    columns.word("rm"),
    columns.word("name"),
    columns.word("password_hash"),
    Column("tags", ARRAY(Text(collation="C")), nullable=False),
    PrimaryKeyConstraint("rm", "name", name="account_pkey"),
    CheckConstraint(_NAME, name="account_name_check"),
    CheckConstraint("password_hash LIKE '$argon2id$%'", name="account_password_check"),
    CheckConstraint(f"tags <@ ARRAY[{', '.join(repr(str(tag)) for tag in Tag)}]", name="account_tags_check"),
)

permission: Final = Table(
    "permission",
    metadata,
    columns.word("rm"),
    columns.word("account"),
    columns.word("vhost"),
    columns.word("configure"),
    columns.word("write"),
    columns.word("read"),
    PrimaryKeyConstraint("rm", "account", "vhost", name="permission_pkey"),
    ForeignKeyConstraint(
        ["rm", "account"], ["dtx.account.rm", "dtx.account.name"], name="permission_account_fkey", ondelete="CASCADE"
    ),
    ForeignKeyConstraint(
        ["rm", "vhost"], ["dtx.vhost.rm", "dtx.vhost.name"], name="permission_vhost_fkey", ondelete="CASCADE"
    ),
)

topic_permission: Final = Table(
    "topic_permission",
    metadata,
    columns.word("rm"),
    columns.word("account"),
    columns.word("vhost"),
    columns.word("exchange"),
    columns.word("write"),
    columns.word("read"),
    PrimaryKeyConstraint("rm", "account", "vhost", "exchange", name="topic_permission_pkey"),
    ForeignKeyConstraint(
        ["rm", "account"],
        ["dtx.account.rm", "dtx.account.name"],
        name="topic_permission_account_fkey",
        ondelete="CASCADE",
    ),
    ForeignKeyConstraint(
        ["rm", "vhost"], ["dtx.vhost.rm", "dtx.vhost.name"], name="topic_permission_vhost_fkey", ondelete="CASCADE"
    ),
    CheckConstraint("octet_length(exchange) BETWEEN 1 AND 255", name="topic_permission_exchange_check"),
)

account_version: Final = Table(
    "account_version",
    metadata,
    columns.word("rm"),
    Column("version", BigInteger, nullable=False),
    PrimaryKeyConstraint("rm", name="account_version_pkey"),
)

LOOPBACK_USERS: Final = frozenset({"guest"})
"""Users that may only connect from this machine: their password is public (RabbitMQ's rule ``loopback_users``)."""
DEFAULT_USER: Final = "guest"
DEFAULT_PASSWORD: Final = b"guest"
DEFAULT_VHOST: Final = "/"

_RM: Final = bindparam("rm", None, type_=Text)
VERSION: Final = select(account_version.c.version).where(account_version.c.rm == _RM)
VHOSTS: Final = select(vhost.c.name).where(vhost.c.rm == _RM).order_by(vhost.c.name)
ACCOUNTS: Final = (
    select(account.c.name, account.c.password_hash, account.c.tags).where(account.c.rm == _RM).order_by(account.c.name)
)
PERMISSIONS: Final = (
    select(permission.c.account, permission.c.vhost, permission.c.configure, permission.c.write, permission.c.read)
    .where(permission.c.rm == _RM)
    .order_by(permission.c.account, permission.c.vhost)
)
TOPICS: Final = (
    select(
        topic_permission.c.account,
        topic_permission.c.vhost,
        topic_permission.c.exchange,
        topic_permission.c.write,
        topic_permission.c.read,
    )
    .where(topic_permission.c.rm == _RM)
    .order_by(topic_permission.c.account, topic_permission.c.vhost, topic_permission.c.exchange)
)
EVERYTHING: Final[tuple[Select[tuple[object, ...]], ...]] = (VERSION, VHOSTS, ACCOUNTS, PERMISSIONS, TOPICS)
"""To be read in one snapshot of the database, in this order, for :func:`snapshot`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """An account.

    Args:
        name: as in the client's login.
        password_hash: never shown.
        tags: values of :class:`Tag`.
        grants: by virtual host; the user may not enter any other.
        topics: by virtual host and topic exchange; at other exchanges every routing key is allowed.
    """

    name: str
    password_hash: str = field(repr=False)
    tags: frozenset[str]
    grants: Mapping[str, Patterns]
    topics: Mapping[tuple[str, str], TopicPatterns] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All users and virtual hosts of a resource manager at one moment.

    Args:
        version: grows with every change; 0 if there was none.
        vhosts: names.
        users: by name.
    """

    version: int = 0
    vhosts: frozenset[str] = frozenset()
    users: Mapping[str, User] = field(default_factory=dict)


def snapshot(
    version: Iterable[tuple[int]],
    vhosts: Iterable[tuple[str]],
    accounts: Iterable[tuple[str, str, list[str]]],
    permissions: Iterable[tuple[str, str, str, str, str]],
    topic_permissions: Iterable[tuple[str, str, str, str, str]],
) -> Snapshot:
    """The rows of :data:`EVERYTHING` as one value."""
    topics: defaultdict[str, dict[tuple[str, str], TopicPatterns]] = defaultdict(dict)
    for name, where, at, write, read in topic_permissions:
        topics[name][where, at] = TopicPatterns(write=write, read=read)
    grants: defaultdict[str, dict[str, Patterns]] = defaultdict(dict)
    for name, where, configure, write, read in permissions:
        grants[name][where] = Patterns(configure=configure, write=write, read=read)
    return Snapshot(
        version=next((number for (number,) in version), 0),
        vhosts=frozenset(name for (name,) in vhosts),
        users=MappingProxyType(
            {
                name: User(
                    name=name,
                    password_hash=stored,
                    tags=frozenset(tags),
                    grants=grants.get(name, {}),
                    topics=topics.get(name, {}),
                )
                for name, stored, tags in accounts
            }
        ),
    )


_CONTENTS: Final = (
    (branch, "branches in doubt", "have them completed"),
    (queue, "durable queues", "delete them"),
    (exchange, "durable exchanges", "delete them"),
)
"""Contents that a virtual host must not have when it is removed, and the remedy for each."""


class EditError(LogError):
    """The request cannot be done. The message gives the reason and the remedy."""


class AccountEditor:
    """Changes the users of a resource manager, each call in a transaction of its own.

    Every method raises EditError if it refuses, LogError if the tables are missing, and LogUnavailable if the database
    is not reachable.

    Args:
        url: the log's database.
        rm: name of the resource manager.
    """

    def __init__(self, url: str, rm: str) -> None:
        self._dsn = Dsn(url)
        self._engine = engine(self._dsn)
        self._rm = rm

    def provision(self) -> bool:
        """Create user guest and virtual host ``/`` if nothing was ever created here. Returns whether it did."""
        with self._transaction() as connection:
            return self._provision(connection)

    def _provision(self, connection: Connection) -> bool:
        # The first process inserts this row; others wait for its commit. A removed guest stays removed.
        first = (
            insert(account_version)
            .values(rm=self._rm, version=0)
            .on_conflict_do_nothing()
            .returning(account_version.c.version)
        )
        if connection.execute(first).first() is None:
            return False
        hashed = hash_password(DEFAULT_PASSWORD)
        tags = [Tag.ADMINISTRATOR]
        connection.execute(insert(vhost).values(rm=self._rm, name=DEFAULT_VHOST))
        connection.execute(insert(account).values(rm=self._rm, name=DEFAULT_USER, password_hash=hashed, tags=tags))
        key = {"rm": self._rm, "account": DEFAULT_USER, "vhost": DEFAULT_VHOST}
        connection.execute(insert(permission).values(**key, configure=".*", write=".*", read=".*"))
        return True

    def read(self) -> Snapshot:
        """All users and virtual hosts."""
        with self._transaction(isolation_level="REPEATABLE READ") as connection:
            rows: Any = [connection.execute(statement, {"rm": self._rm}).all() for statement in EVERYTHING]
        return snapshot(*rows)

    def add_user(self, name: str, password: bytes, tags: Collection[str] = ()) -> None:
        """Create a user, which may enter no virtual host yet."""
        _check_name("user", name)
        hashed = _hashed(password)
        new = insert(account).values(rm=self._rm, name=name, password_hash=hashed, tags=sorted(set(tags)))
        with self._change_transaction() as connection:
            if connection.execute(new.on_conflict_do_nothing().returning(account.c.name)).first() is None:
                raise EditError(f"user {name!r} exists already: dtx user passwd changes the password")

    def put_user(self, name: str, stored: str, tags: Collection[str]) -> None:
        """Create or change a user with the hash of its password, see :func:`~dtx.auth.passwords.imported_hash`."""
        _check_name("user", name)
        changed = {"password_hash": stored, "tags": sorted(set(tags))}
        new = insert(account).values(rm=self._rm, name=name, **changed)
        with self._change_transaction() as connection:
            connection.execute(new.on_conflict_do_update(constraint="account_pkey", set_=changed))

    def set_password(self, name: str, password: bytes) -> None:
        """Change a password. It applies to the next login at once, and closes no connection."""
        hashed = _hashed(password)
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            connection.execute(update(account).where(*self._named(account, name)).values(password_hash=hashed))

    def set_tags(self, name: str, tags: Collection[str]) -> None:
        """Give a user these tags and no others."""
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            connection.execute(update(account).where(*self._named(account, name)).values(tags=sorted(set(tags))))

    def remove_user(self, name: str) -> int:
        """Remove a user with all permissions.

        Returns:
            The number of branches in doubt that it has started. Only a coordinator can complete them from now on.
        """
        with self._change_transaction() as connection:
            if connection.execute(delete(account).where(*self._named(account, name))).rowcount == 0:
                raise self._unknown_user(name)
            owned = select(func.count()).where(branch.c.rm == self._rm, branch.c.owner == name)
            return int(connection.execute(owned).scalar_one())

    def grant(
        self, name: str, where: str, *, configure: str | None = None, write: str | None = None, read: str | None = None
    ) -> Patterns:
        """Give a user permissions in a virtual host, or change them.

        Args:
            name: the user.
            where: the virtual host.
            configure: regular expression; ``None`` for no change (at first it is empty and matches no name).
            write: likewise.
            read: likewise.

        Returns:
            Its permissions after the change.
        """
        given = {"configure": configure, "write": write, "read": read}
        changed = {word: pattern for word, pattern in given.items() if pattern is not None}
        for word, pattern in changed.items():
            _check_pattern(word, pattern, pattern)
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            self._require_vhost(connection, where)
            key = {"rm": self._rm, "account": name, "vhost": where}
            new = insert(permission).values(**key, **(dict.fromkeys(given, "") | changed))
            new = (
                new.on_conflict_do_update(constraint="permission_pkey", set_=changed)
                if changed
                else new.on_conflict_do_nothing()
            )
            connection.execute(new)
            columns = (permission.c.configure, permission.c.write, permission.c.read)
            found = connection.execute(select(*columns).where(permission.c.account == name, *self._in_vhost(where)))
            return Patterns(*found.one())

    def revoke(self, name: str, where: str) -> None:
        """Revoke all permissions of a user in a virtual host, which it may not enter any more."""
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            deletion = delete(permission).where(permission.c.account == name, *self._in_vhost(where))
            if connection.execute(deletion).rowcount == 0:
                raise EditError(f"user {name!r} has no permissions in virtual host {where!r}")

    def grant_topic(
        self, name: str, where: str, exchange_name: str, *, write: str | None = None, read: str | None = None
    ) -> TopicPatterns:
        """Limit the routing keys with which a user may use a topic exchange.

        The user needs the permissions to use the exchange as well.

        Args:
            name: the user.
            where: the virtual host.
            exchange_name: need not exist yet, nor be a topic exchange.
            write: regular expression, in which ``{username}`` and ``{vhost}`` are replaced by the names. ``None``: no
                change. At first it is empty and matches only the empty key.
            read: likewise.

        Returns:
            Its topic permissions after the change.
        """
        given = {"write": write, "read": read}
        changed = {word: pattern for word, pattern in given.items() if pattern is not None}
        for word, pattern in changed.items():
            _check_pattern(word, pattern, expand(TopicPatterns(pattern, ""), name, where).write)
        _check_name("exchange", exchange_name)
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            self._require_vhost(connection, where)
            key = {"rm": self._rm, "account": name, "vhost": where, "exchange": exchange_name}
            new = insert(topic_permission).values(**key, **(dict.fromkeys(given, "") | changed))
            new = (
                new.on_conflict_do_update(constraint="topic_permission_pkey", set_=changed)
                if changed
                else new.on_conflict_do_nothing()
            )
            connection.execute(new)
            columns = (topic_permission.c.write, topic_permission.c.read)
            found = connection.execute(select(*columns).where(*self._topics(name, where, exchange_name)))
            return TopicPatterns(*found.one())

    def revoke_topic(self, name: str, where: str, exchange_name: str | None = None) -> int:
        """Lift the limits of :meth:`grant_topic`: every routing key is allowed again.

        Args:
            name: the user.
            where: the virtual host.
            exchange_name: of the exchange; ``None`` for all.

        Returns:
            The number of exchanges where limits were lifted.
        """
        with self._change_transaction() as connection:
            self._require_user(connection, name)
            deletion = delete(topic_permission).where(*self._topics(name, where, exchange_name))
            count = connection.execute(deletion).rowcount
            if not count:
                at = "" if exchange_name is None else f" for exchange {exchange_name!r}"
                raise EditError(f"user {name!r} has no topic permissions{at} in virtual host {where!r}")
            return count

    def add_vhost(self, name: str) -> None:
        """Create a virtual host."""
        _check_name("virtual host", name)
        new = insert(vhost).values(rm=self._rm, name=name).on_conflict_do_nothing().returning(vhost.c.name)
        with self._change_transaction() as connection:
            if connection.execute(new).first() is None:
                raise EditError(f"virtual host {name!r} exists already")

    def remove_vhost(self, name: str) -> None:
        """Remove an empty virtual host: a removal must never lose a message or a prepared branch."""
        with self._change_transaction() as connection:
            self._require_vhost(connection, name)
            for table, things, what_to_do in _CONTENTS:
                held = select(literal(1)).where(table.c.rm == self._rm, table.c.vhost == name).limit(1)
                if connection.execute(held).first() is not None:
                    raise EditError(f"virtual host {name!r} still has {things}: {what_to_do} first")
            connection.execute(delete(vhost).where(*self._named(vhost, name)))

    def _named(self, table: Table, name: str) -> tuple[Any, ...]:
        return table.c.rm == self._rm, table.c.name == name

    def _in_vhost(self, where: str) -> tuple[Any, ...]:
        return permission.c.rm == self._rm, permission.c.vhost == where

    def _topics(self, name: str, where: str, exchange_name: str | None) -> tuple[Any, ...]:
        at = () if exchange_name is None else (topic_permission.c.exchange == exchange_name,)
        mine = topic_permission.c.account == name
        return topic_permission.c.rm == self._rm, topic_permission.c.vhost == where, mine, *at

    def _require_user(self, connection: Connection, name: str) -> None:
        # locked, so that it still exists when the change is written
        if (
            connection.execute(select(account.c.name).where(*self._named(account, name)).with_for_update()).first()
            is None
        ):
            raise self._unknown_user(name)

    def _require_vhost(self, connection: Connection, name: str) -> None:
        if connection.execute(select(vhost.c.name).where(*self._named(vhost, name)).with_for_update()).first() is None:
            raise EditError(f"there is no virtual host {name!r}: dtx vhost list shows those there are")

    def _unknown_user(self, name: str) -> EditError:
        return EditError(f"there is no user {name!r}: dtx user list shows those there are")

    @contextmanager
    def _change_transaction(self) -> Iterator[Connection]:
        """A transaction for a change. It first provisions guest and ``/``.

        A change marks them as provisioned, so a change before the first start must provision them.
        """
        with self._transaction() as connection:
            self._provision(connection)
            yield connection

    @contextmanager
    def _transaction(self, **options: Any) -> Iterator[Connection]:
        with (
            explained(self._dsn, tables="tables of users"),
            self._engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection


def _check_pattern(word: str, given: str, expanded: str) -> None:
    try:
        if "\0" in expanded:
            raise BadPattern("it holds a NUL")
        check_pattern(expanded)
    except BadPattern as error:
        raise EditError(f"the pattern {given!r} of --{word} cannot be used: {error}") from None


def _check_name(what: str, name: str) -> None:
    try:
        octets = len(name.encode())
    except UnicodeEncodeError:
        raise EditError(f"the name of the {what} must be UTF-8") from None
    if not 1 <= octets <= MAX_NAME or "\0" in name:
        raise EditError(f"the name of the {what} must have 1 to {MAX_NAME} bytes, and no NUL")


def _hashed(password: bytes) -> str:
    if not 1 <= len(password) <= MAX_PASSWORD or b"\0" in password:
        raise EditError(f"a password must have 1 to {MAX_PASSWORD} bytes, and no NUL")
    return hash_password(password)
