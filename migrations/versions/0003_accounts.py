"""The users of standalone mode: virtual hosts, accounts, permissions, and a number that counts their changes.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0003"
down_revision: str | None = "0002"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE dtx.vhost (
    rm text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    CONSTRAINT vhost_pkey PRIMARY KEY (rm, name),
    CONSTRAINT vhost_name_check CHECK (octet_length(name) BETWEEN 1 AND 255)
);

CREATE TABLE dtx.account (
    rm text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    password_hash text COLLATE "C" NOT NULL,
    tags text[] COLLATE "C" NOT NULL,
    CONSTRAINT account_pkey PRIMARY KEY (rm, name),
    CONSTRAINT account_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    CONSTRAINT account_password_check CHECK (password_hash LIKE '$argon2id$%'),
    CONSTRAINT account_tags_check CHECK (tags <@ ARRAY['administrator', 'monitoring', 'impersonator'])
);

CREATE TABLE dtx.permission (
    rm text COLLATE "C" NOT NULL,
    account text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    configure text COLLATE "C" NOT NULL,
    write text COLLATE "C" NOT NULL,
    read text COLLATE "C" NOT NULL,
    CONSTRAINT permission_pkey PRIMARY KEY (rm, account, vhost),
    CONSTRAINT permission_account_fkey FOREIGN KEY (rm, account) REFERENCES dtx.account (rm, name) ON DELETE CASCADE,
    CONSTRAINT permission_vhost_fkey FOREIGN KEY (rm, vhost) REFERENCES dtx.vhost (rm, name) ON DELETE CASCADE
);

CREATE TABLE dtx.account_version (
    rm text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    CONSTRAINT account_version_pkey PRIMARY KEY (rm)
);
"""

# The row is locked until the change commits. So numbers become visible in their order, and not before their change.
CHANGES = """
CREATE FUNCTION dtx.accounts_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO dtx.account_version AS v (rm, version) VALUES (coalesce(NEW.rm, OLD.rm), 1)
    ON CONFLICT (rm) DO UPDATE SET version = v.version + 1;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dtx.accounts_changed IS 'counts changes of users: a running dtx reads them again';
CREATE TRIGGER vhost_changed AFTER INSERT OR UPDATE OR DELETE ON dtx.vhost
    FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
CREATE TRIGGER account_changed AFTER INSERT OR UPDATE OR DELETE ON dtx.account
    FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
CREATE TRIGGER permission_changed AFTER INSERT OR UPDATE OR DELETE ON dtx.permission
    FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
"""


def upgrade() -> None:
    for statements in (TABLES, CHANGES):
        op.execute(statements)


def downgrade() -> None:
    op.execute("""
        DROP TABLE dtx.permission, dtx.account, dtx.vhost, dtx.account_version;
        DROP FUNCTION dtx.accounts_changed();
    """)
