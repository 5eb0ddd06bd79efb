"""A branch without a broker has marks of the exchanges that it publishes to.

A migration is history: it imports nothing of dtx and never changes once released.
"""

from alembic import op

revision = "0009"
down_revision: str | None = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null is not known: branches of before, and of a dtx of before that is still the active one, are looked at closely.
    op.execute("ALTER TABLE dtx.branch ADD COLUMN exchange_marks bytea")


def downgrade() -> None:
    op.execute("ALTER TABLE dtx.branch DROP COLUMN exchange_marks")
