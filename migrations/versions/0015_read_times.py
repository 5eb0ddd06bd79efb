"""The verdicts for the operators' pages have the times at which their sources were read.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0015"
down_revision: str | None = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE dtx.reconciliation ADD COLUMN sources text DEFAULT '[]' NOT NULL;
        COMMENT ON COLUMN dtx.reconciliation.sources IS 'JSON: when each source was last read';
        ALTER TABLE dtx.verdict ADD COLUMN known_at timestamptz;
        """
    )


def downgrade() -> None:
    op.execute("ALTER TABLE dtx.reconciliation DROP COLUMN sources; ALTER TABLE dtx.verdict DROP COLUMN known_at")
