"""What the tables say about users: read in whole, since that is little, and kept as one value that never changes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from sqlalchemy import Select, Text, bindparam, select

from dtx.auth.permissions import Patterns, TopicPatterns
from dtx.auth.tables import account, account_version, permission, topic_permission, vhost

LOOPBACK_USERS: Final = frozenset({"guest"})
"""Who may only connect from this machine, since their password is known to all: RabbitMQ's rule ``loopback_users``."""
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
        name: as the client gives it.
        password_hash: never shown.
        tags: what else it is; words of ``dtx.auth.tables.TAGS``.
        grants: by virtual host; where there is none the user may not enter.
        topics: by virtual host and topic exchange; where there are none every routing key will do.
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
        version: grows with every change; 0 where there never was one.
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
    for name, where, exchange, write, read in topic_permissions:
        topics[name][where, exchange] = TopicPatterns(write=write, read=read)
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
