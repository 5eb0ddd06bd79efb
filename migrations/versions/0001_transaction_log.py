"""The transaction log: branches in doubt with their work, the journal, the lease.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE dtx.branch (
    id uuid NOT NULL,
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    state text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    timeout bigint NOT NULL,
    started_at timestamptz NOT NULL,
    prepared_at timestamptz,
    decided_at timestamptz,
    one_phase boolean NOT NULL,
    publishes integer NOT NULL,
    consumes integer NOT NULL,
    bytes bigint NOT NULL,
    stuck text,
    outcome text COLLATE "C",
    CONSTRAINT branch_pkey PRIMARY KEY (id),
    CONSTRAINT branch_xid_key UNIQUE (rm, vhost, format_id, gtrid, bqual),
    CONSTRAINT branch_format_id_check CHECK (format_id BETWEEN 0 AND 4294967295),
    CONSTRAINT branch_xid_check CHECK (octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64),
    CONSTRAINT branch_state_check CHECK (state IN ('taking', 'prepared', 'committing', 'rolling-back', 'heuristic')),
    CONSTRAINT branch_outcome_check CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')),
    CONSTRAINT branch_heuristic_check CHECK ((state = 'heuristic') = (outcome IS NOT NULL)),
    CONSTRAINT branch_counts_check
        CHECK (version >= 1 AND timeout >= 0 AND publishes >= 0 AND consumes >= 0 AND bytes >= 0)
) WITH (fillfactor = 65);

CREATE TABLE dtx.work (
    branch_id uuid NOT NULL,
    position integer NOT NULL,
    rm text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    queue bytea,
    flags integer NOT NULL,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    unit integer,
    CONSTRAINT work_pkey PRIMARY KEY (branch_id, position),
    CONSTRAINT work_kind_check CHECK (kind IN ('publish', 'consume')),
    CONSTRAINT work_queue_check CHECK ((kind = 'consume') = (queue IS NOT NULL)),
    CONSTRAINT work_unit_check CHECK (kind = 'consume' OR unit IS NULL),
    CONSTRAINT work_position_check CHECK (position >= 0)
);

CREATE TABLE dtx.unit (
    branch_id uuid NOT NULL,
    number integer NOT NULL,
    rm text COLLATE "C" NOT NULL,
    lock text COLLATE "C" NOT NULL,
    nonce uuid NOT NULL,
    incarnation text COLLATE "C",
    receipt boolean NOT NULL,
    state text COLLATE "C" NOT NULL,
    CONSTRAINT unit_pkey PRIMARY KEY (branch_id, number),
    CONSTRAINT unit_state_check CHECK (state IN ('pending', 'done')),
    CONSTRAINT unit_number_check CHECK (number >= 0)
);

CREATE TABLE dtx.heuristic_outcome (
    branch_id uuid NOT NULL,
    rm text COLLATE "C" NOT NULL,
    outcome text COLLATE "C" NOT NULL,
    actor text NOT NULL,
    reason text,
    at timestamptz NOT NULL,
    CONSTRAINT heuristic_outcome_pkey PRIMARY KEY (branch_id),
    CONSTRAINT heuristic_outcome_outcome_check CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard'))
);

CREATE TABLE dtx.journal (
    id uuid NOT NULL,
    at timestamptz NOT NULL,
    rm text COLLATE "C" NOT NULL,
    event text COLLATE "C" NOT NULL,
    branch_id uuid NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    owner text COLLATE "C" NOT NULL,
    actor text NOT NULL,
    reason text,
    outcome text COLLATE "C",
    one_phase boolean NOT NULL,
    publishes integer NOT NULL,
    consumes integer NOT NULL,
    bytes bigint NOT NULL,
    started_at timestamptz,
    prepared_at timestamptz,
    decided_at timestamptz,
    xid8 xid8 DEFAULT pg_current_xact_id() NOT NULL,
    CONSTRAINT journal_pkey PRIMARY KEY (at, id),
    CONSTRAINT journal_format_id_check CHECK (format_id BETWEEN 0 AND 4294967295),
    CONSTRAINT journal_xid_check CHECK (octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64),
    CONSTRAINT journal_event_check CHECK (event IN (
        'prepared', 'timed-out', 'stuck', 'hazard', 'heuristic', 'repeated',
        'committed', 'rolled-back', 'read-only', 'forgotten', 'discarded')),
    CONSTRAINT journal_outcome_check CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard'))
) PARTITION BY RANGE (at);

CREATE INDEX journal_xid_idx ON dtx.journal (gtrid, bqual, at);

-- Takes what has no partition of its own (a clock that jumped): a write never fails for want of one.
CREATE TABLE dtx.journal_default PARTITION OF dtx.journal DEFAULT;

CREATE TABLE dtx.lease (
    rm text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    holder text NOT NULL,
    process text,
    instance uuid NOT NULL,
    taken_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    retention_days integer NOT NULL,
    CONSTRAINT lease_pkey PRIMARY KEY (rm),
    CONSTRAINT lease_epoch_check CHECK (epoch >= 1),
    CONSTRAINT lease_retention_check CHECK (retention_days >= 1)
) WITH (fillfactor = 10);
"""

# Rows live for milliseconds: there are many dead rows in small tables. So vacuum runs after a number of dead rows, not
# throttled, and not because of inserts. Bodies are not compressed: for their short life, that costs more CPU than the
# disk saves.
STORAGE = """
ALTER TABLE dtx.branch SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 5000);
ALTER TABLE dtx.work SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 5000);
ALTER TABLE dtx.unit SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 5000);
ALTER TABLE dtx.lease SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
ALTER TABLE dtx.work ALTER COLUMN body SET STORAGE EXTERNAL;
"""

# A group of writes is several statements in one round trip, and commits at its end: only an error can stop it. A
# statement calls this function to raise an error when it did not find the rows that it expected.
REQUIRE = """
CREATE FUNCTION dtx.require(ok boolean, code text, otherwise text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF ok THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = otherwise;
END
$$;
COMMENT ON FUNCTION dtx.require IS 'raises SQLSTATE code unless ok: a statement that proves what it expected';
"""

VIEW = """
CREATE VIEW dtx.in_doubt AS
SELECT b.format_id || ':' || encode(b.gtrid, 'hex') || ':' || encode(b.bqual, 'hex') AS xid,
       b.rm, b.vhost, b.state, b.owner,
       date_trunc('milliseconds', now() - b.started_at) AS age,
       b.publishes, b.consumes, b.bytes, b.stuck, b.outcome, w.queues, w.exchanges,
       b.started_at, b.prepared_at, b.decided_at, b.id AS branch_id
FROM dtx.branch b
LEFT JOIN LATERAL (
    SELECT string_agg(DISTINCT encode(queue, 'escape'), ', ') AS queues,
           string_agg(DISTINCT CASE WHEN kind = 'publish' THEN encode(exchange, 'escape') END, ', ') AS exchanges
    FROM dtx.work WHERE branch_id = b.id
) w ON true;
COMMENT ON VIEW dtx.in_doubt IS 'every branch that has voted and is not completed; xid is format:gtrid-hex:bqual-hex';
"""


def upgrade() -> None:
    for statements in (TABLES, STORAGE, REQUIRE, VIEW):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP VIEW dtx.in_doubt;
        DROP FUNCTION dtx.require(boolean, text, text);
        DROP TABLE dtx.lease, dtx.journal, dtx.heuristic_outcome, dtx.unit, dtx.work, dtx.branch;
    """)
