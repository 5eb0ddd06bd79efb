SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
CREATE SCHEMA dtx;
CREATE FUNCTION dtx.accounts_changed() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO dtx.account_version AS v (rm, version) VALUES (coalesce(NEW.rm, OLD.rm), 1)
    ON CONFLICT (rm) DO UPDATE SET version = v.version + 1;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION dtx.accounts_changed() IS 'counts changes of users: a running dtx reads them again';
CREATE FUNCTION dtx.branch_holds(format_id bigint, gtrid bytea, bqual bytea, state text, version integer, timeout bigint, publishes integer, consumes integer, bytes bigint, outcome text, published bytea, consumed bytea) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
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
CREATE FUNCTION dtx.journal_holds(event text, format_id bigint, gtrid bytea, bqual bytea, outcome text) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
BEGIN
    RETURN format_id BETWEEN 0 AND 4294967295
        AND octet_length(gtrid) BETWEEN 1 AND 64 AND octet_length(bqual) <= 64
        AND event IN ('prepared', 'timed-out', 'stuck', 'decided', 'discarded', 'redirected', 'hazard', 'heuristic',
            'repeated', 'committed', 'rolled-back', 'read-only', 'forgotten')
        AND outcome IN ('committed', 'rolled-back', 'mixed', 'hazard');
END
$$;
CREATE FUNCTION dtx.release_body() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    DELETE FROM dtx.body b WHERE b.id = OLD.shared AND b.uses = 1;
    IF NOT FOUND THEN
        UPDATE dtx.body b SET uses = b.uses - 1 WHERE b.id = OLD.shared;
    END IF;
    RETURN NULL;
END
$$;
CREATE FUNCTION dtx.require(ok boolean, code text, otherwise text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF ok THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = otherwise;
END
$$;
COMMENT ON FUNCTION dtx.require(ok boolean, code text, otherwise text) IS 'raises SQLSTATE code unless ok: a statement that proves what it expected';
CREATE FUNCTION dtx.slots(packed bytea) RETURNS TABLE(ordinal bigint, queue bigint, "position" bigint)
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT n,
        ('x' || encode(substr(plain, (16 * n + 1)::integer, 8), 'hex'))::bit(64)::bigint,
        ('x' || encode(substr(plain, (16 * n + 9)::integer, 8), 'hex'))::bit(64)::bigint
    FROM (SELECT packed || ''::bytea AS plain OFFSET 0) AS unpacked,
        generate_series(0::bigint, octet_length(plain) / 16 - 1) AS n
$$;
COMMENT ON FUNCTION dtx.slots(packed bytea) IS 'the messages that branch.published or branch.consumed names';
CREATE FUNCTION dtx.unit_holds(number integer, state text) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
BEGIN
    RETURN number >= 0
        AND state IN ('pending', 'done');
END
$$;
CREATE FUNCTION dtx.work_holds("position" integer, kind text, queue bytea, unit integer, fate text) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
BEGIN
    RETURN "position" >= 0
        AND kind IN ('publish', 'consume')
        AND (kind = 'consume') = (queue IS NOT NULL)
        AND (kind = 'consume' OR unit IS NULL)
        AND fate IN ('unsure', 'published', 'consumed', 'put-back', 'dropped', 'discarded');
END
$$;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE dtx.account (
    rm text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    password_hash text NOT NULL COLLATE pg_catalog."C",
    tags text[] NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT account_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255))),
    CONSTRAINT account_password_check CHECK ((password_hash ~~ '$argon2id$%'::text)),
    CONSTRAINT account_tags_check CHECK ((tags <@ ARRAY['administrator'::text, 'monitoring'::text, 'impersonator'::text, 'operator'::text]))
);
CREATE TABLE dtx.account_version (
    rm text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL
);
CREATE TABLE dtx.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE dtx.archive (
    branch_id uuid NOT NULL,
    "position" integer NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    owner text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    queue bytea,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    fate text NOT NULL COLLATE pg_catalog."C",
    at timestamp with time zone NOT NULL,
    CONSTRAINT archive_fate_check CHECK ((fate = ANY (ARRAY['discarded'::text, 'dropped'::text]))),
    CONSTRAINT archive_kind_check CHECK ((kind = ANY (ARRAY['publish'::text, 'consume'::text])))
);
CREATE TABLE dtx.audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    actor text NOT NULL,
    role text NOT NULL COLLATE pg_catalog."C",
    address text NOT NULL,
    action text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL,
    reason text NOT NULL,
    detail text NOT NULL,
    result text
);
COMMENT ON COLUMN dtx.audit.result IS 'how it ended; null when dtx died before it was known';
ALTER TABLE dtx.audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dtx.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dtx.binding (
    rm text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    source bytea NOT NULL,
    destination_kind text NOT NULL COLLATE pg_catalog."C",
    destination bytea NOT NULL,
    routing_key bytea NOT NULL,
    arguments bytea NOT NULL,
    CONSTRAINT binding_destination_kind_check CHECK ((destination_kind = ANY (ARRAY['queue'::text, 'exchange'::text])))
);
CREATE TABLE dtx.body (
    id bigint NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    uses integer NOT NULL,
    content bytea NOT NULL
)
WITH (fillfactor='50', toast_tuple_target='128', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0.5', autovacuum_analyze_threshold='100000', toast.autovacuum_vacuum_scale_factor='0.05', toast.autovacuum_vacuum_threshold='20000', toast.autovacuum_vacuum_cost_delay='0');
ALTER TABLE ONLY dtx.body ALTER COLUMN rm SET STATISTICS 0;
ALTER TABLE ONLY dtx.body ALTER COLUMN content SET STATISTICS 0;
ALTER TABLE ONLY dtx.body ALTER COLUMN content SET STORAGE EXTERNAL;
CREATE TABLE dtx.branch (
    id uuid NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    owner text NOT NULL COLLATE pg_catalog."C",
    version integer NOT NULL,
    timeout bigint NOT NULL,
    started_at timestamp with time zone NOT NULL,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    one_phase boolean NOT NULL,
    publishes integer NOT NULL,
    consumes integer NOT NULL,
    bytes bigint NOT NULL,
    stuck text,
    outcome text COLLATE pg_catalog."C",
    published bytea,
    consumed bytea,
    exchange_marks bytea
)
WITH (fillfactor='65', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_scale_factor='0.5', autovacuum_analyze_threshold='5000');
ALTER TABLE ONLY dtx.branch ALTER COLUMN published SET STORAGE EXTERNAL;
ALTER TABLE ONLY dtx.branch ALTER COLUMN consumed SET STORAGE EXTERNAL;
CREATE TABLE dtx.exchange (
    rm text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    name bytea NOT NULL,
    type text NOT NULL COLLATE pg_catalog."C",
    auto_delete boolean NOT NULL,
    internal boolean NOT NULL,
    arguments bytea NOT NULL
);
CREATE TABLE dtx.heuristic_outcome (
    branch_id uuid NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    outcome text NOT NULL COLLATE pg_catalog."C",
    actor text NOT NULL,
    reason text,
    at timestamp with time zone NOT NULL,
    CONSTRAINT heuristic_outcome_outcome_check CHECK ((outcome = ANY (ARRAY['committed'::text, 'rolled-back'::text, 'mixed'::text, 'hazard'::text])))
);
CREATE TABLE dtx.message (
    queue bigint NOT NULL,
    "position" bigint NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    flags integer NOT NULL,
    properties bytea NOT NULL,
    body bytea,
    expires_at timestamp with time zone,
    shared bigint,
    CONSTRAINT message_slot_check CHECK (((queue > 0) AND ("position" >= 0)))
)
WITH (toast_tuple_target='8160', autovacuum_vacuum_threshold='20000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_scale_factor='0', autovacuum_vacuum_insert_threshold='100000', autovacuum_analyze_scale_factor='0.5', autovacuum_analyze_threshold='100000', autovacuum_vacuum_scale_factor='0.05', toast.autovacuum_vacuum_threshold='20000', toast.autovacuum_vacuum_cost_delay='0', toast.autovacuum_vacuum_scale_factor='0.05');
ALTER TABLE ONLY dtx.message ALTER COLUMN queue SET STATISTICS 10;
ALTER TABLE ONLY dtx.message ALTER COLUMN "position" SET STATISTICS 10;
ALTER TABLE ONLY dtx.message ALTER COLUMN rm SET STATISTICS 0;
ALTER TABLE ONLY dtx.message ALTER COLUMN exchange SET STATISTICS 0;
ALTER TABLE ONLY dtx.message ALTER COLUMN routing_key SET STATISTICS 0;
ALTER TABLE ONLY dtx.message ALTER COLUMN flags SET STATISTICS 10;
ALTER TABLE ONLY dtx.message ALTER COLUMN properties SET STATISTICS 0;
ALTER TABLE ONLY dtx.message ALTER COLUMN body SET STATISTICS 0;
ALTER TABLE ONLY dtx.message ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE ONLY dtx.message ALTER COLUMN expires_at SET STATISTICS 10;
ALTER TABLE ONLY dtx.message ALTER COLUMN shared SET STATISTICS 0;
CREATE TABLE dtx.queue (
    id bigint NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    name bytea NOT NULL,
    auto_delete boolean NOT NULL,
    arguments bytea NOT NULL,
    delivered bigint NOT NULL,
    CONSTRAINT queue_numbers_check CHECK (((id > 0) AND (delivered >= 0)))
)
WITH (fillfactor='50');
CREATE TABLE dtx.work (
    branch_id uuid NOT NULL,
    "position" integer NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    exchange bytea NOT NULL,
    routing_key bytea NOT NULL,
    queue bytea,
    flags integer NOT NULL,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    unit integer,
    fate text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_scale_factor='0.5', autovacuum_analyze_threshold='5000');
ALTER TABLE ONLY dtx.work ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE VIEW dtx.in_doubt AS
 SELECT ((((b.format_id || ':'::text) || encode(b.gtrid, 'hex'::text)) || ':'::text) || encode(b.bqual, 'hex'::text)) AS xid,
    b.rm,
    b.vhost,
    b.state,
    b.owner,
    date_trunc('milliseconds'::text, (now() - b.started_at)) AS age,
    b.publishes,
    b.consumes,
    b.bytes,
    b.stuck,
    b.outcome,
    w.queues,
    w.exchanges,
    b.started_at,
    b.prepared_at,
    b.decided_at,
    b.id AS branch_id
   FROM (dtx.branch b
     LEFT JOIN LATERAL ( SELECT string_agg(DISTINCT encode(concerned.queue, 'escape'::text), ', '::text) AS queues,
            string_agg(DISTINCT encode(concerned.exchange, 'escape'::text), ', '::text) AS exchanges
           FROM ( SELECT work.queue,
                        CASE
                            WHEN (work.kind = 'publish'::text) THEN work.exchange
                            ELSE NULL::bytea
                        END AS exchange
                   FROM dtx.work
                  WHERE (work.branch_id = b.id)
                UNION ALL
                 SELECT NULL::bytea,
                    m.exchange
                   FROM (dtx.slots(b.published) s(ordinal, queue, "position")
                     JOIN dtx.message m ON (((m.queue = s.queue) AND (m."position" = s."position"))))
                UNION ALL
                 SELECT q.name,
                    NULL::bytea
                   FROM (dtx.slots(b.consumed) s(ordinal, queue, "position")
                     JOIN dtx.queue q ON ((q.id = s.queue)))) concerned) w ON (true));
COMMENT ON VIEW dtx.in_doubt IS 'every branch that has voted and is not completed; xid is format:gtrid-hex:bqual-hex';
CREATE TABLE dtx.journal (
    id uuid NOT NULL,
    at timestamp with time zone NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    event text NOT NULL COLLATE pg_catalog."C",
    branch_id uuid NOT NULL,
    vhost text NOT NULL COLLATE pg_catalog."C",
    format_id bigint NOT NULL,
    gtrid bytea NOT NULL,
    bqual bytea NOT NULL,
    owner text NOT NULL COLLATE pg_catalog."C",
    actor text NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean NOT NULL,
    publishes integer NOT NULL,
    consumes integer NOT NULL,
    bytes bigint NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() NOT NULL
)
PARTITION BY RANGE (at);
CREATE TABLE dtx.journal_20261124 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261125 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261126 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261127 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261128 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261129 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261130 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261201 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_20261202 (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL,
    CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome))
);
CREATE TABLE dtx.journal_default (
    id uuid CONSTRAINT journal_id_not_null NOT NULL,
    at timestamp with time zone CONSTRAINT journal_at_not_null NOT NULL,
    rm text CONSTRAINT journal_rm_not_null NOT NULL COLLATE pg_catalog."C",
    event text CONSTRAINT journal_event_not_null NOT NULL COLLATE pg_catalog."C",
    branch_id uuid CONSTRAINT journal_branch_id_not_null NOT NULL,
    vhost text CONSTRAINT journal_vhost_not_null NOT NULL COLLATE pg_catalog."C",
    format_id bigint CONSTRAINT journal_format_id_not_null NOT NULL,
    gtrid bytea CONSTRAINT journal_gtrid_not_null NOT NULL,
    bqual bytea CONSTRAINT journal_bqual_not_null NOT NULL,
    owner text CONSTRAINT journal_owner_not_null NOT NULL COLLATE pg_catalog."C",
    actor text CONSTRAINT journal_actor_not_null NOT NULL,
    reason text,
    outcome text COLLATE pg_catalog."C",
    one_phase boolean CONSTRAINT journal_one_phase_not_null NOT NULL,
    publishes integer CONSTRAINT journal_publishes_not_null NOT NULL,
    consumes integer CONSTRAINT journal_consumes_not_null NOT NULL,
    bytes bigint CONSTRAINT journal_bytes_not_null NOT NULL,
    started_at timestamp with time zone,
    prepared_at timestamp with time zone,
    decided_at timestamp with time zone,
    xid8 xid8 DEFAULT pg_current_xact_id() CONSTRAINT journal_xid8_not_null NOT NULL
);
CREATE TABLE dtx.lease (
    rm text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL,
    holder text NOT NULL,
    process text,
    instance uuid NOT NULL,
    taken_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    retention_days integer NOT NULL,
    archive_days integer,
    audit_days integer,
    log uuid DEFAULT gen_random_uuid() NOT NULL,
    CONSTRAINT lease_archive_check CHECK ((archive_days >= 1)),
    CONSTRAINT lease_audit_check CHECK ((audit_days >= 1)),
    CONSTRAINT lease_epoch_check CHECK ((epoch >= 1)),
    CONSTRAINT lease_retention_check CHECK ((retention_days >= 1))
)
WITH (fillfactor='10', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='100');
CREATE TABLE dtx.permission (
    rm text NOT NULL COLLATE pg_catalog."C",
    account text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    configure text NOT NULL COLLATE pg_catalog."C",
    write text NOT NULL COLLATE pg_catalog."C",
    read text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE dtx.reconciliation (
    number bigint NOT NULL,
    as_of timestamp with time zone NOT NULL,
    published_at timestamp with time zone DEFAULT now() NOT NULL,
    lines bigint NOT NULL,
    fingerprint bigint NOT NULL,
    totals text NOT NULL,
    shown bigint NOT NULL,
    CONSTRAINT reconciliation_counts_check CHECK (((number >= 1) AND (lines >= 0) AND (shown >= 0)))
);
COMMENT ON COLUMN dtx.reconciliation.totals IS 'JSON: for each verdict its transactions and branches';
CREATE TABLE dtx.token (
    rm text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    role text NOT NULL COLLATE pg_catalog."C",
    hash bytea NOT NULL,
    made_by text NOT NULL,
    made_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    CONSTRAINT token_hash_check CHECK ((octet_length(hash) = 32)),
    CONSTRAINT token_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 64))),
    CONSTRAINT token_role_check CHECK ((role = ANY (ARRAY['viewer'::text, 'operator'::text, 'coordinator'::text])))
);
CREATE TABLE dtx.topic_permission (
    rm text NOT NULL COLLATE pg_catalog."C",
    account text NOT NULL COLLATE pg_catalog."C",
    vhost text NOT NULL COLLATE pg_catalog."C",
    exchange text NOT NULL COLLATE pg_catalog."C",
    write text NOT NULL COLLATE pg_catalog."C",
    read text NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT topic_permission_exchange_check CHECK (((octet_length(exchange) >= 1) AND (octet_length(exchange) <= 255)))
);
CREATE TABLE dtx.unit (
    branch_id uuid NOT NULL,
    number integer NOT NULL,
    rm text NOT NULL COLLATE pg_catalog."C",
    lock text NOT NULL COLLATE pg_catalog."C",
    nonce uuid NOT NULL,
    incarnation text COLLATE pg_catalog."C",
    receipt boolean NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_scale_factor='0.5', autovacuum_analyze_threshold='5000');
CREATE TABLE dtx.verdict (
    format_id bigint,
    gtrid bytea NOT NULL,
    verdict text NOT NULL COLLATE pg_catalog."C",
    findings text[] NOT NULL COLLATE pg_catalog."C",
    since timestamp with time zone,
    first_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone NOT NULL,
    rms text[] NOT NULL COLLATE pg_catalog."C",
    owners text[] NOT NULL COLLATE pg_catalog."C",
    branches integer NOT NULL,
    decision text COLLATE pg_catalog."C",
    tm text,
    fingerprint bytea NOT NULL,
    evidence text NOT NULL,
    CONSTRAINT verdict_branches_check CHECK ((branches >= 0)),
    CONSTRAINT verdict_fingerprint_check CHECK ((octet_length(fingerprint) = 16)),
    CONSTRAINT verdict_format_id_check CHECK (((format_id >= 0) AND (format_id <= '4294967295'::bigint))),
    CONSTRAINT verdict_gtrid_check CHECK (((octet_length(gtrid) >= 1) AND (octet_length(gtrid) <= 200)))
);
COMMENT ON COLUMN dtx.verdict.evidence IS 'JSON: the lines that it rests on';
CREATE TABLE dtx.vhost (
    rm text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT vhost_name_check CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255)))
);
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261124 FOR VALUES FROM ('2026-11-24 00:00:00+00') TO ('2026-11-25 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261125 FOR VALUES FROM ('2026-11-25 00:00:00+00') TO ('2026-11-26 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261126 FOR VALUES FROM ('2026-11-26 00:00:00+00') TO ('2026-11-27 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261127 FOR VALUES FROM ('2026-11-27 00:00:00+00') TO ('2026-11-28 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261128 FOR VALUES FROM ('2026-11-28 00:00:00+00') TO ('2026-11-29 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261129 FOR VALUES FROM ('2026-11-29 00:00:00+00') TO ('2026-11-30 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261130 FOR VALUES FROM ('2026-11-30 00:00:00+00') TO ('2026-12-01 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261201 FOR VALUES FROM ('2026-12-01 00:00:00+00') TO ('2026-12-02 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_20261202 FOR VALUES FROM ('2026-12-02 00:00:00+00') TO ('2026-12-03 00:00:00+00');
ALTER TABLE ONLY dtx.journal ATTACH PARTITION dtx.journal_default DEFAULT;
INSERT INTO dtx.account VALUES ('dtx', 'guest', '$argon2id$v=19$m=19456,t=2,p=1$oHPvxfqyarJvzScXU0ivxg$0b0wHPOT4oBKTqcNjf1X1gnE16sAakM7tm6QwPe86YU', '{administrator}');
INSERT INTO dtx.account VALUES ('dtx', 'alice', '$argon2id$v=19$m=19456,t=2,p=1$Y0QS5ZYbR/lGW4PZUvtF4Q$at+H5eaUQSD6dXtJWKJ7KLkse2u2hc1AW9qROnGURZE', '{}');
INSERT INTO dtx.account_version VALUES ('dtx', 7);
INSERT INTO dtx.alembic_version VALUES ('0014');
INSERT INTO dtx.archive VALUES ('01a210e8-0bb0-77c3-b69d-623b06c1906e', 0, 'dtx', '/', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'publish', '\x', '\x666f72676f7474656e2e6f7574', '\x666f72676f7474656e2e6f7574', '\x90000a746578742f706c61696e02', '\x61', 'dropped', '2026-11-25 04:12:56.066826+00');
INSERT INTO dtx.archive VALUES ('01a210e8-0bb0-77c3-b69d-623b06c1906e', 1, 'dtx', '/', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'publish', '\x', '\x666f72676f7474656e2e6f7574', '\x666f72676f7474656e2e6f7574', '\x90000a746578742f706c61696e02', '\x62', 'dropped', '2026-11-25 04:12:56.066826+00');
INSERT INTO dtx.archive VALUES ('01a210e8-279d-7772-a768-cf70ff09ca99', 0, 'beside', 'older', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'publish', '\x', '\x666f72676f7474656e2e6f7574', NULL, '\x90000a746578742f706c61696e02', '\x61', 'dropped', '2026-11-25 04:13:03.4984+00');
INSERT INTO dtx.archive VALUES ('01a210e8-279d-7772-a768-cf70ff09ca99', 1, 'beside', 'older', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'publish', '\x', '\x666f72676f7474656e2e6f7574', NULL, '\x90000a746578742f706c61696e02', '\x62', 'dropped', '2026-11-25 04:13:03.4984+00');
INSERT INTO dtx.binding VALUES ('dtx', '/', '\x6f6c6465722e636f70696573', 'queue', '\x7265616479', '\x7265616479', '\x');
INSERT INTO dtx.binding VALUES ('dtx', '/', '\x6f6c6465722e636f70696573', 'queue', '\x726561647920746f6f', '\x726561647920746f6f', '\x');
INSERT INTO dtx.body VALUES (4413201854157960200, 'dtx', 2, '\x746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420746869726420');
INSERT INTO dtx.branch VALUES ('01a210e8-03c9-70d3-ba52-2238218ee150', 'dtx', '/', 7302244, '\x7075626c69736865732d3100ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.505337+00', '2026-11-25 04:12:50.512863+00', NULL, false, 2, 0, 30, NULL, NULL, '\x3ef2f6837e21f866000661120a3bceec3ef2f6837e21f866000661120a3bceed', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0424-72c6-a75a-7045a42d6413', 'dtx', '/', 7302244, '\x7075626c69736865732d3200ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.596363+00', '2026-11-25 04:12:50.597274+00', NULL, false, 2, 0, 30, NULL, NULL, '\x368cc2078e2965cd000661120a3bceee368cc2078e2965cd000661120a3bceef', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0455-7f29-825a-8b73d3758aa8', 'dtx', '/', 7302244, '\x636f6e73756d7074696f6e2d3100ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.645772+00', '2026-11-25 04:12:50.656545+00', NULL, false, 0, 2, 0, NULL, NULL, '\x', '\x266028ce73d75146000661120a3bcef0266028ce73d75146000661120a3bcef1', '\x');
INSERT INTO dtx.branch VALUES ('01a210e8-04b3-7ec0-9977-47cada178d13', 'dtx', '/', 7302244, '\x636f6e73756d7074696f6e2d3200ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.739335+00', '2026-11-25 04:12:50.740708+00', NULL, false, 0, 2, 0, NULL, NULL, '\x', '\x1487b28091b8a803000661120a3bcef21487b28091b8a803000661120a3bcef3', '\x');
INSERT INTO dtx.branch VALUES ('01a210e8-0540-7d93-8682-32c15bfa5255', 'dtx', '/', 7302244, '\x626f74682d3100ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.880036+00', '2026-11-25 04:12:50.893168+00', NULL, false, 2, 1, 30, NULL, NULL, '\x36399c0485e8af56000661120a3bcef536399c0485e8af56000661120a3bcef6', '\x2b92e7f0bfa35401000661120a3bcef4', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-057d-72df-8f4f-1cd1ac144df4', 'dtx', '/', 7302244, '\x626f74682d3200ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:50.941344+00', '2026-11-25 04:12:50.949166+00', NULL, false, 2, 1, 30, NULL, NULL, '\x1f6dcda1ac6210a0000661120a3bcef81f6dcda1ac6210a0000661120a3bcef9', '\x196dae3a41b4606c000661120a3bcef7', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0706-74b4-a527-d36efc4edf35', 'dtx', '/', 7302244, '\x6c617267652d3100ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:51.334526+00', '2026-11-25 04:12:51.348494+00', NULL, false, 2, 1, 5028, NULL, NULL, '\x1089386001cfa343000661120a3bcefb1089386001cfa343000661120a3bcefc', '\x1b2f387b9911fde8000661120a3bcefa', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-075b-792e-8770-97ea26f7f49f', 'dtx', '/', 4294967294, '\x0000000000000000000000000000000000000000000000000000000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:51.419811+00', '2026-11-25 04:12:51.430898+00', NULL, false, 2, 0, 30, NULL, NULL, '\x2daab30326579cdc000661120a3bcefd2daab30326579cdc000661120a3bcefe', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-07cc-7895-9f26-3cb22803eb20', 'dtx', '/', 0, '\x00', '\x', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:51.532395+00', '2026-11-25 04:12:51.537568+00', NULL, false, 2, 1, 30, NULL, NULL, '\x08c06bddfab0c93a000661120a3bcf0008c06bddfab0c93a000661120a3bcf01', '\x1941e0c8f7f463f8000661120a3bceff', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0929-768d-9eea-d78d907e0754', 'dtx', '/', 7302244, '\x616c6963652d3100ff00', '\x00', 'prepared', 'alice', 1, 60, '2026-11-25 04:12:51.881299+00', '2026-11-25 04:12:51.895338+00', NULL, false, 2, 1, 30, NULL, NULL, '\x36dc26d56cdd3fb0000661120a3bcf0336dc26d56cdd3fb0000661120a3bcf04', '\x3a0327d72ac9aabb000661120a3bcf02', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0968-7550-bf1e-276ab93e55d3', 'dtx', '/', 7302244, '\x616c6963652d3200ff00', '\x00', 'prepared', 'alice', 1, 60, '2026-11-25 04:12:51.944832+00', '2026-11-25 04:12:51.945914+00', NULL, false, 2, 1, 30, NULL, NULL, '\x0c123d3e375c7c7f000661120a3bcf060c123d3e375c7c7f000661120a3bcf07', '\x3dae16c6f3149880000661120a3bcf05', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0994-7a86-b27f-ff754e4bdd5a', 'dtx', '/', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:51.988966+00', '2026-11-25 04:12:51.990953+00', NULL, false, 2, 0, 30, NULL, NULL, '\x316c9b7d734655fa000661120a3bcf08316c9b7d734655fa000661120a3bcf09', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-09c0-7759-b81e-2ba444c23cd7', 'dtx', 'older two', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:52.032444+00', '2026-11-25 04:12:52.033605+00', NULL, false, 2, 1, 30, NULL, NULL, '\x222e32d4910c7a9a000661120a3bcf0b222e32d4910c7a9a000661120a3bcf0c', '\x0fd6badc971d2fc2000661120a3bcf0a', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-09ec-7bcc-9793-8d432f99f25c', 'dtx', '/', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'heuristic', 'guest', 2, 60, '2026-11-25 04:12:52.076635+00', '2026-11-25 04:12:52.080622+00', '2026-11-25 04:12:53.69761+00', false, 2, 1, 30, NULL, 'committed', '\x', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-0a3d-7e6d-8d90-1fc5d457d4b6', 'dtx', '/', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'heuristic', 'guest', 2, 60, '2026-11-25 04:12:52.157948+00', '2026-11-25 04:12:52.173299+00', '2026-11-25 04:12:54.396694+00', false, 2, 1, 30, NULL, 'rolled-back', '\x1ea448484f295ace000661120a3bcf111ea448484f295ace000661120a3bcf12', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-1d67-7ab3-bccb-97a5d93207b4', 'beside', 'older', 7302244, '\x7075626c69736865732d3100ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:57.063954+00', '2026-11-25 04:12:57.06656+00', NULL, false, 2, 0, 30, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-0a94-7e5f-9aed-8cb8337347c7', 'dtx', '/', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'heuristic', 'guest', 2, 60, '2026-11-25 04:12:52.244527+00', '2026-11-25 04:12:52.246755+00', '2026-11-25 04:12:55.031974+00', false, 2, 0, 30, NULL, 'hazard', '\x280a5de499938196000661120a3bcf13280a5de499938196000661120a3bcf14', '\x', '\xe3b0c442');
INSERT INTO dtx.branch VALUES ('01a210e8-1ddd-73e8-8764-698dd5eba923', 'beside', 'older', 7302244, '\x7075626c69736865732d3200ff00', '\x00', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:57.181019+00', '2026-11-25 04:12:57.195573+00', NULL, false, 2, 0, 30, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-1eb3-7825-9018-ac94a6036140', 'beside', 'older', 7302244, '\x636f6e73756d7074696f6e2d3100ff00', '\x00', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:57.395441+00', '2026-11-25 04:12:57.427409+00', NULL, false, 0, 2, 58, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-1f5b-76fe-8c25-69eeb1996c61', 'beside', 'older', 7302244, '\x636f6e73756d7074696f6e2d3200ff00', '\x00', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:57.563712+00', '2026-11-25 04:12:57.590233+00', NULL, false, 0, 2, 58, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-1ffb-7db7-8842-d15afec64407', 'beside', 'older', 7302244, '\x626f74682d3100ff00', '\x00', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:57.723704+00', '2026-11-25 04:12:57.738468+00', NULL, false, 2, 1, 52, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-2062-7f16-b330-07749fad0097', 'beside', 'older', 7302244, '\x626f74682d3200ff00', '\x00', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:57.826114+00', '2026-11-25 04:12:57.846956+00', NULL, false, 2, 1, 52, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 'beside', 'older', 7302244, '\x6c617267652d3100ff00', '\x00', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:57.966452+00', '2026-11-25 04:12:57.996139+00', NULL, false, 2, 1, 5051, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-2161-7d2b-9081-83047790fa20', 'beside', 'older', 4294967294, '\x0000000000000000000000000000000000000000000000000000000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:58.081428+00', '2026-11-25 04:12:58.094957+00', NULL, false, 2, 0, 30, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-221c-72f5-9ca6-a256a8de3b06', 'beside', 'older', 0, '\x00', '\x', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:58.268973+00', '2026-11-25 04:12:58.31577+00', NULL, false, 2, 1, 56, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-22db-7dc6-a8b5-96ecafe48a51', 'beside', 'older', 7302244, '\x616c6963652d3100ff00', '\x00', 'prepared', 'alice', 2, 60, '2026-11-25 04:12:58.459253+00', '2026-11-25 04:12:58.477692+00', NULL, false, 2, 1, 53, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 'beside', 'older', 7302244, '\x616c6963652d3200ff00', '\x00', 'prepared', 'alice', 2, 60, '2026-11-25 04:12:58.666872+00', '2026-11-25 04:12:58.678637+00', NULL, false, 2, 1, 53, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-23da-7b27-8354-5e3931f078f0', 'beside', 'older', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'prepared', 'guest', 1, 60, '2026-11-25 04:12:58.7147+00', '2026-11-25 04:12:58.716044+00', NULL, false, 2, 0, 30, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-249b-7aef-8dc0-04b2c2180f3f', 'beside', 'older two', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'prepared', 'guest', 2, 60, '2026-11-25 04:12:58.907692+00', '2026-11-25 04:12:58.923597+00', NULL, false, 2, 1, 53, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 'beside', 'older', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'heuristic', 'guest', 4, 60, '2026-11-25 04:12:59.187178+00', '2026-11-25 04:12:59.21219+00', '2026-11-25 04:13:01.085507+00', false, 2, 1, 65, NULL, 'committed', NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 'beside', 'older', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'heuristic', 'guest', 4, 60, '2026-11-25 04:12:59.335645+00', '2026-11-25 04:12:59.361588+00', '2026-11-25 04:13:01.822985+00', false, 2, 1, 67, NULL, 'rolled-back', NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-26db-78f7-b341-ee710c4913cd', 'beside', 'older', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'heuristic', 'guest', 2, 60, '2026-11-25 04:12:59.483482+00', '2026-11-25 04:12:59.485689+00', '2026-11-25 04:13:02.563599+00', false, 2, 0, 30, NULL, 'hazard', NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-280c-7fb3-b20c-ad85e5bdd923', 'beside', 'older', 7302244, '\x737475636b00ff00', '\x00', 'committing', 'guest', 3, 60, '2026-11-25 04:12:59.788838+00', '2026-11-25 04:12:59.80406+00', '2026-11-25 04:13:03.543692+00', false, 3, 0, 49, '404 NOT_FOUND - no exchange ''older.gone'' in vhost ''older''', NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 'beside', 'older', 7302244, '\x6d6978656400ff00', '\x00', 'heuristic', 'guest', 5, 60, '2026-11-25 04:12:59.949016+00', '2026-11-25 04:12:59.965473+00', '2026-11-25 04:13:03.61075+00', false, 3, 0, 49, NULL, 'mixed', NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 'beside', 'older', 7302244, '\x74616b696e6700ff00', '\x00', 'taking', 'guest', 1, 60, '2026-11-25 04:13:04.976956+00', NULL, NULL, false, 2, 2, 74, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 'beside', 'older', 7302244, '\x636f6d6d697474696e6700ff00', '\x00', 'committing', 'guest', 3, 60, '2026-11-25 04:13:05.06384+00', '2026-11-25 04:13:05.104124+00', '2026-11-25 04:13:05.587553+00', false, 2, 1, 56, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-3d70-74d4-a49e-e912aac4c602', 'beside', 'older', 7302244, '\x726f6c6c696e672d6261636b00ff00', '\x00', 'rolling-back', 'guest', 3, 60, '2026-11-25 04:13:05.264044+00', '2026-11-25 04:13:05.29962+00', '2026-11-25 04:13:05.63087+00', false, 2, 2, 86, NULL, NULL, NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 'beside', 'older', 7302244, '\x6865757269737469632d636f6d6d697474696e6700ff00', '\x00', 'heuristic-committing', 'guest', 3, 60, '2026-11-25 04:13:05.380543+00', '2026-11-25 04:13:05.398517+00', '2026-11-25 04:13:06.197556+00', false, 2, 1, 66, NULL, 'committed', NULL, NULL, NULL);
INSERT INTO dtx.branch VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 'beside', 'older', 7302244, '\x6865757269737469632d726f6c6c696e672d6261636b00ff00', '\x00', 'heuristic-rolling-back', 'guest', 3, 60, '2026-11-25 04:13:05.50671+00', '2026-11-25 04:13:05.541321+00', '2026-11-25 04:13:06.602254+00', false, 2, 1, 68, NULL, 'rolled-back', NULL, NULL, NULL);
INSERT INTO dtx.exchange VALUES ('dtx', '/', '\x6f6c6465722e636f70696573', 'fanout', false, false, '\x');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-09ec-7bcc-9793-8d432f99f25c', 'dtx', 'committed', 'token:root at the command line 10f61046', 'a test', '2026-11-25 04:12:53.69761+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-0a3d-7e6d-8d90-1fc5d457d4b6', 'dtx', 'rolled-back', 'token:root at the command line 4f4e165d', 'a test', '2026-11-25 04:12:54.396694+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 'beside', 'committed', 'token:root at the command line aca48997', 'a test', '2026-11-25 04:13:01.112002+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 'beside', 'rolled-back', 'token:root at the command line 162b259f', 'a test', '2026-11-25 04:13:01.838788+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 'beside', 'mixed', 'token:root at the command line a973f265', 'a test', '2026-11-25 04:13:04.111048+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 'beside', 'committed', 'token:root at the command line 6570f293', 'a test', '2026-11-25 04:13:06.197556+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 'beside', 'rolled-back', 'token:root at the command line d26f36f6', 'a test', '2026-11-25 04:13:06.602254+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-0a94-7e5f-9aed-8cb8337347c7', 'dtx', 'hazard', 'token:root at the command line 66bdaa35', 'a test', '2026-11-25 04:12:55.031974+00');
INSERT INTO dtx.heuristic_outcome VALUES ('01a210e8-26db-78f7-b341-ee710c4913cd', 'beside', 'hazard', 'token:root at the command line b9ca6217', 'a test', '2026-11-25 04:13:02.563599+00');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000000b', '2026-11-25 04:12:50.512863+00', 'dtx', 'prepared', '01a210e8-03c9-70d3-ba52-2238218ee150', '/', 7302244, '\x7075626c69736865732d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:50.505337+00', '2026-11-25 04:12:50.512863+00', NULL, '801');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000000e', '2026-11-25 04:12:50.597274+00', 'dtx', 'prepared', '01a210e8-0424-72c6-a75a-7045a42d6413', '/', 7302244, '\x7075626c69736865732d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:50.596363+00', '2026-11-25 04:12:50.597274+00', NULL, '804');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000013', '2026-11-25 04:12:50.656545+00', 'dtx', 'prepared', '01a210e8-0455-7f29-825a-8b73d3758aa8', '/', 7302244, '\x636f6e73756d7074696f6e2d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 0, 2, 0, '2026-11-25 04:12:50.645772+00', '2026-11-25 04:12:50.656545+00', NULL, '809');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000018', '2026-11-25 04:12:50.740708+00', 'dtx', 'prepared', '01a210e8-04b3-7ec0-9977-47cada178d13', '/', 7302244, '\x636f6e73756d7074696f6e2d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 0, 2, 0, '2026-11-25 04:12:50.739335+00', '2026-11-25 04:12:50.740708+00', NULL, '814');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000001c', '2026-11-25 04:12:50.893168+00', 'dtx', 'prepared', '01a210e8-0540-7d93-8682-32c15bfa5255', '/', 7302244, '\x626f74682d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:50.880036+00', '2026-11-25 04:12:50.893168+00', NULL, '818');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000020', '2026-11-25 04:12:50.949166+00', 'dtx', 'prepared', '01a210e8-057d-72df-8f4f-1cd1ac144df4', '/', 7302244, '\x626f74682d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:50.941344+00', '2026-11-25 04:12:50.949166+00', NULL, '822');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000024', '2026-11-25 04:12:51.348494+00', 'dtx', 'prepared', '01a210e8-0706-74b4-a527-d36efc4edf35', '/', 7302244, '\x6c617267652d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 5028, '2026-11-25 04:12:51.334526+00', '2026-11-25 04:12:51.348494+00', NULL, '827');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000028', '2026-11-25 04:12:51.430898+00', 'dtx', 'prepared', '01a210e8-075b-792e-8770-97ea26f7f49f', '/', 4294967294, '\x0000000000000000000000000000000000000000000000000000000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:51.419811+00', '2026-11-25 04:12:51.430898+00', NULL, '831');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000002c', '2026-11-25 04:12:51.537568+00', 'dtx', 'prepared', '01a210e8-07cc-7895-9f26-3cb22803eb20', '/', 0, '\x00', '\x', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:51.532395+00', '2026-11-25 04:12:51.537568+00', NULL, '835');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000030', '2026-11-25 04:12:51.895338+00', 'dtx', 'prepared', '01a210e8-0929-768d-9eea-d78d907e0754', '/', 7302244, '\x616c6963652d3100ff00', '\x00', 'alice', 'alice', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:51.881299+00', '2026-11-25 04:12:51.895338+00', NULL, '840');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000034', '2026-11-25 04:12:51.945914+00', 'dtx', 'prepared', '01a210e8-0968-7550-bf1e-276ab93e55d3', '/', 7302244, '\x616c6963652d3200ff00', '\x00', 'alice', 'alice', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:51.944832+00', '2026-11-25 04:12:51.945914+00', NULL, '844');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000037', '2026-11-25 04:12:51.990953+00', 'dtx', 'prepared', '01a210e8-0994-7a86-b27f-ff754e4bdd5a', '/', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:51.988966+00', '2026-11-25 04:12:51.990953+00', NULL, '847');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000003b', '2026-11-25 04:12:52.033605+00', 'dtx', 'prepared', '01a210e8-09c0-7759-b81e-2ba444c23cd7', 'older two', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.032444+00', '2026-11-25 04:12:52.033605+00', NULL, '851');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000003f', '2026-11-25 04:12:52.080622+00', 'dtx', 'prepared', '01a210e8-09ec-7bcc-9793-8d432f99f25c', '/', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.076635+00', '2026-11-25 04:12:52.080622+00', NULL, '855');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000043', '2026-11-25 04:12:52.173299+00', 'dtx', 'prepared', '01a210e8-0a3d-7e6d-8d90-1fc5d457d4b6', '/', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.157948+00', '2026-11-25 04:12:52.173299+00', NULL, '859');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000046', '2026-11-25 04:12:52.246755+00', 'dtx', 'prepared', '01a210e8-0a94-7e5f-9aed-8cb8337347c7', '/', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:52.244527+00', '2026-11-25 04:12:52.246755+00', NULL, '862');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000004a', '2026-11-25 04:12:52.319434+00', 'dtx', 'prepared', '01a210e8-0adb-7256-b7d5-f97376ac91d2', '/', 7302244, '\x636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.315316+00', '2026-11-25 04:12:52.319434+00', NULL, '866');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000004f', '2026-11-25 04:12:52.415361+00', 'dtx', 'prepared', '01a210e8-0b30-7cc4-a645-f34dd4fbd11a', '/', 7302244, '\x726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.400215+00', '2026-11-25 04:12:52.415361+00', NULL, '871');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000052', '2026-11-25 04:12:52.53426+00', 'dtx', 'prepared', '01a210e8-0bb0-77c3-b69d-623b06c1906e', '/', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:52.52869+00', '2026-11-25 04:12:52.53426+00', NULL, '875');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000055', '2026-11-25 04:12:53.69761+00', 'dtx', 'heuristic', '01a210e8-09ec-7bcc-9793-8d432f99f25c', '/', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'guest', 'token:root at the command line 10f61046', 'a test', 'committed', false, 2, 1, 30, '2026-11-25 04:12:52.076635+00', '2026-11-25 04:12:52.080622+00', '2026-11-25 04:12:53.69761+00', '883');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000056', '2026-11-25 04:12:54.396694+00', 'dtx', 'heuristic', '01a210e8-0a3d-7e6d-8d90-1fc5d457d4b6', '/', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'token:root at the command line 4f4e165d', 'a test', 'rolled-back', false, 2, 1, 30, '2026-11-25 04:12:52.157948+00', '2026-11-25 04:12:52.173299+00', '2026-11-25 04:12:54.396694+00', '891');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000057', '2026-11-25 04:12:55.031974+00', 'dtx', 'heuristic', '01a210e8-0a94-7e5f-9aed-8cb8337347c7', '/', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'guest', 'token:root at the command line 66bdaa35', 'a test', 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:52.244527+00', '2026-11-25 04:12:52.246755+00', '2026-11-25 04:12:55.031974+00', '900');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000058', '2026-11-25 04:12:55.240189+00', 'dtx', 'committed', '01a210e8-0adb-7256-b7d5-f97376ac91d2', '/', 7302244, '\x636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.315316+00', '2026-11-25 04:12:52.319434+00', '2026-11-25 04:12:55.240189+00', '903');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-000000000059', '2026-11-25 04:12:55.28774+00', 'dtx', 'rolled-back', '01a210e8-0b30-7cc4-a645-f34dd4fbd11a', '/', 7302244, '\x726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 30, '2026-11-25 04:12:52.400215+00', '2026-11-25 04:12:52.415361+00', '2026-11-25 04:12:55.28774+00', '905');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000005a', '2026-11-25 04:12:55.895428+00', 'dtx', 'heuristic', '01a210e8-0bb0-77c3-b69d-623b06c1906e', '/', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'token:root at the command line 6451c225', 'a test', 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:52.52869+00', '2026-11-25 04:12:52.53426+00', '2026-11-25 04:12:55.895428+00', '910');
INSERT INTO dtx.journal_20261125 VALUES ('b3f4e64f-80e0-6161-0000-00000000005b', '2026-11-25 04:12:56.066826+00', 'dtx', 'forgotten', '01a210e8-0bb0-77c3-b69d-623b06c1906e', '/', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'guest', NULL, 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:52.52869+00', '2026-11-25 04:12:52.53426+00', '2026-11-25 04:12:55.895428+00', '914');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000000', '2026-11-25 04:12:57.06656+00', 'beside', 'prepared', '01a210e8-1d67-7ab3-bccb-97a5d93207b4', 'older', 7302244, '\x7075626c69736865732d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:57.063954+00', '2026-11-25 04:12:57.06656+00', NULL, '917');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000001', '2026-11-25 04:12:57.195573+00', 'beside', 'prepared', '01a210e8-1ddd-73e8-8764-698dd5eba923', 'older', 7302244, '\x7075626c69736865732d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:57.181019+00', '2026-11-25 04:12:57.195573+00', NULL, '918');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000003', '2026-11-25 04:12:57.427409+00', 'beside', 'prepared', '01a210e8-1eb3-7825-9018-ac94a6036140', 'older', 7302244, '\x636f6e73756d7074696f6e2d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 0, 2, 58, '2026-11-25 04:12:57.395441+00', '2026-11-25 04:12:57.427409+00', NULL, '921');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000005', '2026-11-25 04:12:57.590233+00', 'beside', 'prepared', '01a210e8-1f5b-76fe-8c25-69eeb1996c61', 'older', 7302244, '\x636f6e73756d7074696f6e2d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 0, 2, 58, '2026-11-25 04:12:57.563712+00', '2026-11-25 04:12:57.590233+00', NULL, '923');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000007', '2026-11-25 04:12:57.738468+00', 'beside', 'prepared', '01a210e8-1ffb-7db7-8842-d15afec64407', 'older', 7302244, '\x626f74682d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 52, '2026-11-25 04:12:57.723704+00', '2026-11-25 04:12:57.738468+00', NULL, '925');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000009', '2026-11-25 04:12:57.846956+00', 'beside', 'prepared', '01a210e8-2062-7f16-b330-07749fad0097', 'older', 7302244, '\x626f74682d3200ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 52, '2026-11-25 04:12:57.826114+00', '2026-11-25 04:12:57.846956+00', NULL, '927');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000000b', '2026-11-25 04:12:57.996139+00', 'beside', 'prepared', '01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 'older', 7302244, '\x6c617267652d3100ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 5051, '2026-11-25 04:12:57.966452+00', '2026-11-25 04:12:57.996139+00', NULL, '930');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000000c', '2026-11-25 04:12:58.094957+00', 'beside', 'prepared', '01a210e8-2161-7d2b-9081-83047790fa20', 'older', 4294967294, '\x0000000000000000000000000000000000000000000000000000000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:58.081428+00', '2026-11-25 04:12:58.094957+00', NULL, '931');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000000e', '2026-11-25 04:12:58.31577+00', 'beside', 'prepared', '01a210e8-221c-72f5-9ca6-a256a8de3b06', 'older', 0, '\x00', '\x', 'guest', 'guest', NULL, NULL, false, 2, 1, 56, '2026-11-25 04:12:58.268973+00', '2026-11-25 04:12:58.31577+00', NULL, '933');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000010', '2026-11-25 04:12:58.477692+00', 'beside', 'prepared', '01a210e8-22db-7dc6-a8b5-96ecafe48a51', 'older', 7302244, '\x616c6963652d3100ff00', '\x00', 'alice', 'alice', NULL, NULL, false, 2, 1, 53, '2026-11-25 04:12:58.459253+00', '2026-11-25 04:12:58.477692+00', NULL, '935');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000012', '2026-11-25 04:12:58.678637+00', 'beside', 'prepared', '01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 'older', 7302244, '\x616c6963652d3200ff00', '\x00', 'alice', 'alice', NULL, NULL, false, 2, 1, 53, '2026-11-25 04:12:58.666872+00', '2026-11-25 04:12:58.678637+00', NULL, '938');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000013', '2026-11-25 04:12:58.716044+00', 'beside', 'prepared', '01a210e8-23da-7b27-8354-5e3931f078f0', 'older', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:58.7147+00', '2026-11-25 04:12:58.716044+00', NULL, '939');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000015', '2026-11-25 04:12:58.923597+00', 'beside', 'prepared', '01a210e8-249b-7aef-8dc0-04b2c2180f3f', 'older two', 1, '\x696e2074776f207669727475616c20686f737473', '\x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000', 'guest', 'guest', NULL, NULL, false, 2, 1, 53, '2026-11-25 04:12:58.907692+00', '2026-11-25 04:12:58.923597+00', NULL, '941');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000017', '2026-11-25 04:12:59.21219+00', 'beside', 'prepared', '01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 'older', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 65, '2026-11-25 04:12:59.187178+00', '2026-11-25 04:12:59.21219+00', NULL, '943');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000019', '2026-11-25 04:12:59.361588+00', 'beside', 'prepared', '01a210e8-2647-7d57-b9d1-8f15cda29e8e', 'older', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 67, '2026-11-25 04:12:59.335645+00', '2026-11-25 04:12:59.361588+00', NULL, '946');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000001a', '2026-11-25 04:12:59.485689+00', 'beside', 'prepared', '01a210e8-26db-78f7-b341-ee710c4913cd', 'older', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:59.483482+00', '2026-11-25 04:12:59.485689+00', NULL, '947');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000001c', '2026-11-25 04:12:59.543742+00', 'beside', 'prepared', '01a210e8-270f-7875-8b3c-50398eafc765', 'older', 7302244, '\x636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 55, '2026-11-25 04:12:59.535955+00', '2026-11-25 04:12:59.543742+00', NULL, '949');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000001e', '2026-11-25 04:12:59.621841+00', 'beside', 'prepared', '01a210e8-275b-72cf-8d02-3f881b31defc', 'older', 7302244, '\x726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 57, '2026-11-25 04:12:59.611932+00', '2026-11-25 04:12:59.621841+00', NULL, '951');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000001f', '2026-11-25 04:12:59.679973+00', 'beside', 'prepared', '01a210e8-279d-7772-a768-cf70ff09ca99', 'older', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 0, 30, '2026-11-25 04:12:59.677627+00', '2026-11-25 04:12:59.679973+00', NULL, '952');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000020', '2026-11-25 04:12:59.80406+00', 'beside', 'prepared', '01a210e8-280c-7fb3-b20c-ad85e5bdd923', 'older', 7302244, '\x737475636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 3, 0, 49, '2026-11-25 04:12:59.788838+00', '2026-11-25 04:12:59.80406+00', NULL, '953');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000021', '2026-11-25 04:12:59.965473+00', 'beside', 'prepared', '01a210e8-28ad-7573-8bd2-11962982e608', 'older', 7302244, '\x6d6978656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 3, 0, 49, '2026-11-25 04:12:59.949016+00', '2026-11-25 04:12:59.965473+00', NULL, '954');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000022', '2026-11-25 04:13:01.085507+00', 'beside', 'decided', '01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 'older', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'guest', 'token:root at the command line aca48997', 'a test', 'committed', false, 2, 1, 65, '2026-11-25 04:12:59.187178+00', '2026-11-25 04:12:59.21219+00', NULL, '961');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000023', '2026-11-25 04:13:01.112002+00', 'beside', 'heuristic', '01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 'older', 7302244, '\x6865757269737469632d636f6d6d697474656400ff00', '\x00', 'guest', 'token:root at the command line aca48997', 'a test', 'committed', false, 2, 1, 65, '2026-11-25 04:12:59.187178+00', '2026-11-25 04:12:59.21219+00', '2026-11-25 04:13:01.085507+00', '962');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000024', '2026-11-25 04:13:01.822985+00', 'beside', 'decided', '01a210e8-2647-7d57-b9d1-8f15cda29e8e', 'older', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'token:root at the command line 162b259f', 'a test', 'rolled-back', false, 2, 1, 67, '2026-11-25 04:12:59.335645+00', '2026-11-25 04:12:59.361588+00', NULL, '970');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000025', '2026-11-25 04:13:01.838788+00', 'beside', 'heuristic', '01a210e8-2647-7d57-b9d1-8f15cda29e8e', 'older', 7302244, '\x6865757269737469632d726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'token:root at the command line 162b259f', 'a test', 'rolled-back', false, 2, 1, 67, '2026-11-25 04:12:59.335645+00', '2026-11-25 04:12:59.361588+00', '2026-11-25 04:13:01.822985+00', '971');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000026', '2026-11-25 04:13:02.563599+00', 'beside', 'heuristic', '01a210e8-26db-78f7-b341-ee710c4913cd', 'older', 7302244, '\x6865757269737469632d68617a61726400ff00', '\x00', 'guest', 'token:root at the command line b9ca6217', 'a test', 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:59.483482+00', '2026-11-25 04:12:59.485689+00', NULL, '979');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000028', '2026-11-25 04:13:02.791795+00', 'beside', 'committed', '01a210e8-270f-7875-8b3c-50398eafc765', 'older', 7302244, '\x636f6d6d697474656400ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 55, '2026-11-25 04:12:59.535955+00', '2026-11-25 04:12:59.543742+00', '2026-11-25 04:13:02.755797+00', '984');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000002a', '2026-11-25 04:13:02.826035+00', 'beside', 'rolled-back', '01a210e8-275b-72cf-8d02-3f881b31defc', 'older', 7302244, '\x726f6c6c65642d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 57, '2026-11-25 04:12:59.611932+00', '2026-11-25 04:12:59.621841+00', '2026-11-25 04:13:02.814102+00', '986');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000002b', '2026-11-25 04:13:03.301923+00', 'beside', 'heuristic', '01a210e8-279d-7772-a768-cf70ff09ca99', 'older', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'token:root at the command line 86605fee', 'a test', 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:59.677627+00', '2026-11-25 04:12:59.679973+00', NULL, '991');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000002c', '2026-11-25 04:13:03.4984+00', 'beside', 'forgotten', '01a210e8-279d-7772-a768-cf70ff09ca99', 'older', 7302244, '\x666f72676f7474656e00ff00', '\x00', 'guest', 'guest', NULL, 'rolled-back', false, 2, 0, 30, '2026-11-25 04:12:59.677627+00', '2026-11-25 04:12:59.679973+00', '2026-11-25 04:13:03.301923+00', '995');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000002e', '2026-11-25 04:13:03.553254+00', 'beside', 'stuck', '01a210e8-280c-7fb3-b20c-ad85e5bdd923', 'older', 7302244, '\x737475636b00ff00', '\x00', 'guest', 'dtx', '404 NOT_FOUND - no exchange ''older.gone'' in vhost ''older''', NULL, false, 3, 0, 49, '2026-11-25 04:12:59.788838+00', '2026-11-25 04:12:59.80406+00', '2026-11-25 04:13:03.543692+00', '997');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000030', '2026-11-25 04:13:03.613607+00', 'beside', 'stuck', '01a210e8-28ad-7573-8bd2-11962982e608', 'older', 7302244, '\x6d6978656400ff00', '\x00', 'guest', 'dtx', '404 NOT_FOUND - no exchange ''older.gone'' in vhost ''older''', NULL, false, 3, 0, 49, '2026-11-25 04:12:59.949016+00', '2026-11-25 04:12:59.965473+00', '2026-11-25 04:13:03.61075+00', '999');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000031', '2026-11-25 04:13:04.111048+00', 'beside', 'discarded', '01a210e8-28ad-7573-8bd2-11962982e608', 'older', 7302244, '\x6d6978656400ff00', '\x00', 'guest', 'token:root at the command line a973f265', 'a test', 'mixed', false, 3, 0, 49, '2026-11-25 04:12:59.949016+00', '2026-11-25 04:12:59.965473+00', '2026-11-25 04:13:03.61075+00', '1004');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000032', '2026-11-25 04:13:04.69147+00', 'beside', 'heuristic', '01a210e8-28ad-7573-8bd2-11962982e608', 'older', 7302244, '\x6d6978656400ff00', '\x00', 'guest', 'token:root at the command line 4136311f', NULL, 'mixed', false, 3, 0, 49, '2026-11-25 04:12:59.949016+00', '2026-11-25 04:12:59.965473+00', '2026-11-25 04:13:03.61075+00', '1012');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000034', '2026-11-25 04:13:05.104124+00', 'beside', 'prepared', '01a210e8-3ca7-735c-a406-a68a2085df59', 'older', 7302244, '\x636f6d6d697474696e6700ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 56, '2026-11-25 04:13:05.06384+00', '2026-11-25 04:13:05.104124+00', NULL, '1018');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000036', '2026-11-25 04:13:05.29962+00', 'beside', 'prepared', '01a210e8-3d70-74d4-a49e-e912aac4c602', 'older', 7302244, '\x726f6c6c696e672d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 2, 86, '2026-11-25 04:13:05.264044+00', '2026-11-25 04:13:05.29962+00', NULL, '1020');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-000000000038', '2026-11-25 04:13:05.398517+00', 'beside', 'prepared', '01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 'older', 7302244, '\x6865757269737469632d636f6d6d697474696e6700ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 66, '2026-11-25 04:13:05.380543+00', '2026-11-25 04:13:05.398517+00', NULL, '1022');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000003a', '2026-11-25 04:13:05.541321+00', 'beside', 'prepared', '01a210e8-3e62-709a-81ec-1fba8dbc3953', 'older', 7302244, '\x6865757269737469632d726f6c6c696e672d6261636b00ff00', '\x00', 'guest', 'guest', NULL, NULL, false, 2, 1, 68, '2026-11-25 04:13:05.50671+00', '2026-11-25 04:13:05.541321+00', NULL, '1025');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000003e', '2026-11-25 04:13:06.197556+00', 'beside', 'decided', '01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 'older', 7302244, '\x6865757269737469632d636f6d6d697474696e6700ff00', '\x00', 'guest', 'token:root at the command line 6570f293', 'a test', 'committed', false, 2, 1, 66, '2026-11-25 04:13:05.380543+00', '2026-11-25 04:13:05.398517+00', NULL, '1034');
INSERT INTO dtx.journal_20261125 VALUES ('0582f232-1cda-5706-0000-00000000003f', '2026-11-25 04:13:06.602254+00', 'beside', 'decided', '01a210e8-3e62-709a-81ec-1fba8dbc3953', 'older', 7302244, '\x6865757269737469632d726f6c6c696e672d6261636b00ff00', '\x00', 'guest', 'token:root at the command line d26f36f6', 'a test', 'rolled-back', false, 2, 1, 68, '2026-11-25 04:13:05.50671+00', '2026-11-25 04:13:05.541321+00', NULL, '1039');
INSERT INTO dtx.lease VALUES ('dtx', 2, 'older:2', NULL, 'ac6a14fb-1629-4f35-a996-aa3662435898', '2026-11-25 04:12:49.088615+00', '2026-11-25 04:12:57.925472+00', 36500, 90, 400, 'bc6d53c4-0db6-470d-ac39-d29d58dd7ad8');
INSERT INTO dtx.lease VALUES ('beside', 2, 'older:2', NULL, '977da346-670c-4e9e-80e1-2600c1ef1901', '2026-11-25 04:12:56.60185+00', '2026-11-25 04:13:08.140447+00', 36500, 90, 400, '12f45372-0867-4497-a917-f8dd04d9c96e');
INSERT INTO dtx.message VALUES (4150881425640526760, 1795579969261286, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', '\x6669727374', NULL, NULL);
INSERT INTO dtx.message VALUES (1159647780160019887, 1795579969261287, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', '\x6669727374', NULL, NULL);
INSERT INTO dtx.message VALUES (4150881425640526760, 1795579969261288, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', '\x7365636f6e64', NULL, NULL);
INSERT INTO dtx.message VALUES (1159647780160019887, 1795579969261289, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', '\x7365636f6e64', NULL, NULL);
INSERT INTO dtx.message VALUES (4150881425640526760, 1795579969261290, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', NULL, NULL, 4413201854157960200);
INSERT INTO dtx.message VALUES (1159647780160019887, 1795579969261291, 'dtx', '\x6f6c6465722e636f70696573', '\x', 1, '\xb0000a746578742f706c61696e00000013016e490000000104746578745300000002c3a902', NULL, NULL, 4413201854157960200);
INSERT INTO dtx.message VALUES (4535958819332814950, 1795579969261292, 'dtx', '\x', '\x7075626c69736865732d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (4535958819332814950, 1795579969261293, 'dtx', '\x', '\x7075626c69736865732d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (3930729912493237709, 1795579969261294, 'dtx', '\x', '\x7075626c69736865732d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3930729912493237709, 1795579969261295, 'dtx', '\x', '\x7075626c69736865732d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (2765255038377349446, 1795579969261296, 'dtx', '\x', '\x636f6e73756d7074696f6e2d312e696e', 1, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d312030', NULL, NULL);
INSERT INTO dtx.message VALUES (2765255038377349446, 1795579969261297, 'dtx', '\x', '\x636f6e73756d7074696f6e2d312e696e', 1, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d312031', NULL, NULL);
INSERT INTO dtx.message VALUES (1479347267884853251, 1795579969261298, 'dtx', '\x', '\x636f6e73756d7074696f6e2d322e696e', 1, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d322030', NULL, NULL);
INSERT INTO dtx.message VALUES (1479347267884853251, 1795579969261299, 'dtx', '\x', '\x636f6e73756d7074696f6e2d322e696e', 1, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d322031', NULL, NULL);
INSERT INTO dtx.message VALUES (3139826911423976449, 1795579969261300, 'dtx', '\x', '\x626f74682d312e696e', 1, '\x90000a746578742f706c61696e02', '\x626f74682d312030', NULL, NULL);
INSERT INTO dtx.message VALUES (3907325694961037142, 1795579969261301, 'dtx', '\x', '\x626f74682d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3907325694961037142, 1795579969261302, 'dtx', '\x', '\x626f74682d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (1832312188643336300, 1795579969261303, 'dtx', '\x', '\x626f74682d322e696e', 1, '\x90000a746578742f706c61696e02', '\x626f74682d322030', NULL, NULL);
INSERT INTO dtx.message VALUES (2264692281902764192, 1795579969261304, 'dtx', '\x', '\x626f74682d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (2264692281902764192, 1795579969261305, 'dtx', '\x', '\x626f74682d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (1958846466429681128, 1795579969261306, 'dtx', '\x', '\x6c617267652d312e696e', 1, '\x90000a746578742f706c61696e02', '\x6c617267652d312030', NULL, NULL);
INSERT INTO dtx.message VALUES (1191545561414607683, 1795579969261307, 'dtx', '\x', '\x6c617267652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x07213a2ac1a1016bb89094b0f204046b375b8fa2967500480d54a67a1b1be1d756b74c37e35e5efd1805eaca7a7b8279178acfceb84295f60f553083122fff2ee8314d8196670d8796306e3c20d0d4c92d72d000ed749d0376eafc5e288ccaee0951da95eeee9d6df855bb11609d19254b4433cb5f8556c0fbe9743bdf18e7eb72e5913bf9a4a4b1727ed60a04cad56fda2b60ff35c4d0fef1a31abde4b04cc5159702e0bb04226819f9aa9d8a711c71a0d0b808039aeef4b5b634546a3a478ab6965f7fb670a4b127b6a51d43d118a697ebb3f392ea1af0e484525eab04f20502d4a127629ab3bd934c48d1f491a51612f2f71f304101cfb6ba8ded783201058e2b007406c23d29760f508d753a7cbac0b2c957546ebe66b489157cee54ae26bb40d92f558644aa59fa8109a41e4e7870adaadd87fbf4d1b02f203cdc831a13aa13bfc73d538732535564356bc97dacbb3e01f89cbe8bcdc3f1dae4a26672a8f3133ac192be05f3fc6046c36a87bbe5a30fad94654023fd2a61d1bab4422812adb55a1f5538648fe675f0798bdc168f0f75b7d31f955463eef079336aec5a57b3b354ecb4286a25011d37e303b32b8916a8db68fdadbf4aea177f5db6a85af471d0897307505e808753c262cd4a65514103aefea413057cf9c6f76236380544b1b3de0638ee88d5b80de0174689b02802ead4b77da44bb7beac29fe76077efbd28ffa7eee98b9003f8ad57df029f311070ae98c1dd77099b47688bf9f1ead85ff27d73814084f922cf6e09b7377925198ee758ee0f5e0faff33649fe289da1c04df402e01e76faba4238b2bba1c62a0901c245953a66ad526b254edc2bc165537a8bb5898bd08c3e97ee498e00e01ee92407e4e747bea3e5a1d701a0a6d2f2b840ace10813b52ecf45e4ed075738c2caab0eac69349c06d29d8f75f6d3aee28b224f0aea7ff640925e607ade29e0885520c11e6926471a892d851f5c86ad63dc11c326810e1f3eaf44936fd7c04c029d74220f67e96eabd703d2c9783b9a603116817e2bb65bb584c66ac7decfd9181b0b524602754bcaa6e02493fc388b0ef4c034be0ca77f13e66018c29ea38d38fd9f2bf11b598717056f226ced38c4f685b661fc6dc3ccdbd8a38b17b7bcbb30edb8d45d6e11bb94927405b0df35672da40c10a42619f8ea8c739354a9d20e6087cb7676b2de4a33fe162ae2bd89bff64df8ec711d497d1de2d918c5650423ba55a612ee623c56725db2fc3fb34f7b42667e0efbeab1a7dbac1fc9d7adf9da50c37269140b415bc2392ff78f540ce76a6238b8f86a47854e9351686ba0e1ca47a93a13e07229cecf3c0a04b36d0a041e6da7498d69a23a05d5a6d93cbbc29622707e4a6e1cef3665edb73f2993cd1d3c518be136d4b79057c0a8fc5949c0e10e7107b6ed9e3c8127a4c99d74e49138823402aca882333a29669bea64612dfa9233169acc4393884b88caa9e024dbbe261f2bc6fafb9d8392031ab37f4f84d37b7b0230406bc18b14342d7fb97dbda7f53dfefd3a443a0f03f04d607da1529a7f4935197955530cd6bbca5d741bfa6e2aeb3d0d567c9426bc0f6356ef5f411e9cf96d9d5e72ea2752328882f2226f3572485604718ae3a9f6510600c18f748ca2fd62c7b063ce048a4941e6572afce40c9992b0d24ab5b67122fbe09de28887b1e0f44c3a722e3054848246420aba5d44def87e5890ed92cf151cf0353cbb072655d0d6e7ece1851e387393838f807079f963f842a4cb87b2ef5e4162fd6ba84db1c34b860ba6d9d332aefc0b507c883be1b29cf8c796ecec1aa8bd20b130f999ae1f8fbb51dcc3f81a1e0b5dfc528ddbef02b35c6da0e820e4dfc6cca056edfed81ad0002d1e63c630cd2c07617714ddd5bf94010db31df65634490c3a32423911f46e02c3289bcda210d24b6ceafba3bb971be4066d3c8f680195db27c85ed9ad73849509b57edbe78b0ba0a1f62a53e050d8d6326fcfa27ff98354fc483e4b978d697e6895890fde8e3864bd0604ed1938dcc80f73996cd3b0ba18cc685747d015abef28f1faf928f733b193287a08bffe6e699b5815f0fc4371a828076429878f30cbcf69fec52a89b94f7793350846f76664ff283a74a2ff10eb3d418ee9f58f49986bc0100c23084888f65838630633650100c45d09df7698fd0d7d36353f7b012fa30dd8933f714f05a7a7ab810d8e36e51290a70a80a7d43fe4e05976b1b148c1b6b4633de75d17b13c8a8d6a692e0c512cb6365a07ce177d020b3c3cef4b089c26cd33cfaaefcb3723d844a81547d139fd6ea71f2f83f1005cb8a0daebd9107a5c67fa5b43ea4507140998b78920e7684746c548368d3af630f882be0ad9cc9667fbb02123172b93946086306fd767f0c141558a99b1c156f1b22c30a581f3f3fa4908c46fe1645b4bf69e396ec523ad18fbd9267a25048b91ecd526daee6bb7431a430cc5522873ccae020666d08aa625ef7d6532eeb9d7c350a503a802fbfa111b227ea8e5c8ff6397882a73c2fdd15d01995092118ce7ae8be3f2c602bec7d3ebe7e5fffaf98b73079c69a72e5f6e36ea44537aa528ec7512d2273207776a06debf1a1c9bd2ec242c4989e91ed03abbd4225bb1342e1dbaa07089ba25df3b2a1b3fcd17c78d7aedf091f43d263cc3ed4ef2f7b2d78abeab974a97f1acacd625edd524e169e5d9d42e3c061855e28d3560334869957b5f648e61cb6afc73cfd6a45bae8e27aa2014f6570298a9e07502da5b833adb5cd4fcb742be093302764f61d67b773583a2530fd37171761a18d4eade12cda355b141b6eba857959774d5f28b69e36cf8af127a21b6077020bbe369f33be6d805c76bb60a6fb5b31b41b8e93a7fd9e86bcf49ff29b2ac71736b40004eb6eec86b0340153bdad86cfd55558c3395fdb683ea441a7e894a4607fae4efb5530d655c84201a8fd14b05d84f3c5b951070fec7552b7a8c183decc1541dca3e8f14a436ad892109af712b445275c1b54e68eb660aecdf7cd8161672b3397ca063d70801499b78f2bb0166904473b2558b708d6056170e03b280fd0d3f0e0ed8564e00f8b77f5b9d466de6ed76f02a6f175e5c3f99d80e46eaa0233d747f84e6aabdefba12c034eecaa2d667762db72289f781fbc459957551914b33e304d04a5f9a01bf6f561a616373ee4cc08a9d9c0592c8c78cf156124a1bec34bef20d148dfa79960b4ebd9205e6863dc04ea372b13d3c64e80c01e7c9452800d0adb46ed65b4d89c9b30d8f470ebec4db3c36c1b7386897f3d00a1a5fd5833f20195be09f13e195e8b9391db25ac633218dc050cf9ad2c184ff5adb7302a3040742fe2dd5e69effae4a142c4004137bb5e7d478c2a833b8c2227dc1e92fac6adca412678e9f94d85d25d50a26ec6c68787a7663ed762b1950ca64a034f18d704303f87c96a7c1629671317eee1e239498d6df78b3ee974a13986e72b932f5e68cd9596e3d25846efd7c82ca9958563d7ecf5b3bd77afbb30e29ea0acca07cd8104c471a1a8e48702950ce9b012f5cd9714d0c28f6fb53651e61fe92cd5f49f36bf1eac36fdf5e25fc2151078a889003430215df026c6ec440f7cb6527fe025b1d05fc7cc86d9e5449b85101a8996d1ca9e55facb7d6e919a7898a9e1ad4e36d4cc184f16adecdf8656a4c617276df10c45d6e14927e87b665ab292b8495df2484cb93cd5a3d4058aa0fdb95d0213a1e0e387d395ce930a2e1289e30dabb94550116075b42f6d6b0283018b20191a0292ad9f290cd4399895305b79355c3b77154587fe345a70ea0a0f20627f29d682820916e3d4952a28bc7ef3b37646771946aeba9c0eca6b5c36a761b2436691f37e28f0f44d08ace2a61a57be903be62c4dee2085cc5b66f3de89069d1c406a118e6848bfef32bd52dcb0d37c8b31611b52ba9bbe39f458e04a86bfeb686c283a0c1454bf1853ac58c8d387a91438a909b636e9b5b580d6c05c0a41c84cba2f8f2e5add354f9b4c375588fd8c0ca2d077d3a0fc5280a47c6f912c973e63057f52aab5cda6555ec47d6a7ef8527e7afe83792977e23bdde535d8d906530571fb7686cee0c3d104e3b107e85ae39147f94df2ad74c63f0e64daa137380251ae1fdf15c7dfecd9a544451be71a27b19d866783880200859a1e9d91e8191b9b1cf67b5df83c66784fcd99e0634a5acc35b5041cf14748cc76baa0d0efde8c5fb282483bcb82d6f15d12f9e0025fdfc7e9f452175ae6bc602c8d8d149df4e0e1439ab1709babd86606d2ff73c1fd944b602c9c98a59bef9dbfe95c56298b32ad2ee8cf48eeb14e78f9cf26468995172180a477b6e144c49c6993d5f2342226f039e5e280ffc2dfc08388430b8e2a9c3449b94d8cc676353273f0236ebd295b61c4ba57fee1c3647df42890c35c144effe81e803315fe2d683ddab4d36786487099b4d5a22dfb77155aca51338af58affabc72da2d07ce2d7dda269ba5ce4e6a9921fbd8c217c0881fe0e65e906204a64e9ae79466cc4ec61f4fc189794eaf852c18c43bb067915fbfbe73f5aaa66b774bdf181fb35f2fce2bd7416671b6df17136cca67ded6a275288825ce5853bbad05e6ca323e5d864c5fd334991835b3ccd4b19ed721f37e93c29acb6733d290186a9a7439c6cd69e159d41f50fa44f25ed76073d58c509bba47e14725ac03a26d530ef7099a6bfaf52360471c140464f342fe1f71c6e94dabbd3a33ac760172de638e3fa547d85d2297af7f6f64383825e0afb7aae8903a5d6dbbbba72753b12b0340fee1909115907ca6454a9d225b30a5609042196efeeb770272d81cdc22e4a4d611e8ebc803ead2302fa17bb14fb0c38a23d53fe6e5a9428b5be7a6021786d241dbec364502f6208ee75f500f1820ec7838b12aa2442dbdd9922dc947163ee4b666291939a9619d595f265ff1a9b36757def69326b0c6b7cb6512e3a3ccfafde7dcdf0bbf869a78d94f1f7cf7c2cdfc3a6059b7b2c7b3fac3486110e843bef060c12d45ea0f298eabab58cd38aa1d9211124f57faf8a7255c27624762f11b45a6f1eb3631f41079070c1e3a06728ac72dda73699a29bf6b72fb66ab113311b12e38982ddf92aa841b5d754c0a6fcc41a7e70fa5fcd94e9a767bf19403a41f8bb4d052ac8d93b7375cec2fcca2fd6fa1fa2859bed6a48f5e406e2e332d74d6b98aa6602d906334c555c37fee39be844d97cc2c4135519f9beff8dd74e8a87ab3fb75538a2cf184021d3bf6a25fb0c70c031e1c6d41fa268ef349fcc431d3dae1acc95aeaef5dcf79d4bddb94b63b95ea58c66dc3758e49283e288fb3490fa47220581607f2a426cc5166d8ab657ecc67e28efc5373bbb3b08d96eb8af84cc83e6d258c955b836e1eb43f835a63771c885ad7d415e8d085902994279310600c0d7b0a41a242955a248719bc80e77cf2f43f4c543b2ec7e2cd3d61ee6693dc6780f22e58c1f1a4e93c1083a6ce15499139a0cc8a0a75f02cf82487a6a05b26313ff70e188b91aab833bbed83a98831e54b42ec199717f78e87cce2f2980b95e9b896fc553f6585c7d8c8fd2b75f7a61b96e10e9dea240bd7305abe2bea267897af37f6ba05d9f568324fe2dac588304de66dd0f46c1e57396719830c1a229abdea5288bf874ff590fb8980d8783a81b12966972373991e269705f9b16cade45833beca01605786a2bda45dfa7a4d8c7cce59976777437a9f3d7929fac38000152c6aa79389636cff6e6069741952bd6c7bfb7313716c21f4858ede0777d4c6686276c39422a98f6720315a791cc4da66745483eb25317e13eb14ab60e544dd89c4ca2082437941aedf68b1b520cca70ef74cf68c92ff358ad33756ed4263dcba5029c0cca9fae077728beb7ebd8a7343227fa82943878c1028da90d9c1c1f22ad2a6d8ed288f246b4a4f261981d32fde6a07654bd67a61f4e1fcc5ac8c227c5ba1f1c160234e0b84fb325a81bb3dac94e35c673e889e17e9a0493b8c1152fc4a8c7a30d173e922336382bda7199db1b6a916a2aa4183ce5a73eb0f123349f338d6ecca2a49356b2e1c97fa86ed1e8e9b3ed6e463a8578fcceb251e3dba9863a01d0496b52027e9351664172774dbc9ba5f5ffa77151322475ced912d6e96f6be1afd938865bcce96de2b40be9c8d795f06a1519c908d07db99311b1987fc678e10b590436e4f1be7067be8174c5414178ce690465943eaa6e7be6bca02e6de5b6099b2d1ded911afca3e21c6d142a966cc7c7ccf6f6ddcfc44126abb6c6bd15c57844af3eb897860543a378d78738c131d3af73fa294e03034a5b884257e565ff5e7faef8a941ddb07d8374eea777ba9b438d06aa6344ff9beadaf21bcda38d034ba094ac0d227a8d1d17c98949ff38ba95a0252717573c9b7c823e2753e17e13d29cb9fdca55925323022fe2c0d9e89eb888353d262663d14f90bff24e2dbaf56316f9b31c075109458eda72a91dea5bad07174d71263815e8b2f0483b6afa8f0c03d2c95f110ae9becc217eddecc7d0d3c7dfd56c4d9d3d838e96dbb091fa361bcb73b1a0ed1ae4f867b93e79764fcc3722c5708e472019e28aba235d9e4ac4b92e22c832a00ef60bcc78927e9a644ba032e0f34d9d45b59b42708054fea0546f1d5dc12fcb643ac50cd1d1e9830acb04fa8cee6c28d3b480738543331a5ba829474b1f084e90b8379204d83665f5552a384354de5e53b5f6d46e3d56850c5d036f2fc4aaf8b704c6d294023b47d0a7d94d868ea6817ccbf62feb4273263baa3f541f84bc4926ca5ae23e488764c08dd8f7f11860f0f096300fd5b4474c747eb3e6952198f97324e6d09cf5d4fd7c7d2e43de0bb18fb5615ecb15e97a9692b024d637195464832e5efc8934e465cc14e7f83aa2d8fd43e2a630405325c736ab497ebae2adcd1502c0c41ea7c59ff54db2082d00add93f2bbce123dff6ee701b144c4906e13c40f50e350bfe3ebcfb13b8d65b2aff538dda4df55ae053e3d6538fd37c3b616c8134d2b8e2f4f92d3b62c8fbfad12a6360b6b887513b652efa1c0728f53ba05776f093', NULL, NULL);
INSERT INTO dtx.message VALUES (1191545561414607683, 1795579969261308, 'dtx', '\x', '\x6c617267652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x', NULL, NULL);
INSERT INTO dtx.message VALUES (3290639303857118428, 1795579969261309, 'dtx', '\x', '\x6c6f6e676573742d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3290639303857118428, 1795579969261310, 'dtx', '\x', '\x6c6f6e676573742d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (1819982878192460792, 1795579969261311, 'dtx', '\x', '\x73686f72746573742d322e696e', 1, '\x90000a746578742f706c61696e02', '\x73686f72746573742d322030', NULL, NULL);
INSERT INTO dtx.message VALUES (630622548969703738, 1795579969261312, 'dtx', '\x', '\x73686f72746573742d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (630622548969703738, 1795579969261313, 'dtx', '\x', '\x73686f72746573742d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (4180228684219263675, 1795579969261314, 'dtx', '\x', '\x616c6963652d312e696e', 1, '\x90000a746578742f706c61696e02', '\x616c6963652d312030', NULL, NULL);
INSERT INTO dtx.message VALUES (3953077271020781488, 1795579969261315, 'dtx', '\x', '\x616c6963652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3953077271020781488, 1795579969261316, 'dtx', '\x', '\x616c6963652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (4444514925998807168, 1795579969261317, 'dtx', '\x', '\x616c6963652d322e696e', 1, '\x90000a746578742f706c61696e02', '\x616c6963652d322030', NULL, NULL);
INSERT INTO dtx.message VALUES (869825015462001791, 1795579969261318, 'dtx', '\x', '\x616c6963652d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (869825015462001791, 1795579969261319, 'dtx', '\x', '\x616c6963652d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (3561392368450426362, 1795579969261320, 'dtx', '\x', '\x74776963652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3561392368450426362, 1795579969261321, 'dtx', '\x', '\x74776963652d312e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (1141305012175843266, 1795579969261322, 'dtx', '\x', '\x74776963652d322e696e', 1, '\x90000a746578742f706c61696e02', '\x74776963652d322030', NULL, NULL);
INSERT INTO dtx.message VALUES (2462961934766209690, 1795579969261323, 'dtx', '\x', '\x74776963652d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (2462961934766209690, 1795579969261324, 'dtx', '\x', '\x74776963652d322e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (3260973724734267774, 1795579969261326, 'dtx', '\x', '\x6865757269737469632d636f6d6d69747465642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (3260973724734267774, 1795579969261327, 'dtx', '\x', '\x6865757269737469632d636f6d6d69747465642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (2196327690724234155, 1795579969261328, 'dtx', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e696e', 1, '\x90000a746578742f706c61696e02', '\x6865757269737469632d726f6c6c65642d6261636b2030', NULL, NULL);
INSERT INTO dtx.message VALUES (2207969192721341134, 1795579969261329, 'dtx', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (2207969192721341134, 1795579969261330, 'dtx', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (2885221747694731670, 1795579969261331, 'dtx', '\x', '\x6865757269737469632d68617a6172642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (2885221747694731670, 1795579969261332, 'dtx', '\x', '\x6865757269737469632d68617a6172642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (2344361681965110095, 1795579969261334, 'dtx', '\x', '\x636f6d6d69747465642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.message VALUES (2344361681965110095, 1795579969261335, 'dtx', '\x', '\x636f6d6d69747465642e6f7574', 1, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.message VALUES (4479060776558375933, 1795579969261336, 'dtx', '\x', '\x726f6c6c65642d6261636b2e696e', 1, '\x90000a746578742f706c61696e02', '\x726f6c6c65642d6261636b2030', NULL, NULL);
INSERT INTO dtx.permission VALUES ('dtx', 'guest', '/', '.*', '.*', '.*');
INSERT INTO dtx.permission VALUES ('dtx', 'guest', 'older two', '.*', '.*', '.*');
INSERT INTO dtx.permission VALUES ('dtx', 'alice', '/', '.*', '.*', '.*');
INSERT INTO dtx.queue VALUES (4150881425640526760, 'dtx', '/', '\x7265616479', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1159647780160019887, 'dtx', '/', '\x726561647920746f6f', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1818770012158741857, 'dtx', '/', '\x7075626c69736865732d312e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (4535958819332814950, 'dtx', '/', '\x7075626c69736865732d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3360370404911631519, 'dtx', '/', '\x7075626c69736865732d322e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3930729912493237709, 'dtx', '/', '\x7075626c69736865732d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1626347257805937343, 'dtx', '/', '\x636f6e73756d7074696f6e2d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3041784160317800369, 'dtx', '/', '\x636f6e73756d7074696f6e2d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3907325694961037142, 'dtx', '/', '\x626f74682d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2264692281902764192, 'dtx', '/', '\x626f74682d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1191545561414607683, 'dtx', '/', '\x6c617267652d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2765255038377349446, 'dtx', '/', '\x636f6e73756d7074696f6e2d312e696e', false, '\x', 1795579969261297);
INSERT INTO dtx.queue VALUES (1479347267884853251, 'dtx', '/', '\x636f6e73756d7074696f6e2d322e696e', false, '\x', 1795579969261299);
INSERT INTO dtx.queue VALUES (3139826911423976449, 'dtx', '/', '\x626f74682d312e696e', false, '\x', 1795579969261300);
INSERT INTO dtx.queue VALUES (1832312188643336300, 'dtx', '/', '\x626f74682d322e696e', false, '\x', 1795579969261303);
INSERT INTO dtx.queue VALUES (1958846466429681128, 'dtx', '/', '\x6c617267652d312e696e', false, '\x', 1795579969261306);
INSERT INTO dtx.queue VALUES (3850615310274860311, 'dtx', '/', '\x6c6f6e676573742d312e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3290639303857118428, 'dtx', '/', '\x6c6f6e676573742d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (630622548969703738, 'dtx', '/', '\x73686f72746573742d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3953077271020781488, 'dtx', '/', '\x616c6963652d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (869825015462001791, 'dtx', '/', '\x616c6963652d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (415150573553987130, 'dtx', '/', '\x74776963652d312e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3561392368450426362, 'dtx', '/', '\x74776963652d312e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2462961934766209690, 'dtx', 'older two', '\x74776963652d322e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3260973724734267774, 'dtx', '/', '\x6865757269737469632d636f6d6d69747465642e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2207969192721341134, 'dtx', '/', '\x6865757269737469632d726f6c6c65642d6261636b2e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (3199545919132719561, 'dtx', '/', '\x6865757269737469632d68617a6172642e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2885221747694731670, 'dtx', '/', '\x6865757269737469632d68617a6172642e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2344361681965110095, 'dtx', '/', '\x636f6d6d69747465642e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1819982878192460792, 'dtx', '/', '\x73686f72746573742d322e696e', false, '\x', 1795579969261311);
INSERT INTO dtx.queue VALUES (4180228684219263675, 'dtx', '/', '\x616c6963652d312e696e', false, '\x', 1795579969261314);
INSERT INTO dtx.queue VALUES (4444514925998807168, 'dtx', '/', '\x616c6963652d322e696e', false, '\x', 1795579969261317);
INSERT INTO dtx.queue VALUES (1141305012175843266, 'dtx', 'older two', '\x74776963652d322e696e', false, '\x', 1795579969261322);
INSERT INTO dtx.queue VALUES (3427187747427148307, 'dtx', '/', '\x6865757269737469632d636f6d6d69747465642e696e', false, '\x', 1795579969261325);
INSERT INTO dtx.queue VALUES (2196327690724234155, 'dtx', '/', '\x6865757269737469632d726f6c6c65642d6261636b2e696e', false, '\x', 1795579969261328);
INSERT INTO dtx.queue VALUES (1121307064610918196, 'dtx', '/', '\x636f6d6d69747465642e696e', false, '\x', 1795579969261333);
INSERT INTO dtx.queue VALUES (1943368568589432730, 'dtx', '/', '\x726f6c6c65642d6261636b2e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (2805973121321453709, 'dtx', '/', '\x666f72676f7474656e2e696e', false, '\x', 0);
INSERT INTO dtx.queue VALUES (1565221748702643247, 'dtx', '/', '\x666f72676f7474656e2e6f7574', false, '\x', 0);
INSERT INTO dtx.queue VALUES (4479060776558375933, 'dtx', '/', '\x726f6c6c65642d6261636b2e696e', false, '\x', 1795579969261336);
INSERT INTO dtx.unit VALUES ('01a210e8-1eb3-7825-9018-ac94a6036140', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.74b18467-59e0-46a4-8fa4-b1aaeaace4cd', 'a1f9ae68-7891-4ef3-bc9e-f0037d954d28', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-1f5b-76fe-8c25-69eeb1996c61', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.1a29ef41-6ff8-4557-9033-1cb6a1b54579', '42849ea1-58ce-460e-9b29-5f8a442fe73a', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-1ffb-7db7-8842-d15afec64407', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.020da243-e20d-4b58-959d-6958c884395e', '1276037b-1b1d-4585-af02-6710ad75c698', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-2062-7f16-b330-07749fad0097', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.b20db848-faf5-4f1b-adb6-ba9ff3815688', 'e96ea4e3-ea63-48dc-99c2-1e790daba02f', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.48bb09b3-bc3f-4268-8b9b-e7a58d69142b', '2bd222a1-1f76-4e23-8b02-b33aea66736e', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-221c-72f5-9ca6-a256a8de3b06', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.c49183ec-b9e1-4f58-9f4d-618eb64187ff', 'aae41731-8bab-489c-b0fb-7ea2599ec776', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-22db-7dc6-a8b5-96ecafe48a51', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.ac3053df-328e-4a16-9a4d-35f2b4030e35', '3d596317-f239-48eb-be01-d09ea2ce815b', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.53a51b4d-be99-4be3-b672-50c64f602207', 'c25a3d51-d43e-41af-b4b5-c7174ff9e51b', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-249b-7aef-8dc0-04b2c2180f3f', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.2ebdc774-d8bc-4cf0-bd95-a43555818685', 'b18a5d28-afb5-4419-a363-5f4c52519e90', 'd5be7f3d-4564-407a-b54c-f736f07a3a86', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.8b9cf0b1-98b6-4da1-a2cf-0a353624e885', 'f953d3ae-f212-4510-bfd9-0aceea3b912e', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.7db8a64f-ecd5-4473-b804-8b386d60b8f1', '24149c2b-55fe-46e5-aedc-8fab5914bf59', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-280c-7fb3-b20c-ad85e5bdd923', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '84c7354b-4e37-4482-8ee1-3309f8981611', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '1ee466fa-a2e3-4f1d-93fc-e92b1f038534', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '5e6cca05-6b43-44e0-85ca-ba9ba427cad6', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3d70-74d4-a49e-e912aac4c602', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.32f1b3d4-524f-4dcf-80d2-20e720f96fd6', '71a3c360-d152-45c0-a787-74e278e70de3', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '0f9b8c82-4df3-4242-8a25-afa05a39a291', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', 'aea45855-c376-42e1-81a1-183e20c6389d', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.cdfa990b-52c8-410d-81e5-c747946e1bab', '74f72ff3-214c-4250-817d-0a1b5173522e', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.e7df2565-f076-4632-a98c-672471a93725', '6c34aee3-73a2-4ef9-ba1e-c17619dc349d', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.a2edc645-62a6-4d3c-a4c5-fcf8ca68eeae', 'a9ab9cc8-7a5b-4dcb-92e1-16904c17c911', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '813152f5-698e-46b4-9b81-b3c2c71aec17', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 1, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.cbabd5bc-5d51-48da-b84e-89a26e6ff5a3', '23a48b85-f387-4070-a243-131a2c02f5a9', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'done');
INSERT INTO dtx.unit VALUES ('01a210e8-3d70-74d4-a49e-e912aac4c602', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', '7e6b4e1f-2bff-4aab-bd16-e63600a46bc1', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.unit VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 0, 'beside', 'dtx.lock.beside.12f4537208674497a917f8dd04d9c96e.977da346670c4e9e80e12600c1ef1901.f6f0c70e-f72d-459c-862e-24bac6193cc6', 'f8d6009d-7ffe-4446-b382-ca80b53c39db', 'a03236e0-31c5-4c56-a0f1-49530f92daea', true, 'pending');
INSERT INTO dtx.vhost VALUES ('dtx', '/');
INSERT INTO dtx.vhost VALUES ('dtx', 'older two');
INSERT INTO dtx.work VALUES ('01a210e8-1d67-7ab3-bccb-97a5d93207b4', 0, 'beside', 'publish', '\x', '\x7075626c69736865732d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1d67-7ab3-bccb-97a5d93207b4', 1, 'beside', 'publish', '\x', '\x7075626c69736865732d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1ddd-73e8-8764-698dd5eba923', 0, 'beside', 'publish', '\x', '\x7075626c69736865732d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1ddd-73e8-8764-698dd5eba923', 1, 'beside', 'publish', '\x', '\x7075626c69736865732d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1eb3-7825-9018-ac94a6036140', 0, 'beside', 'consume', '\x', '\x636f6e73756d7074696f6e2d312e696e', '\x636f6e73756d7074696f6e2d312e696e', 0, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d312030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1eb3-7825-9018-ac94a6036140', 1, 'beside', 'consume', '\x', '\x636f6e73756d7074696f6e2d312e696e', '\x636f6e73756d7074696f6e2d312e696e', 0, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d312031', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1f5b-76fe-8c25-69eeb1996c61', 0, 'beside', 'consume', '\x', '\x636f6e73756d7074696f6e2d322e696e', '\x636f6e73756d7074696f6e2d322e696e', 0, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d322030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1f5b-76fe-8c25-69eeb1996c61', 1, 'beside', 'consume', '\x', '\x636f6e73756d7074696f6e2d322e696e', '\x636f6e73756d7074696f6e2d322e696e', 0, '\x90000a746578742f706c61696e02', '\x636f6e73756d7074696f6e2d322031', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1ffb-7db7-8842-d15afec64407', 0, 'beside', 'publish', '\x', '\x626f74682d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1ffb-7db7-8842-d15afec64407', 1, 'beside', 'publish', '\x', '\x626f74682d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-1ffb-7db7-8842-d15afec64407', 2, 'beside', 'consume', '\x', '\x626f74682d312e696e', '\x626f74682d312e696e', 0, '\x90000a746578742f706c61696e02', '\x626f74682d312030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-2062-7f16-b330-07749fad0097', 0, 'beside', 'publish', '\x', '\x626f74682d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-2062-7f16-b330-07749fad0097', 1, 'beside', 'publish', '\x', '\x626f74682d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-2062-7f16-b330-07749fad0097', 2, 'beside', 'consume', '\x', '\x626f74682d322e696e', '\x626f74682d322e696e', 0, '\x90000a746578742f706c61696e02', '\x626f74682d322030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 0, 'beside', 'publish', '\x', '\x6c617267652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x07213a2ac1a1016bb89094b0f204046b375b8fa2967500480d54a67a1b1be1d756b74c37e35e5efd1805eaca7a7b8279178acfceb84295f60f553083122fff2ee8314d8196670d8796306e3c20d0d4c92d72d000ed749d0376eafc5e288ccaee0951da95eeee9d6df855bb11609d19254b4433cb5f8556c0fbe9743bdf18e7eb72e5913bf9a4a4b1727ed60a04cad56fda2b60ff35c4d0fef1a31abde4b04cc5159702e0bb04226819f9aa9d8a711c71a0d0b808039aeef4b5b634546a3a478ab6965f7fb670a4b127b6a51d43d118a697ebb3f392ea1af0e484525eab04f20502d4a127629ab3bd934c48d1f491a51612f2f71f304101cfb6ba8ded783201058e2b007406c23d29760f508d753a7cbac0b2c957546ebe66b489157cee54ae26bb40d92f558644aa59fa8109a41e4e7870adaadd87fbf4d1b02f203cdc831a13aa13bfc73d538732535564356bc97dacbb3e01f89cbe8bcdc3f1dae4a26672a8f3133ac192be05f3fc6046c36a87bbe5a30fad94654023fd2a61d1bab4422812adb55a1f5538648fe675f0798bdc168f0f75b7d31f955463eef079336aec5a57b3b354ecb4286a25011d37e303b32b8916a8db68fdadbf4aea177f5db6a85af471d0897307505e808753c262cd4a65514103aefea413057cf9c6f76236380544b1b3de0638ee88d5b80de0174689b02802ead4b77da44bb7beac29fe76077efbd28ffa7eee98b9003f8ad57df029f311070ae98c1dd77099b47688bf9f1ead85ff27d73814084f922cf6e09b7377925198ee758ee0f5e0faff33649fe289da1c04df402e01e76faba4238b2bba1c62a0901c245953a66ad526b254edc2bc165537a8bb5898bd08c3e97ee498e00e01ee92407e4e747bea3e5a1d701a0a6d2f2b840ace10813b52ecf45e4ed075738c2caab0eac69349c06d29d8f75f6d3aee28b224f0aea7ff640925e607ade29e0885520c11e6926471a892d851f5c86ad63dc11c326810e1f3eaf44936fd7c04c029d74220f67e96eabd703d2c9783b9a603116817e2bb65bb584c66ac7decfd9181b0b524602754bcaa6e02493fc388b0ef4c034be0ca77f13e66018c29ea38d38fd9f2bf11b598717056f226ced38c4f685b661fc6dc3ccdbd8a38b17b7bcbb30edb8d45d6e11bb94927405b0df35672da40c10a42619f8ea8c739354a9d20e6087cb7676b2de4a33fe162ae2bd89bff64df8ec711d497d1de2d918c5650423ba55a612ee623c56725db2fc3fb34f7b42667e0efbeab1a7dbac1fc9d7adf9da50c37269140b415bc2392ff78f540ce76a6238b8f86a47854e9351686ba0e1ca47a93a13e07229cecf3c0a04b36d0a041e6da7498d69a23a05d5a6d93cbbc29622707e4a6e1cef3665edb73f2993cd1d3c518be136d4b79057c0a8fc5949c0e10e7107b6ed9e3c8127a4c99d74e49138823402aca882333a29669bea64612dfa9233169acc4393884b88caa9e024dbbe261f2bc6fafb9d8392031ab37f4f84d37b7b0230406bc18b14342d7fb97dbda7f53dfefd3a443a0f03f04d607da1529a7f4935197955530cd6bbca5d741bfa6e2aeb3d0d567c9426bc0f6356ef5f411e9cf96d9d5e72ea2752328882f2226f3572485604718ae3a9f6510600c18f748ca2fd62c7b063ce048a4941e6572afce40c9992b0d24ab5b67122fbe09de28887b1e0f44c3a722e3054848246420aba5d44def87e5890ed92cf151cf0353cbb072655d0d6e7ece1851e387393838f807079f963f842a4cb87b2ef5e4162fd6ba84db1c34b860ba6d9d332aefc0b507c883be1b29cf8c796ecec1aa8bd20b130f999ae1f8fbb51dcc3f81a1e0b5dfc528ddbef02b35c6da0e820e4dfc6cca056edfed81ad0002d1e63c630cd2c07617714ddd5bf94010db31df65634490c3a32423911f46e02c3289bcda210d24b6ceafba3bb971be4066d3c8f680195db27c85ed9ad73849509b57edbe78b0ba0a1f62a53e050d8d6326fcfa27ff98354fc483e4b978d697e6895890fde8e3864bd0604ed1938dcc80f73996cd3b0ba18cc685747d015abef28f1faf928f733b193287a08bffe6e699b5815f0fc4371a828076429878f30cbcf69fec52a89b94f7793350846f76664ff283a74a2ff10eb3d418ee9f58f49986bc0100c23084888f65838630633650100c45d09df7698fd0d7d36353f7b012fa30dd8933f714f05a7a7ab810d8e36e51290a70a80a7d43fe4e05976b1b148c1b6b4633de75d17b13c8a8d6a692e0c512cb6365a07ce177d020b3c3cef4b089c26cd33cfaaefcb3723d844a81547d139fd6ea71f2f83f1005cb8a0daebd9107a5c67fa5b43ea4507140998b78920e7684746c548368d3af630f882be0ad9cc9667fbb02123172b93946086306fd767f0c141558a99b1c156f1b22c30a581f3f3fa4908c46fe1645b4bf69e396ec523ad18fbd9267a25048b91ecd526daee6bb7431a430cc5522873ccae020666d08aa625ef7d6532eeb9d7c350a503a802fbfa111b227ea8e5c8ff6397882a73c2fdd15d01995092118ce7ae8be3f2c602bec7d3ebe7e5fffaf98b73079c69a72e5f6e36ea44537aa528ec7512d2273207776a06debf1a1c9bd2ec242c4989e91ed03abbd4225bb1342e1dbaa07089ba25df3b2a1b3fcd17c78d7aedf091f43d263cc3ed4ef2f7b2d78abeab974a97f1acacd625edd524e169e5d9d42e3c061855e28d3560334869957b5f648e61cb6afc73cfd6a45bae8e27aa2014f6570298a9e07502da5b833adb5cd4fcb742be093302764f61d67b773583a2530fd37171761a18d4eade12cda355b141b6eba857959774d5f28b69e36cf8af127a21b6077020bbe369f33be6d805c76bb60a6fb5b31b41b8e93a7fd9e86bcf49ff29b2ac71736b40004eb6eec86b0340153bdad86cfd55558c3395fdb683ea441a7e894a4607fae4efb5530d655c84201a8fd14b05d84f3c5b951070fec7552b7a8c183decc1541dca3e8f14a436ad892109af712b445275c1b54e68eb660aecdf7cd8161672b3397ca063d70801499b78f2bb0166904473b2558b708d6056170e03b280fd0d3f0e0ed8564e00f8b77f5b9d466de6ed76f02a6f175e5c3f99d80e46eaa0233d747f84e6aabdefba12c034eecaa2d667762db72289f781fbc459957551914b33e304d04a5f9a01bf6f561a616373ee4cc08a9d9c0592c8c78cf156124a1bec34bef20d148dfa79960b4ebd9205e6863dc04ea372b13d3c64e80c01e7c9452800d0adb46ed65b4d89c9b30d8f470ebec4db3c36c1b7386897f3d00a1a5fd5833f20195be09f13e195e8b9391db25ac633218dc050cf9ad2c184ff5adb7302a3040742fe2dd5e69effae4a142c4004137bb5e7d478c2a833b8c2227dc1e92fac6adca412678e9f94d85d25d50a26ec6c68787a7663ed762b1950ca64a034f18d704303f87c96a7c1629671317eee1e239498d6df78b3ee974a13986e72b932f5e68cd9596e3d25846efd7c82ca9958563d7ecf5b3bd77afbb30e29ea0acca07cd8104c471a1a8e48702950ce9b012f5cd9714d0c28f6fb53651e61fe92cd5f49f36bf1eac36fdf5e25fc2151078a889003430215df026c6ec440f7cb6527fe025b1d05fc7cc86d9e5449b85101a8996d1ca9e55facb7d6e919a7898a9e1ad4e36d4cc184f16adecdf8656a4c617276df10c45d6e14927e87b665ab292b8495df2484cb93cd5a3d4058aa0fdb95d0213a1e0e387d395ce930a2e1289e30dabb94550116075b42f6d6b0283018b20191a0292ad9f290cd4399895305b79355c3b77154587fe345a70ea0a0f20627f29d682820916e3d4952a28bc7ef3b37646771946aeba9c0eca6b5c36a761b2436691f37e28f0f44d08ace2a61a57be903be62c4dee2085cc5b66f3de89069d1c406a118e6848bfef32bd52dcb0d37c8b31611b52ba9bbe39f458e04a86bfeb686c283a0c1454bf1853ac58c8d387a91438a909b636e9b5b580d6c05c0a41c84cba2f8f2e5add354f9b4c375588fd8c0ca2d077d3a0fc5280a47c6f912c973e63057f52aab5cda6555ec47d6a7ef8527e7afe83792977e23bdde535d8d906530571fb7686cee0c3d104e3b107e85ae39147f94df2ad74c63f0e64daa137380251ae1fdf15c7dfecd9a544451be71a27b19d866783880200859a1e9d91e8191b9b1cf67b5df83c66784fcd99e0634a5acc35b5041cf14748cc76baa0d0efde8c5fb282483bcb82d6f15d12f9e0025fdfc7e9f452175ae6bc602c8d8d149df4e0e1439ab1709babd86606d2ff73c1fd944b602c9c98a59bef9dbfe95c56298b32ad2ee8cf48eeb14e78f9cf26468995172180a477b6e144c49c6993d5f2342226f039e5e280ffc2dfc08388430b8e2a9c3449b94d8cc676353273f0236ebd295b61c4ba57fee1c3647df42890c35c144effe81e803315fe2d683ddab4d36786487099b4d5a22dfb77155aca51338af58affabc72da2d07ce2d7dda269ba5ce4e6a9921fbd8c217c0881fe0e65e906204a64e9ae79466cc4ec61f4fc189794eaf852c18c43bb067915fbfbe73f5aaa66b774bdf181fb35f2fce2bd7416671b6df17136cca67ded6a275288825ce5853bbad05e6ca323e5d864c5fd334991835b3ccd4b19ed721f37e93c29acb6733d290186a9a7439c6cd69e159d41f50fa44f25ed76073d58c509bba47e14725ac03a26d530ef7099a6bfaf52360471c140464f342fe1f71c6e94dabbd3a33ac760172de638e3fa547d85d2297af7f6f64383825e0afb7aae8903a5d6dbbbba72753b12b0340fee1909115907ca6454a9d225b30a5609042196efeeb770272d81cdc22e4a4d611e8ebc803ead2302fa17bb14fb0c38a23d53fe6e5a9428b5be7a6021786d241dbec364502f6208ee75f500f1820ec7838b12aa2442dbdd9922dc947163ee4b666291939a9619d595f265ff1a9b36757def69326b0c6b7cb6512e3a3ccfafde7dcdf0bbf869a78d94f1f7cf7c2cdfc3a6059b7b2c7b3fac3486110e843bef060c12d45ea0f298eabab58cd38aa1d9211124f57faf8a7255c27624762f11b45a6f1eb3631f41079070c1e3a06728ac72dda73699a29bf6b72fb66ab113311b12e38982ddf92aa841b5d754c0a6fcc41a7e70fa5fcd94e9a767bf19403a41f8bb4d052ac8d93b7375cec2fcca2fd6fa1fa2859bed6a48f5e406e2e332d74d6b98aa6602d906334c555c37fee39be844d97cc2c4135519f9beff8dd74e8a87ab3fb75538a2cf184021d3bf6a25fb0c70c031e1c6d41fa268ef349fcc431d3dae1acc95aeaef5dcf79d4bddb94b63b95ea58c66dc3758e49283e288fb3490fa47220581607f2a426cc5166d8ab657ecc67e28efc5373bbb3b08d96eb8af84cc83e6d258c955b836e1eb43f835a63771c885ad7d415e8d085902994279310600c0d7b0a41a242955a248719bc80e77cf2f43f4c543b2ec7e2cd3d61ee6693dc6780f22e58c1f1a4e93c1083a6ce15499139a0cc8a0a75f02cf82487a6a05b26313ff70e188b91aab833bbed83a98831e54b42ec199717f78e87cce2f2980b95e9b896fc553f6585c7d8c8fd2b75f7a61b96e10e9dea240bd7305abe2bea267897af37f6ba05d9f568324fe2dac588304de66dd0f46c1e57396719830c1a229abdea5288bf874ff590fb8980d8783a81b12966972373991e269705f9b16cade45833beca01605786a2bda45dfa7a4d8c7cce59976777437a9f3d7929fac38000152c6aa79389636cff6e6069741952bd6c7bfb7313716c21f4858ede0777d4c6686276c39422a98f6720315a791cc4da66745483eb25317e13eb14ab60e544dd89c4ca2082437941aedf68b1b520cca70ef74cf68c92ff358ad33756ed4263dcba5029c0cca9fae077728beb7ebd8a7343227fa82943878c1028da90d9c1c1f22ad2a6d8ed288f246b4a4f261981d32fde6a07654bd67a61f4e1fcc5ac8c227c5ba1f1c160234e0b84fb325a81bb3dac94e35c673e889e17e9a0493b8c1152fc4a8c7a30d173e922336382bda7199db1b6a916a2aa4183ce5a73eb0f123349f338d6ecca2a49356b2e1c97fa86ed1e8e9b3ed6e463a8578fcceb251e3dba9863a01d0496b52027e9351664172774dbc9ba5f5ffa77151322475ced912d6e96f6be1afd938865bcce96de2b40be9c8d795f06a1519c908d07db99311b1987fc678e10b590436e4f1be7067be8174c5414178ce690465943eaa6e7be6bca02e6de5b6099b2d1ded911afca3e21c6d142a966cc7c7ccf6f6ddcfc44126abb6c6bd15c57844af3eb897860543a378d78738c131d3af73fa294e03034a5b884257e565ff5e7faef8a941ddb07d8374eea777ba9b438d06aa6344ff9beadaf21bcda38d034ba094ac0d227a8d1d17c98949ff38ba95a0252717573c9b7c823e2753e17e13d29cb9fdca55925323022fe2c0d9e89eb888353d262663d14f90bff24e2dbaf56316f9b31c075109458eda72a91dea5bad07174d71263815e8b2f0483b6afa8f0c03d2c95f110ae9becc217eddecc7d0d3c7dfd56c4d9d3d838e96dbb091fa361bcb73b1a0ed1ae4f867b93e79764fcc3722c5708e472019e28aba235d9e4ac4b92e22c832a00ef60bcc78927e9a644ba032e0f34d9d45b59b42708054fea0546f1d5dc12fcb643ac50cd1d1e9830acb04fa8cee6c28d3b480738543331a5ba829474b1f084e90b8379204d83665f5552a384354de5e53b5f6d46e3d56850c5d036f2fc4aaf8b704c6d294023b47d0a7d94d868ea6817ccbf62feb4273263baa3f541f84bc4926ca5ae23e488764c08dd8f7f11860f0f096300fd5b4474c747eb3e6952198f97324e6d09cf5d4fd7c7d2e43de0bb18fb5615ecb15e97a9692b024d637195464832e5efc8934e465cc14e7f83aa2d8fd43e2a630405325c736ab497ebae2adcd1502c0c41ea7c59ff54db2082d00add93f2bbce123dff6ee701b144c4906e13c40f50e350bfe3ebcfb13b8d65b2aff538dda4df55ae053e3d6538fd37c3b616c8134d2b8e2f4f92d3b62c8fbfad12a6360b6b887513b652efa1c0728f53ba05776f093', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 1, 'beside', 'publish', '\x', '\x6c617267652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-20ee-7bf7-8af6-56fc2cf7d91e', 2, 'beside', 'consume', '\x', '\x6c617267652d312e696e', '\x6c617267652d312e696e', 0, '\x90000a746578742f706c61696e02', '\x6c617267652d312030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-2161-7d2b-9081-83047790fa20', 0, 'beside', 'publish', '\x', '\x6c6f6e676573742d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-2161-7d2b-9081-83047790fa20', 1, 'beside', 'publish', '\x', '\x6c6f6e676573742d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-221c-72f5-9ca6-a256a8de3b06', 0, 'beside', 'publish', '\x', '\x73686f72746573742d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-221c-72f5-9ca6-a256a8de3b06', 1, 'beside', 'publish', '\x', '\x73686f72746573742d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-221c-72f5-9ca6-a256a8de3b06', 2, 'beside', 'consume', '\x', '\x73686f72746573742d322e696e', '\x73686f72746573742d322e696e', 0, '\x90000a746578742f706c61696e02', '\x73686f72746573742d322030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-22db-7dc6-a8b5-96ecafe48a51', 0, 'beside', 'publish', '\x', '\x616c6963652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-22db-7dc6-a8b5-96ecafe48a51', 1, 'beside', 'publish', '\x', '\x616c6963652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-22db-7dc6-a8b5-96ecafe48a51', 2, 'beside', 'consume', '\x', '\x616c6963652d312e696e', '\x616c6963652d312e696e', 0, '\x90000a746578742f706c61696e02', '\x616c6963652d312030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 0, 'beside', 'publish', '\x', '\x616c6963652d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 1, 'beside', 'publish', '\x', '\x616c6963652d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-23aa-7e8b-a4d1-1edd27d097ef', 2, 'beside', 'consume', '\x', '\x616c6963652d322e696e', '\x616c6963652d322e696e', 0, '\x90000a746578742f706c61696e02', '\x616c6963652d322030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-23da-7b27-8354-5e3931f078f0', 0, 'beside', 'publish', '\x', '\x74776963652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-23da-7b27-8354-5e3931f078f0', 1, 'beside', 'publish', '\x', '\x74776963652d312e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-249b-7aef-8dc0-04b2c2180f3f', 0, 'beside', 'publish', '\x', '\x74776963652d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-249b-7aef-8dc0-04b2c2180f3f', 1, 'beside', 'publish', '\x', '\x74776963652d322e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-249b-7aef-8dc0-04b2c2180f3f', 2, 'beside', 'consume', '\x', '\x74776963652d322e696e', '\x74776963652d322e696e', 0, '\x90000a746578742f706c61696e02', '\x74776963652d322030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-280c-7fb3-b20c-ad85e5bdd923', 0, 'beside', 'publish', '\x', '\x737475636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-280c-7fb3-b20c-ad85e5bdd923', 1, 'beside', 'publish', '\x', '\x737475636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-280c-7fb3-b20c-ad85e5bdd923', 2, 'beside', 'publish', '\x6f6c6465722e676f6e65', '\x6b', NULL, 0, '\x90000a746578742f706c61696e02', '\x737475636b', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 0, 'beside', 'publish', '\x', '\x6865757269737469632d636f6d6d69747465642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, 'published');
INSERT INTO dtx.work VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 1, 'beside', 'publish', '\x', '\x6865757269737469632d636f6d6d69747465642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, 'published');
INSERT INTO dtx.work VALUES ('01a210e8-25b3-7f69-a4cf-ad7eabe6e762', 2, 'beside', 'consume', '\x', '\x6865757269737469632d636f6d6d69747465642e696e', '\x6865757269737469632d636f6d6d69747465642e696e', 0, '\x90000a746578742f706c61696e02', '\x6865757269737469632d636f6d6d69747465642030', 1, 'consumed');
INSERT INTO dtx.work VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 0, 'beside', 'publish', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, 'dropped');
INSERT INTO dtx.work VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 1, 'beside', 'publish', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, 'dropped');
INSERT INTO dtx.work VALUES ('01a210e8-2647-7d57-b9d1-8f15cda29e8e', 2, 'beside', 'consume', '\x', '\x6865757269737469632d726f6c6c65642d6261636b2e696e', '\x6865757269737469632d726f6c6c65642d6261636b2e696e', 0, '\x90000a746578742f706c61696e02', '\x6865757269737469632d726f6c6c65642d6261636b2030', 1, 'put-back');
INSERT INTO dtx.work VALUES ('01a210e8-26db-78f7-b341-ee710c4913cd', 0, 'beside', 'publish', '\x', '\x6865757269737469632d68617a6172642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, 'dropped');
INSERT INTO dtx.work VALUES ('01a210e8-26db-78f7-b341-ee710c4913cd', 1, 'beside', 'publish', '\x', '\x6865757269737469632d68617a6172642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, 'dropped');
INSERT INTO dtx.work VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 0, 'beside', 'publish', '\x', '\x6d697865642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, 'published');
INSERT INTO dtx.work VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 1, 'beside', 'publish', '\x', '\x6d697865642e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, 'published');
INSERT INTO dtx.work VALUES ('01a210e8-28ad-7573-8bd2-11962982e608', 2, 'beside', 'publish', '\x6f6c6465722e676f6e65', '\x6b', NULL, 0, '\x90000a746578742f706c61696e02', '\x737475636b', NULL, 'discarded');
INSERT INTO dtx.work VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 0, 'beside', 'publish', '\x', '\x636f6d6d697474696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 1, 'beside', 'publish', '\x', '\x636f6d6d697474696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3ca7-735c-a406-a68a2085df59', 2, 'beside', 'consume', '\x', '\x636f6d6d697474696e672e696e', '\x636f6d6d697474696e672e696e', 0, '\x90000a746578742f706c61696e02', '\x636f6d6d697474696e672030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3d70-74d4-a49e-e912aac4c602', 2, 'beside', 'consume', '\x', '\x726f6c6c696e672d6261636b2e696e', '\x726f6c6c696e672d6261636b2e696e', 0, '\x90000a746578742f706c61696e02', '\x726f6c6c696e672d6261636b2030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3d70-74d4-a49e-e912aac4c602', 3, 'beside', 'consume', '\x', '\x726f6c6c696e672d6261636b2e696e', '\x726f6c6c696e672d6261636b2e696e', 0, '\x90000a746578742f706c61696e02', '\x726f6c6c696e672d6261636b2031', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 0, 'beside', 'publish', '\x', '\x6865757269737469632d636f6d6d697474696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 1, 'beside', 'publish', '\x', '\x6865757269737469632d636f6d6d697474696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3de4-71f1-a0bb-2b17ef6f97bd', 2, 'beside', 'consume', '\x', '\x6865757269737469632d636f6d6d697474696e672e696e', '\x6865757269737469632d636f6d6d697474696e672e696e', 0, '\x90000a746578742f706c61696e02', '\x6865757269737469632d636f6d6d697474696e672030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 0, 'beside', 'publish', '\x', '\x6865757269737469632d726f6c6c696e672d6261636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 1, 'beside', 'publish', '\x', '\x6865757269737469632d726f6c6c696e672d6261636b2e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3e62-709a-81ec-1fba8dbc3953', 2, 'beside', 'consume', '\x', '\x6865757269737469632d726f6c6c696e672d6261636b2e696e', '\x6865757269737469632d726f6c6c696e672d6261636b2e696e', 0, '\x90000a746578742f706c61696e02', '\x6865757269737469632d726f6c6c696e672d6261636b2030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 0, 'beside', 'publish', '\x', '\x74616b696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x61', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 1, 'beside', 'publish', '\x', '\x74616b696e672e6f7574', NULL, 0, '\x90000a746578742f706c61696e02', '\x62', NULL, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 2, 'beside', 'consume', '\x', '\x74616b696e672e696e', '\x74616b696e672e696e', 0, '\x90000a746578742f706c61696e02', '\x74616b696e672030', 1, NULL);
INSERT INTO dtx.work VALUES ('01a210e8-3c50-7961-a611-33fa190a3bcc', 3, 'beside', 'consume', '\x', '\x74616b696e672e696e', '\x74616b696e672e696e', 0, '\x90000a746578742f706c61696e02', '\x74616b696e672031', 1, NULL);
SELECT pg_catalog.setval('dtx.audit_id_seq', 24, true);
ALTER TABLE ONLY dtx.account
    ADD CONSTRAINT account_pkey PRIMARY KEY (rm, name);
ALTER TABLE ONLY dtx.account_version
    ADD CONSTRAINT account_version_pkey PRIMARY KEY (rm);
ALTER TABLE ONLY dtx.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY dtx.archive
    ADD CONSTRAINT archive_pkey PRIMARY KEY (branch_id, "position");
ALTER TABLE ONLY dtx.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dtx.body
    ADD CONSTRAINT body_pkey PRIMARY KEY (id);
ALTER TABLE dtx.branch
    ADD CONSTRAINT branch_check CHECK (dtx.branch_holds(format_id, gtrid, bqual, state, version, timeout, publishes, consumes, bytes, outcome, published, consumed)) NOT VALID;
ALTER TABLE ONLY dtx.branch
    ADD CONSTRAINT branch_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dtx.branch
    ADD CONSTRAINT branch_xid_key UNIQUE (rm, vhost, format_id, gtrid, bqual);
ALTER TABLE ONLY dtx.exchange
    ADD CONSTRAINT exchange_pkey PRIMARY KEY (rm, vhost, name);
ALTER TABLE ONLY dtx.heuristic_outcome
    ADD CONSTRAINT heuristic_outcome_pkey PRIMARY KEY (branch_id);
ALTER TABLE ONLY dtx.journal
    ADD CONSTRAINT journal_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261124
    ADD CONSTRAINT journal_20261124_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261125
    ADD CONSTRAINT journal_20261125_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261126
    ADD CONSTRAINT journal_20261126_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261127
    ADD CONSTRAINT journal_20261127_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261128
    ADD CONSTRAINT journal_20261128_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261129
    ADD CONSTRAINT journal_20261129_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261130
    ADD CONSTRAINT journal_20261130_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261201
    ADD CONSTRAINT journal_20261201_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.journal_20261202
    ADD CONSTRAINT journal_20261202_pkey PRIMARY KEY (at, id);
ALTER TABLE dtx.journal
    ADD CONSTRAINT journal_check CHECK (dtx.journal_holds(event, format_id, gtrid, bqual, outcome)) NOT VALID;
ALTER TABLE ONLY dtx.journal_default
    ADD CONSTRAINT journal_default_pkey PRIMARY KEY (at, id);
ALTER TABLE ONLY dtx.lease
    ADD CONSTRAINT lease_pkey PRIMARY KEY (rm);
ALTER TABLE ONLY dtx.message
    ADD CONSTRAINT message_pkey PRIMARY KEY (queue, "position");
ALTER TABLE ONLY dtx.permission
    ADD CONSTRAINT permission_pkey PRIMARY KEY (rm, account, vhost);
ALTER TABLE ONLY dtx.queue
    ADD CONSTRAINT queue_name_key UNIQUE (rm, vhost, name);
ALTER TABLE ONLY dtx.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dtx.reconciliation
    ADD CONSTRAINT reconciliation_pkey PRIMARY KEY (number);
ALTER TABLE ONLY dtx.token
    ADD CONSTRAINT token_pkey PRIMARY KEY (rm, name);
ALTER TABLE ONLY dtx.topic_permission
    ADD CONSTRAINT topic_permission_pkey PRIMARY KEY (rm, account, vhost, exchange);
ALTER TABLE dtx.unit
    ADD CONSTRAINT unit_check CHECK (dtx.unit_holds(number, state)) NOT VALID;
ALTER TABLE ONLY dtx.unit
    ADD CONSTRAINT unit_pkey PRIMARY KEY (branch_id, number);
ALTER TABLE ONLY dtx.vhost
    ADD CONSTRAINT vhost_pkey PRIMARY KEY (rm, name);
ALTER TABLE dtx.work
    ADD CONSTRAINT work_check CHECK (dtx.work_holds("position", kind, queue, unit, fate)) NOT VALID;
ALTER TABLE ONLY dtx.work
    ADD CONSTRAINT work_pkey PRIMARY KEY (branch_id, "position");
CREATE INDEX archive_at_idx ON dtx.archive USING btree (rm, at, branch_id, "position");
CREATE INDEX archive_xid_idx ON dtx.archive USING btree (gtrid, bqual);
CREATE UNIQUE INDEX binding_key ON dtx.binding USING btree (rm, vhost, source, destination_kind, destination, routing_key, sha256(arguments));
CREATE INDEX journal_xid_idx ON ONLY dtx.journal USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261124_gtrid_bqual_at_idx ON dtx.journal_20261124 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261125_gtrid_bqual_at_idx ON dtx.journal_20261125 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261126_gtrid_bqual_at_idx ON dtx.journal_20261126 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261127_gtrid_bqual_at_idx ON dtx.journal_20261127 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261128_gtrid_bqual_at_idx ON dtx.journal_20261128 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261129_gtrid_bqual_at_idx ON dtx.journal_20261129 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261130_gtrid_bqual_at_idx ON dtx.journal_20261130 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261201_gtrid_bqual_at_idx ON dtx.journal_20261201 USING btree (gtrid, bqual, at);
CREATE INDEX journal_20261202_gtrid_bqual_at_idx ON dtx.journal_20261202 USING btree (gtrid, bqual, at);
CREATE INDEX journal_default_gtrid_bqual_at_idx ON dtx.journal_default USING btree (gtrid, bqual, at);
CREATE INDEX message_expires_idx ON dtx.message USING btree (queue, "position", expires_at) WHERE (expires_at IS NOT NULL);
CREATE INDEX message_transient_idx ON dtx.message USING btree (queue, "position") WHERE ((flags & 1) = 0);
CREATE UNIQUE INDEX token_hash_idx ON dtx.token USING btree (hash);
CREATE UNIQUE INDEX verdict_key ON dtx.verdict USING btree (gtrid, COALESCE(format_id, ('-1'::integer)::bigint));
CREATE INDEX verdict_last_at_idx ON dtx.verdict USING btree (last_at, gtrid);
CREATE INDEX verdict_verdict_idx ON dtx.verdict USING btree (verdict, last_at, gtrid);
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261124_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261124_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261125_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261125_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261126_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261126_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261127_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261127_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261128_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261128_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261129_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261129_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261130_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261130_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261201_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261201_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_20261202_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_20261202_pkey;
ALTER INDEX dtx.journal_xid_idx ATTACH PARTITION dtx.journal_default_gtrid_bqual_at_idx;
ALTER INDEX dtx.journal_pkey ATTACH PARTITION dtx.journal_default_pkey;
CREATE TRIGGER account_changed AFTER INSERT OR DELETE OR UPDATE ON dtx.account FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
CREATE TRIGGER message_release_body AFTER DELETE ON dtx.message FOR EACH ROW WHEN ((old.shared IS NOT NULL)) EXECUTE FUNCTION dtx.release_body();
CREATE TRIGGER permission_changed AFTER INSERT OR DELETE OR UPDATE ON dtx.permission FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
CREATE TRIGGER topic_permission_changed AFTER INSERT OR DELETE OR UPDATE ON dtx.topic_permission FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
CREATE TRIGGER vhost_changed AFTER INSERT OR DELETE OR UPDATE ON dtx.vhost FOR EACH ROW EXECUTE FUNCTION dtx.accounts_changed();
ALTER TABLE ONLY dtx.permission
    ADD CONSTRAINT permission_account_fkey FOREIGN KEY (rm, account) REFERENCES dtx.account(rm, name) ON DELETE CASCADE;
ALTER TABLE ONLY dtx.permission
    ADD CONSTRAINT permission_vhost_fkey FOREIGN KEY (rm, vhost) REFERENCES dtx.vhost(rm, name) ON DELETE CASCADE;
ALTER TABLE ONLY dtx.topic_permission
    ADD CONSTRAINT topic_permission_account_fkey FOREIGN KEY (rm, account) REFERENCES dtx.account(rm, name) ON DELETE CASCADE;
ALTER TABLE ONLY dtx.topic_permission
    ADD CONSTRAINT topic_permission_vhost_fkey FOREIGN KEY (rm, vhost) REFERENCES dtx.vhost(rm, name) ON DELETE CASCADE;
