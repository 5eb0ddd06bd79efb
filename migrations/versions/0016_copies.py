"""Messages that were sent again, the copies of them that were settled, and those that were not delivered.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0016"
down_revision: str | None = "0015"
branch_labels = None
depends_on = None

UNIT = "ALTER TABLE dtx.unit ADD COLUMN attempt integer NOT NULL DEFAULT 1;"

# An older dtx writes no value; null means for ever.
LEASE = """
ALTER TABLE dtx.lease ADD COLUMN duplicate_days integer,
    ADD CONSTRAINT lease_duplicate_check CHECK (duplicate_days >= 1);
"""

TABLES = """
CREATE TABLE dtx.replay (
    branch_id uuid NOT NULL,
    position integer NOT NULL,
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    digest bytea NOT NULL,
    at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT replay_pkey PRIMARY KEY (branch_id, position),
    CONSTRAINT replay_position_check CHECK (position >= 0)
);
CREATE INDEX replay_at_idx ON dtx.replay (rm, at);

CREATE TABLE dtx.settlement (
    branch_id uuid NOT NULL,
    position integer NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    queue bytea NOT NULL,
    rm text COLLATE "C" NOT NULL,
    attempt integer NOT NULL,
    digest bytea NOT NULL,
    at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT settlement_pkey PRIMARY KEY (branch_id, position, vhost, queue),
    CONSTRAINT settlement_numbers_check CHECK (position >= 0 AND attempt >= 1)
);
CREATE INDEX settlement_at_idx ON dtx.settlement (rm, at);

CREATE TABLE dtx.duplicate (
    branch_id uuid NOT NULL,
    position integer NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    queue bytea NOT NULL,
    attempt integer NOT NULL,
    rm text COLLATE "C" NOT NULL,
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT duplicate_pkey PRIMARY KEY (branch_id, position, vhost, queue, attempt),
    CONSTRAINT duplicate_numbers_check CHECK (position >= 0 AND attempt >= 1)
);
CREATE INDEX duplicate_at_idx ON dtx.duplicate (rm, at);
"""


def upgrade() -> None:
    for statements in (UNIT, LEASE, TABLES):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP TABLE dtx.duplicate, dtx.settlement, dtx.replay;
        ALTER TABLE dtx.lease DROP COLUMN duplicate_days;
        ALTER TABLE dtx.unit DROP COLUMN attempt;
    """)
