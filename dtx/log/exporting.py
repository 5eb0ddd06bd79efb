"""The messages of a branch, one after the other: whatever it holds, some MiB of memory will do.

Nothing is kept open between two looks. A branch that ends meanwhile takes its messages along; then the export ends with
an error rather than short.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Select, Subquery, Text, case, cast, func, null, select, union_all

from dtx.log.api import LogError
from dtx.log.queries import WORK_COLUMNS, kept
from dtx.log.reading import LogReader
from dtx.log.records import Fate, WorkKind
from dtx.log.tables import archive, branch, work
from dtx.xa.xid import Xid

_HEAD: Final = ("position", "kind", "fate", "exchange", "routing_key", "queue", "properties")
_SMALL: Final = 64 * 1024
"""Octets of a body up to which it comes with its row."""
_ROWS: Final = 32
_CHUNK: Final = 1024 * 1024
"""Octets of a larger body that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A message without its body.

    Args:
        branch_id: of the branch.
        position: within it.
        kind: what the branch does with it.
        fate: what became of it; ``None`` while that is open.
        exchange, routing_key, queue: where it goes, or comes from.
        properties: content header from the property flags on.
        size: octets of the body.
    """

    branch_id: UUID
    position: int
    kind: WorkKind
    fate: Fate | None
    exchange: bytes
    routing_key: bytes
    queue: bytes | None
    properties: bytes
    size: int


class Export:
    """What is exported of an xid.

    Args:
        log: read from.
        rm: name of the resource manager.
        vhost: of the branch.
        xid: of the branch.
        archived: whether what nobody got of a forgotten branch is meant, rather than what a branch holds.
        positions: these messages alone; empty for all.
    """

    def __init__(
        self, log: LogReader, rm: str, vhost: str, xid: Xid, *, archived: bool = False, positions: Sequence[int] = ()
    ) -> None:
        self._log = log
        source = archive if archived else branch
        column = source.c.branch_id if archived else source.c.id
        found = log.rows(
            select(column)
            .distinct()
            .where(
                source.c.rm == rm,
                source.c.vhost == vhost,
                source.c.format_id == xid.format_id,
                source.c.gtrid == xid.gtrid,
                source.c.bqual == xid.bqual,
            )
            .order_by(column)
        )
        self.branches: tuple[UUID, ...] = tuple(row[0] for row in found)
        """Those of that xid: several may have been forgotten, one is there."""
        self._archived = archived
        self._positions = tuple(positions)
        self.count = sum(self._count(branch_id) for branch_id in self.branches)
        """How many messages it will be."""

    def __iter__(self) -> Iterator[tuple[Piece, Iterator[bytes]]]:
        """Each message with its body, which is to be read before the next one.

        Raises:
            LogError: the branch has ended meanwhile, or the database is away.
        """
        told = 0
        for branch_id in self.branches:
            last = -1
            while rows := self._log.rows(self._page(branch_id, last)):
                for row in rows:
                    piece = _piece(branch_id, row)
                    yield piece, self._body(piece, row[7])
                    last, told = piece.position, told + 1
        if told != self.count:
            raise _ended()

    def _count(self, branch_id: UUID) -> int:
        messages = self._messages(branch_id)
        return int(self._log.rows(select(func.count()).select_from(messages).where(*self._chosen(messages)))[0][0])

    def _page(self, branch_id: UUID, last: int) -> Select[Any]:
        of = self._messages(branch_id)
        size = func.octet_length(of.c.body)
        return (
            select(*(of.c[name] for name in _HEAD), case((size <= _SMALL, of.c.body)), size)
            .where(of.c.position > last, *self._chosen(of))
            .order_by(of.c.position)
            .limit(_ROWS)
        )

    def _body(self, piece: Piece, whole: bytes | None) -> Iterator[bytes]:
        if whole is not None:
            yield bytes(whole)
            return
        of = self._messages(piece.branch_id)
        for start in range(0, piece.size, _CHUNK):
            chunk = select(func.substring(of.c.body, start + 1, _CHUNK)).where(of.c.position == piece.position)
            found = self._log.rows(chunk)
            if not found:
                raise _ended()
            yield bytes(found[0][0])

    def _messages(self, branch_id: UUID) -> Subquery:
        if self._archived:
            return select(*_named(archive.c)).where(archive.c.branch_id == branch_id).subquery("messages")
        held = kept(branch_id).order_by(None).subquery("held")
        by_name: dict[str, Any] = {column.name: found for column, found in zip(WORK_COLUMNS, held.c, strict=True)}
        by_name["fate"] = cast(null(), Text)  # of messages in the database that is open as long as they are there
        own = select(*_named(work.c)).where(work.c.branch_id == branch_id)
        return union_all(own, select(*_named(by_name))).subquery("messages")

    def _chosen(self, of: Subquery) -> tuple[Any, ...]:
        return (of.c.position.in_(self._positions),) if self._positions else ()


def _named(columns: Any) -> list[Any]:
    return [columns[name] for name in (*_HEAD, "body")]


def _piece(branch_id: UUID, row: Sequence[Any]) -> Piece:
    position, kind, fate, exchange, routing_key, queue, properties, _, size = row
    return Piece(
        branch_id=branch_id,
        position=int(position),
        kind=WorkKind(kind),
        fate=None if fate is None else Fate(fate),
        exchange=bytes(exchange),
        routing_key=bytes(routing_key),
        queue=None if queue is None else bytes(queue),
        properties=bytes(properties),
        size=int(size),
    )


def _ended() -> LogError:
    return LogError("the branch has ended while its messages were read: look again")
