"""A branch in standalone mode has marks of the exchanges that it publishes to.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0009"
down_revision: str | None = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null means not known, for branches of an older dtx, which may still be active: all their messages are read.
    op.execute("ALTER TABLE dtx.branch ADD COLUMN exchange_marks bytea")


def downgrade() -> None:
    op.execute("ALTER TABLE dtx.branch DROP COLUMN exchange_marks")
