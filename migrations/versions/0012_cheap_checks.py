"""One function for each table checks the constraints of the tables that every branch writes.

A migration imports nothing of dtx, and never changes after a release.
"""

from alembic import op

revision = "0012"
down_revision: str | None = "0011"
branch_labels = None
depends_on = None

# PostgreSQL stores a CHECK as text, and parses it for each statement that writes: half of its work for a single client.
# A function in PL/pgSQL is planned once a session. The functions check the same conditions as the constraints before
# them; null passes, as there.
FUNCTIONS = """
CREATE FUNCTION dtx.branch_holds(format_id bigint, gtrid bytea, bqual bytea, state text, version integer,
    timeout bigint, publishes integer, consumes integer, bytes bigint, outcome text, published bytea, consumed bytea)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN format_id BETWEEN 0 AND 4294967295
        AND octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64
        AND state IN ('taking', 'prepared', 'committing', 'rolling-back', 'heuristic-committing',
            'heuristic-rolling-back', 'heuristic')
        AND outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')
        AND (state IN ('heuristic', 'heuristic-committing', 'heuristic-rolling-back')) = (outcome IS NOT NULL)
        AND version >= 1 AND timeout >= 0 AND publishes >= 0 AND consumes >= 0 AND bytes >= 0
        AND octet_length(published) % 16 = 0 AND octet_length(consumed) % 16 = 0;
END
$$;
CREATE FUNCTION dtx.work_holds("position" integer, kind text, queue bytea, unit integer, fate text)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN "position" >= 0
        AND kind IN ('publish', 'consume')
        AND (kind = 'consume') = (queue IS NOT NULL)
        AND (kind = 'consume' OR unit IS NULL)
        AND fate IN ('unsure', 'published', 'consumed', 'put-back', 'dropped', 'discarded');
END
$$;
CREATE FUNCTION dtx.unit_holds(number integer, state text)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN number >= 0
        AND state IN ('pending', 'done');
END
$$;
CREATE FUNCTION dtx.journal_holds(event text, format_id bigint, gtrid bytea, bqual bytea, outcome text)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN format_id BETWEEN 0 AND 4294967295
        AND octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64
        AND event IN ('prepared', 'timed-out', 'stuck', 'decided', 'discarded', 'redirected', 'hazard', 'heuristic',
            'repeated', 'committed', 'rolled-back', 'read-only', 'forgotten')
        AND outcome IN ('committed', 'rolled-back', 'mixed', 'hazard');
END
$$;
"""

# NOT VALID: all rows obey the same conditions already, so they need not be read, however long the journal is.
CHECKS = """
ALTER TABLE dtx.branch
    ADD CONSTRAINT branch_check CHECK (dtx.branch_holds(format_id, gtrid, bqual, state, version, timeout, publishes,
        consumes, bytes, outcome, published, consumed)) NOT VALID,
    DROP CONSTRAINT branch_format_id_check, DROP CONSTRAINT branch_xid_check, DROP CONSTRAINT branch_state_check,
    DROP CONSTRAINT branch_outcome_check, DROP CONSTRAINT branch_heuristic_check, DROP CONSTRAINT branch_counts_check,
    DROP CONSTRAINT branch_slots_check;
ALTER TABLE dtx.work
    ADD CONSTRAINT work_check CHECK (dtx.work_holds("position", kind, queue, unit, fate)) NOT VALID,
    DROP CONSTRAINT work_kind_check, DROP CONSTRAINT work_queue_check, DROP CONSTRAINT work_unit_check,
    DROP CONSTRAINT work_position_check, DROP CONSTRAINT work_fate_check;
ALTER TABLE dtx.unit
    ADD CONSTRAINT unit_check CHECK (dtx.unit_holds(number, state)) NOT VALID,
    DROP CONSTRAINT unit_state_check, DROP CONSTRAINT unit_number_check;
ALTER TABLE dtx.journal
    ADD CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome)) NOT VALID,
    DROP CONSTRAINT journal_format_id_check, DROP CONSTRAINT journal_xid_check, DROP CONSTRAINT journal_event_check,
    DROP CONSTRAINT journal_outcome_check;
"""

OLD_CHECKS = """
ALTER TABLE dtx.branch DROP CONSTRAINT branch_check,
    ADD CONSTRAINT branch_format_id_check CHECK (format_id BETWEEN 0 AND 4294967295) NOT VALID,
    ADD CONSTRAINT branch_xid_check
        CHECK (octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64) NOT VALID,
    ADD CONSTRAINT branch_state_check CHECK (state IN ('taking', 'prepared', 'committing', 'rolling-back',
        'heuristic-committing', 'heuristic-rolling-back', 'heuristic')) NOT VALID,
    ADD CONSTRAINT branch_outcome_check CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')) NOT VALID,
    ADD CONSTRAINT branch_heuristic_check CHECK (
        (state IN ('heuristic', 'heuristic-committing', 'heuristic-rolling-back')) = (outcome IS NOT NULL)) NOT VALID,
    ADD CONSTRAINT branch_counts_check CHECK (
        version >= 1 AND timeout >= 0 AND publishes >= 0 AND consumes >= 0 AND bytes >= 0) NOT VALID,
    ADD CONSTRAINT branch_slots_check
        CHECK (octet_length(published) % 16 = 0 AND octet_length(consumed) % 16 = 0) NOT VALID;
ALTER TABLE dtx.work DROP CONSTRAINT work_check,
    ADD CONSTRAINT work_kind_check CHECK (kind IN ('publish', 'consume')) NOT VALID,
    ADD CONSTRAINT work_queue_check CHECK ((kind = 'consume') = (queue IS NOT NULL)) NOT VALID,
    ADD CONSTRAINT work_unit_check CHECK (kind = 'consume' OR unit IS NULL) NOT VALID,
    ADD CONSTRAINT work_position_check CHECK ("position" >= 0) NOT VALID,
    ADD CONSTRAINT work_fate_check
        CHECK (fate IN ('unsure', 'published', 'consumed', 'put-back', 'dropped', 'discarded')) NOT VALID;
ALTER TABLE dtx.unit DROP CONSTRAINT unit_check,
    ADD CONSTRAINT unit_state_check CHECK (state IN ('pending', 'done')) NOT VALID,
    ADD CONSTRAINT unit_number_check CHECK (number >= 0) NOT VALID;
ALTER TABLE dtx.journal DROP CONSTRAINT journal_check,
    ADD CONSTRAINT journal_format_id_check CHECK (format_id BETWEEN 0 AND 4294967295) NOT VALID,
    ADD CONSTRAINT journal_xid_check
        CHECK (octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64) NOT VALID,
    ADD CONSTRAINT journal_event_check CHECK (event IN ('prepared', 'timed-out', 'stuck', 'decided', 'discarded',
        'redirected', 'hazard', 'heuristic', 'repeated', 'committed', 'rolled-back', 'read-only', 'forgotten'))
        NOT VALID,
    ADD CONSTRAINT journal_outcome_check CHECK (outcome IN ('committed', 'rolled-back', 'mixed', 'hazard')) NOT VALID;
"""
OLD_FUNCTIONS = """
DROP FUNCTION dtx.branch_holds, dtx.work_holds, dtx.unit_holds, dtx.journal_holds;
"""


def upgrade() -> None:
    for statements in (FUNCTIONS, CHECKS):
        op.execute(statements)


def downgrade() -> None:
    for statements in (OLD_CHECKS, OLD_FUNCTIONS):
        op.execute(statements)
