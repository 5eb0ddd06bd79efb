"""Heuristic decisions: their states, the fate of each message, and the archive of undelivered messages.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels = None
depends_on = None

# The new constraints allow more than the old ones, which all rows obey.
BRANCH = """
ALTER TABLE dtx.branch DROP CONSTRAINT branch_state_check, DROP CONSTRAINT branch_heuristic_check;
ALTER TABLE dtx.branch
    ADD CONSTRAINT branch_state_check CHECK (state IN ('taking', 'prepared', 'committing', 'rolling-back',
        'heuristic-committing', 'heuristic-rolling-back', 'heuristic')),
    ADD CONSTRAINT branch_heuristic_check CHECK (
        (state IN ('heuristic', 'heuristic-committing', 'heuristic-rolling-back')) = (outcome IS NOT NULL));
ALTER TABLE dtx.work ADD COLUMN fate text COLLATE "C",
    ADD CONSTRAINT work_fate_check
        CHECK (fate IN ('unsure', 'published', 'consumed', 'put-back', 'dropped', 'discarded'));
ALTER TABLE dtx.journal DROP CONSTRAINT journal_event_check;
ALTER TABLE dtx.journal ADD CONSTRAINT journal_event_check CHECK (event IN (
    'prepared', 'timed-out', 'stuck', 'decided', 'discarded', 'redirected', 'hazard', 'heuristic', 'repeated',
    'committed', 'rolled-back', 'read-only', 'forgotten'));
"""

ARCHIVE = """
CREATE TABLE dtx.archive (
    branch_id uuid NOT NULL,
    position integer NOT NULL,
    rm text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    owner text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    queue bytea,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    fate text COLLATE "C" NOT NULL,
    at timestamptz NOT NULL,
    CONSTRAINT archive_pkey PRIMARY KEY (branch_id, position),
    CONSTRAINT archive_kind_check CHECK (kind IN ('publish', 'consume')),
    CONSTRAINT archive_fate_check CHECK (fate IN ('discarded', 'dropped'))
);
CREATE INDEX archive_xid_idx ON dtx.archive (gtrid, bqual);
"""


def upgrade() -> None:
    for statements in (BRANCH, ARCHIVE):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP TABLE dtx.archive;
        ALTER TABLE dtx.work DROP COLUMN fate;
        ALTER TABLE dtx.branch DROP CONSTRAINT branch_state_check, DROP CONSTRAINT branch_heuristic_check;
        ALTER TABLE dtx.branch
            ADD CONSTRAINT branch_state_check
                CHECK (state IN ('taking', 'prepared', 'committing', 'rolling-back', 'heuristic')),
            ADD CONSTRAINT branch_heuristic_check CHECK ((state = 'heuristic') = (outcome IS NOT NULL));
        DELETE FROM dtx.journal WHERE event IN ('decided', 'discarded', 'redirected');
        ALTER TABLE dtx.journal DROP CONSTRAINT journal_event_check;
        ALTER TABLE dtx.journal ADD CONSTRAINT journal_event_check CHECK (event IN (
            'prepared', 'timed-out', 'stuck', 'hazard', 'heuristic', 'repeated',
            'committed', 'rolled-back', 'read-only', 'forgotten', 'discarded'));
    """)
