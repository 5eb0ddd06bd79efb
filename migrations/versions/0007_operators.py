"""Operators: their tokens, the audit log of their actions, and a tag for users that are operators.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0007"
down_revision: str | None = "0006"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE dtx.token (
    rm text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    role text COLLATE "C" NOT NULL,
    hash bytea NOT NULL,
    made_by text NOT NULL,
    made_at timestamptz NOT NULL,
    expires_at timestamptz,
    CONSTRAINT token_pkey PRIMARY KEY (rm, name),
    CONSTRAINT token_name_check CHECK (octet_length(name) BETWEEN 1 AND 64),
    CONSTRAINT token_role_check CHECK (role IN ('viewer', 'operator', 'coordinator')),
    CONSTRAINT token_hash_check CHECK (octet_length(hash) = 32)
);
CREATE UNIQUE INDEX token_hash_idx ON dtx.token (hash);

CREATE TABLE dtx.audit (
    id bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz DEFAULT now() NOT NULL,
    rm text COLLATE "C" NOT NULL,
    actor text NOT NULL,
    role text COLLATE "C" NOT NULL,
    address text NOT NULL,
    action text COLLATE "C" NOT NULL,
    subject text NOT NULL,
    reason text NOT NULL,
    detail text NOT NULL,
    result text,
    CONSTRAINT audit_pkey PRIMARY KEY (id)
);
COMMENT ON COLUMN dtx.audit.result IS 'how it ended; null when dtx died before it was known';
"""

TAGS = """
ALTER TABLE dtx.account DROP CONSTRAINT account_tags_check;
ALTER TABLE dtx.account ADD CONSTRAINT account_tags_check
    CHECK (tags <@ ARRAY['administrator', 'monitoring', 'impersonator', 'operator']);
"""


def upgrade() -> None:
    for statements in (TABLES, TAGS):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP TABLE dtx.audit, dtx.token;
        UPDATE dtx.account SET tags = array_remove(tags, 'operator') WHERE 'operator' = ANY (tags);
        ALTER TABLE dtx.account DROP CONSTRAINT account_tags_check;
        ALTER TABLE dtx.account ADD CONSTRAINT account_tags_check
            CHECK (tags <@ ARRAY['administrator', 'monitoring', 'impersonator']);
    """)
