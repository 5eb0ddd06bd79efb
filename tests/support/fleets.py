"""Random fleets with few values: xids recur, owners change, clocks go back, lines are repeated or missing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession

from dtx.log.records import JournalEvent
from dtx.pipeline.reconcile.folded_rows import (
    rows_of_decisions,
    rows_of_events,
    rows_of_observations,
    with_format_ids,
)
from dtx.pipeline.reconcile.judged_rows import VERDICT_COLUMNS, is_finding, judge_rows, with_evidence
from dtx.pipeline.verdicts import STATE_MARK, Choice, Rules, SourceKind, Verdict
from dtx.xa.codes import Heuristic
from tests.support.reference import Decision, Event, Judgement, Key, Observation

_TIME = pa.timestamp("us", tz="UTC")
EVENTS = pa.schema(
    {
        "id": pa.string(), "at": _TIME, "rm": pa.string(), "event": pa.string(), "branch_id": pa.string(),
        "vhost": pa.string(), "format_id": pa.int64(), "gtrid": pa.binary(), "bqual": pa.binary(),
        "owner": pa.string(), "actor": pa.string(), "reason": pa.string(), "outcome": pa.string(),
        "one_phase": pa.bool_(), "publishes": pa.int32(), "consumes": pa.int32(), "bytes": pa.int64(),
        "started_at": _TIME, "prepared_at": _TIME, "decided_at": _TIME, "xid8": pa.int64(), "source": pa.string(),
    }
)  # fmt: skip
OBSERVATIONS = pa.schema(
    {
        "source": pa.string(), "kind": pa.string(), "rm": pa.string(), "vhost": pa.string(), "format_id": pa.int64(),
        "gtrid": pa.binary(), "bqual": pa.binary(), "branch_id": pa.string(), "state": pa.string(),
        "owner": pa.string(), "since": _TIME, "observed_at": _TIME,
    }
)  # fmt: skip
DECISIONS = pa.schema(
    {
        "tm": pa.string(), "format_id": pa.int64(), "gtrid": pa.binary(), "decision": pa.string(), "at": _TIME,
        "finished": pa.bool_(), "source": pa.string(),
    }
)  # fmt: skip
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SOURCES, _RMS, _VHOSTS, _BQUALS = ("db1", "db2"), ("rm1", "rm2"), ("/", "v"), (b"", b"b1")
_OWNERS = ("ann", "ann", "ann", "w,e|i:rd ünï")
_FORMATS = (1, 1, 1, 4_294_967_295)
_LIVES = ("life-1", "life-1", "life-1", "life-2")
# the usual events come more often than the others: otherwise all findings would be heuristics
_EVENTS = (*JournalEvent, *(JournalEvent.PREPARED, JournalEvent.COMMITTED) * 6, *(JournalEvent.ROLLED_BACK,) * 3)
_STATES = (*STATE_MARK, "taking", *("prepared",) * 6)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The data of one fleet."""

    events: tuple[Event, ...] = ()
    observations: tuple[Observation, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def __add__(self, other: "Fleet") -> "Fleet":
        return Fleet(
            self.events + other.events, self.observations + other.observations, self.decisions + other.decisions
        )

    def about(self, gtrid: bytes) -> "Fleet":
        """The data of one transaction, to show it when two verdicts differ."""
        return Fleet(
            tuple(line for line in self.events if line.gtrid == gtrid),
            tuple(seen for seen in self.observations if seen.gtrid == gtrid),
            tuple(made for made in self.decisions if made.gtrid == gtrid),
        )


def fleet_of(seed: int, transactions: int) -> Fleet:
    """A random fleet: about three lines for each transaction, for some of them many and for some none.

    Args:
        seed: the same seed gives the same fleet.
        transactions: the maximum number of transactions.
    """
    dice = Random(seed)

    def gtrid() -> bytes:
        return b"g%d" % dice.randrange(transactions)

    def place() -> dict[str, Any]:
        return {
            "source": dice.choice(_SOURCES), "rm": dice.choice(_RMS), "vhost": dice.choice(_VHOSTS),
            "bqual": dice.choice(_BQUALS), "format_id": dice.choice(_FORMATS), "gtrid": gtrid(),
            "owner": dice.choice(_OWNERS),
        }  # fmt: skip

    def at() -> int:
        return dice.randrange(13) * 250_000_000

    def event(number: int) -> Event:
        here = place()
        return Event(
            **here, branch_id=dice.choice(_LIVES), id=f"line-{seed}-{number}", event=dice.choice(_EVENTS),
            outcome=dice.choice((None, *Heuristic)), at=at(), actor=dice.choice((here["owner"], "operator")),
        )  # fmt: skip

    events = tuple(event(number) for number in range(transactions * 2))

    def observation() -> Observation:
        kind = dice.choice(tuple(SourceKind))
        return Observation(
            # the names of PostgreSQL's prepared transactions need not be xids
            **(place() | {"format_id": dice.choice((None, *_FORMATS))}), kind=kind, state=dice.choice(_STATES),
            branch_id=dice.choice(_LIVES) if kind is SourceKind.DTX else None, since=dice.choice((None, at(), at())),
            observed_at=at(),
        )  # fmt: skip

    observations = tuple(observation() for _ in range(transactions // 2))
    decisions = tuple(
        Decision(
            source=dice.choice(("log1", "log2")), tm=dice.choice(("tm1", "tm,2")),
            format_id=dice.choice((None, *_FORMATS)), gtrid=gtrid(), decision=dice.choice(tuple(Choice)),
            at=dice.choice((None, at(), at())),
            finished=dice.choice((None, True, False)),
        )
        for _ in range(transactions // 2)
    )  # fmt: skip
    return Fleet(events, observations, decisions)


def line(gtrid: bytes, event: str, at: int, **more: object) -> Event:
    """A line about the branch of *gtrid* in the resource manager rm; *more* overrides the values."""
    told = {
        "source": "db", "rm": "rm", "vhost": "/", "format_id": 1, "gtrid": gtrid, "bqual": b"", "branch_id": "life",
        "id": f"{gtrid!r} {event}", "event": event, "at": at, "owner": "ann", "actor": "ann",
    }  # fmt: skip
    return Event(**(told | more))  # type: ignore[arg-type]


def _when(micros: int | None) -> datetime | None:
    return None if micros is None else _EPOCH + timedelta(microseconds=micros)


def _table(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def events_table(events: Iterable[Event], first_xid8: int = 1) -> pa.Table:
    """Lines as in a journal or the lake, in commit order."""
    rows = [
        (
            line.id, _when(line.at), line.rm, str(line.event), line.branch_id, line.vhost, line.format_id,
            line.gtrid, line.bqual, line.owner, line.actor, None,
            None if line.outcome is None else str(line.outcome), False, 1, 0, 1, None, None, None, first_xid8 + number,
            line.source,
        )
        for number, line in enumerate(events)
    ]  # fmt: skip
    return _table(rows, EVENTS)


def observations_table(observations: Iterable[Observation]) -> pa.Table:
    """Observations as the readers return them."""
    rows = [
        (
            seen.source, str(seen.kind), seen.rm, seen.vhost, seen.format_id, seen.gtrid,
            seen.bqual, seen.branch_id, seen.state, seen.owner, _when(seen.since), _when(seen.observed_at),
        )
        for seen in observations
    ]  # fmt: skip
    return _table(rows, OBSERVATIONS)


def decisions_table(decisions: Iterable[Decision]) -> pa.Table:
    """Decisions as the readers return them."""
    rows = [
        (
            made.tm, made.format_id, made.gtrid, str(made.decision), _when(made.at), made.finished,
            made.source,
        )
        for made in decisions
    ]  # fmt: skip
    return _table(rows, DECISIONS)


def events_frame(spark: SparkSession, events: Iterable[Event], first_xid8: int = 1) -> DataFrame:
    """Lines in Spark; through Arrow, so that no Python worker has to start."""
    return spark.createDataFrame(events_table(events, first_xid8))


def observations_frame(spark: SparkSession, observations: Iterable[Observation]) -> DataFrame:
    """Observations in Spark."""
    return spark.createDataFrame(observations_table(observations))


def decisions_frame(spark: SparkSession, decisions: Iterable[Decision]) -> DataFrame:
    """Decisions in Spark."""
    return spark.createDataFrame(decisions_table(decisions))


def judgements(rows: Iterable[Row]) -> dict[Key, tuple[Judgement, bytes]]:
    """Verdicts of Spark in the form of the reference, and their fingerprints.

    Args:
        rows: with ``since_micros`` etc., because Python would convert times to its own zone.
    """
    return {
        (row.format_id, bytes(row.gtrid)): (
            Judgement(
                format_id=row.format_id,
                gtrid=bytes(row.gtrid),
                findings=tuple(Verdict(word) for word in row.findings),
                since=row.since_micros,
                first_at=row.first_micros,
                last_at=row.last_micros,
                rms=tuple(row.rms),
                owners=tuple(row.owners),
                branches=row.branches,
                decision=row.decision,
                tm=row.tm,
                known_at=row.known_micros,
            ),
            bytes(row.fingerprint),
        )
        for row in rows
    }


def verdicts_of(events: DataFrame, observations: DataFrame, decisions: DataFrame, rules: Rules) -> DataFrame:
    """Return the verdict, with evidence, on every global transaction of these rows, without a lake."""
    rows = (
        rows_of_events(events).unionByName(rows_of_observations(observations)).unionByName(rows_of_decisions(decisions))
    )
    judged = judge_rows(with_format_ids(rows), rules).select(*VERDICT_COLUMNS)
    return with_evidence(judged, judged.where(is_finding()), events, observations, decisions)
