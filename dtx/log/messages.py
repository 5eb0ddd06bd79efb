"""Reading messages and topology: a start that touches no body, bodies in batches, what became of a write.

A start reads the primary key of ``message`` alone. PostgreSQL packs the positions of a queue into one value, which is
an array here without a Python object for each: a million of them take a second or two.
"""

import sys
from array import array
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

from sqlalchemy import bindparam, select, text

from dtx.log import binary
from dtx.log.api import LogError
from dtx.log.changes import (
    BindingRow,
    Definitions,
    DestinationKind,
    ExchangeRow,
    QueueContents,
    QueueRow,
    Slot,
    StoredMessage,
)
from dtx.log.queries import Query, Readers
from dtx.log.tables import binding, exchange, queue

QUEUES_AT_ONCE: Final = 50
"""Queues whose positions come in the first answer."""
MAX_QUEUES_AT_ONCE: Final = 2_000
"""And in any: short ones come ever more at once, so that a hundred thousand do not take a round trip each."""
POSITIONS_AT_ONCE: Final = 500_000
"""Positions in one answer beyond which the next has fewer queues: some megabytes."""
MESSAGES_AT_ONCE: Final = 1_000
"""Messages whose bodies come in one answer, unless a number of octets ends it before."""
_NO_LIMIT: Final = 2**62
SLOTS_AT_ONCE: Final = 10_000
"""Slots in one question whether they exist."""

_EXCHANGES: Final = Query(
    select(exchange.c.vhost, exchange.c.name, exchange.c.type, exchange.c.auto_delete, exchange.c.internal,
           exchange.c.arguments)
    .where(exchange.c.rm == bindparam("rm"))
    .order_by(exchange.c.vhost, exchange.c.name)
)  # fmt: skip
_QUEUES: Final = Query(
    select(queue.c.vhost, queue.c.id, queue.c.name, queue.c.auto_delete, queue.c.arguments, queue.c.delivered)
    .where(queue.c.rm == bindparam("rm"))
    .order_by(queue.c.vhost, queue.c.name)
)
_BINDINGS: Final = Query(
    select(binding.c.vhost, binding.c.source, binding.c.destination_kind, binding.c.destination,
           binding.c.routing_key, binding.c.arguments)
    .where(binding.c.rm == bindparam("rm"))
    .order_by(binding.c.vhost, binding.c.source, binding.c.destination_kind, binding.c.destination,
              binding.c.routing_key)
)  # fmt: skip
_OF_EACH: Final = """
SELECT q.id, s.*
FROM unnest(CAST(:queues AS bigint[])) WITH ORDINALITY AS q(id, ordinal)
CROSS JOIN LATERAL (SELECT {packed} FROM (
    SELECT {columns} FROM dtx.message m WHERE m.queue = q.id {condition} ORDER BY m.position) AS m
) AS s(positions{more})
WHERE s.positions IS NOT NULL
"""


def _of_each(packed: str, columns: str, *, more: str = "", condition: str = "") -> Query:
    values = ", ".join(f"string_agg({value}, CAST('' AS bytea))" for value in ("int8send(m.position)", *packed.split()))
    return Query(text(_OF_EACH.format(packed=values, columns=f"m.position{columns}", more=more, condition=condition)))


_POSITIONS: Final = _of_each("", "")
_SIZE: Final = (
    "coalesce(octet_length(m.body), (SELECT octet_length(b.content) FROM dtx.body b WHERE b.id = m.shared), 0)"
)
_DETAILS: Final = _of_each("int4send(m.flags) int4send(m.size)", f", m.flags, {_SIZE} AS size", more=", flags, sizes")
_TRANSIENT: Final = _of_each("", "", condition="AND m.flags & 1 = 0")
_EXPIRIES: Final = _of_each(
    "timestamptz_send(m.expires_at)", ", m.expires_at", more=", times", condition="AND m.expires_at IS NOT NULL"
)
_IN_SLOTS: Final = """
FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[])) AS u(queue, position)
CROSS JOIN LATERAL (
    SELECT * FROM dtx.message m WHERE m.queue = u.queue AND m.position = u.position OFFSET 0) AS m
"""
"""OFFSET 0: a planner that has last seen an empty table would read all of it, and compare each row with each slot."""
_MESSAGES: Final = Query(
    # Sizes are known without reading what is stored beside the row.
    text(f"""
SELECT m.queue, m.position, m.exchange, m.routing_key, m.flags, m.properties,
    coalesce(m.body, (SELECT b.content FROM dtx.body b WHERE b.id = m.shared)), m.expires_at, m.shared
FROM (
    SELECT m.*, sum(m.size) OVER (ORDER BY m.ordinal) - m.size AS before
    FROM (
        SELECT m.*, {_SIZE} AS size, u.ordinal
        FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[]))
            WITH ORDINALITY AS u(queue, position, ordinal)
        CROSS JOIN LATERAL (
            SELECT * FROM dtx.message m WHERE m.queue = u.queue AND m.position = u.position OFFSET 0) AS m
    ) AS m
) AS m
WHERE m.before < :octets ORDER BY m.ordinal
""")
)
_BODY: Final = StoredMessage._fields.index("body")
_EXIST: Final = Query(text("SELECT m.queue, m.position" + _IN_SLOTS))
_STRAYS: Final = Query(
    # one look-up for each queue, however many messages it has
    text("""
WITH RECURSIVE q AS (
    (SELECT m.queue, m.rm FROM dtx.message m ORDER BY m.queue, m.position LIMIT 1)
    UNION ALL
    SELECT n.queue, n.rm FROM q CROSS JOIN LATERAL (
        SELECT m.queue, m.rm FROM dtx.message m WHERE m.queue > q.queue ORDER BY m.queue, m.position LIMIT 1) AS n
)
SELECT q.queue FROM q WHERE q.rm = :rm
""")
)


class MessageReader:
    """Reads messages and topology on the log's reading sessions; a method raises LogUnavailable as they do.

    Args:
        readers: the sessions.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def load_definitions(self) -> Definitions:
        """See :class:`dtx.log.api.MessageLog`."""
        fetch = self._readers.fetch
        return Definitions(
            exchanges=tuple(
                ExchangeRow(
                    vhost=vhost, name=name, type=type_, auto_delete=auto, internal=internal, arguments=arguments
                )
                for vhost, name, type_, auto, internal, arguments in await fetch(_EXCHANGES)
            ),
            queues=tuple(
                QueueRow(vhost=vhost, id=id_, name=name, auto_delete=auto, arguments=arguments, delivered=delivered)
                for vhost, id_, name, auto, arguments, delivered in await fetch(_QUEUES)
            ),
            bindings=tuple(
                BindingRow(vhost, source, DestinationKind(kind), destination, key, arguments)
                for vhost, source, kind, destination, key, arguments in await fetch(_BINDINGS)
            ),
        )

    async def load_queues(
        self, queues: Sequence[int], *, detailed: Collection[int] = ()
    ) -> AsyncIterator[QueueContents]:
        """See :class:`dtx.log.api.MessageLog`."""
        start, size = 0, QUEUES_AT_ONCE
        while start < len(queues):
            count = 0
            for contents in await self._contents(queues[start : start + size], detailed):
                count += len(contents.positions)
                yield contents
            start += size
            size = max(1, size // 2) if count > POSITIONS_AT_ONCE else min(2 * size, MAX_QUEUES_AT_ONCE)

    async def _contents(self, queues: Sequence[int], detailed: Collection[int]) -> list[QueueContents]:
        fetch = self._readers.fetch
        plain = [id_ for id_ in queues if id_ not in detailed]
        packed = {id_: packed for id_, *packed in await fetch(_POSITIONS, queues=plain)} if plain else {}
        if len(plain) < len(queues):
            wanted = [id_ for id_ in queues if id_ in detailed]
            packed |= {id_: packed for id_, *packed in await fetch(_DETAILS, queues=wanted)}
        full = list(packed)
        transient: dict[int, bytes] = dict(await fetch(_TRANSIENT, queues=full)) if full else {}
        expiries = {id_: packed for id_, *packed in await fetch(_EXPIRIES, queues=full)} if full else {}
        return [
            QueueContents(
                queue=id_,
                positions=_unpacked("q", packed[id_][0]) if id_ in packed else array("q"),
                transient=_unpacked("q", transient.get(id_)),
                expiries=_expiries(*expiries[id_]) if id_ in expiries else (),
                flags=_unpacked("i", packed[id_][1] if id_ in packed else None) if id_ in detailed else None,
                sizes=_unpacked("i", packed[id_][2] if id_ in packed else None) if id_ in detailed else None,
            )
            for id_ in queues
        ]

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """See :class:`dtx.log.api.MessageLog`."""
        found: dict[Slot, StoredMessage] = {}
        left = _NO_LIMIT if octets is None else octets
        for start in range(0, len(slots), MESSAGES_AT_ONCE):
            queues, positions = zip(*slots[start : start + MESSAGES_AT_ONCE], strict=True)
            rows = await self._readers.fetch(_MESSAGES, queues=list(queues), positions=list(positions), octets=left)
            for row in rows:
                message = StoredMessage._make(row)
                if row[_BODY] is None:
                    raise LogError(f"body {message.shared} is not in the database, but a message uses it")
                found[message.slot] = message
                left -= len(message.body)
            if left <= 0:
                break
        return found

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """See :class:`dtx.log.api.MessageLog`."""
        found: set[Slot] = set()
        for start in range(0, len(slots), SLOTS_AT_ONCE):
            queues, positions = zip(*slots[start : start + SLOTS_AT_ONCE], strict=True)
            rows = await self._readers.fetch(_EXIST, queues=list(queues), positions=list(positions))
            found.update(map(Slot._make, rows))
        return found

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """See :class:`dtx.log.api.MessageLog`."""
        there = set(known)
        return [queue for (queue,) in await self._readers.fetch(_STRAYS) if queue not in there]


def _unpacked(typecode: str, data: bytes | None) -> "array[int]":
    """Big endian integers, as PostgreSQL sends them, as an array of this machine's."""
    numbers: array[int] = array(typecode)
    numbers.frombytes(data or b"")
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _expiries(positions: bytes, times: bytes) -> list[tuple[int, float]]:
    return list(zip(_unpacked("q", positions), map(binary.seconds_from, _unpacked("q", times)), strict=True))
