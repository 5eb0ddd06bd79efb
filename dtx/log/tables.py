"""The tables of the log, schema ``dtx``. Migrations make them; a test proves that both agree.

Constraints repeat the invariants of the core: no bug and no manual SQL can store what recovery cannot read. The tables
that every branch writes have one function each (:data:`INVARIANTS`). PostgreSQL parses a CHECK again for each
statement, but plans a function once a session (measured: half of its work for one client). Names, keys, properties and
bodies are ``bytea``: they are bytes on the wire. Every row names its resource manager, since several dtx, each with its
own broker, may share a database.

There are no foreign keys to ``branch``: they would run trigger queries for every row (measured: about a fifth more
processor time in PostgreSQL). One writer inserts and deletes these rows in the same statement sequence as their branch.
There is none from ``message`` to ``queue`` either: the messages of a deleted queue are removed later, in pieces.
"""

from typing import Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    Interval,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.types import UserDefinedType

from dtx.db.columns import SCHEMA, metadata, moment, octets, one_of, prose, word
from dtx.log.changes import DestinationKind
from dtx.log.records import UNDELIVERED, WITH_OUTCOME, Fate, JournalEvent, LogState, UnitState, WorkKind
from dtx.xa.codes import Heuristic


class Xid8(UserDefinedType[str]):
    """PostgreSQL's 64 bit transaction id, as ``pg_current_xact_id()`` returns it."""

    cache_ok: bool | None = True

    def get_col_spec(self, **_: object) -> str:
        """The name of the type in DDL."""
        return "xid8"


_XID_LENGTHS: Final = "octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64"
BRANCH_XID_KEY: Final = "branch_xid_key"
"""The constraint of a branch whose xid is there already."""
_FORMAT_ID: Final = "format_id BETWEEN 0 AND 4294967295"

INVARIANTS: Final = {
    "branch": (
        _FORMAT_ID,
        _XID_LENGTHS,
        one_of("state", LogState),
        one_of("outcome", Heuristic),
        f"({one_of('state', sorted(WITH_OUTCOME))}) = (outcome IS NOT NULL)",
        "version >= 1 AND timeout >= 0 AND publishes >= 0 AND consumes >= 0 AND bytes >= 0",
        "octet_length(published) % 16 = 0 AND octet_length(consumed) % 16 = 0",
    ),
    "work": (
        '"position" >= 0',
        one_of("kind", WorkKind),
        "(kind = 'consume') = (queue IS NOT NULL)",
        "(kind = 'consume' OR unit IS NULL)",
        one_of("fate", Fate),
    ),
    "unit": ("number >= 0", one_of("state", UnitState)),
    "journal": (_FORMAT_ID, _XID_LENGTHS, one_of("event", JournalEvent), one_of("outcome", Heuristic)),
}
"""For the tables that every branch writes: the conditions that ``<table>_holds`` checks for a row. A null passes."""


def _holds(table: str, *columns: str) -> CheckConstraint:
    """The constraint that calls the function of *table* with *columns* as arguments."""
    return CheckConstraint(f"{SCHEMA}.{table}_holds({', '.join(columns)})", name=f"{table}_check")


branch: Final = Table(
    "branch",
    metadata,
    Column("id", Uuid, nullable=False),
    word("rm"),
    word("vhost"),
    Column("format_id", BigInteger, nullable=False),
    octets("gtrid"),
    octets("bqual"),
    word("state"),
    word("owner"),
    Column("version", Integer, nullable=False),
    Column("timeout", BigInteger, nullable=False),
    moment("started_at"),
    moment("prepared_at", nullable=True),
    moment("decided_at", nullable=True),
    Column("one_phase", Boolean, nullable=False),
    Column("publishes", Integer, nullable=False),
    Column("consumes", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    prose("stuck", nullable=True),
    word("outcome", nullable=True),
    # Standalone mode: pairs of 64 bit integers, queue and position; dtx.slots() reads them.
    octets("published", nullable=True),
    octets("consumed", nullable=True),
    # Marks of the exchanges that the published messages were sent to (dtx.log.changes.mark); null where unknown.
    octets("exchange_marks", nullable=True),
    # The member that has it; null if dtx is alone. The session of the writer has the value.
    Column("member", Uuid, server_default=text("(NULLIF(current_setting('dtx.member'::text, true), ''::text))::uuid")),
    PrimaryKeyConstraint("id", name="branch_pkey"),
    UniqueConstraint("rm", "vhost", "format_id", "gtrid", "bqual", name=BRANCH_XID_KEY),
    _holds(
        "branch", "format_id", "gtrid", "bqual", "state", "version", "timeout", "publishes", "consumes", "bytes",
        "outcome", "published", "consumed",
    ),
    # Neither state nor version is indexed and a third of each page stays free: an update needs no index entry (HOT).
    postgresql_with={"fillfactor": 65},
)  # fmt: skip

work: Final = Table(
    "work",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    word("rm"),
    word("kind"),
    octets("exchange"),
    octets("routing_key"),
    octets("queue", nullable=True),
    Column("flags", Integer, nullable=False),
    octets("properties"),
    octets("body"),
    Column("unit", Integer),
    word("fate", nullable=True),
    PrimaryKeyConstraint("branch_id", "position", name="work_pkey"),
    _holds("work", '"position"', "kind", "queue", "unit", "fate"),
)

archive: Final = Table(
    "archive",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    word("rm"),
    word("vhost"),
    Column("format_id", BigInteger, nullable=False),
    octets("gtrid"),
    octets("bqual"),
    word("owner"),
    word("kind"),
    octets("exchange"),
    octets("routing_key"),
    octets("queue", nullable=True),
    octets("properties"),
    octets("body"),
    word("fate"),
    moment("at"),
    PrimaryKeyConstraint("branch_id", "position", name="archive_pkey"),
    CheckConstraint(one_of("kind", WorkKind), name="archive_kind_check"),
    CheckConstraint(one_of("fate", sorted(UNDELIVERED)), name="archive_fate_check"),
    Index("archive_xid_idx", "gtrid", "bqual"),
    Index("archive_at_idx", "rm", "at", "branch_id", "position"),
)
"""Undelivered messages of forgotten branches."""

unit: Final = Table(
    "unit",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False),
    word("rm"),
    word("lock"),
    Column("nonce", Uuid, nullable=False),
    word("incarnation", nullable=True),
    Column("receipt", Boolean, nullable=False),
    word("state"),
    Column("attempt", Integer, server_default=text("1"), nullable=False),
    PrimaryKeyConstraint("branch_id", "number", name="unit_pkey"),
    _holds("unit", "number", "state"),
)

heuristic_outcome: Final = Table(
    "heuristic_outcome",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    word("rm"),
    word("outcome"),
    prose("actor"),
    prose("reason", nullable=True),
    moment("at"),
    PrimaryKeyConstraint("branch_id", name="heuristic_outcome_pkey"),
    CheckConstraint(one_of("outcome", Heuristic), name="heuristic_outcome_outcome_check"),
)

journal: Final = Table(
    "journal",
    metadata,
    Column("id", Uuid, nullable=False),
    moment("at"),
    word("rm"),
    word("event"),
    Column("branch_id", Uuid, nullable=False),
    word("vhost"),
    Column("format_id", BigInteger, nullable=False),
    octets("gtrid"),
    octets("bqual"),
    word("owner"),
    prose("actor"),
    prose("reason", nullable=True),
    word("outcome", nullable=True),
    Column("one_phase", Boolean, nullable=False),
    Column("publishes", Integer, nullable=False),
    Column("consumes", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    moment("started_at", nullable=True),
    moment("prepared_at", nullable=True),
    moment("decided_at", nullable=True),
    # Readers follow the journal by this column below pg_snapshot_xmin: max(id) would miss entries committed late.
    Column("xid8", Xid8, server_default=text("pg_current_xact_id()"), nullable=False),
    PrimaryKeyConstraint("at", "id", name="journal_pkey"),
    # The last entry of one xid without a sort; vhost and resource manager hardly ever differ, so they only filter.
    Index("journal_xid_idx", "gtrid", "bqual", "at"),
    _holds("journal", "event", "format_id", "gtrid", "bqual", "outcome"),
    postgresql_partition_by="RANGE (at)",
)

replay: Final = Table(
    "replay",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    word("rm"),
    word("vhost"),
    octets("exchange"),
    octets("routing_key"),
    octets("digest"),
    moment("at", now=True),
    PrimaryKeyConstraint("branch_id", "position", name="replay_pkey"),
    CheckConstraint('"position" >= 0', name="replay_position_check"),
    Index("replay_at_idx", "rm", "at"),
)
"""Messages that were sent again."""

settlement: Final = Table(
    "settlement",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    word("vhost"),
    octets("queue"),
    word("rm"),
    Column("attempt", Integer, nullable=False),
    octets("digest"),
    moment("at", now=True),
    PrimaryKeyConstraint("branch_id", "position", "vhost", "queue", name="settlement_pkey"),
    CheckConstraint('"position" >= 0 AND attempt >= 1', name="settlement_numbers_check"),
    Index("settlement_at_idx", "rm", "at"),
)
"""The copy of a message that was settled first in a queue."""

duplicate: Final = Table(
    "duplicate",
    metadata,
    Column("branch_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    word("vhost"),
    octets("queue"),
    Column("attempt", Integer, nullable=False),
    word("rm"),
    octets("exchange"),
    octets("routing_key"),
    octets("properties"),
    octets("body"),
    moment("at", now=True),
    PrimaryKeyConstraint("branch_id", "position", "vhost", "queue", "attempt", name="duplicate_pkey"),
    CheckConstraint('"position" >= 0 AND attempt >= 1', name="duplicate_numbers_check"),
    Index("duplicate_at_idx", "rm", "at"),
)
"""Copies that were not delivered."""

exchange: Final = Table(
    "exchange",
    metadata,
    word("rm"),
    word("vhost"),
    octets("name"),
    word("type"),
    Column("auto_delete", Boolean, nullable=False),
    Column("internal", Boolean, nullable=False),
    octets("arguments"),
    PrimaryKeyConstraint("rm", "vhost", "name", name="exchange_pkey"),
)

queue: Final = Table(
    "queue",
    metadata,
    Column("id", BigInteger, nullable=False, autoincrement=False),
    word("rm"),
    word("vhost"),
    octets("name"),
    Column("auto_delete", Boolean, nullable=False),
    octets("arguments"),
    # Messages up to this position may have been delivered before: written ahead, at intervals.
    Column("delivered", BigInteger, nullable=False),
    PrimaryKeyConstraint("id", name="queue_pkey"),
    UniqueConstraint("rm", "vhost", "name", name="queue_name_key"),
    CheckConstraint("id > 0 AND delivered >= 0", name="queue_numbers_check"),
    # "delivered" changes often and is not indexed (HOT).
    postgresql_with={"fillfactor": 50},
)

binding: Final = Table(
    "binding",
    metadata,
    word("rm"),
    word("vhost"),
    octets("source"),
    word("destination_kind"),
    octets("destination"),
    octets("routing_key"),
    octets("arguments"),
    CheckConstraint(one_of("destination_kind", DestinationKind), name="binding_destination_kind_check"),
    # Arguments may be longer than an index can hold.
    Index(
        "binding_key", "rm", "vhost", "source", "destination_kind", "destination", "routing_key",
        text("sha256(arguments)"), unique=True,
    ),
)  # fmt: skip

# A body that several messages share. A trigger on "message" counts its uses down, and deletes it with the last one.
body: Final = Table(
    "body",
    metadata,
    Column("id", BigInteger, nullable=False, autoincrement=False),
    word("rm"),
    Column("uses", Integer, nullable=False),
    octets("content"),
    PrimaryKeyConstraint("id", name="body_pkey"),
    postgresql_with={"fillfactor": 50},
)

message: Final = Table(
    "message",
    metadata,
    Column("queue", BigInteger, nullable=False, autoincrement=False),
    Column("position", BigInteger, nullable=False, autoincrement=False),
    word("rm"),
    octets("exchange"),
    octets("routing_key"),
    Column("flags", Integer, nullable=False),
    octets("properties"),
    # Null where it shares the body that "shared" names.
    octets("body", nullable=True),
    moment("expires_at", nullable=True),
    Column("shared", BigInteger),
    PrimaryKeyConstraint("queue", "position", name="message_pkey"),
    CheckConstraint("queue > 0 AND position >= 0", name="message_slot_check"),
    # A startup reads the primary key only, regardless of body sizes; these two indexes have its few special rows.
    Index("message_expires_idx", "queue", "position", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("message_transient_idx", "queue", "position", postgresql_where=text("flags & 1 = 0")),
)

lease: Final = Table(
    "lease",
    metadata,
    word("rm"),
    Column("epoch", BigInteger, nullable=False),
    prose("holder"),
    prose("process", nullable=True),
    Column("instance", Uuid, nullable=False),
    moment("taken_at"),
    moment("expires_at"),
    Column("retention_days", Integer, nullable=False),
    # Null: for ever.
    Column("archive_days", Integer),
    Column("audit_days", Integer),
    Column("log", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
    Column("duplicate_days", Integer),
    PrimaryKeyConstraint("rm", name="lease_pkey"),
    CheckConstraint("epoch >= 1", name="lease_epoch_check"),
    CheckConstraint("retention_days >= 1", name="lease_retention_check"),
    CheckConstraint("archive_days >= 1", name="lease_archive_check"),
    CheckConstraint("audit_days >= 1", name="lease_audit_check"),
    CheckConstraint("duplicate_days >= 1", name="lease_duplicate_check"),
    # One row that is updated every few seconds: it stays in its page.
    postgresql_with={"fillfactor": 10},
)

member: Final = Table(
    "member",
    metadata,
    Column("instance", Uuid, nullable=False),
    word("rm"),
    # Unlike that of the lease, it is unique among all members, also after they have raised it.
    Column("epoch", BigInteger, nullable=False),
    prose("holder"),
    prose("process", nullable=True),
    prose("address"),
    moment("joined_at", now=True),
    moment("expires_at"),
    PrimaryKeyConstraint("instance", name="member_pkey"),
    UniqueConstraint("rm", "epoch", name="member_epoch_key"),
    postgresql_with={"fillfactor": 10},
)
"""The active dtx of resource managers that have several; these hold the lease together."""

member_secret: Final = Table(
    "member_secret",
    metadata,
    word("rm"),
    octets("secret"),
    moment("made_at", now=True),
    PrimaryKeyConstraint("rm", "secret", name="member_secret_pkey"),
    CheckConstraint("octet_length(secret) = 32", name="member_secret_check"),
)
"""What members prove to each other. The two youngest are valid."""


# The verdicts of the pipeline about all resource managers. These two tables have no column for one. A run of the
# pipeline replaces their rows in one transaction, without a lease; dtx itself does not write them.
def _words(name: str) -> Column[list[str]]:
    return Column(name, ARRAY(Text(collation="C")), nullable=False)


reconciliation: Final = Table(
    "reconciliation",
    metadata,
    Column("number", BigInteger, nullable=False, autoincrement=False),
    moment("as_of"),
    moment("published_at", now=True),
    Column("lines", BigInteger, nullable=False),
    Column("fingerprint", BigInteger, nullable=False),
    prose("totals", comment="JSON: for each verdict its transactions and branches"),
    Column("shown", BigInteger, nullable=False),
    # an older pipeline does not write it
    Column("sources", Text, nullable=False, server_default="[]", comment="JSON: when each source was last read"),
    PrimaryKeyConstraint("number", name="reconciliation_pkey"),
    CheckConstraint("number >= 1 AND lines >= 0 AND shown >= 0", name="reconciliation_counts_check"),
)
"""The published runs; the verdicts are those of the last one."""

verdict: Final = Table(
    "verdict",
    metadata,
    Column("format_id", BigInteger),
    octets("gtrid"),
    word("verdict"),
    _words("findings"),
    moment("since", nullable=True),
    moment("first_at"),
    moment("last_at"),
    _words("rms"),
    _words("owners"),
    Column("branches", Integer, nullable=False),
    word("decision", nullable=True),
    prose("tm", nullable=True),
    octets("fingerprint"),
    prose("evidence", comment="JSON: the lines that it rests on"),
    moment("known_at", nullable=True),
    CheckConstraint("format_id BETWEEN 0 AND 4294967295", name="verdict_format_id_check"),
    # names of PostgreSQL's own prepared transactions may be longer than a gtrid
    CheckConstraint("octet_length(gtrid) BETWEEN 1 AND 200", name="verdict_gtrid_check"),
    CheckConstraint("branches >= 0", name="verdict_branches_check"),
    CheckConstraint("octet_length(fingerprint) = 16", name="verdict_fingerprint_check"),
    # There is no primary key, since there may be no format id: when a participant's name for the transaction is no xid,
    # or when a decision concerns no known branch, in a log without format ids.
    Index("verdict_key", "gtrid", text("coalesce(format_id, -1)"), unique=True),
    Index("verdict_last_at_idx", "last_at", "gtrid"),
    Index("verdict_verdict_idx", "verdict", "last_at", "gtrid"),
)


# Migrations are compared with the tables alone, so it has a metadata of its own. A test compares its columns.
in_doubt: Final = Table(
    "in_doubt",
    MetaData(schema=SCHEMA),
    Column("xid", Text, doc="the xid, as `format:gtrid-hex:bqual-hex`"),
    Column("rm", Text, doc="the resource manager (`--rm`)"),
    Column("vhost", Text, doc="the virtual host"),
    Column("state", Text, doc=f"the state: {', '.join(f'`{state}`' for state in LogState)}"),
    Column("owner", Text, doc="the user that started the branch"),
    Column("age", Interval, doc="the time since the start of the branch"),
    Column("publishes", Integer, doc="the number of messages that it publishes"),
    Column("consumes", Integer, doc="the number of messages that it consumes"),
    Column("bytes", BigInteger, doc="the size of all these messages in bytes"),
    Column("stuck", Text, doc="the reason why phase two does not continue; null if it is not stuck"),
    Column("outcome", Text, doc=f"the heuristic outcome: {', '.join(f'`{each}`' for each in Heuristic)}; null if none"),
    Column("queues", Text, doc="the queues of the messages that it consumes, separated by a comma and a space"),
    Column("exchanges", Text, doc="the exchanges that it publishes to, in the same form; the default one is empty"),
    Column("started_at", DateTime(timezone=True), doc="the time of its start"),
    Column("prepared_at", DateTime(timezone=True), doc="the time of its vote; null if it has not voted"),
    Column("decided_at", DateTime(timezone=True), doc="the time of the decision; null if there is none"),
    Column("branch_id", Uuid, doc="the id of the branch in the tables of dtx"),
)
"""The view for people with psql: the branches that are in the log."""
