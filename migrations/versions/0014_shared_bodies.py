"""The body of a message that goes to several queues is stored once.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0014"
down_revision: str | None = "0013"
branch_labels = None
depends_on = None

# Existing rows keep their bodies. A row that shares a body has null instead of an empty body: an older dtx then fails
# to read the message, and cannot deliver it without its content.
TABLES = """
CREATE TABLE dtx.body (
    id bigint NOT NULL,
    rm text COLLATE "C" NOT NULL,
    uses integer NOT NULL,
    content bytea NOT NULL,
    CONSTRAINT body_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50);

ALTER TABLE dtx.message ADD COLUMN shared bigint, ALTER COLUMN body DROP NOT NULL;
"""

# The number of uses changes with every message that leaves. So the content is stored outside the row, and is not
# written again. Vacuum runs after a number of dead rows, as for messages.
STORAGE = """
ALTER TABLE dtx.body SET (toast_tuple_target = 128,
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 100000,
    toast.autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_threshold = 20000,
    toast.autovacuum_vacuum_cost_delay = 0);
ALTER TABLE dtx.body ALTER COLUMN content SET STORAGE EXTERNAL;
ALTER TABLE dtx.body ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN rm SET STATISTICS 0;
ALTER TABLE dtx.message ALTER COLUMN shared SET STATISTICS 0;
"""

# A trigger counts every deletion of a message in its transaction: a body exists exactly as long as messages use it.
# Messages that share no body do not call it.
RELEASE = """
CREATE FUNCTION dtx.release_body() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM dtx.body b WHERE b.id = OLD.shared AND b.uses = 1;
    IF NOT FOUND THEN
        UPDATE dtx.body b SET uses = b.uses - 1 WHERE b.id = OLD.shared;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER message_release_body AFTER DELETE ON dtx.message
    FOR EACH ROW WHEN (OLD.shared IS NOT NULL) EXECUTE FUNCTION dtx.release_body();
"""

COPY_BACK = """
UPDATE dtx.message m SET body = b.content, shared = NULL FROM dtx.body b WHERE b.id = m.shared;
DROP TRIGGER message_release_body ON dtx.message;
DROP FUNCTION dtx.release_body();
ALTER TABLE dtx.message ALTER COLUMN body SET NOT NULL, DROP COLUMN shared;
DROP TABLE dtx.body;
"""


def upgrade() -> None:
    for statements in (TABLES, STORAGE, RELEASE):
        op.execute(statements)


def downgrade() -> None:
    op.execute(COPY_BACK)
