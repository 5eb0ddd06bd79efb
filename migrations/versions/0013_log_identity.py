"""Each log has an id, which differs from that of a log of the same name in another database.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0013"
down_revision: str | None = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE dtx.lease ADD COLUMN log uuid NOT NULL DEFAULT gen_random_uuid()")


def downgrade() -> None:
    op.execute("ALTER TABLE dtx.lease DROP COLUMN log")
