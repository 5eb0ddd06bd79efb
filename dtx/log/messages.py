"""Reading messages and topology: a start that touches no body, bodies in batches, what became of a write.

A start reads the primary key of ``message`` alone. PostgreSQL packs the positions of a queue into one value, which is
an array here without a Python object for each: a million of them take a second or two.
"""

import sys
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

from sqlalchemy import bindparam, select, text

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
"""Queues whose positions come in one answer, so that ten thousand small ones do not take a round trip each."""
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
    SELECT {columns} FROM dtx.message m WHERE m.queue = q.id ORDER BY m.position) AS m) AS s
"""
_POSITIONS: Final = Query(
    text(_OF_EACH.format(packed="string_agg(int8send(m.position), CAST('' AS bytea))", columns="m.position"))
)
_DETAILS: Final = Query(
    text(
        _OF_EACH.format(
            packed="string_agg(int8send(m.position), CAST('' AS bytea)), "
            "string_agg(int4send(m.flags), CAST('' AS bytea)), "
            "string_agg(int4send(octet_length(m.body)), CAST('' AS bytea))",
            columns="m.position, m.flags, m.body",
        )
    )
)
_TRANSIENT: Final = Query(
    text(
        "SELECT m.queue, m.position FROM unnest(CAST(:queues AS bigint[])) AS q(id) "
        "JOIN dtx.message m ON m.queue = q.id AND m.flags & 1 = 0"
    )
)
_EXPIRIES: Final = Query(
    text(
        "SELECT m.queue, m.position, m.expires_at FROM unnest(CAST(:queues AS bigint[])) AS q(id) "
        "JOIN dtx.message m ON m.queue = q.id AND m.expires_at IS NOT NULL"
    )
)
_IN_SLOTS: Final = """
FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[])) AS u(queue, position)
JOIN dtx.message m ON m.queue = u.queue AND m.position = u.position
"""
_MESSAGES: Final = Query(
    # Sizes are known without reading what is stored beside the row.
    text("""
SELECT m.queue, m.position, m.exchange, m.routing_key, m.flags, m.properties, m.body, m.expires_at
FROM (
    SELECT m.*, sum(octet_length(m.body)) OVER (ORDER BY u.ordinal) - octet_length(m.body) AS before, u.ordinal
    FROM unnest(CAST(:queues AS bigint[]), CAST(:positions AS bigint[])) WITH ORDINALITY AS u(queue, position, ordinal)
    JOIN dtx.message m ON m.queue = u.queue AND m.position = u.position
) AS m
WHERE m.before < :octets ORDER BY m.ordinal
""")
)
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
SELECT q.queue FROM q WHERE q.rm = :rm AND q.queue <> ALL (CAST(:known AS bigint[]))
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
        fetch = self._readers.fetch
        for start in range(0, len(queues), QUEUES_AT_ONCE):
            ids = list(queues[start : start + QUEUES_AT_ONCE])
            plain = [id_ for id_ in ids if id_ not in detailed]
            packed = {row[0]: row[1:] for row in await fetch(_POSITIONS, queues=plain)} if plain else {}
            if len(plain) < len(ids):
                wanted = [id_ for id_ in ids if id_ in detailed]
                packed |= {row[0]: row[1:] for row in await fetch(_DETAILS, queues=wanted)}
            transient: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
            for id_, position in await fetch(_TRANSIENT, queues=ids):
                transient[id_].append(position)
            expiries: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
            for id_, position, expires_at in await fetch(_EXPIRIES, queues=ids):
                expiries[id_].append((position, expires_at))
            for id_ in ids:
                positions, *details = packed[id_]
                flags, sizes = details or (None, None)
                yield QueueContents(
                    queue=id_,
                    positions=_unpacked("q", positions),
                    transient=transient[id_],
                    expiries=expiries[id_],
                    flags=_unpacked("i", flags) if id_ in detailed else None,
                    sizes=_unpacked("i", sizes) if id_ in detailed else None,
                )

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """See :class:`dtx.log.api.MessageLog`."""
        found: dict[Slot, StoredMessage] = {}
        left = _NO_LIMIT if octets is None else octets
        for start in range(0, len(slots), MESSAGES_AT_ONCE):
            queues, positions = zip(*slots[start : start + MESSAGES_AT_ONCE], strict=True)
            rows = await self._readers.fetch(_MESSAGES, queues=list(queues), positions=list(positions), octets=left)
            for message in map(StoredMessage._make, rows):
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
        return [row[0] for row in await self._readers.fetch(_STRAYS, known=list(known))]


def _unpacked(typecode: str, data: bytes | None) -> "array[int]":
    """Big endian integers, as PostgreSQL sends them, as an array of this machine's."""
    numbers: array[int] = array(typecode)
    numbers.frombytes(data or b"")
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
