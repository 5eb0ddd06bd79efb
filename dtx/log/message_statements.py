"""What a group of writes does to messages and topology.

Messages are put before any is dropped. A slot is never used again, so one that is put and dropped in one group is gone,
in whichever order the records came. Nothing here but a put is ever a conflict: what is to be dropped may be gone, and
topology may be written again.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from dtx.log import binary
from dtx.log.changes import Change, Define
from dtx.log.statement import Bound, Column, Statement, in_pieces, insert, ours, ours_by_row, unnest

MESSAGE: Final[tuple[Column, ...]] = (
    ("queue", "", "bigint", binary.int8s),
    ("position", "", "bigint", binary.int8s),
    ("exchange", "", "bytea", binary.bytes_),
    ("routing_key", "", "bytea", binary.bytes_),
    ("flags", "", "integer", binary.int4s),
    ("properties", "", "bytea", binary.bytes_),
    ("body", "", "bytea", binary.bytes_),
    ("expires_at", "", "timestamptz", binary.times),
)
"""The fields of a StoredMessage that shares no body, in their order: it is bound as it is."""
BODY: Final[tuple[Column, ...]] = (
    ("id", "", "bigint", binary.int8s),
    ("uses", "", "integer", binary.int4s),
    ("content", "", "bytea", binary.bytes_),
)
_SLOT: Final = MESSAGE[:2]
_EXPIRY: Final = (*_SLOT, MESSAGE[-1])
_REVISION: Final = (*_SLOT, MESSAGE[5])
_SHARING: Final[tuple[Column, ...]] = (*MESSAGE[:6], MESSAGE[-1], ("shared", "", "bigint", binary.int8s))
EXCHANGE: Final[tuple[Column, ...]] = (
    ("vhost", "vhost", "text", binary.texts),
    ("name", "name", "bytea", binary.bytes_),
    ("type", "type", "text", binary.texts),
    ("auto_delete", "auto_delete", "boolean", binary.booleans),
    ("internal", "internal", "boolean", binary.booleans),
    ("arguments", "arguments", "bytea", binary.bytes_),
)
QUEUE: Final[tuple[Column, ...]] = (
    ("id", "id", "bigint", binary.int8s),
    ("vhost", "vhost", "text", binary.texts),
    ("name", "name", "bytea", binary.bytes_),
    ("auto_delete", "auto_delete", "boolean", binary.booleans),
    ("arguments", "arguments", "bytea", binary.bytes_),
    ("delivered", "delivered", "bigint", binary.int8s),
)
BINDING: Final[tuple[Column, ...]] = (
    ("vhost", "", "text", binary.texts),
    ("source", "", "bytea", binary.bytes_),
    ("destination_kind", "", "text", binary.texts),
    ("destination", "", "bytea", binary.bytes_),
    ("routing_key", "", "bytea", binary.bytes_),
    ("arguments", "", "bytea", binary.bytes_),
)
_exchange_values = attrgetter(*(column[1] for column in EXCHANGE))
_queue_values = attrgetter(*(column[1] for column in QUEUE))
_BODY: Final = [column[0] for column in MESSAGE].index("body")
_CONTENT: Final = [column[0] for column in BODY].index("content")

PUT_BODY: Final = Statement(b"put_body", insert("body", BODY), BODY)
PUT_MESSAGE: Final = Statement(b"put_message", insert("message", MESSAGE), MESSAGE, begins=True)
PUT_SHARING: Final = Statement(b"put_sharing", insert("message", _SHARING), _SHARING)
EXPIRE_MESSAGE: Final = Statement(
    b"expire_message",
    f"UPDATE dtx.message m SET expires_at = u.expires_at FROM {unnest(_EXPIRY)} "
    "WHERE m.queue = u.queue AND m.position = u.position AND m.rm = $1::text AND $2::bigint >= 0",
    _EXPIRY,
)
REVISE_MESSAGE: Final = Statement(
    b"revise_message",
    f"UPDATE dtx.message m SET properties = u.properties FROM {unnest(_REVISION)} "
    "WHERE m.queue = u.queue AND m.position = u.position AND m.rm = $1::text AND $2::bigint >= 0",
    _REVISION,
)
DROP_MESSAGE: Final = Statement(
    b"drop_message",
    # what is gone already is no error
    f"DELETE FROM dtx.message m USING {unnest(_SLOT)} "
    "WHERE m.queue = u.queue AND m.position = u.position AND m.rm = $1::text AND $2::bigint >= 0",
    _SLOT,
)
MARK_DELIVERED: Final = Statement(
    b"mark_delivered",
    f"UPDATE dtx.queue q SET delivered = u.position FROM {unnest(_SLOT)} "
    f"WHERE q.id = u.queue AND {ours('q')} AND q.delivered < u.position AND $2::bigint >= 0",
    _SLOT,
)
BINDING_GONE: Final = Statement(
    b"binding_gone",
    f"DELETE FROM dtx.binding b USING {unnest(BINDING)} WHERE {ours_by_row('b')} AND $2::bigint >= 0 AND "
    + " AND ".join(f"b.{column[0]} = u.{column[0]}" for column in BINDING)
    + " AND sha256(b.arguments) = sha256(u.arguments)",
    BINDING,
)
QUEUE_GONE: Final = Statement(
    b"queue_gone",
    f"DELETE FROM dtx.queue q USING {unnest(QUEUE[:1])} WHERE q.id = u.id AND {ours('q')} AND $2::bigint >= 0",
    QUEUE[:1],
)
EXCHANGE_GONE: Final = Statement(
    b"exchange_gone",
    f"DELETE FROM dtx.exchange e USING {unnest(EXCHANGE[:2])} "
    f"WHERE {ours_by_row('e')} AND e.vhost = u.vhost AND e.name = u.name AND $2::bigint >= 0",
    EXCHANGE[:2],
)
PUT_EXCHANGE: Final = Statement(
    b"put_exchange",
    insert(
        "exchange",
        EXCHANGE,
        "ON CONFLICT (rm, vhost, name) DO UPDATE SET "
        + ", ".join(f"{column[0]} = excluded.{column[0]}" for column in EXCHANGE[2:]),
    ),
    EXCHANGE,
)
PUT_QUEUE: Final = Statement(b"put_queue", insert("queue", QUEUE, "ON CONFLICT (id) DO NOTHING"), QUEUE)
PUT_BINDING: Final = Statement(b"put_binding", insert("binding", BINDING, "ON CONFLICT DO NOTHING"), BINDING)

STATEMENTS: Final = (
    PUT_BODY,
    PUT_MESSAGE,
    PUT_SHARING,
    EXPIRE_MESSAGE,
    REVISE_MESSAGE,
    DROP_MESSAGE,
    MARK_DELIVERED,
    BINDING_GONE,
    QUEUE_GONE,
    EXCHANGE_GONE,
    PUT_EXCHANGE,
    PUT_QUEUE,
    PUT_BINDING,
)
"""In the order of their execution within a group."""


Filled = tuple[Statement, Sequence[Sequence[Any]]]
"""A statement and its rows."""


def changed(changes: Sequence[Change]) -> list[Filled]:
    """The statements for all *changes* of one group with their rows, none of them empty."""
    puts: list[Sequence[Any]] = []
    sharing: list[Sequence[Any]] = []
    bodies: dict[int, tuple[int, int, bytes]] = {}
    for change in changes:
        for put in change.puts:
            if put.shared is None:
                puts.append(put[:-1])
                continue
            uses = bodies[put.shared][1] if put.shared in bodies else 0
            bodies[put.shared] = put.shared, uses + 1, put.body
            sharing.append((*put[:6], put.expires_at, put.shared))
    drops = [slot for change in changes for slot in change.drops]
    expiries = [(*slot, expires_at) for change in changes for slot, expires_at in change.expiries]
    revisions = {slot: revised for change in changes for slot, revised in change.revisions}
    delivered: dict[int, int] = {}
    for change in changes:
        for queue, position in change.delivered:
            delivered[queue] = max(position, delivered.get(queue, 0))
    filled: tuple[Filled, ...] = (
        *((PUT_BODY, rows) for rows in in_pieces(list(bodies.values()), _CONTENT)),
        *((PUT_MESSAGE, rows) for rows in in_pieces(puts, _BODY)),
        (PUT_SHARING, sharing),
        (EXPIRE_MESSAGE, expiries),
        (REVISE_MESSAGE, [(*slot, revised) for slot, revised in revisions.items()]),
        (DROP_MESSAGE, drops),
        (MARK_DELIVERED, tuple(delivered.items())),
    )
    return [(statement, rows) for statement, rows in filled if rows]


def bind_topology(rm: bytes, record: Define) -> list[Bound]:
    """The statements for one *record*, none of them empty."""
    filled: tuple[Filled, ...] = (
        (BINDING_GONE, record.bindings_gone),
        (QUEUE_GONE, [(queue,) for queue in record.queues_gone]),
        (EXCHANGE_GONE, record.exchanges_gone),
        (PUT_EXCHANGE, list(map(_exchange_values, record.exchanges))),
        (PUT_QUEUE, list(map(_queue_values, record.queues))),
        (PUT_BINDING, record.bindings),
    )
    return [statement.bind(rm, len(rows), rows) for statement, rows in filled if rows]
