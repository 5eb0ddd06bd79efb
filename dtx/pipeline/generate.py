"""A fleet for tests and benchmarks: journals, observations and decision logs with known anomalies, at any scale.

Transactions come by number, each told by its story: the lines of each of its branches, and what its manager has
decided. All of it follows from the plan: nothing is at random. Times are seconds after the transaction's begin.
``first`` is said of its first branch, ``others`` of all others.

Resource managers have clocks that differ and loads that differ (a tenth of them does half of the work); of ten
transactions, one gives all its branches the same xid, as some transaction managers do.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import MICROS, Choice, Rules, SourceKind, Verdict
from dtx.xa.codes import Heuristic

OPERATOR: Final = "operator"
_E = JournalEvent
_STEPS: Final = pa.list_(
    pa.struct(
        {
            "event": pa.string(), "after": pa.float64(), "outcome": pa.string(), "life": pa.int32(),
            "actor": pa.string(), "one_phase": pa.bool_(),
        }
    )
)  # fmt: skip
_TOLD: Final = pa.schema(
    {
        "told": pa.int32(), "story": pa.string(), "verdict": pa.string(), "first": _STEPS, "others": _STEPS,
        "least": pa.int32(), "most": pa.int32(), "seen": pa.bool_(), "others_seen": pa.bool_(),
        "youngest": pa.float64(), "oldest": pa.float64(), "foreign": pa.bool_(), "two_owners": pa.bool_(),
        "choice": pa.string(), "decided_after": pa.float64(), "finished": pa.bool_(),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStep:
    """One line of a journal.

    Args:
        event: what it tells.
        after: seconds after the begin of the transaction.
        outcome: of a heuristic decision.
        life: which of the lives of its xid.
        actor: who does it; ``None``: the branch's owner.
    """

    event: JournalEvent
    after: float
    outcome: Heuristic | None = None
    life: int = 0
    actor: str | None = None
    one_phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What the transaction manager's log has.

    Args:
        choice: which way.
        after: seconds after the begin.
        finished: whether all branches have acknowledged.
    """

    choice: Choice
    after: float = 1.0
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A kind of transaction.

    Args:
        name: of the kind.
        verdict: that is right.
        first, others: lines of the first branch, and of each of the others.
        decided: ``None``: no log has it.
        least, most: branches.
        seen: the first branch, or with *others_seen* every one, is in doubt now.
        age: seconds before the end of the time that is looked at when it begins; ``None``: any time before.
        foreign: a PostgreSQL has a branch of it in doubt, too.
        two_owners: the second branch is another user's.
        share: of a thousand ordinary transactions; 0 for those that are put in by number.
    """

    name: str
    verdict: Verdict
    first: tuple[HistoryStep, ...]
    others: tuple[HistoryStep, ...]
    decided: Decided | None = None
    least: int = 2
    most: int = 4
    seen: bool = False
    others_seen: bool = False
    age: tuple[int, int] | None = None
    foreign: bool = False
    two_owners: bool = False
    share: int = 0


def _step(
    event: JournalEvent, after: float, outcome: Heuristic | None = None, *, life: int = 0, actor: str | None = None
) -> HistoryStep:
    return HistoryStep(event=event, after=after, outcome=outcome, life=life, actor=actor)


_PREPARED = _step(_E.PREPARED, 0.2)
_COMMITTED = (_PREPARED, _step(_E.COMMITTED, 1.2))
_ROLLED_BACK = (_PREPARED, _step(_E.ROLLED_BACK, 1.2))
_TIMED_OUT = (_step(_E.TIMED_OUT, 0.3, actor="dtx"),)
_COMMIT = Decided(choice=Choice.COMMIT)

ORDINARY: Final = (
    Story(name="two-phase", verdict=Verdict.COMMITTED, first=_COMMITTED, others=_COMMITTED, decided=_COMMIT, share=853),
    Story(
        name="one-phase",
        verdict=Verdict.COMMITTED,
        first=(HistoryStep(event=_E.COMMITTED, after=0.3, one_phase=True),),
        others=(),
        least=1,
        most=1,
        share=60,
    ),
    Story(
        name="read-only",
        verdict=Verdict.COMMITTED,
        first=(_step(_E.READ_ONLY, 0.2),),
        others=_COMMITTED,
        decided=_COMMIT,
        share=20,
    ),
    Story(
        name="all-read-only",
        verdict=Verdict.COMMITTED,
        first=(_step(_E.READ_ONLY, 0.2),),
        others=(_step(_E.READ_ONLY, 0.2),),
        share=10,
    ),
    Story(name="presumed-abort", verdict=Verdict.ROLLED_BACK, first=_ROLLED_BACK, others=_ROLLED_BACK, share=30),
    Story(
        name="timed-out",
        verdict=Verdict.ROLLED_BACK,
        first=_TIMED_OUT,
        others=_ROLLED_BACK,
        share=10,
    ),
    Story(
        name="stuck-for-a-while",
        verdict=Verdict.COMMITTED,
        first=(_PREPARED, _step(_E.STUCK, 1.2), _step(_E.REDIRECTED, 60.0, actor=OPERATOR), _step(_E.COMMITTED, 61.0)),
        others=_COMMITTED,
        decided=Decided(choice=Choice.COMMIT),
        share=8,
    ),
    Story(
        name="ended-by-a-clock-set-back",  # and asked for before that end was read
        verdict=Verdict.COMMITTED,
        first=(_PREPARED, _step(_E.COMMITTED, -240.0)),
        others=_COMMITTED,
        decided=_COMMIT,
        seen=True,
        share=5,
    ),
    Story(
        name="heuristic-as-decided",
        verdict=Verdict.COMMITTED,
        first=(
            _PREPARED,
            _step(_E.DECIDED, 30.0, actor=OPERATOR),
            _step(_E.HEURISTIC, 30.1, Heuristic.COMMITTED, actor=OPERATOR),
            _step(_E.FORGOTTEN, 900.0, Heuristic.COMMITTED),
        ),
        others=_COMMITTED,
        decided=_COMMIT,
        share=4,
    ),
)
"""What a fleet does all day; none of it is to be found. The first takes what is missing of a thousand."""

INJECTED: Final = (
    Story(
        name="xid-reused",
        verdict=Verdict.XID_REUSED,
        first=(*_COMMITTED, _step(_E.PREPARED, 5_000.0, life=1), _step(_E.COMMITTED, 5_001.0, life=1)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(name="mixed", verdict=Verdict.MIXED, first=_ROLLED_BACK, others=_COMMITTED),
    Story(
        name="against-decision",
        verdict=Verdict.AGAINST_DECISION,
        first=_ROLLED_BACK,
        others=_ROLLED_BACK,
        decided=_COMMIT,
    ),
    Story(
        name="timed-out-against-decision",
        verdict=Verdict.AGAINST_DECISION,
        first=_TIMED_OUT,
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(
        name="heuristic-damage",
        verdict=Verdict.HEURISTIC_DAMAGE,
        first=(_PREPARED, _step(_E.HEURISTIC, 30.0, Heuristic.ROLLED_BACK, actor=OPERATOR)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(
        name="hazard",
        verdict=Verdict.HAZARD,
        first=(_PREPARED, _step(_E.HEURISTIC, 30.0, Heuristic.HAZARD, actor=OPERATOR)),
        others=_COMMITTED,
        decided=_COMMIT,
    ),
    Story(
        name="forgotten-early",
        verdict=Verdict.FORGOTTEN_EARLY,
        first=(
            _PREPARED,
            _step(_E.HEURISTIC, 30.0, Heuristic.COMMITTED, actor=OPERATOR),
            _step(_E.FORGOTTEN, 32.0, Heuristic.COMMITTED, actor=OPERATOR),
        ),
        others=(_PREPARED, _step(_E.COMMITTED, 4_000.0)),
        decided=Decided(choice=Choice.COMMIT, after=3_999.0),
    ),
    Story(
        name="unfinished",
        verdict=Verdict.UNFINISHED,
        first=(_PREPARED,),
        others=_COMMITTED,
        decided=Decided(choice=Choice.COMMIT, finished=False),
        seen=True,
        age=(1_200, 86_400),
    ),
    Story(
        name="orphan",
        verdict=Verdict.ORPHAN,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        foreign=True,
        age=(7_200, 86_400),
    ),
    Story(
        name="orphan-beside-timed-out",
        verdict=Verdict.ORPHAN,
        first=(_PREPARED,),
        others=_TIMED_OUT,
        seen=True,
        age=(7_200, 86_400),
    ),
    Story(
        name="ended-since-the-archive",
        verdict=Verdict.NOT_ARCHIVED,
        first=(_PREPARED,),
        others=_COMMITTED,
        decided=_COMMIT,
        age=(7_200, 86_400),
    ),
    Story(
        name="owner-mismatch",
        verdict=Verdict.OWNER_MISMATCH,
        first=_COMMITTED,
        others=_COMMITTED,
        decided=_COMMIT,
        two_owners=True,
    ),
    Story(
        name="in-doubt",
        verdict=Verdict.IN_DOUBT,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        age=(600, 1_800),
    ),
)
"""What is to be found: at least one for each verdict that is not plain."""


_STORIES: Final = (*ORDINARY, *INJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """How large a fleet is, and what goes wrong in it.

    Args:
        transactions: global ones; about 2.4 branches and 4.8 lines of a journal each.
        anomalies: transactions of each kind that is to be found.
        resource_managers, databases, managers: how many resource managers there are, the databases that have their
            journals, and the transaction managers.
        days: over which they are spread, up to *as_of*.
        as_of: when the fleet is looked at.
        skew: seconds by which a clock is ahead or behind, at most.
        seed: another one gives another fleet.
    """

    transactions: int
    anomalies: int = 0
    resource_managers: int = 40
    databases: int = 4
    managers: int = 3
    days: int = 30
    as_of: datetime = datetime(2026, 1, 31, tzinfo=UTC)
    skew: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.transactions < self.anomalies * len(INJECTED):
            raise ValueError(
                f"{self.anomalies} anomalies of each of {len(INJECTED)} kinds need {self.anomalies * len(INJECTED)} "
                f"transactions, the plan has {self.transactions}"
            )
        if self.resource_managers < max(story.most for story in _STORIES):
            raise ValueError("the branches of a transaction are in different resource managers: at least 4 are needed")
        if min(self.transactions, self.databases, self.managers, self.days) < 1 or self.anomalies < 0:
            raise ValueError("there is at least one of everything in a plan")

    @property
    def rules(self) -> Rules:
        """What its verdicts depend on: every dtx was asked when the lake had been read."""
        as_of = (self.as_of - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        return Rules(as_of=as_of, asked=frozenset(f"db{number}" for number in range(self.databases)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFleet:
    """What the pipeline gets to see, and what is true.

    Args:
        events, observations, decisions: as readers give them.
        truth: ``format_id``, ``gtrid``, ``story`` and the ``verdict`` that is right.
    """

    events: DataFrame
    observations: DataFrame
    decisions: DataFrame
    truth: DataFrame


def generate(spark: SparkSession, plan: FleetPlan) -> GeneratedFleet:
    """The fleet of a plan; nothing is computed before it is read."""
    transactions = _transactions(spark, plan)
    branches = _branches(transactions, plan)
    return GeneratedFleet(
        events=_events(branches),
        observations=_observations(branches, plan),
        decisions=_decisions(transactions),
        truth=transactions.select("format_id", "gtrid", "story", "verdict"),
    )


def write(fleet: GeneratedFleet, directory: str) -> None:
    """The fleet as Parquet: ``events``, ``observations``, ``decisions``, ``truth`` under *directory*.

    Args:
        fleet: which.
        directory: path or address that Spark can write to; what is there is replaced.
    """
    for name in ("events", "observations", "decisions", "truth"):
        frame: DataFrame = getattr(fleet, name)
        frame.write.mode("overwrite").parquet(f"{directory}/{name}")


def _chance(plan: FleetPlan, salt: str, *columns: str) -> Column:
    """From 0 to 1, the same for the same."""
    mixed = sf.xxhash64(*(sf.col(column) for column in columns), sf.lit(f"{plan.seed} {salt}"))
    return sf.pmod(mixed, sf.lit(1 << 40)) / float(1 << 40)


def _told(number: int, story: Story) -> dict[str, Any]:
    decided = story.decided
    return {
        "told": number,
        "story": story.name,
        "verdict": str(story.verdict),
        "first": [_as_json(step) for step in story.first],
        "others": [_as_json(step) for step in story.others],
        "least": story.least,
        "most": story.most,
        "seen": story.seen,
        "others_seen": story.others_seen,
        "youngest": None if story.age is None else float(story.age[0]),
        "oldest": None if story.age is None else float(story.age[1]),
        "foreign": story.foreign,
        "two_owners": story.two_owners,
        "choice": None if decided is None else str(decided.choice),
        "decided_after": None if decided is None else decided.after,
        "finished": None if decided is None else decided.finished,
    }


def _as_json(step: HistoryStep) -> dict[str, Any]:
    return asdict(step) | {"event": str(step.event), "outcome": None if step.outcome is None else str(step.outcome)}


def _stories(spark: SparkSession) -> DataFrame:
    """The stories, to be joined: as expressions they would be written out again wherever one of them is asked for."""
    table = pa.Table.from_pylist([_told(number, story) for number, story in enumerate(_STORIES)], schema=_TOLD)
    return sf.broadcast(spark.createDataFrame(table))


def _transactions(spark: SparkSession, plan: FleetPlan) -> DataFrame:
    thousandth = sf.floor(_chance(plan, "story", "n") * 1_000)
    usual = sf.lit(0)
    edge = 1_000
    for number, story in enumerate(ORDINARY[1:], 1):
        usual = sf.when((thousandth < edge) & (thousandth >= edge - story.share), number).otherwise(usual)
        edge -= story.share
    injected = len(INJECTED) * plan.anomalies
    told = usual
    if injected:
        every = plan.transactions // injected
        turn = sf.floor(sf.col("n") / every)
        told = sf.when(
            (sf.col("n") % every == 0) & (turn < injected), sf.lit(len(ORDINARY)) + turn % len(INJECTED)
        ).otherwise(usual)
    span = plan.days * 86_400 - 3 * 86_400
    begun_before = 86_400.0 + (1 - (sf.col("n") + _chance(plan, "begin", "n")) / plan.transactions) * span
    youngest, oldest = sf.col("youngest"), sf.col("oldest")
    ago = sf.coalesce(youngest + (oldest - youngest) * _chance(plan, "age", "n"), begun_before)
    least, most = sf.col("least"), sf.col("most")
    count = least + sf.floor((most - least + 1) * sf.pow(_chance(plan, "branches", "n"), sf.lit(3.0)))
    gtrid = sf.concat_ws(".", "tm", sf.lit(str(plan.seed)), sf.lower(sf.conv("n", 10, 36))).cast("binary")
    numbers = spark.range(plan.transactions).select(sf.col("id").alias("n"))
    return (
        numbers.select("n", told.cast("int").alias("told"))
        .join(_stories(spark), "told")
        .withColumn("tm", sf.concat(sf.lit("tm"), sf.floor(_chance(plan, "tm", "n") * plan.managers)))
        .withColumn("gtrid", gtrid)
        .withColumns(
            {
                "begun": sf.lit(plan.rules.as_of) - (ago * MICROS).cast("bigint"),
                "count": count.cast("int"),
                "format_id": sf.lit(4_660).cast("bigint"),
                "same_xid": _chance(plan, "same xid", "n") < 0.1,
                "home": sf.floor(sf.pow(_chance(plan, "home", "n"), sf.lit(3.3)) * plan.resource_managers),
            }
        )
    )


def _branches(transactions: DataFrame, plan: FleetPlan) -> DataFrame:
    number = sf.pmod(sf.col("home") + sf.col("branch"), sf.lit(plan.resource_managers))
    second = sf.col("two_owners") & (sf.col("branch") == 1)
    owner = sf.floor(sf.pow(_chance(plan, "owner", "n"), sf.lit(2.0)) * 20)
    return (
        transactions.withColumn("branch", sf.explode(sf.sequence(sf.lit(0), sf.col("count") - 1)))
        .withColumn("number", number)
        .withColumn("rm", sf.concat(sf.lit("rm-"), sf.lpad(sf.col("number").cast("string"), 3, "0")))
        .withColumn("source", sf.concat(sf.lit("db"), sf.col("number") % plan.databases))
        .withColumn("vhost", sf.lit("/"))
        .withColumn(
            "bqual",
            sf.when(sf.col("same_xid"), sf.lit("")).otherwise(sf.concat(sf.lit("b"), sf.col("branch"))).cast("binary"),
        )
        .withColumn("owner", sf.concat(sf.lit("app"), sf.when(second, owner + 20).otherwise(owner)))
        .withColumn("ahead", ((_chance(plan, "clock", "rm") * 2 - 1) * plan.skew * MICROS).cast("bigint"))
    )


def _uuid(*columns: Column | str) -> Column:
    digits = sf.md5(sf.concat_ws("/", *columns).cast("binary"))
    edges = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    return sf.concat_ws("-", *(sf.substring(digits, start, length) for start, length in edges))


def _events(branches: DataFrame) -> DataFrame:
    own = sf.when(sf.col("branch") == 0, sf.col("first")).otherwise(sf.col("others"))
    steps = branches.select("*", sf.posexplode(own).alias("nth", "step"))
    at = sf.col("begun") + (sf.col("step.after") * MICROS).cast("bigint") + sf.col("ahead")
    messages = sf.pmod(sf.xxhash64("n", "branch"), sf.lit(5)).cast("int")
    prepared = sf.when(~sf.col("step.one_phase"), sf.col("begun") + sf.lit(200_000) + sf.col("ahead"))
    decided = sf.when(sf.col("step.event") != "prepared", at)
    return steps.select(
        _uuid("gtrid", sf.col("branch"), sf.col("nth"), sf.lit("line")).alias("id"),
        sf.timestamp_micros(at).alias("at"),
        "rm",
        sf.col("step.event").alias("event"),
        _uuid("gtrid", sf.col("branch"), sf.col("step.life")).alias("branch_id"),
        "vhost",
        "format_id",
        "gtrid",
        "bqual",
        "owner",
        sf.coalesce("step.actor", "owner").alias("actor"),
        sf.when(sf.col("step.actor") == "operator", sf.lit("generated")).alias("reason"),
        sf.col("step.outcome").alias("outcome"),
        sf.col("step.one_phase").alias("one_phase"),
        (messages + 1).alias("publishes"),
        messages.alias("consumes"),
        ((messages + 1) * 640).cast("bigint").alias("bytes"),
        sf.timestamp_micros(sf.col("begun") + sf.col("ahead")).alias("started_at"),
        sf.timestamp_micros(prepared).alias("prepared_at"),
        sf.timestamp_micros(decided).alias("decided_at"),
        (sf.col("n") * 64 + sf.col("branch") * 8 + sf.col("nth") + 1).alias("xid8"),
        "source",
    )


def _observations(branches: DataFrame, plan: FleetPlan) -> DataFrame:
    first, every, foreign = (sf.col(name) for name in ("seen", "others_seen", "foreign"))
    observed = sf.timestamp_micros(sf.lit(plan.rules.as_of)).alias("observed_at")
    since = sf.timestamp_micros(sf.col("begun") + sf.lit(200_000) + sf.col("ahead")).alias("since")
    ours = branches.where((first & (sf.col("branch") == 0)) | every).select(
        "source", sf.lit(str(SourceKind.DTX)).alias("kind"), "rm", "vhost", "format_id", "gtrid", "bqual",
        _uuid("gtrid", sf.col("branch"), sf.lit(0)).alias("branch_id"),
        sf.lit("prepared").alias("state"), "owner", since, observed,
    )  # fmt: skip
    theirs = branches.where(foreign & (sf.col("branch") == 0)).select(
        sf.lit("accounts").alias("source"), sf.lit(str(SourceKind.POSTGRESQL)).alias("kind"),
        sf.lit("accounts").alias("rm"), sf.lit("bank").alias("vhost"), "format_id", "gtrid",
        sf.lit("pg").cast("binary").alias("bqual"),
        sf.lit(None).cast("string").alias("branch_id"),
        sf.lit("prepared").alias("state"), sf.lit("bank_role").alias("owner"), since, observed,
    )  # fmt: skip
    return ours.unionByName(theirs)


def _decisions(transactions: DataFrame) -> DataFrame:
    return transactions.select(
        "tm",
        # there are logs that do not keep it
        sf.when(sf.pmod(sf.col("n"), sf.lit(100)) != 7, sf.col("format_id")).alias("format_id"),
        "gtrid",
        sf.col("choice").alias("decision"),
        sf.timestamp_micros(sf.col("begun") + (sf.col("decided_after") * MICROS).cast("bigint")).alias("at"),
        "finished",
        sf.concat(sf.lit("log of "), sf.col("tm")).alias("source"),
    ).where(sf.col("decision").isNotNull())
