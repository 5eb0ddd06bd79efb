"""Topic permissions of users in standalone mode: the routing keys that they may use at a topic exchange.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE dtx.topic_permission (
    rm text COLLATE "C" NOT NULL,
    account text COLLATE "C" NOT NULL,
    vhost text COLLATE "C" NOT NULL,
    exchange text COLLATE "C" NOT NULL,
    write text COLLATE "C" NOT NULL,
    read text COLLATE "C" NOT NULL,
    CONSTRAINT topic_permission_pkey PRIMARY KEY (rm, account, vhost, exchange),
    CONSTRAINT topic_permission_account_fkey
        FOREIGN KEY (rm, account) REFERENCES dtx.account (rm, name) ON DELETE CASCADE,
    CONSTRAINT topic_permission_vhost_fkey FOREIGN KEY (rm, vhost) REFERENCES dtx.vhost (rm, name) ON DELETE CASCADE,
    CONSTRAINT topic_permission_exchange_check CHECK (octet_length(exchange) BETWEEN 1 AND 255)
);
CREATE TRIGGER topic_permission_changed AFTER INSERT OR UPDATE OR DELETE ON dtx.topic_permission
    FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE dtx.topic_permission")
