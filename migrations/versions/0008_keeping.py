"""Retention of archive and audit log, and an index of the archive by time.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0008"
down_revision: str | None = "0007"
branch_labels = None
depends_on = None

# An older dtx writes no values; null means for ever.
LEASE = """
ALTER TABLE dtx.lease ADD COLUMN archive_days integer, ADD COLUMN audit_days integer,
    ADD CONSTRAINT lease_archive_check CHECK (archive_days >= 1),
    ADD CONSTRAINT lease_audit_check CHECK (audit_days >= 1);
"""
ARCHIVE = "CREATE INDEX archive_at_idx ON dtx.archive (rm, at, branch_id, position);"


def upgrade() -> None:
    for statements in (LEASE, ARCHIVE):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP INDEX dtx.archive_at_idx;
        ALTER TABLE dtx.lease DROP COLUMN archive_days, DROP COLUMN audit_days;
    """)
