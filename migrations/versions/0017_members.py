"""Several active dtx of one resource manager: each is a member, and each branch in the log belongs to one.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0017"
down_revision: str | None = "0016"
branch_labels = None
depends_on = None

MEMBER = """
CREATE SEQUENCE dtx.member_epoch START WITH 4294967296;

CREATE TABLE dtx.member (
    instance uuid NOT NULL,
    rm text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    holder text NOT NULL,
    process text,
    address text NOT NULL,
    joined_at timestamptz DEFAULT now() NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT member_pkey PRIMARY KEY (instance),
    CONSTRAINT member_epoch_key UNIQUE (rm, epoch)
) WITH (fillfactor = 10);
"""

# The writer of a member names it in its session; the only dtx of a resource manager names none.
BRANCH = """
ALTER TABLE dtx.branch ADD COLUMN member uuid
    DEFAULT (NULLIF(current_setting('dtx.member'::text, true), ''::text))::uuid;
"""

# A dtx that takes the lease alone may be of a version that knows no members. From then on none of them can write.
FENCE = """
CREATE FUNCTION dtx.fence_members() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM dtx.member WHERE rm = NEW.rm;
    RETURN NEW;
END $$;
CREATE TRIGGER fence_members BEFORE UPDATE ON dtx.lease FOR EACH ROW WHEN (OLD.instance <> NEW.instance)
    EXECUTE FUNCTION dtx.fence_members();
"""

PROOFS = """
CREATE TABLE dtx.member_secret (
    rm text COLLATE "C" NOT NULL,
    secret bytea NOT NULL,
    made_at timestamptz DEFAULT now() NOT NULL,
    CONSTRAINT member_secret_pkey PRIMARY KEY (rm, secret),
    CONSTRAINT member_secret_check CHECK (octet_length(secret) = 32)
);
"""


def upgrade() -> None:
    for statements in (MEMBER, BRANCH, FENCE, PROOFS):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP TRIGGER fence_members ON dtx.lease;
        DROP FUNCTION dtx.fence_members();
        ALTER TABLE dtx.branch DROP COLUMN member;
        DROP TABLE dtx.member_secret, dtx.member;
        DROP SEQUENCE dtx.member_epoch;
    """)
