"""The tables of standalone mode's users: virtual hosts, accounts, permissions, permissions on topics.

Operators change them while dtx runs, with ``dtx user`` and ``dtx vhost``; no lease is needed. Triggers count every
change in ``account_version``, so that a running dtx notices by reading one number, whoever made the change.
"""

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from dtx.log.tables import metadata

TAGS: Final = ("administrator", "monitoring", "impersonator", "operator")
"""What an account may be besides its permissions: the words are RabbitMQ's, and one more for who decides."""


def _word(name: str) -> Column[str]:
    return Column(name, Text(collation="C"), nullable=False)


# The wire carries names as short strings: 255 octets.
_NAME: Final = "octet_length(name) BETWEEN 1 AND 255"

vhost: Final = Table(
    "vhost",
    metadata,
    _word("rm"),
    _word("name"),
    PrimaryKeyConstraint("rm", "name", name="vhost_pkey"),
    CheckConstraint(_NAME, name="vhost_name_check"),
)

account: Final = Table(
    "account",
    metadata,
    _word("rm"),
    _word("name"),
    _word("password_hash"),
    Column("tags", ARRAY(Text(collation="C")), nullable=False),
    PrimaryKeyConstraint("rm", "name", name="account_pkey"),
    CheckConstraint(_NAME, name="account_name_check"),
    CheckConstraint("password_hash LIKE '$argon2id$%'", name="account_password_check"),
    CheckConstraint(f"tags <@ ARRAY[{', '.join(map(repr, TAGS))}]", name="account_tags_check"),
)

permission: Final = Table(
    "permission",
    metadata,
    _word("rm"),
    _word("account"),
    _word("vhost"),
    _word("configure"),
    _word("write"),
    _word("read"),
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
    _word("rm"),
    _word("account"),
    _word("vhost"),
    _word("exchange"),
    _word("write"),
    _word("read"),
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
    _word("rm"),
    Column("version", BigInteger, nullable=False),
    PrimaryKeyConstraint("rm", name="account_version_pkey"),
)
