"""One group of writes as a few statements.

Every statement proves what it expects with ``dtx.require``; the group commits as a whole or not at all.

Messages are put before any is dropped. A slot is never used again, so a message that is put and dropped in one group is
gone, in any order of the records. Among changes of messages and topology only a put can conflict: a message to drop may
be gone already, and topology may be written again.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, assert_never

from dtx.db.columns import (
    Encoder,
    Field,
    bytes_,
    fields_of,
    int4s,
    int8,
    int8s,
    optional_bytes,
    raw_uuids,
    texts,
    times,
    uuids,
    values_of,
)
from dtx.db.pipeline import CONFLICT, Bound, Statement, both, expect_all, in_pieces, insert, unnest
from dtx.log import tables
from dtx.log.changes import Change, Define, Slot, Store, mark, marks, pack_slots
from dtx.log.records import (
    ENDINGS,
    EXCLUSIVE,
    MOVED,
    WITH_OUTCOME,
    Advance,
    CompleteWrite,
    DuplicateWrite,
    Insert,
    JournalEntry,
    Line,
    LogWrite,
    NoteWrite,
    SettlementsWrite,
)

LEASE_LOST: Final = "DTX02"
"""SQLSTATE raised when the writer's epoch is not that of the lease."""
OUT_OF_ORDER: Final = "DTX03"
"""SQLSTATE raised when the group before this one was not written."""
DUPLICATE_XID: Final = "DTX04"
"""SQLSTATE raised when a branch of another member has ended with the xid of a new one."""

PROOF: Final = (
    # The lock is the proof, not the read: it waits for a successor that is taking the lease, and a later successor
    # waits for this group's commit. EXISTS would let a group commit that began before the lease was lost.
    "dtx.require(coalesce((SELECT true FROM dtx.lease WHERE rm = $1::text AND epoch = $2::bigint FOR SHARE), "
    "(SELECT true FROM dtx.member WHERE rm = $1::text AND epoch = $2::bigint FOR KEY SHARE), false), "
    f"'{LEASE_LOST}', 'another dtx holds the lease')"
)
"""Makes a statement fail unless ``$2`` is the epoch of the lease, or of a member, and keeps it until the commit."""


def _ours(table: str) -> str:
    """The condition that the row of *table*, found by its id, belongs to the resource manager.

    No index can serve this form. While a table is empty, PostgreSQL rates an index that begins with ``rm`` as high as
    that of the id. It would keep that plan, which reads every branch in doubt for each write.
    """
    return f"{table}.rm || '' = $1::text"


def _ours_by_row(table: str) -> str:
    """The same where the key begins with ``rm``: the index is usable only together with a row of ``u``."""
    return f"{table}.rm = CASE WHEN u.vhost IS NOT NULL THEN $1::text END"


def _packed(value: Sequence[Slot] | None) -> bytes | None:
    return None if value is None else pack_slots(value)


_SLOTS: Final = Encoder(
    "bytea",
    lambda values: optional_bytes.array([None if value is None else pack_slots(value) for value in values]),
    _packed,
)
"""The slots of one branch."""
_XID: Final = {name: f"xid.{name}" for name in ("format_id", "gtrid", "bqual")}

BRANCH: Final = fields_of(
    tables.branch, without=("member",), attributes=_XID, encoders={"published": _SLOTS, "consumed": _SLOTS}
)
WORK: Final = fields_of(tables.work, without=("branch_id", "fate"))
UNIT: Final = fields_of(tables.unit, without=("branch_id",))
COMPLETE: Final = (Field("id", "id", uuids), Field("expect", "expect", texts), Field("version", "version", int4s))
ADVANCE: Final = (
    *COMPLETE,
    Field("state", "to", texts),
    *(column for column in BRANCH if column.name in {"prepared_at", "decided_at", "stuck", "outcome"}),
)
_FATE: Final = (Field("branch_id", "", uuids), Field("position", "", int4s), Field("fate", "", texts))
_CLOSE: Final = (Field("branch_id", "", uuids), Field("publishes", "", texts), Field("consumes", "", texts))
_REDIRECT: Final = (
    *_FATE[:2],
    Field("exchange", "", bytes_),
    Field("routing_key", "", bytes_),
    Field("queue", "", optional_bytes),
)
_RELEASE: Final = (Field("id", "", uuids), Field("kind", "", texts))
_ARCHIVE: Final = (Field("id", "", uuids), Field("at", "", times))
_VOTED: Final = {
    "state": "'prepared'",
    "version": "1",
    "decided_at": "NULL",
    "one_phase": "false",
    "stuck": "NULL",
    "outcome": "NULL",
}
"""The other columns of a branch that has only voted."""
JOURNAL: Final = fields_of(tables.journal, without=("id", "xid8"), attributes=_XID)
_LINE_ID: Final = Field("line", "", raw_uuids)
_DAY: Final = 86_400.0
_NEW: Final = (
    *(column for column in BRANCH if column.name in {"vhost", *_XID, "started_at"}),
    Field("since", "", texts),
    _LINE_ID,
)
"""The columns of a branch that are compared with endings of other members."""
VOTE: Final = (*(column for column in BRANCH if column.name not in _VOTED), _LINE_ID, Field("actor", "", texts))
"""The columns that differ between branches that enter with their vote: see :class:`Line`."""
END: Final = (
    *COMPLETE,
    _LINE_ID,
    Field("event", "event", texts),
    Field("at", "at", times),
    Field("actor", "actor", texts),
)
HEURISTIC: Final = fields_of(tables.heuristic_outcome)
REPLAY: Final = fields_of(tables.replay, without=("branch_id", "vhost", "at"))
SETTLEMENT: Final = fields_of(tables.settlement, without=("at",))
DUPLICATE: Final = fields_of(tables.duplicate, without=("at",))
_OWNER: Final = Field("branch_id", "", uuids)
_ID: Final = Field("id", "", raw_uuids)
_NUMBERS: Final = (_OWNER, Field("number", "", int4s))
MESSAGE: Final = fields_of(tables.message, without=("shared",), encoders={"body": bytes_})
"""The fields of a StoredMessage without a shared body, in its order: it is bound unchanged."""
BODY: Final = fields_of(tables.body)
_SLOT: Final = MESSAGE[:2]
_EXPIRY: Final = (*_SLOT, MESSAGE[-1])
_REVISION: Final = (*_SLOT, MESSAGE[5])
_SHARING: Final = (*MESSAGE[:6], MESSAGE[-1], Field("shared", "", int8s))
EXCHANGE: Final = fields_of(tables.exchange)
QUEUE: Final = fields_of(tables.queue)
BINDING: Final = fields_of(tables.binding)

_branch_values = values_of(BRANCH[:-1])
_vote_values = values_of(VOTE[:-3])
_new_values = values_of(_NEW[:-2])
_work_values = values_of(WORK)
_unit_values = values_of(UNIT)
_advance_values = values_of(ADVANCE)
_complete_values = values_of(COMPLETE)
_journal_values = values_of(JOURNAL)
_replay_values = values_of(REPLAY)
_settlement_values = values_of(SETTLEMENT)
_duplicate_values = values_of(DUPLICATE)
_exchange_values = values_of(EXCHANGE)
_queue_values = values_of(QUEUE)


def _place(columns: Sequence[Field], name: str) -> int:
    return [column.name for column in columns].index(name)


_OPEN: Final = "(w.fate IS NULL OR w.fate = 'unsure')"

PROVE_LEASE: Final = Statement(b"prove_lease", f"SELECT {PROOF}")
PROVE_SEQUENCE: Final = Statement(
    b"prove_sequence",
    # A setting made in a transaction is undone when that fails. So a statement that finds it knows that the group
    # before has committed in this session, without a row for that purpose.
    f"SELECT {PROOF}, dtx.require($3::text = '' OR current_setting('dtx.sequence', true) = $3::text, '{OUT_OF_ORDER}', "
    "'the group before was not written'), set_config('dtx.sequence', $4::text, false)",
)
INSERT_BRANCH: Final = Statement(b"insert_branch", insert("branch", BRANCH), BRANCH, proof=PROOF)
INSERT_WORK: Final = Statement(b"insert_work", insert("work", (_OWNER, *WORK)), (_OWNER, *WORK))
PUT_UNIT: Final = Statement(
    b"put_unit",
    insert(
        "unit",
        (_OWNER, *UNIT),
        "ON CONFLICT (branch_id, number) DO UPDATE SET "
        + ", ".join(f"{column.name} = excluded.{column.name}" for column in UNIT[1:]),
    ),
    (_OWNER, *UNIT),
)
ADVANCE_BRANCH: Final = Statement(
    b"advance_branch",
    expect_all(
        "UPDATE dtx.branch b SET state = u.state, version = b.version + 1, "
        "prepared_at = coalesce(u.prepared_at, b.prepared_at), decided_at = coalesce(u.decided_at, b.decided_at), "
        "stuck = u.stuck, outcome = coalesce(u.outcome, b.outcome) "
        f"FROM {unnest(ADVANCE)} "
        f"WHERE b.id = u.id AND {_ours('b')} AND b.state = u.expect AND b.version = u.version RETURNING 1",
        "the branch is not in the expected state and version",
    ),
    ADVANCE,
    proof=PROOF,
)
PUT_REPLAY: Final = Statement(
    b"put_replay",
    # The time is that of the last replay: copies are remembered for a window from then on.
    f"INSERT INTO dtx.replay (rm, vhost, branch_id, {', '.join(column.name for column in REPLAY)}) "
    f"SELECT b.rm, b.vhost, u.* FROM {unnest((_OWNER, *REPLAY))} JOIN dtx.branch b ON b.id = u.branch_id "
    f"AND {_ours('b')} WHERE $2::bigint >= 0 ON CONFLICT (branch_id, position) DO UPDATE SET at = excluded.at",
    (_OWNER, *REPLAY),
)
UNIT_DONE: Final = Statement(
    b"unit_done",
    expect_all(
        f"UPDATE dtx.unit t SET state = 'done' FROM {unnest(_NUMBERS)} "
        "WHERE t.branch_id = u.branch_id AND t.number = u.number AND t.rm = $1::text RETURNING 1",
        "the unit is not there",
    ),
    _NUMBERS,
)
SETTLE: Final = Statement(
    b"settle",
    expect_all(
        f"DELETE FROM dtx.work w USING {unnest(_NUMBERS)} "
        "WHERE w.branch_id = u.branch_id AND w.position = u.number AND w.rm = $1::text RETURNING 1",
        "the work is not there",
    ),
    _NUMBERS,
)
SET_FATE: Final = Statement(
    b"set_fate",
    expect_all(
        f"UPDATE dtx.work w SET fate = u.fate FROM {unnest(_FATE)} WHERE w.branch_id = u.branch_id "
        f"AND w.position = u.position AND w.rm = $1::text AND {_OPEN} RETURNING 1",
        "the work is not there, or not open",
    ),
    _FATE,
)
CLOSE_WORK: Final = Statement(
    b"close_work",
    f"UPDATE dtx.work w SET fate = CASE w.kind WHEN 'publish' THEN u.publishes ELSE u.consumes END "
    f"FROM {unnest(_CLOSE)} WHERE w.branch_id = u.branch_id AND w.rm = $1::text AND $2::bigint >= 0 AND {_OPEN}",
    _CLOSE,
)
REDIRECT: Final = Statement(
    b"redirect",
    expect_all(
        "UPDATE dtx.work w SET exchange = CASE w.kind WHEN 'publish' THEN u.exchange ELSE w.exchange END, "
        "routing_key = CASE w.kind WHEN 'publish' THEN u.routing_key ELSE w.routing_key END, queue = u.queue, "
        f"flags = CASE w.kind WHEN 'publish' THEN w.flags ELSE w.flags & ~{EXCLUSIVE} END "
        f"FROM {unnest(_REDIRECT)} WHERE w.branch_id = u.branch_id "
        f"AND w.position = u.position AND w.rm = $1::text AND {_OPEN} RETURNING 1",
        "the work is not there, or not open",
    ),
    _REDIRECT,
)
RELEASE: Final = Statement(
    b"release",
    "UPDATE dtx.branch b SET published = CASE u.kind WHEN 'publish' THEN '' ELSE b.published END, "
    "consumed = CASE u.kind WHEN 'consume' THEN '' ELSE b.consumed END "
    f"FROM {unnest(_RELEASE)} WHERE b.id = u.id AND {_ours('b')} AND $2::bigint >= 0",
    _RELEASE,
)
ARCHIVE: Final = Statement(
    b"archive",
    # Positions of published messages of a branch of standalone mode are those of its slots; it has no other work.
    "INSERT INTO dtx.archive (rm, branch_id, position, vhost, format_id, gtrid, bqual, owner, kind, exchange, "
    "routing_key, queue, properties, body, fate, at) "
    "SELECT b.rm, b.id, m.position, b.vhost, b.format_id, b.gtrid, b.bqual, b.owner, m.kind, m.exchange, "
    "m.routing_key, m.queue, m.properties, m.body, m.fate, u.at "
    f"FROM {unnest(_ARCHIVE)} JOIN dtx.branch b ON b.id = u.id AND {_ours('b')} CROSS JOIN LATERAL ("
    "SELECT w.position, w.kind, w.exchange, w.routing_key, w.queue, w.properties, w.body, w.fate FROM dtx.work w "
    "WHERE w.branch_id = b.id AND w.fate IN ('dropped', 'discarded') "
    "UNION ALL SELECT s.ordinal::integer, 'publish', h.exchange, h.routing_key, q.name, h.properties, "
    "coalesce(h.body, c.content), 'dropped' FROM dtx.slots(b.published) s "
    "JOIN dtx.message h ON h.queue = s.queue AND h.position = s.position LEFT JOIN dtx.body c ON c.id = h.shared "
    "LEFT JOIN dtx.queue q ON q.id = s.queue) m WHERE $2::bigint >= 0",
    _ARCHIVE,
)
PUT_HEURISTIC: Final = Statement(
    b"put_heuristic",
    insert(
        "heuristic_outcome",
        HEURISTIC,
        "ON CONFLICT (branch_id) DO UPDATE SET outcome = excluded.outcome, actor = excluded.actor, "
        "reason = excluded.reason, at = excluded.at",
    ),
    HEURISTIC,
)
COMPLETE_BRANCH: Final = Statement(
    b"complete_branch",
    f"WITH gone AS (DELETE FROM dtx.branch b USING {unnest(COMPLETE)} "
    f"WHERE b.id = u.id AND {_ours('b')} AND b.state = u.expect AND b.version = u.version "
    "RETURNING b.id, b.outcome), "
    "work AS (DELETE FROM dtx.work w USING gone WHERE w.branch_id = gone.id), "
    "units AS (DELETE FROM dtx.unit t USING gone WHERE t.branch_id = gone.id), "
    "outcomes AS (DELETE FROM dtx.heuristic_outcome h USING gone "
    "WHERE h.branch_id = gone.id AND gone.outcome IS NOT NULL) "
    f"SELECT dtx.require((SELECT count(*) FROM gone) = $2::bigint, '{CONFLICT}', "
    "'the branch is not in the expected state and version')",
    COMPLETE,
)
_COLUMNS: Final = ", ".join(column.name for column in BRANCH)
_KNOWN: Final = {column.name for column in (*BRANCH, *END)}
_ENDINGS: Final = ", ".join(f"'{event}'" for event in sorted(ENDINGS))
_LINE: Final = {each.name: each.name if each.name in _KNOWN else "NULL" for each in JOURNAL} | {"branch_id": "id"}
"""The columns of a journal entry, and the columns of the branch's row that they are copied from."""


def _lines(rows: str, **values: str) -> str:
    """Inserts the journal entries of the branches *rows*, with *values* instead of some of their columns."""
    selected = ", ".join(values.get(name, found) for name, found in _LINE.items())
    columns = ", ".join(_LINE)
    return f"lines AS (INSERT INTO dtx.journal (rm, id, {columns}) SELECT $1::text, line, {selected} FROM {rows}) "


INSERT_VOTE: Final = Statement(
    b"insert_vote",
    f"WITH u AS MATERIALIZED (SELECT * FROM {unnest(VOTE)}), "
    + _lines("u", **_VOTED, at="prepared_at", event="'prepared'")
    + f"INSERT INTO dtx.branch (rm, {_COLUMNS}) SELECT $1::text, "
    + ", ".join(_VOTED.get(column.name, column.name) for column in BRANCH)
    + " FROM u WHERE $2::bigint >= 0",
    VOTE,
    proof=PROOF,
)


def _no_other_ending(name: bytes, earliest: str) -> Statement:
    """Proves that no branch of another member has ended since the new branches began; *earliest* selects partitions.

    It runs after the insert, which waits for the end of another branch with the xid: a statement sees what was
    committed before it began. A snapshot of PostgreSQL orders commits without any clock. The times only select
    partitions of the journal, so the clocks of members may differ by a day. Ids of lines begin with the number of their
    writer.
    """
    return Statement(
        name,
        f"SELECT dtx.require(NOT EXISTS (SELECT FROM {unnest(_NEW)} CROSS JOIN LATERAL ("
        "SELECT FROM dtx.journal j WHERE j.gtrid = u.gtrid AND j.bqual = u.bqual "
        f"AND j.at > {earliest} AND j.at < now() + interval '1 day' AND j.rm = $1::text AND j.vhost = u.vhost "
        f"AND j.format_id = u.format_id AND j.event IN ({_ENDINGS}) "
        "AND NOT pg_visible_in_snapshot(j.xid8, u.since::pg_snapshot) "
        "AND substr(uuid_send(j.id), 1, 8) <> substr(uuid_send(u.line), 1, 8)) AS ended WHERE $2::bigint >= 0), "
        f"'{DUPLICATE_XID}', 'a branch with this xid has ended since this one began')",
        _NEW,
    )


# The first one selects the partitions once, and not for each row. It is for branches that are younger than a day.
PROVE_NEW: Final = _no_other_ending(b"prove_new", "now() - interval '2 days'")
PROVE_OLD: Final = _no_other_ending(b"prove_old", "u.started_at - interval '1 day'")


def _end(more: str = "") -> str:
    """Deletes branches, and inserts a journal entry from each of their rows."""
    return (
        f"WITH gone AS (DELETE FROM dtx.branch b USING {unnest(END)} "
        f"WHERE b.id = u.id AND {_ours('b')} AND b.state = u.expect AND b.version = u.version "
        f"RETURNING b.*, u.line, u.event, u.at, u.actor), {more}"
        + _lines("gone", decided_at="CASE WHEN event = 'forgotten' THEN decided_at ELSE coalesce(decided_at, at) END")
        + f"SELECT dtx.require((SELECT count(*) FROM gone) = $2::bigint, '{CONFLICT}', "
        "'the branch is not in the expected state and version')"
    )


_WITH_WORK: Final = (
    "work AS (DELETE FROM dtx.work w USING gone WHERE w.branch_id = gone.id), "
    "units AS (DELETE FROM dtx.unit t USING gone WHERE t.branch_id = gone.id), "
)
_WITH_OUTCOME: Final = "outcomes AS (DELETE FROM dtx.heuristic_outcome h USING gone WHERE h.branch_id = gone.id), "
# Only a branch in a state of WITH_OUTCOME has an outcome (branch_check), and only an outcome has a row there.
END_BRANCH: Final = Statement(b"end_branch", _end(), END, proof=PROOF)
END_WITH_WORK: Final = Statement(b"end_with_work", _end(_WITH_WORK), END, proof=PROOF)
END_WITH_OUTCOME: Final = Statement(b"end_with_outcome", _end(_WITH_WORK + _WITH_OUTCOME), END)
INSERT_JOURNAL: Final = Statement(b"insert_journal", insert("journal", (_ID, *JOURNAL)), (_ID, *JOURNAL))

PUT_SETTLEMENT: Final = Statement(
    b"put_settlement", insert("settlement", SETTLEMENT, "ON CONFLICT DO NOTHING"), SETTLEMENT, proof=PROOF
)
# In every other case, the first settlement stays.
PUT_MOVED: Final = Statement(
    b"put_moved",
    f"INSERT INTO dtx.settlement (rm, {', '.join(column.name for column in SETTLEMENT)}) "
    f"SELECT DISTINCT ON (u.branch_id, u.position, u.vhost, u.queue) $1::text, u.* FROM {unnest(SETTLEMENT)} "
    "WHERE $2::bigint >= 0 ON CONFLICT (branch_id, position, vhost, queue) "
    "DO UPDATE SET attempt = excluded.attempt, digest = excluded.digest, at = excluded.at",
    SETTLEMENT,
)
PUT_DUPLICATE: Final = Statement(
    b"put_duplicate", insert("duplicate", DUPLICATE, "ON CONFLICT DO NOTHING"), DUPLICATE, proof=PROOF
)

PUT_BODY: Final = Statement(b"put_body", insert("body", BODY), BODY)
PUT_MESSAGE: Final = Statement(b"put_message", insert("message", MESSAGE), MESSAGE, proof=PROOF)
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
    # a message that is already gone is no error
    f"DELETE FROM dtx.message m USING {unnest(_SLOT)} "
    "WHERE m.queue = u.queue AND m.position = u.position AND m.rm = $1::text AND $2::bigint >= 0",
    _SLOT,
)
MARK_DELIVERED: Final = Statement(
    b"mark_delivered",
    f"UPDATE dtx.queue q SET delivered = u.position FROM {unnest(_SLOT)} "
    f"WHERE q.id = u.queue AND {_ours('q')} AND q.delivered < u.position AND $2::bigint >= 0",
    _SLOT,
)
DELETE_BINDING: Final = Statement(
    b"delete_binding",
    f"DELETE FROM dtx.binding b USING {unnest(BINDING)} WHERE {_ours_by_row('b')} AND $2::bigint >= 0 AND "
    + " AND ".join(f"b.{column.name} = u.{column.name}" for column in BINDING)
    + " AND sha256(b.arguments) = sha256(u.arguments)",
    BINDING,
)
DELETE_QUEUE: Final = Statement(
    b"delete_queue",
    f"DELETE FROM dtx.queue q USING {unnest(QUEUE[:1])} WHERE q.id = u.id AND {_ours('q')} AND $2::bigint >= 0",
    QUEUE[:1],
)
DELETE_EXCHANGE: Final = Statement(
    b"delete_exchange",
    f"DELETE FROM dtx.exchange e USING {unnest(EXCHANGE[:2])} "
    f"WHERE {_ours_by_row('e')} AND e.vhost = u.vhost AND e.name = u.name AND $2::bigint >= 0",
    EXCHANGE[:2],
)
PUT_EXCHANGE: Final = Statement(
    b"put_exchange",
    insert(
        "exchange",
        EXCHANGE,
        "ON CONFLICT (rm, vhost, name) DO UPDATE SET "
        + ", ".join(f"{column.name} = excluded.{column.name}" for column in EXCHANGE[2:]),
    ),
    EXCHANGE,
)
PUT_QUEUE: Final = Statement(b"put_queue", insert("queue", QUEUE, "ON CONFLICT (id) DO NOTHING"), QUEUE)
PUT_BINDING: Final = Statement(b"put_binding", insert("binding", BINDING, "ON CONFLICT DO NOTHING"), BINDING)


STATEMENTS: Final = (
    PROVE_LEASE,
    PROVE_SEQUENCE,
    ARCHIVE,
    COMPLETE_BRANCH,
    END_BRANCH,
    END_WITH_WORK,
    END_WITH_OUTCOME,
    INSERT_BRANCH,
    INSERT_VOTE,
    PROVE_NEW,
    PROVE_OLD,
    INSERT_WORK,
    ADVANCE_BRANCH,
    PUT_UNIT,
    PUT_REPLAY,
    UNIT_DONE,
    SETTLE,
    REDIRECT,
    SET_FATE,
    CLOSE_WORK,
    RELEASE,
    PUT_HEURISTIC,
    INSERT_JOURNAL,
    PUT_SETTLEMENT,
    PUT_MOVED,
    PUT_DUPLICATE,
    PUT_BODY,
    PUT_MESSAGE,
    PUT_SHARING,
    EXPIRE_MESSAGE,
    REVISE_MESSAGE,
    DROP_MESSAGE,
    MARK_DELIVERED,
    DELETE_BINDING,
    DELETE_QUEUE,
    DELETE_EXCHANGE,
    PUT_EXCHANGE,
    PUT_QUEUE,
    PUT_BINDING,
)
"""In the order in which a group executes them."""
_RANKS: Final = {statement: rank for rank, statement in enumerate(STATEMENTS)}
PREPARED: Final = both(STATEMENTS)
"""The statements that a writing session prepares."""


_BY_BODY: Final = {
    INSERT_WORK: 1 + _place(WORK, "body"),
    PUT_BODY: _place(BODY, "content"),
    PUT_MESSAGE: _place(MESSAGE, "body"),
    PUT_DUPLICATE: _place(DUPLICATE, "body"),
}
"""Statements that are sent in pieces, and the column that has the size."""

_Rows = defaultdict[Statement, list[Any]]
"""The rows of a group, by statement."""


def _insert(rows: _Rows, record: Insert, line_id: bytes) -> None:
    branch, journal = record.branch, record.journal
    if isinstance(journal, Line):
        rows[INSERT_VOTE].append((*_vote_values(branch), _exchange_marks(record), line_id, journal.actor))
    else:
        rows[INSERT_BRANCH].append((*_branch_values(branch), _exchange_marks(record)))
        if branch.units:
            rows[PUT_UNIT] += [(branch.id, *_unit_values(unit)) for unit in branch.units]
        _line(rows, journal, line_id)
    if record.since is not None:
        is_young = branch.started_at > time.time() - _DAY
        rows[PROVE_NEW if is_young else PROVE_OLD].append((*_new_values(branch), record.since, line_id))
    if record.work:
        rows[INSERT_WORK] += [(branch.id, *_work_values(work)) for work in record.work]


def _advance(rows: _Rows, record: Advance, line_id: bytes) -> None:
    branch_id, journal = record.id, record.journal
    rows[ADVANCE_BRANCH].append(_advance_values(record))
    if record.unit is not None:
        rows[PUT_UNIT].append((branch_id, *_unit_values(record.unit)))
    if record.replays:
        rows[PUT_REPLAY] += [(branch_id, *_replay_values(replay)) for replay in record.replays]
    if record.units_done:
        rows[UNIT_DONE] += [(branch_id, number) for number in record.units_done]
    if record.settled:
        rows[SETTLE] += [(branch_id, position) for position in record.settled]
    if record.outcome is not None and journal is not None:
        rows[PUT_HEURISTIC].append((branch_id, record.outcome, journal.actor, journal.reason, journal.at))
    if record.close is not None:
        rows[CLOSE_WORK].append((branch_id, record.close.publishes, record.close.consumes))
    if record.released:
        rows[RELEASE] += [(branch_id, kind) for kind in sorted(record.released)]
    if record.redirects:
        rows[REDIRECT] += [(branch_id, to.position, to.exchange, to.routing_key, to.queue) for to in record.redirects]
    if record.fates:
        rows[SET_FATE] += [(branch_id, position, fate) for position, fate in record.fates]
    _line(rows, journal, line_id)


def _complete(rows: _Rows, record: CompleteWrite, line_id: bytes) -> None:
    journal = record.journal
    if record.archive:
        rows[ARCHIVE].append((record.id, journal.at))
    if isinstance(journal, Line):
        if record.expect in WITH_OUTCOME:
            end = END_WITH_OUTCOME
        else:
            end = END_WITH_WORK if record.change is None else END_BRANCH
        rows[end].append((*_complete_values(record), line_id, *journal))
    else:
        rows[COMPLETE_BRANCH].append(_complete_values(record))
        _line(rows, journal, line_id)


def _line(rows: _Rows, journal: JournalEntry | None, line_id: bytes) -> None:
    if journal is not None:
        rows[INSERT_JOURNAL].append((line_id, *_journal_values(journal)))


def _change(rows: _Rows, changes: Sequence[Change]) -> None:
    puts: list[Any] = []
    bodies: dict[int, tuple[int, int, bytes]] = {}
    revisions: dict[Slot, bytes] = {}
    delivered: dict[int, int] = {}
    for change in changes:
        for put in change.puts:
            if put.shared is None:
                puts.append(put[:-1])
                continue
            uses = bodies[put.shared][1] if put.shared in bodies else 0
            bodies[put.shared] = put.shared, uses + 1, put.body
            rows[PUT_SHARING].append((*put[:6], put.expires_at, put.shared))
        if change.drops:
            rows[DROP_MESSAGE] += change.drops
        if change.expiries:
            rows[EXPIRE_MESSAGE] += [(*slot, expires_at) for slot, expires_at in change.expiries]
        revisions.update(change.revisions)
        for queue, position in change.delivered:
            delivered[queue] = max(position, delivered.get(queue, 0))
    if puts:
        rows[PUT_MESSAGE] = puts
    if bodies:
        rows[PUT_BODY] += bodies.values()
    if revisions:
        rows[REVISE_MESSAGE] += [(*slot, revised) for slot, revised in revisions.items()]
    if delivered:
        rows[MARK_DELIVERED] += delivered.items()


def _define(rows: _Rows, record: Define) -> None:
    rows[DELETE_BINDING] += record.removed_bindings
    rows[DELETE_QUEUE] += [(queue,) for queue in record.removed_queues]
    rows[DELETE_EXCHANGE] += record.removed_exchanges
    rows[PUT_EXCHANGE] += map(_exchange_values, record.exchanges)
    rows[PUT_QUEUE] += map(_queue_values, record.queues)
    rows[PUT_BINDING] += record.bindings


def _exchange_marks(record: Insert) -> bytes | None:
    """Marks of the exchanges of the messages that *record* puts, if these are all that its branch publishes."""
    change, published = record.change, record.branch.published
    if change is None or published is None or len(change.puts) != len(published):
        return None
    if len(published) == 1:
        return mark(change.puts[0].exchange)
    return marks([put.exchange for put in change.puts])


class WriteSequence(NamedTuple):
    """The place of a group among those that are sent before earlier ones are answered.

    Args:
        number: its number, which the next group checks.
        predecessor: the number of the group that must be written before; 0 where none is under way.
    """

    number: int
    predecessor: int


def bind_group(
    rm: bytes, epoch: int, group: Iterable[tuple[LogWrite, bytes]], sequence: WriteSequence | None = None
) -> list[Bound]:
    """The statements of one group, none of them empty.

    Completions go first, so that an xid may end and begin again in one group; no branch may occur twice. Messages are
    put before any is dropped. There is at most one Define in a group, since a name may be removed and added again.

    Args:
        rm: name of the resource manager.
        epoch: of the lease.
        group: each record with the id of its journal entry.
        sequence: for a group that is sent behind another one, or that another one may be sent behind.

    Raises:
        UnicodeError, struct.error, OverflowError: a value does not fit its column.
    """
    rows: _Rows = defaultdict(list)
    changes: list[Change] = []
    for record, line_id in group:
        match record:
            case Insert():
                _insert(rows, record, line_id)
            case CompleteWrite():
                _complete(rows, record, line_id)
            case Store():
                pass
            case Advance():
                _advance(rows, record, line_id)
            case NoteWrite():
                _line(rows, record.journal, line_id)
            case SettlementsWrite():
                for settlement in record.settlements:
                    statement = PUT_MOVED if settlement.attempt == MOVED else PUT_SETTLEMENT
                    rows[statement].append(_settlement_values(settlement))
            case DuplicateWrite():
                rows[PUT_DUPLICATE].append(_duplicate_values(record.duplicate))
            case Define():
                _define(rows, record)
            case _ as never:
                assert_never(never)
        if record.change is not None:
            changes.append(record.change)
    if changes:
        _change(rows, changes)
    found = [
        (statement, piece) for statement in sorted(rows, key=_RANKS.__getitem__) for piece in _pieces(statement, rows)
    ]
    if sequence is not None:
        behind = b"%d" % sequence.predecessor if sequence.predecessor else b""
        bound: list[Bound] = [(PROVE_SEQUENCE, [rm, int8(epoch), behind, b"%d" % sequence.number])]
    elif found and len(found[0][1]) == 1 and found[0][0].proof:
        first, (row,) = found.pop(0)
        bound = [first.bind_proving(rm, epoch, row)]
    else:
        bound = [(PROVE_LEASE, [rm, int8(epoch)])]
    return bound + [statement.bind(rm, len(piece), piece) for statement, piece in found]


def _pieces(statement: Statement, rows: _Rows) -> Iterable[list[Any]]:
    """The rows of one statement, in the pieces that are sent; none of them empty."""
    given = rows[statement]
    if not given:
        return ()
    if statement is RELEASE:
        return [[row] for row in given]
    body = None if len(given) == 1 else _BY_BODY.get(statement)
    return (given,) if body is None else in_pieces(given, body)
