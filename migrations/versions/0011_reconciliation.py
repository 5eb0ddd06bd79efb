"""The results of the reconciliation pipeline about global transactions, for the operators' pages.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0011"
down_revision: str | None = "0010"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE dtx.reconciliation (
    number bigint NOT NULL,
    as_of timestamptz NOT NULL,
    published_at timestamptz DEFAULT now() NOT NULL,
    lines bigint NOT NULL,
    fingerprint bigint NOT NULL,
    totals text NOT NULL,
    shown bigint NOT NULL,
    CONSTRAINT reconciliation_pkey PRIMARY KEY (number),
    CONSTRAINT reconciliation_counts_check CHECK (number >= 1 AND lines >= 0 AND shown >= 0)
);
COMMENT ON COLUMN dtx.reconciliation.totals IS 'JSON: for each verdict its transactions and branches';

CREATE TABLE dtx.verdict (
    format_id bigint,
    gtrid bytea NOT NULL,
    verdict text COLLATE "C" NOT NULL,
    findings text[] COLLATE "C" NOT NULL,
    since timestamptz,
    first_at timestamptz NOT NULL,
    last_at timestamptz NOT NULL,
    rms text[] COLLATE "C" NOT NULL,
    owners text[] COLLATE "C" NOT NULL,
    branches integer NOT NULL,
    decision text COLLATE "C",
    tm text,
    fingerprint bytea NOT NULL,
    evidence text NOT NULL,
    CONSTRAINT verdict_format_id_check CHECK (format_id BETWEEN 0 AND 4294967295),
    CONSTRAINT verdict_gtrid_check CHECK (octet_length(gtrid) BETWEEN 1 AND 200),
    CONSTRAINT verdict_branches_check CHECK (branches >= 0),
    CONSTRAINT verdict_fingerprint_check CHECK (octet_length(fingerprint) = 16)
);
COMMENT ON COLUMN dtx.verdict.evidence IS 'JSON: the lines that it rests on';
CREATE UNIQUE INDEX verdict_key ON dtx.verdict (gtrid, coalesce(format_id, -1));
CREATE INDEX verdict_last_at_idx ON dtx.verdict (last_at, gtrid);
CREATE INDEX verdict_verdict_idx ON dtx.verdict (verdict, last_at, gtrid);
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE dtx.verdict, dtx.reconciliation")
