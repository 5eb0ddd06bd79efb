"""One group of writes as a few statements: what branches and the journal need.

Every statement proves what it expects with ``dtx.require``; the group commits as a whole or not at all. What a group
does to messages and topology is in :mod:`dtx.log.message_statements`.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final, NamedTuple, assert_never

from dtx.log import binary, message_statements
from dtx.log.changes import Change, Define, Store
from dtx.log.marks import mark, marks
from dtx.log.message_statements import Filled, bind_topology, changed
from dtx.log.records import EXCLUSIVE, WITH_OUTCOME, Advance, Complete, Insert, JournalEntry, Line, LogWrite, Note
from dtx.log.statement import (
    CONFLICT,
    OUT_OF_TURN,
    PROOF,
    Bound,
    Column,
    Statement,
    both,
    expect_all,
    in_pieces,
    insert,
    ours,
    unnest,
)

BRANCH: Final[tuple[Column, ...]] = (
    ("id", "id", "uuid", binary.uuids),
    ("vhost", "vhost", "text", binary.texts),
    ("format_id", "xid.format_id", "bigint", binary.int8s),
    ("gtrid", "xid.gtrid", "bytea", binary.bytes_),
    ("bqual", "xid.bqual", "bytea", binary.bytes_),
    ("state", "state", "text", binary.texts),
    ("owner", "owner", "text", binary.texts),
    ("version", "version", "integer", binary.int4s),
    ("timeout", "timeout", "bigint", binary.int8s),
    ("started_at", "started_at", "timestamptz", binary.times),
    ("prepared_at", "prepared_at", "timestamptz", binary.times),
    ("decided_at", "decided_at", "timestamptz", binary.times),
    ("one_phase", "one_phase", "boolean", binary.booleans),
    ("publishes", "publishes", "integer", binary.int4s),
    ("consumes", "consumes", "integer", binary.int4s),
    ("bytes", "bytes", "bigint", binary.int8s),
    ("stuck", "stuck", "text", binary.optional_texts),
    ("outcome", "outcome", "text", binary.optional_texts),
    ("published", "published", "bytea", binary.packed_slots),
    ("consumed", "consumed", "bytea", binary.packed_slots),
    ("exchange_marks", "", "bytea", binary.optional_bytes),
)
WORK: Final[tuple[Column, ...]] = (
    ("position", "position", "integer", binary.int4s),
    ("kind", "kind", "text", binary.texts),
    ("exchange", "exchange", "bytea", binary.bytes_),
    ("routing_key", "routing_key", "bytea", binary.bytes_),
    ("queue", "queue", "bytea", binary.optional_bytes),
    ("flags", "flags", "integer", binary.int4s),
    ("properties", "properties", "bytea", binary.bytes_),
    ("body", "body", "bytea", binary.bytes_),
    ("unit", "unit", "integer", binary.optional_int4s),
)
UNIT: Final[tuple[Column, ...]] = (
    ("number", "number", "integer", binary.int4s),
    ("lock", "lock", "text", binary.texts),
    ("nonce", "nonce", "uuid", binary.uuids),
    ("incarnation", "incarnation", "text", binary.optional_texts),
    ("receipt", "receipt", "boolean", binary.booleans),
    ("state", "state", "text", binary.texts),
)
ADVANCE: Final[tuple[Column, ...]] = (
    ("id", "id", "uuid", binary.uuids),
    ("expect", "expect", "text", binary.texts),
    ("version", "version", "integer", binary.int4s),
    ("state", "to", "text", binary.texts),
    ("prepared_at", "prepared_at", "timestamptz", binary.times),
    ("decided_at", "decided_at", "timestamptz", binary.times),
    ("stuck", "stuck", "text", binary.optional_texts),
    ("outcome", "outcome", "text", binary.optional_texts),
)
COMPLETE: Final[tuple[Column, ...]] = ADVANCE[:3]
_FATE: Final[tuple[Column, ...]] = (
    ("branch_id", "", "uuid", binary.uuids),
    ("position", "", "integer", binary.int4s),
    ("fate", "", "text", binary.texts),
)
_CLOSE: Final[tuple[Column, ...]] = (
    ("branch_id", "", "uuid", binary.uuids),
    ("publishes", "", "text", binary.texts),
    ("consumes", "", "text", binary.texts),
)
_REDIRECT: Final[tuple[Column, ...]] = (
    ("branch_id", "", "uuid", binary.uuids),
    ("position", "", "integer", binary.int4s),
    ("exchange", "", "bytea", binary.bytes_),
    ("routing_key", "", "bytea", binary.bytes_),
    ("queue", "", "bytea", binary.optional_bytes),
)
_RELEASE: Final[tuple[Column, ...]] = (("id", "", "uuid", binary.uuids), ("kind", "", "text", binary.texts))
_ARCHIVE: Final[tuple[Column, ...]] = (("id", "", "uuid", binary.uuids), ("at", "", "timestamptz", binary.times))
_VOTED: Final = {
    "state": "'prepared'",
    "version": "1",
    "decided_at": "NULL",
    "one_phase": "false",
    "stuck": "NULL",
    "outcome": "NULL",
}
"""What a branch has when it has voted and nothing more has happened to it."""
JOURNAL: Final[tuple[Column, ...]] = (
    ("at", "at", "timestamptz", binary.times),
    ("event", "event", "text", binary.texts),
    ("branch_id", "branch_id", "uuid", binary.uuids),
    ("vhost", "vhost", "text", binary.texts),
    ("format_id", "xid.format_id", "bigint", binary.int8s),
    ("gtrid", "xid.gtrid", "bytea", binary.bytes_),
    ("bqual", "xid.bqual", "bytea", binary.bytes_),
    ("owner", "owner", "text", binary.texts),
    ("actor", "actor", "text", binary.optional_texts),
    ("reason", "reason", "text", binary.optional_texts),
    ("outcome", "outcome", "text", binary.optional_texts),
    ("one_phase", "one_phase", "boolean", binary.booleans),
    ("publishes", "publishes", "integer", binary.int4s),
    ("consumes", "consumes", "integer", binary.int4s),
    ("bytes", "bytes", "bigint", binary.int8s),
    ("started_at", "started_at", "timestamptz", binary.times),
    ("prepared_at", "prepared_at", "timestamptz", binary.times),
    ("decided_at", "decided_at", "timestamptz", binary.times),
)
VOTE: Final[tuple[Column, ...]] = (
    *(column for column in BRANCH if column[0] not in _VOTED),
    ("line", "", "uuid", binary.raw_uuids),
    ("actor", "", "text", binary.texts),
)
"""What differs from branch to branch when it enters with its vote: see :class:`Line`."""
END: Final[tuple[Column, ...]] = (
    *COMPLETE,
    ("line", "", "uuid", binary.raw_uuids),
    ("event", "event", "text", binary.texts),
    ("at", "at", "timestamptz", binary.times),
    ("actor", "actor", "text", binary.texts),
)
HEURISTIC: Final[tuple[Column, ...]] = (
    ("branch_id", "branch_id", "uuid", binary.uuids),
    ("outcome", "outcome", "text", binary.texts),
    ("actor", "actor", "text", binary.optional_texts),
    ("reason", "reason", "text", binary.optional_texts),
    ("at", "at", "timestamptz", binary.times),
)
_OWNER: Final[Column] = ("branch_id", "", "uuid", binary.uuids)
_ID: Final[Column] = ("id", "", "uuid", binary.raw_uuids)
_NUMBERS: Final[tuple[Column, ...]] = (_OWNER, ("number", "", "integer", binary.int4s))

_branch_values = attrgetter(*(column[1] for column in BRANCH[:-1]))
_vote_values = attrgetter(*(column[1] for column in VOTE[:-3]))
_work_values = attrgetter(*(column[1] for column in WORK))
_unit_values = attrgetter(*(column[1] for column in UNIT))
_advance_values = attrgetter(*(column[1] for column in ADVANCE))
_complete_values = attrgetter(*(column[1] for column in COMPLETE))
_journal_values = attrgetter(*(column[1] for column in JOURNAL))
_WORK_BODY: Final = 1 + [column[0] for column in WORK].index("body")

_OPEN: Final = "(w.fate IS NULL OR w.fate = 'unsure')"

PROVE_LEASE: Final = Statement(b"prove_lease", f"SELECT {PROOF}")
PROVE_TURN: Final = Statement(
    b"prove_turn",
    # A setting that a transaction makes is gone when it fails. So whoever finds it knows that the group before has
    # committed, in this session, without a row that tells of it.
    f"SELECT {PROOF}, dtx.require($3::text = '' OR current_setting('dtx.turn', true) = $3::text, '{OUT_OF_TURN}', "
    "'the group before was not written'), set_config('dtx.turn', $4::text, false)",
)
INSERT_BRANCH: Final = Statement(b"insert_branch", insert("branch", BRANCH), BRANCH, begins=True)
INSERT_WORK: Final = Statement(b"insert_work", insert("work", (_OWNER, *WORK)), (_OWNER, *WORK))
PUT_UNIT: Final = Statement(
    b"put_unit",
    insert(
        "unit",
        (_OWNER, *UNIT),
        "ON CONFLICT (branch_id, number) DO UPDATE SET "
        + ", ".join(f"{column[0]} = excluded.{column[0]}" for column in UNIT[1:]),
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
        f"WHERE b.id = u.id AND {ours('b')} AND b.state = u.expect AND b.version = u.version RETURNING 1",
        "the branch is not in the expected state and version",
    ),
    ADVANCE,
    begins=True,
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
    f"FROM {unnest(_RELEASE)} WHERE b.id = u.id AND {ours('b')} AND $2::bigint >= 0",
    _RELEASE,
)
ARCHIVE: Final = Statement(
    b"archive",
    # Positions of what a branch of standalone mode hides are those of its slots; it has no work besides.
    "INSERT INTO dtx.archive (rm, branch_id, position, vhost, format_id, gtrid, bqual, owner, kind, exchange, "
    "routing_key, queue, properties, body, fate, at) "
    "SELECT b.rm, b.id, m.position, b.vhost, b.format_id, b.gtrid, b.bqual, b.owner, m.kind, m.exchange, "
    "m.routing_key, m.queue, m.properties, m.body, m.fate, u.at "
    f"FROM {unnest(_ARCHIVE)} JOIN dtx.branch b ON b.id = u.id AND {ours('b')} CROSS JOIN LATERAL ("
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
    f"WHERE b.id = u.id AND {ours('b')} AND b.state = u.expect AND b.version = u.version "
    "RETURNING b.id, b.outcome), "
    "work AS (DELETE FROM dtx.work w USING gone WHERE w.branch_id = gone.id), "
    "units AS (DELETE FROM dtx.unit t USING gone WHERE t.branch_id = gone.id), "
    "outcomes AS (DELETE FROM dtx.heuristic_outcome h USING gone "
    "WHERE h.branch_id = gone.id AND gone.outcome IS NOT NULL) "
    f"SELECT dtx.require((SELECT count(*) FROM gone) = $2::bigint, '{CONFLICT}', "
    "'the branch is not in the expected state and version')",
    COMPLETE,
)
_COLUMNS: Final = ", ".join(column[0] for column in BRANCH)
_LINES: Final = f"INSERT INTO dtx.journal (rm, id, {', '.join(column[0] for column in JOURNAL)})"
_OF_BRANCH: Final = "vhost, format_id, gtrid, bqual, owner, actor, NULL"
INSERT_VOTE: Final = Statement(
    b"insert_vote",
    f"WITH u AS MATERIALIZED (SELECT * FROM {unnest(VOTE)}), "
    f"lines AS ({_LINES} SELECT $1::text, line, prepared_at, 'prepared', id, {_OF_BRANCH}, NULL, false, "
    "publishes, consumes, bytes, started_at, prepared_at, NULL::timestamptz FROM u) "
    f"INSERT INTO dtx.branch (rm, {_COLUMNS}) SELECT $1::text, "
    + ", ".join(_VOTED.get(column[0], column[0]) for column in BRANCH)
    + " FROM u WHERE $2::bigint >= 0",
    VOTE,
    begins=True,
)


def _end(more: str = "") -> str:
    """Branches end, and each leaves the line that its row tells."""
    return (
        f"WITH gone AS (DELETE FROM dtx.branch b USING {unnest(END)} "
        f"WHERE b.id = u.id AND {ours('b')} AND b.state = u.expect AND b.version = u.version "
        f"RETURNING b.*, u.line, u.event, u.at, u.actor), {more}"
        f"lines AS ({_LINES} SELECT rm, line, at, event, id, {_OF_BRANCH}, outcome, one_phase, publishes, consumes, "
        "bytes, started_at, prepared_at, "
        "CASE WHEN event = 'forgotten' THEN decided_at ELSE coalesce(decided_at, at) END FROM gone) "
        f"SELECT dtx.require((SELECT count(*) FROM gone) = $2::bigint, '{CONFLICT}', "
        "'the branch is not in the expected state and version')"
    )


_WITH_WORK: Final = (
    "work AS (DELETE FROM dtx.work w USING gone WHERE w.branch_id = gone.id), "
    "units AS (DELETE FROM dtx.unit t USING gone WHERE t.branch_id = gone.id), "
)
_WITH_OUTCOME: Final = "outcomes AS (DELETE FROM dtx.heuristic_outcome h USING gone WHERE h.branch_id = gone.id), "
# Only a branch in a state of WITH_OUTCOME has an outcome (branch_check), and only with one is there a row of it.
END_BRANCH: Final = Statement(b"end_branch", _end(), END, begins=True)
END_WITH_WORK: Final = Statement(b"end_with_work", _end(_WITH_WORK), END, begins=True)
END_WITH_OUTCOME: Final = Statement(b"end_with_outcome", _end(_WITH_WORK + _WITH_OUTCOME), END)
INSERT_JOURNAL: Final = Statement(b"insert_journal", insert("journal", (_ID, *JOURNAL)), (_ID, *JOURNAL))

STATEMENTS: Final = (
    PROVE_LEASE,
    PROVE_TURN,
    ARCHIVE,
    COMPLETE_BRANCH,
    END_BRANCH,
    END_WITH_WORK,
    END_WITH_OUTCOME,
    INSERT_BRANCH,
    INSERT_VOTE,
    INSERT_WORK,
    ADVANCE_BRANCH,
    PUT_UNIT,
    UNIT_DONE,
    SETTLE,
    REDIRECT,
    SET_FATE,
    CLOSE_WORK,
    RELEASE,
    PUT_HEURISTIC,
    INSERT_JOURNAL,
    *message_statements.STATEMENTS,
)
"""In the order of their execution within a group."""
PREPARED: Final = both(STATEMENTS)
"""What a session that writes prepares."""


class _Rows:
    """What a group writes, by statement."""

    def __init__(self) -> None:
        self.branches: list[Any] = []
        self.votes: list[Any] = []
        self.works: list[Any] = []
        self.units: list[Any] = []
        self.advances: list[Any] = []
        self.done: list[Any] = []
        self.settled: list[Any] = []
        self.outcomes: list[Any] = []
        self.completes: list[Any] = []
        self.ends: list[Any] = []
        self.ends_with_work: list[Any] = []
        self.ends_with_outcome: list[Any] = []
        self.lines: list[Any] = []
        self.fates: list[Any] = []
        self.closed: list[Any] = []
        self.redirects: list[Any] = []
        self.released: list[Any] = []
        self.archived: list[Any] = []
        self.changes: list[Change] = []

    def insert(self, record: Insert, line_id: bytes) -> None:
        """A branch enters."""
        branch, journal = record.branch, record.journal
        if isinstance(journal, Line):
            self.votes.append((*_vote_values(branch), _exchange_marks(record), line_id, journal.actor))
        else:
            self.branches.append((*_branch_values(branch), _exchange_marks(record)))
            if branch.units:
                self.units.extend([(branch.id, *_unit_values(unit)) for unit in branch.units])
            self.line(journal, line_id)
        if record.work:
            self.works.extend([(branch.id, *_work_values(work)) for work in record.work])
        self.change(record.change)

    def advance(self, record: Advance, line_id: bytes) -> None:
        """A branch changes."""
        journal = record.journal
        self.advances.append(_advance_values(record))
        if record.unit is not None:
            self.units.append((record.id, *_unit_values(record.unit)))
        self.done.extend([(record.id, number) for number in record.units_done])
        self.settled.extend([(record.id, position) for position in record.settled])
        if record.outcome is not None and journal is not None:
            self.outcomes.append((record.id, record.outcome, journal.actor, journal.reason, journal.at))
        if record.close is not None:
            self.closed.append((record.id, record.close.publishes, record.close.consumes))
        self.released.extend([(record.id, kind) for kind in sorted(record.released)])
        self.redirects.extend(
            [(record.id, to.position, to.exchange, to.routing_key, to.queue) for to in record.redirects]
        )
        self.fates.extend([(record.id, position, fate) for position, fate in record.fates])
        self.line(journal, line_id)
        self.change(record.change)

    def complete(self, record: Complete, line_id: bytes) -> None:
        """A branch ends."""
        journal = record.journal
        if record.archive:
            self.archived.append((record.id, journal.at))
        if isinstance(journal, Line):
            if record.expect in WITH_OUTCOME:
                ends = self.ends_with_outcome
            else:
                ends = self.ends_with_work if record.change is None else self.ends
            ends.append((*_complete_values(record), line_id, *journal))
        else:
            self.completes.append(_complete_values(record))
            self.line(journal, line_id)
        self.change(record.change)

    def line(self, journal: JournalEntry | None, line_id: bytes) -> None:
        """The journal tells."""
        if journal is not None:
            self.lines.append((line_id, *_journal_values(journal)))

    def change(self, change: Change | None) -> None:
        """Messages come and go."""
        if change is not None:
            self.changes.append(change)


def _exchange_marks(record: Insert) -> bytes | None:
    """Marks of the exchanges of the messages that a branch brings along, if these are all that it publishes."""
    change, published = record.change, record.branch.published
    if change is None or published is None or len(change.puts) != len(published):
        return None
    if len(published) == 1:
        return mark(change.puts[0].exchange)
    return marks([put.exchange for put in change.puts])


class Turn(NamedTuple):
    """The place of a group among those that are sent before the ones before them are answered.

    Args:
        mine: its number, by which the next one knows it.
        behind: the number of the group that has to be written before; 0 where none is under way.
    """

    mine: int
    behind: int


def bind_group(rm: bytes, epoch: int, group: Iterable[tuple[LogWrite, bytes]], turn: Turn | None = None) -> list[Bound]:
    """The statements of one group, none of them empty.

    Completions go first, so that an xid may end and begin again in one group; no branch may occur twice. Messages are
    put before any is dropped: a slot is never used again, so one that is put and dropped in one group is gone, in
    whichever order its records came. There is at most one Define in a group, since a name may go and come again.

    Args:
        rm: name of the resource manager.
        epoch: of the lease.
        group: each record with the id of its journal line.
        turn: where it may be sent behind another one, or another one behind it.

    Raises:
        UnicodeError, struct.error: a value does not fit its column.
    """
    rows = _Rows()
    topology: list[Bound] = []
    for record, line_id in group:
        match record:
            case Insert():
                rows.insert(record, line_id)
            case Complete():
                rows.complete(record, line_id)
            case Store(change=change):
                rows.changes.append(change)
            case Advance():
                rows.advance(record, line_id)
            case Note(journal=journal, change=change):
                rows.line(journal, line_id)
                rows.change(change)
            case Define():
                topology += bind_topology(rm, record)
            case _ as never:
                assert_never(never)
    filled = (
        (ARCHIVE, rows.archived),
        (COMPLETE_BRANCH, rows.completes),
        (END_BRANCH, rows.ends),
        (END_WITH_WORK, rows.ends_with_work),
        (END_WITH_OUTCOME, rows.ends_with_outcome),
        (INSERT_BRANCH, rows.branches),
        (INSERT_VOTE, rows.votes),
        *((INSERT_WORK, piece) for piece in in_pieces(rows.works, _WORK_BODY)),
        (ADVANCE_BRANCH, rows.advances),
        (PUT_UNIT, rows.units),
        (UNIT_DONE, rows.done),
        (SETTLE, rows.settled),
        (REDIRECT, rows.redirects),
        (SET_FATE, rows.fates),
        (CLOSE_WORK, rows.closed),
        *((RELEASE, [row]) for row in rows.released),
        (PUT_HEURISTIC, rows.outcomes),
        (INSERT_JOURNAL, rows.lines),
    )
    found: list[Filled] = [(statement, piece) for statement, piece in filled if piece]
    if rows.changes:
        found += changed(rows.changes)
    if turn is not None:
        behind = b"%d" % turn.behind if turn.behind else b""
        bound: list[Bound] = [(PROVE_TURN, [rm, binary.int8(epoch), behind, b"%d" % turn.mine])]
    elif found and len(found[0][1]) == 1 and found[0][0].begins:
        first, (row,) = found.pop(0)
        bound = [first.bind_proving(rm, epoch, row)]
    else:
        bound = [(PROVE_LEASE, [rm, binary.int8(epoch)])]
    bound += [statement.bind(rm, len(piece), piece) for statement, piece in found]
    return bound + topology if topology else bound
