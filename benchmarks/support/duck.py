"""The reconciliation in SQL, for DuckDB: the same folds and the same rules over the same Parquet files."""

from collections.abc import Iterable

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import (
    DECIDED,
    DIRECTIONS,
    ENDED,
    EVENT_MARK,
    HEURISTIC_MARK,
    OPENED,
    STATE_MARK,
    TO_COMMIT,
    TO_ROLL_BACK,
    WITH_OUTCOME,
    Mark,
    Rules,
    Verdict,
)


def _case(column: str, marks: Iterable[tuple[str, Mark]]) -> str:
    return f"CASE {column} " + " ".join(f"WHEN '{word}' THEN {int(mark)}" for word, mark in marks) + " ELSE 0 END"


def _words(words: Iterable[object]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def question(directory: str, out: str, rules: Rules, part: tuple[int, int] = (0, 1)) -> str:
    """Return a COPY of the verdicts, with a row for each transaction.

    The columns are ``format_id``, ``gtrid``, ``verdict``, ``since``, ``rms``, ``owners``, ``branches``.

    Args:
        directory: of :func:`tests.support.generated_fleet.write`.
        out: the Parquet file to write.
        rules: parameters of the rules.
        part: the number of the part of the transactions, from 0, and the number of parts.
    """
    of_part = f"hash(gtrid) % {part[1]} = {part[0]}"
    event = _case("event", ((str(each), mark) for each, mark in EVENT_MARK.items()))
    outcome = _case("outcome", ((str(each), mark) for each, mark in HEURISTIC_MARK.items()))
    seen = _case("state", STATE_MARK.items())
    mark = (
        f"CASE WHEN event IN ({_words(WITH_OUTCOME)}) AND outcome IS NOT NULL THEN ({event}) | ({outcome})"
        f" WHEN event = '{JournalEvent.HEURISTIC}' THEN {int(Mark.HEURISTIC_HAZARD)} ELSE {event} END"
    )

    def has(mark: int, marks: str = "marks") -> str:
        return f"({marks} & {int(mark)} <> 0)"

    normally = Mark.COMMITTED | Mark.ROLLED_BACK
    by_hand, back_by_hand = has(Mark.HEURISTIC_COMMITTED), has(Mark.HEURISTIC_ROLLED_BACK)
    matching = {
        Verdict.XID_REUSED: "rows > branches",
        Verdict.MIXED: f"{has(Mark.COMMITTED)} AND {has(Mark.ROLLED_BACK)}",
        Verdict.AGAINST_DECISION: (
            f"({has(Mark.COMMITTED)} AND {has(Mark.DECIDED_ROLLBACK)})"
            f" OR ({has(Mark.ROLLED_BACK)} AND {has(Mark.DECIDED_COMMIT)})"
            f" OR ({has(Mark.TIMED_OUT)} AND {has(Mark.DECIDED_COMMIT | TO_COMMIT)})"
        ),
        Verdict.HEURISTIC_DAMAGE: (
            f"{has(Mark.HEURISTIC_MIXED)} OR ({by_hand} AND {back_by_hand})"
            f" OR ({by_hand} AND {has(Mark.DECIDED_ROLLBACK | TO_ROLL_BACK | Mark.TIMED_OUT)})"
            f" OR ({back_by_hand} AND {has(Mark.DECIDED_COMMIT | TO_COMMIT)})"
        ),
        Verdict.HAZARD: "unknown",
        Verdict.FORGOTTEN_EARLY: (
            "forgotten_at IS NOT NULL AND (open > 0 OR undone"
            f" OR coalesce(decided_at > forgotten_at + INTERVAL {rules.skew} MICROSECONDS, false))"
        ),
        Verdict.UNFINISHED: (
            f"(undone AND coalesce({rules.as_of} - epoch_us(latest) >= {rules.skew}, true))"
            f" OR (open > 0 AND {has(DECIDED | TO_COMMIT | TO_ROLL_BACK)}"
            f" AND coalesce(known_at - epoch_us(latest) >= {rules.skew}, true))"
        ),
        Verdict.ORPHAN: (
            f"{str(rules.decisions_read).lower()} AND NOT gone AND NOT {has(DECIDED | TO_COMMIT | TO_ROLL_BACK)}"
            f" AND coalesce(age > {rules.orphan_after}, false)"
        ),
        Verdict.OWNER_MISMATCH: "coalesce(owners_differ, false)",
        Verdict.IN_DOUBT: "open > 0",
        Verdict.NOT_ARCHIVED: "gone",
        Verdict.ROLLED_BACK: (
            f"NOT {has(Mark.COMMITTED | Mark.HEURISTIC_COMMITTED)} AND"
            f" ({has(Mark.ROLLED_BACK | Mark.TIMED_OUT | Mark.HEURISTIC_ROLLED_BACK)}"
            f" OR ({has(Mark.DECIDED_ROLLBACK)} AND NOT {has(Mark.DECIDED_COMMIT)}))"
        ),
        Verdict.COMMITTED: "true",
    }
    verdict = "CASE " + " ".join(f"WHEN {matching[each]} THEN '{each}'" for each in Verdict) + " END"
    return f"""
COPY (
WITH lines AS (
    SELECT format_id, gtrid, true AS is_branch, hash(source, rm, vhost, bqual) AS place, rm AS name, owner,
        {mark} AS mark, hash(branch_id) AS life,
        "at" AS moment, event = 'forgotten' AND actor <> owner AS taken_away,
        list_contains([{_words(sorted(rules.asked))}], source) AS is_asked
    FROM read_parquet('{directory}/events/*.parquet') WHERE {of_part}
), told AS (
    SELECT format_id, gtrid, is_branch, place, name, owner, life, mark AS marks,
        CASE WHEN {has(OPENED, "mark")} THEN moment END AS opened_at,
        CASE WHEN taken_away THEN moment END AS forgotten_at, moment, 0 AS seen,
        NULL::TIMESTAMPTZ AS seen_since, true AS of_dtx, NULL::TIMESTAMPTZ AS seen_at,
        is_asked
    FROM lines
    UNION ALL
    SELECT format_id, gtrid, true, hash(source, rm, vhost, bqual), rm, owner,
        CASE WHEN branch_id IS NOT NULL THEN hash(branch_id) END,
        0, NULL, NULL, coalesce(since, observed_at), {seen}, since, kind = 'dtx', observed_at, false
    FROM read_parquet('{directory}/observations/*.parquet') WHERE state IN ({_words(STATE_MARK)}) AND {of_part}
), decisions AS (
    SELECT * FROM read_parquet('{directory}/decisions/*.parquet') WHERE {of_part}
), named AS (
    SELECT decisions.* EXCLUDE (format_id), coalesce(decisions.format_id, known.format_id) AS format_id
    FROM decisions LEFT JOIN (
        SELECT DISTINCT format_id, gtrid FROM (
            SELECT format_id, gtrid FROM told UNION ALL
            SELECT format_id, gtrid FROM decisions WHERE format_id IS NOT NULL
        ) WHERE gtrid IN (SELECT gtrid FROM decisions WHERE format_id IS NULL)
    ) AS known ON decisions.format_id IS NULL AND decisions.gtrid = known.gtrid
), together AS (
    SELECT * FROM told
    UNION ALL
    SELECT format_id, gtrid, false, hash(source, tm, decision), tm, source, NULL,
        CASE decision WHEN 'commit' THEN {int(Mark.DECIDED_COMMIT)} ELSE {int(Mark.DECIDED_ROLLBACK)} END
            | CASE finished WHEN true THEN {int(Mark.DONE)} WHEN false THEN {int(Mark.UNDONE)} ELSE 0 END,
        NULL, NULL, "at", 0, NULL, false, NULL, false
    FROM named
), folded AS (
    SELECT format_id, gtrid, is_branch, place, name, owner, life, bit_or(marks) AS marks, min(opened_at) AS opened_at,
        min(forgotten_at) AS forgotten_at, max(moment) AS last_at, bit_or(seen) AS seen, max(seen_since) AS seen_since,
        bool_or(of_dtx) AS of_dtx, max(seen_at) AS seen_at, bool_or(is_asked) AS is_asked
    FROM together GROUP BY ALL
), now AS (
    SELECT * REPLACE (CASE WHEN {has(ENDED)} THEN marks ELSE marks | seen END AS marks) FROM folded
), branches AS (
    SELECT *, is_branch AND {has(OPENED)} AND NOT {has(ENDED)} AS waits, waits AND seen = 0 AND is_asked AS gone,
        waits AND NOT gone AS is_open, coalesce(opened_at, seen_since) AS opened,
        coalesce(epoch_us(seen_at), {rules.as_of}) AS known,
        is_branch AND (({has(Mark.HEURISTIC_HAZARD)} AND NOT {has(normally)})
            OR ({has(Mark.FORGOTTEN)} AND NOT {has(DIRECTIONS)})) AS unknown,
        {has(Mark.UNDONE)} AND NOT {has(Mark.DONE)} AS undone
    FROM now
), facts AS (
    SELECT format_id, gtrid, bit_or(marks) AS marks, bool_or(unknown) AS unknown,
        count(*) FILTER (is_open) AS open, min(opened) FILTER (is_open) AS since,
        max(known) FILTER (is_open) AS known_at, max(known - epoch_us(opened)) FILTER (is_open) AS age,
        min(forgotten_at) AS forgotten_at,
        min(owner) FILTER (of_dtx) <> max(owner) FILTER (of_dtx) AS owners_differ,
        max(last_at) FILTER (NOT is_branch) AS decided_at, max(last_at) AS latest, bool_or(undone) AS undone,
        bool_or(gone) AS gone,
        count(*) FILTER (is_branch) AS rows,
        count(DISTINCT place) FILTER (is_branch) AS branches,
        list_sort(list(DISTINCT name) FILTER (is_branch)) AS rms,
        list_sort(list(DISTINCT owner) FILTER (is_branch)) AS owners
    FROM branches GROUP BY ALL
)
SELECT format_id, gtrid, {verdict} AS verdict, since, rms, owners, branches FROM facts
) TO '{out}' (FORMAT parquet, COMPRESSION zstd)
"""
