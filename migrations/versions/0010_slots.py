"""The slots of a branch are read in a time that is proportional to their number, not to its square.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0010"
down_revision: str | None = "0009"
branch_labels = None
depends_on = None

# Long values are stored compressed, and each substr would decompress everything before it: so decompress once.
UPGRADE = """
CREATE OR REPLACE FUNCTION dtx.slots(packed bytea)
RETURNS TABLE (ordinal bigint, queue bigint, "position" bigint)
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT n,
        ('x' || encode(substr(plain, (16 * n + 1)::integer, 8), 'hex'))::bit(64)::bigint,
        ('x' || encode(substr(plain, (16 * n + 9)::integer, 8), 'hex'))::bit(64)::bigint
    FROM (SELECT packed || ''::bytea AS plain OFFSET 0) AS unpacked,
        generate_series(0::bigint, octet_length(plain) / 16 - 1) AS n
$$;
"""
DOWNGRADE = """
CREATE OR REPLACE FUNCTION dtx.slots(packed bytea)
RETURNS TABLE (ordinal bigint, queue bigint, "position" bigint)
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT n,
        ('x' || encode(substr(packed, (16 * n + 1)::integer, 8), 'hex'))::bit(64)::bigint,
        ('x' || encode(substr(packed, (16 * n + 9)::integer, 8), 'hex'))::bit(64)::bigint
    FROM generate_series(0::bigint, octet_length(packed) / 16 - 1) AS n
$$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
