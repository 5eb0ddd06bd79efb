"""Operators: their tokens, and the audit log of their actions, for API and command line.

No lease is needed to write the tables.

A token has 256 random bits and cannot be guessed, so a fast hash is enough. It is shown once. A line of the audit log
is written before an action begins, and completed when its result is known. An action without a result may have
happened.
"""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Connection,
    Identity,
    Index,
    PrimaryKeyConstraint,
    Table,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from dtx.auth.roles import OperatorRole
from dtx.db.columns import metadata, moment, octets, one_of, prose, word
from dtx.db.connections import Dsn, LogError, explained, timed_engine

PREFIX: Final = "dtx_"
"""Prefix of tokens, which lets secret scanners find leaked ones."""
MAX_NAME: Final = 64

token: Final = Table(
    "token",
    metadata,
    word("rm"),
    word("name"),
    word("role"),
    octets("hash"),
    prose("made_by"),
    moment("made_at"),
    moment("expires_at", nullable=True),
    PrimaryKeyConstraint("rm", "name", name="token_pkey"),
    CheckConstraint("octet_length(name) BETWEEN 1 AND 64", name="token_name_check"),
    CheckConstraint(one_of("role", OperatorRole), name="token_role_check"),
    CheckConstraint("octet_length(hash) = 32", name="token_hash_check"),
    Index("token_hash_idx", "hash", unique=True),
)

audit: Final = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    moment("at", now=True),
    word("rm"),
    prose("actor"),
    word("role"),
    prose("address"),
    word("action"),
    prose("subject"),
    prose("reason"),
    prose("detail"),
    prose("result", nullable=True, comment="how it ended; null when dtx died before it was known"),
    PrimaryKeyConstraint("id", name="audit_pkey"),
)


class TokenError(LogError):
    """A token cannot be made or revoked. The message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret.

    Args:
        name: of its holder; recorded in journal and audit log.
        role: its permissions.
        made_by: name of its maker.
        made_at, expires_at: seconds since the epoch; ``None`` for never.
    """

    name: str
    role: OperatorRole
    made_by: str
    made_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """A line of the audit log.

    Args:
        id: ascending number.
        at: seconds since the epoch.
        actor, role: name and role of the operator.
        address: of the operator.
        action: name of the action.
        subject: its object, for example virtual host and xid.
        reason: that the operator gave.
        detail: parameters of the request, as JSON.
        result: its result; ``None`` if dtx died before it was known.
    """

    id: int
    at: float
    actor: str
    role: str
    address: str
    action: str
    subject: str
    reason: str
    detail: str
    result: str | None


class OperatorLog:
    """Reads and writes tokens and audit log. Every call is a transaction of its own, and blocks.

    Every method raises LogError if the tables are missing, and LogUnavailable if the database is not reachable.

    Args:
        url: the log's database.
        rm: name of the resource manager.
    """

    def __init__(self, url: str, rm: str) -> None:
        self._dsn = Dsn(url)
        self._engine = timed_engine(self._dsn)
        self._rm = rm

    # -- tokens

    def make_token(self, name: str, role: OperatorRole, made_by: str, *, seconds: float | None = None) -> str:
        """Make a token.

        Args:
            name: of its holder.
            role: its permissions.
            made_by: name of its maker, for people.
            seconds: lifetime; ``None`` for no end.

        Returns:
            The text of the token, which is not stored.

        Raises:
            TokenError: the name is taken, or not valid.
        """
        if not 1 <= len(name.encode()) <= MAX_NAME or not name.isprintable() or ":" in name:
            raise TokenError(f"{name!r} is not a name of 1 to {MAX_NAME} printable bytes without colons")
        secret = PREFIX + secrets.token_urlsafe(32)
        new = insert(token).values(
            rm=self._rm,
            name=name,
            role=str(role),
            hash=_hash(secret),
            made_by=made_by,
            made_at=func.now(),
            expires_at=None if seconds is None else func.now() + func.make_interval(0, 0, 0, 0, 0, 0, seconds),
        )
        with self._transaction() as connection:
            if connection.execute(new.on_conflict_do_nothing().returning(token.c.name)).first() is None:
                raise TokenError(f"there is a token named {name!r} already")
        return secret

    def revoke_token(self, name: str) -> None:
        """Delete a token.

        Raises:
            TokenError: there is no token of that name.
        """
        with self._transaction() as connection:
            deletion = delete(token).where(token.c.rm == self._rm, token.c.name == name)
            if connection.execute(deletion).rowcount == 0:
                raise TokenError(f"there is no token named {name!r}")

    def tokens(self) -> list[Token]:
        """All tokens, by name."""
        with self._transaction() as connection:
            return [_token(row) for row in connection.execute(_TOKENS.where(token.c.rm == self._rm)).all()]

    def find_token(self, secret: str) -> Token | None:
        """The token with the text *secret*; ``None`` if there is none, or it has expired."""
        if not secret.startswith(PREFIX):
            return None
        wanted = _TOKENS.where(
            token.c.rm == self._rm,
            token.c.hash == _hash(secret),
            func.coalesce(token.c.expires_at > func.now(), True),
        )
        with self._transaction() as connection:
            row = connection.execute(wanted).first()
        return None if row is None else _token(row)

    # -- the audit log

    def begin(self, *, actor: str, role: str, address: str, action: str, subject: str, reason: str, detail: str) -> int:
        """Record an action before it begins. Arguments as in :class:`AuditLine`.

        Returns:
            The number of the line, for :meth:`finish`.
        """
        line = {"actor": actor, "role": role, "address": address, "action": action}
        line |= {"subject": subject, "reason": reason, "detail": detail}
        line = {key: _storable(value) for key, value in line.items()}
        with self._transaction() as connection:
            new = insert(audit).values(rm=self._rm, **line).returning(audit.c.id)
            return int(connection.execute(new).scalar_one())

    def finish(self, number: int, result: str) -> None:
        """Record the result of an action."""
        with self._transaction() as connection:
            connection.execute(update(audit).where(audit.c.id == number).values(result=_storable(result)))

    def audit_lines(
        self,
        *,
        before: int | None = None,
        actor: str | None = None,
        action: str | None = None,
        subject: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
    ) -> list[AuditLine]:
        """Lines that match, the latest first; ``None`` matches all.

        Args:
            before: only lines with smaller numbers.
            actor: the exact actor.
            action: the exact action.
            subject: a part of the subject.
            since: seconds since the epoch: lines of that time or later.
            until: seconds since the epoch: lines before that time.
            limit: greatest number of lines.
        """
        columns = [audit.c[name] for name in AuditLine.__slots__]
        statement = select(*columns).where(*self._matching(actor, action, subject))
        statement = statement.order_by(audit.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(audit.c.id < before)
        if since is not None:
            statement = statement.where(audit.c.at >= datetime.fromtimestamp(since, UTC))
        if until is not None:
            statement = statement.where(audit.c.at < datetime.fromtimestamp(until, UTC))
        with self._transaction() as connection:
            rows = connection.execute(statement).all()
        return [AuditLine(**dict(zip(AuditLine.__slots__, row, strict=True))) for row in rows]

    def audit_count(self, most: int, actor: str | None, action: str | None, subject: str | None) -> int:
        """The number of lines that match, but at most *most*; the other arguments as in :meth:`audit_lines`."""
        lines = select(audit.c.id).where(*self._matching(actor, action, subject)).limit(most).subquery()
        with self._transaction() as connection:
            return int(connection.execute(select(func.count()).select_from(lines)).scalar_one())

    def _matching(self, actor: str | None, action: str | None, subject: str | None) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = [audit.c.rm == self._rm]
        for column, value in ((audit.c.actor, actor), (audit.c.action, action)):
            if value is not None:
                found.append(column == _storable(value))
        if subject is not None:
            found.append(func.strpos(audit.c.subject, _storable(subject)) > 0)
        return found

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with explained(self._dsn), self._engine.begin() as connection:
            yield connection


_TOKENS: Final = select(token.c.name, token.c.role, token.c.made_by, token.c.made_at, token.c.expires_at).order_by(
    token.c.name
)


def _token(row: Any) -> Token:
    name, role, made_by, made_at, expires_at = row
    return Token(name=name, role=OperatorRole(role), made_by=made_by, made_at=made_at, expires_at=expires_at)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _storable(text: str) -> str:
    """*text* with characters escaped that PostgreSQL cannot store."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
