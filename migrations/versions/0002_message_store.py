"""The message store of standalone mode: exchanges, queues, bindings, messages; and the slots of a branch's messages.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels = None
depends_on = None

TABLES = """
ALTER TABLE dtx.branch
    ADD COLUMN published bytea,
    ADD COLUMN consumed bytea,
    ADD CONSTRAINT branch_slots_check CHECK (octet_length(published) % 16 = 0 AND octet_length(consumed) % 16 = 0),
    ALTER COLUMN published SET STORAGE EXTERNAL,
    ALTER COLUMN consumed SET STORAGE EXTERNAL;

CREATE TABLE dtx.exchange (
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    name bytea NOT NULL,
    type text COLLATE "C" NOT NULL,
    auto_delete boolean NOT NULL,
    internal boolean NOT NULL,
    arguments bytea NOT NULL,
    CONSTRAINT exchange_pkey PRIMARY KEY (rm, vhost, name)
);

CREATE TABLE dtx.queue (
    id bigint NOT NULL,
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    name bytea NOT NULL,
    auto_delete boolean NOT NULL,
    arguments bytea NOT NULL,
    delivered bigint NOT NULL,
    CONSTRAINT queue_pkey PRIMARY KEY (id),
    CONSTRAINT queue_name_key UNIQUE (rm, vhost, name),
    CONSTRAINT queue_numbers_check CHECK (id > 0 AND delivered >= 0)
) WITH (fillfactor = 50);

CREATE TABLE dtx.binding (
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    source bytea NOT NULL,
    destination_kind text COLLATE "C" NOT NULL,
    destination bytea NOT NULL,
    routing_key bytea NOT NULL,
    arguments bytea NOT NULL,
    CONSTRAINT binding_destination_kind_check CHECK (destination_kind IN ('queue', 'exchange'))
);

-- arguments may be longer than an index can hold
CREATE UNIQUE INDEX binding_key
    ON dtx.binding (rm, vhost, source, destination_kind, destination, routing_key, sha256(arguments));

CREATE TABLE dtx.message (
    queue bigint NOT NULL,
    position bigint NOT NULL,
    rm text COLLATE "C" NOT NULL,
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    flags integer NOT NULL,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    expires_at timestamptz,
    CONSTRAINT message_pkey PRIMARY KEY (queue, position),
    CONSTRAINT message_slot_check CHECK (queue > 0 AND position >= 0)
);

-- A start reads the primary key alone, whatever the bodies weigh; these two have what is particular about a few.
CREATE INDEX message_expires_idx ON dtx.message (queue, position, expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX message_transient_idx ON dtx.message (queue, position) WHERE flags & 1 = 0;
"""

# As for the work of branches, vacuum runs after a number of dead rows, not throttled. Here it also runs after inserts:
# rows that stay are a backlog, and a start reads positions from the index alone only for vacuumed pages. Bodies are not
# compressed, and stay in the row up to a whole page: a row in two places costs twice as much to write and delete.
STORAGE = """
ALTER TABLE dtx.message SET (toast_tuple_target = 8160,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 100000,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 20000,
    toast.autovacuum_vacuum_cost_delay = 0);
ALTER TABLE dtx.message ALTER COLUMN body SET STORAGE EXTERNAL;
"""

# The slots of messages that a branch has put and holds: pairs of 64 bit integers, queue and position, big endian.
SLOTS = """
CREATE FUNCTION dtx.slots(packed bytea) RETURNS TABLE (ordinal bigint, queue bigint, "position" bigint)
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT n,
        ('x' || encode(substr(packed, (16 * n + 1)::integer, 8), 'hex'))::bit(64)::bigint,
        ('x' || encode(substr(packed, (16 * n + 9)::integer, 8), 'hex'))::bit(64)::bigint
    FROM generate_series(0::bigint, octet_length(packed) / 16 - 1) AS n
$$;
COMMENT ON FUNCTION dtx.slots IS 'the messages that branch.published or branch.consumed names';
"""

VIEW = """
CREATE OR REPLACE VIEW dtx.in_doubt AS
SELECT b.format_id || ':' || encode(b.gtrid, 'hex') || ':' || encode(b.bqual, 'hex') AS xid,
       b.rm, b.vhost, b.state, b.owner,
       date_trunc('milliseconds', now() - b.started_at) AS age,
       b.publishes, b.consumes, b.bytes, b.stuck, b.outcome, w.queues, w.exchanges,
       b.started_at, b.prepared_at, b.decided_at, b.id AS branch_id
FROM dtx.branch b
LEFT JOIN LATERAL (
    SELECT string_agg(DISTINCT encode(queue, 'escape'), ', ') AS queues,
           string_agg(DISTINCT encode(exchange, 'escape'), ', ') AS exchanges
    FROM (
        SELECT queue, CASE WHEN kind = 'publish' THEN exchange END AS exchange
        FROM dtx.work WHERE branch_id = b.id
        UNION ALL
        SELECT NULL, m.exchange
        FROM dtx.slots(b.published) s JOIN dtx.message m ON (m.queue, m.position) = (s.queue, s.position)
        UNION ALL
        SELECT q.name, NULL
        FROM dtx.slots(b.consumed) s JOIN dtx.queue q ON q.id = s.queue
    ) concerned
) w ON true;
"""

OLD_VIEW = """
CREATE OR REPLACE VIEW dtx.in_doubt AS
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
"""


def upgrade() -> None:
    for statements in (TABLES, STORAGE, SLOTS, VIEW):
        op.execute(statements)


def downgrade() -> None:
    op.execute(OLD_VIEW)
    op.execute("""
        DROP FUNCTION dtx.slots(bytea);
        DROP TABLE dtx.message, dtx.binding, dtx.queue, dtx.exchange;
        ALTER TABLE dtx.branch DROP COLUMN published, DROP COLUMN consumed;
    """)
