"""The tables of operators: their tokens, and the trail of what they did. No lease is needed to write them."""

from enum import StrEnum
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

from dtx.log.tables import metadata


class Role(StrEnum):
    """What somebody may do; each may do what those before it may."""

    VIEWER = "viewer"
    """Look at everything but the contents of messages."""
    OPERATOR = "operator"
    """Decide about a branch and its messages, one at a time."""
    COORDINATOR = "coordinator"
    """Decide about many at once; make users, virtual hosts and tokens; read the trail."""

    def includes(self, other: "Role") -> bool:
        """Whether who has this role may do what *other* may."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {role: rank for rank, role in enumerate(Role)}


def _word(name: str) -> Column[str]:
    return Column(name, Text(collation="C"), nullable=False)


def _text(name: str, *, nullable: bool = False, comment: str | None = None) -> Column[str]:
    return Column(name, Text, nullable=nullable, comment=comment)


token: Final = Table(
    "token",
    metadata,
    _word("rm"),
    _word("name"),
    _word("role"),
    Column("hash", LargeBinary, nullable=False),
    _text("made_by"),
    Column("made_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    PrimaryKeyConstraint("rm", "name", name="token_pkey"),
    CheckConstraint("octet_length(name) BETWEEN 1 AND 64", name="token_name_check"),
    CheckConstraint(f"role IN ({', '.join(repr(str(role)) for role in Role)})", name="token_role_check"),
    CheckConstraint("octet_length(hash) = 32", name="token_hash_check"),
    Index("token_hash_idx", "hash", unique=True),
)

audit: Final = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("at", DateTime(timezone=True), server_default=text("now()"), nullable=False),
    _word("rm"),
    _text("actor"),
    _word("role"),
    _text("address"),
    _word("action"),
    _text("subject"),
    _text("reason"),
    _text("detail"),
    _text("result", nullable=True, comment="how it ended; null when dtx died before it was known"),
    PrimaryKeyConstraint("id", name="audit_pkey"),
)
