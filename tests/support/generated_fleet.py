"""Generates a fleet: journals, observations and decision logs with known anomalies, at any scale.

Each transaction has a number and a scenario: the lines of each of its branches, and the decision of its manager. The
plan determines everything; the same plan gives the same fleet. Times are seconds after the transaction began.

Resource managers have different clocks and loads: a tenth of them does half of the work. In half of the transactions,
each later line of a branch has a clock of its own, as after fail-overs. One transaction of ten gives all its branches
the same xid, as some transaction managers do.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import MICROS, Choice, Rules, SourceKind, Verdict, micros_of
from dtx.xa.codes import Heuristic

OPERATOR: Final = "operator"
_E = JournalEvent


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a journal.

    Args:
        event: of the branch.
        after: seconds after the beginning of the transaction.
        outcome: of a heuristic decision.
        life: number of the use of the xid, from 0.
        actor: the user of the event; ``None``: the branch's owner.
        one_phase: whether the branch commits in one phase.
    """

    event: JournalEvent
    after: float
    outcome: Heuristic | None = None
    life: int = 0
    actor: str | None = None
    one_phase: bool = False


_PREPARED = _Line(_E.PREPARED, 0.2)
_COMMITTED = (_PREPARED, _Line(_E.COMMITTED, 1.2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind of transaction.

    Args:
        name: of the kind.
        verdict: the correct verdict.
        first, others: lines of the first branch, and of each of the others.
        choice: the decision in the log of the transaction manager; ``None``: no log has one.
        decided_after: seconds from the beginning to the decision.
        finished: whether all branches have acknowledged the decision.
        least, most: number of branches.
        seen: the first branch, or with *others_seen* every branch, is in doubt at the end.
        age: range of seconds from the beginning of the transaction to the end; ``None``: any time of the plan.
        foreign: a PostgreSQL database also has a branch in doubt.
        two_owners: the second branch belongs to another user.
        share: transactions of this kind in a thousand; 0 for anomalies, which the plan counts.
    """

    name: str
    verdict: Verdict
    first: tuple[_Line, ...]
    others: tuple[_Line, ...] = _COMMITTED
    choice: Choice | None = None
    decided_after: float = 1.0
    finished: bool = True
    least: int = 2
    most: int = 4
    seen: bool = False
    others_seen: bool = False
    age: tuple[int, int] | None = None
    foreign: bool = False
    two_owners: bool = False
    share: int = 0


_ROLLED_BACK = (_PREPARED, _Line(_E.ROLLED_BACK, 1.2))
_TIMED_OUT = (_Line(_E.TIMED_OUT, 0.3, actor="dtx"),)
_COMMIT = Choice.COMMIT

ORDINARY: Final = (
    Scenario(name="two-phase", verdict=Verdict.COMMITTED, first=_COMMITTED, choice=_COMMIT, share=853),
    Scenario(
        name="one-phase",
        verdict=Verdict.COMMITTED,
        first=(_Line(_E.COMMITTED, 0.3, one_phase=True),),
        others=(),
        least=1,
        most=1,
        share=60,
    ),
    Scenario(name="read-only", verdict=Verdict.COMMITTED, first=(_Line(_E.READ_ONLY, 0.2),), choice=_COMMIT, share=20),
    Scenario(
        name="all-read-only",
        verdict=Verdict.COMMITTED,
        first=(_Line(_E.READ_ONLY, 0.2),),
        others=(_Line(_E.READ_ONLY, 0.2),),
        share=10,
    ),
    Scenario(name="presumed-abort", verdict=Verdict.ROLLED_BACK, first=_ROLLED_BACK, others=_ROLLED_BACK, share=30),
    Scenario(name="timed-out", verdict=Verdict.ROLLED_BACK, first=_TIMED_OUT, others=_ROLLED_BACK, share=10),
    Scenario(
        name="stuck-for-a-while",
        verdict=Verdict.COMMITTED,
        first=(_PREPARED, _Line(_E.STUCK, 1.2), _Line(_E.REDIRECTED, 60.0, actor=OPERATOR), _Line(_E.COMMITTED, 61.0)),
        choice=_COMMIT,
        share=8,
    ),
    Scenario(
        name="ended-by-a-clock-set-back",  # its participant was read before the end of the branch
        verdict=Verdict.COMMITTED,
        first=(_PREPARED, _Line(_E.COMMITTED, -240.0)),
        choice=_COMMIT,
        seen=True,
        share=5,
    ),
    Scenario(
        name="heuristic-as-decided",
        verdict=Verdict.COMMITTED,
        first=(
            _PREPARED,
            _Line(_E.DECIDED, 30.0, actor=OPERATOR),
            _Line(_E.HEURISTIC, 30.1, Heuristic.COMMITTED, actor=OPERATOR),
            _Line(_E.FORGOTTEN, 900.0, Heuristic.COMMITTED),
        ),
        choice=_COMMIT,
        share=4,
    ),
)
"""Kinds without findings. The first one gets the rest of each thousand."""

INJECTED: Final = (
    Scenario(
        name="xid-reused",
        verdict=Verdict.XID_REUSED,
        first=(*_COMMITTED, _Line(_E.PREPARED, 5_000.0, life=1), _Line(_E.COMMITTED, 5_001.0, life=1)),
        choice=_COMMIT,
    ),
    Scenario(name="mixed", verdict=Verdict.MIXED, first=_ROLLED_BACK),
    Scenario(
        name="against-decision",
        verdict=Verdict.AGAINST_DECISION,
        first=_ROLLED_BACK,
        others=_ROLLED_BACK,
        choice=_COMMIT,
    ),
    Scenario(name="timed-out-against-decision", verdict=Verdict.AGAINST_DECISION, first=_TIMED_OUT, choice=_COMMIT),
    Scenario(
        name="heuristic-damage",
        verdict=Verdict.HEURISTIC_DAMAGE,
        first=(_PREPARED, _Line(_E.HEURISTIC, 30.0, Heuristic.ROLLED_BACK, actor=OPERATOR)),
        choice=_COMMIT,
    ),
    Scenario(
        name="hazard",
        verdict=Verdict.HAZARD,
        first=(_PREPARED, _Line(_E.HEURISTIC, 30.0, Heuristic.HAZARD, actor=OPERATOR)),
        choice=_COMMIT,
    ),
    Scenario(
        name="forgotten-early",
        verdict=Verdict.FORGOTTEN_EARLY,
        first=(
            _PREPARED,
            _Line(_E.HEURISTIC, 30.0, Heuristic.COMMITTED, actor=OPERATOR),
            _Line(_E.FORGOTTEN, 32.0, Heuristic.COMMITTED, actor=OPERATOR),
        ),
        others=(_PREPARED, _Line(_E.COMMITTED, 4_000.0)),
        choice=_COMMIT,
        decided_after=3_999.0,
    ),
    Scenario(
        name="unfinished",
        verdict=Verdict.UNFINISHED,
        first=(_PREPARED,),
        choice=_COMMIT,
        finished=False,
        seen=True,
        age=(1_200, 86_400),
    ),
    Scenario(
        name="orphan",
        verdict=Verdict.ORPHAN,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        foreign=True,
        age=(7_200, 86_400),
    ),
    Scenario(
        name="orphan-beside-timed-out",
        verdict=Verdict.ORPHAN,
        first=(_PREPARED,),
        others=_TIMED_OUT,
        seen=True,
        age=(7_200, 86_400),
    ),
    Scenario(
        name="ended-since-the-archive",
        verdict=Verdict.NOT_ARCHIVED,
        first=(_PREPARED,),
        choice=_COMMIT,
        age=(7_200, 86_400),
    ),
    Scenario(name="owner-mismatch", verdict=Verdict.OWNER_MISMATCH, first=_COMMITTED, choice=_COMMIT, two_owners=True),
    Scenario(
        name="in-doubt",
        verdict=Verdict.IN_DOUBT,
        first=(_PREPARED,),
        others=(_PREPARED,),
        seen=True,
        others_seen=True,
        age=(600, 1_800),
    ),
)
"""Kinds with findings: at least one for each verdict that is not plain."""


_SCENARIOS: Final = (*ORDINARY, *INJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The size of a fleet, and its anomalies.

    Args:
        transactions: number of global transactions; each has about 2.4 branches and 4.8 lines of a journal.
        anomalies: number of transactions of each kind in :data:`INJECTED`.
        resource_managers, databases, managers: number of resource managers, of databases with their journals, and of
            transaction managers.
        days: length of time, up to *as_of*, over which the transactions are spread.
        as_of: the time at which the fleet is read.
        skew: limit, in seconds, by which a clock is ahead or behind.
        seed: another seed gives another fleet.

    Raises:
        ValueError: the numbers do not fit together.
    """

    transactions: int
    anomalies: int = 0
    resource_managers: int = 40
    databases: int = 4
    managers: int = 3
    days: int = 30
    as_of: datetime = datetime(2026, 1, 31, tzinfo=UTC)
    skew: float = 240.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.transactions < self.anomalies * len(INJECTED):
            raise ValueError(
                f"{self.anomalies} anomalies of each of {len(INJECTED)} kinds need {self.anomalies * len(INJECTED)} "
                f"transactions, the plan has {self.transactions}"
            )
        if self.resource_managers < max(scenario.most for scenario in _SCENARIOS):
            raise ValueError("the branches of a transaction are in different resource managers: at least 4 are needed")
        if min(self.transactions, self.databases, self.managers, self.days) < 1 or self.anomalies < 0:
            raise ValueError("transactions, databases, managers and days are at least 1, anomalies at least 0")

    @property
    def rules(self) -> Rules:
        """The parameters of its verdicts: every dtx was read after the lake."""
        return Rules(as_of=micros_of(self.as_of), asked=frozenset(f"db{number}" for number in range(self.databases)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFleet:
    """The input of the pipeline, and the correct result.

    Args:
        events, observations, decisions: the input, with the columns of the readers.
        truth: ``format_id``, ``gtrid``, ``scenario`` and the correct ``verdict``.
    """

    events: DataFrame
    observations: DataFrame
    decisions: DataFrame
    truth: DataFrame


def generate(spark: SparkSession, plan: FleetPlan) -> GeneratedFleet:
    """Return the fleet of a plan; Spark computes it when it is read."""
    transactions = _transactions(spark, plan)
    branches = _branches(transactions, plan)
    return GeneratedFleet(
        events=_events(branches, plan),
        observations=_observations(branches, plan),
        decisions=_decisions(transactions),
        truth=transactions.select("format_id", "gtrid", sf.col("name").alias("scenario"), "verdict"),
    )


def write(fleet: GeneratedFleet, directory: str) -> None:
    """Write the fleet as Parquet: ``events``, ``observations``, ``decisions``, ``truth`` in *directory*.

    Args:
        fleet: the fleet.
        directory: path or URI that Spark can write to; existing files are replaced.
    """
    for name in ("events", "observations", "decisions", "truth"):
        frame: DataFrame = getattr(fleet, name)
        frame.write.mode("overwrite").parquet(f"{directory}/{name}")


def _chance(plan: FleetPlan, salt: str, *columns: str) -> Column:
    """Return a number from 0 to 1, which depends only on the seed, *salt* and *columns*."""
    mixed = sf.xxhash64(*(sf.col(column) for column in columns), sf.lit(f"{plan.seed} {salt}"))
    return sf.pmod(mixed, sf.lit(1 << 40)) / float(1 << 40)


def _scenarios(spark: SparkSession) -> DataFrame:
    """Return the scenarios as a table to join: as expressions, Spark would repeat them at each use."""
    table = pa.Table.from_pylist(
        [asdict(scenario) | {"scenario": number} for number, scenario in enumerate(_SCENARIOS)]
    )
    # the other branches have no outcomes, so Arrow knows no type of them
    others = table["others"].cast(table["first"].type)
    table = table.set_column(table.column_names.index("others"), "others", others)
    return sf.broadcast(spark.createDataFrame(table))


def _transactions(spark: SparkSession, plan: FleetPlan) -> DataFrame:
    thousandth = sf.floor(_chance(plan, "story", "n") * 1_000)
    usual = sf.lit(0)
    edge = 1_000
    for number, scenario in enumerate(ORDINARY[1:], 1):
        usual = sf.when((thousandth < edge) & (thousandth >= edge - scenario.share), number).otherwise(usual)
        edge -= scenario.share
    injected = len(INJECTED) * plan.anomalies
    chosen = usual
    if injected:
        every = plan.transactions // injected
        turn = sf.floor(sf.col("n") / every)
        chosen = sf.when(
            (sf.col("n") % every == 0) & (turn < injected), sf.lit(len(ORDINARY)) + turn % len(INJECTED)
        ).otherwise(usual)
    span = plan.days * 86_400 - 3 * 86_400
    begun_before = 86_400.0 + (1 - (sf.col("n") + _chance(plan, "begin", "n")) / plan.transactions) * span
    youngest, oldest = (sf.get("age", sf.lit(number)) for number in (0, 1))
    ago = sf.coalesce(youngest + (oldest - youngest) * _chance(plan, "age", "n"), begun_before)
    least, most = sf.col("least"), sf.col("most")
    count = least + sf.floor((most - least + 1) * sf.pow(_chance(plan, "branches", "n"), sf.lit(3.0)))
    gtrid = sf.concat_ws(".", "tm", sf.lit(str(plan.seed)), sf.lower(sf.conv("n", 10, 36))).cast("binary")
    numbers = spark.range(plan.transactions).select(sf.col("id").alias("n"))
    return (
        numbers.select("n", chosen.cast("bigint").alias("scenario"))
        .join(_scenarios(spark), "scenario")
        .withColumn("tm", sf.concat(sf.lit("tm"), sf.floor(_chance(plan, "tm", "n") * plan.managers)))
        .withColumn("gtrid", gtrid)
        .withColumns(
            {
                "begun": sf.lit(plan.rules.as_of) - (ago * MICROS).cast("bigint"),
                "count": count.cast("int"),
                "format_id": sf.lit(4_660).cast("bigint"),
                "same_xid": _chance(plan, "same xid", "n") < 0.1,
                "fails_over": _chance(plan, "fail-over", "n") < 0.5,
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
        .withColumn("ahead", _offset(plan, "rm"))
    )


def _offset(plan: FleetPlan, *columns: str) -> Column:
    """Return the microseconds by which a clock is ahead; see :func:`_chance`."""
    return ((_chance(plan, "clock", *columns) * 2 - 1) * plan.skew * MICROS).cast("bigint")


def _uuid(*columns: Column | str) -> Column:
    digits = sf.md5(sf.concat_ws("/", *columns).cast("binary"))
    edges = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    return sf.concat_ws("-", *(sf.substring(digits, start, length) for start, length in edges))


def _events(branches: DataFrame, plan: FleetPlan) -> DataFrame:
    lines = sf.when(sf.col("branch") == 0, sf.col("first")).otherwise(sf.col("others"))
    steps = branches.select("*", sf.posexplode(lines).alias("nth", "step"))
    own = sf.when(sf.col("fails_over") & (sf.col("nth") > 0), _offset(plan, "n", "branch", "nth"))
    at = sf.col("begun") + (sf.col("step.after") * MICROS).cast("bigint") + sf.coalesce(own, "ahead")
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
        # some logs have no format id
        sf.when(sf.pmod(sf.col("n"), sf.lit(100)) != 7, sf.col("format_id")).alias("format_id"),
        "gtrid",
        sf.col("choice").alias("decision"),
        sf.timestamp_micros(sf.col("begun") + (sf.col("decided_after") * MICROS).cast("bigint")).alias("at"),
        "finished",
        sf.concat(sf.lit("log of "), sf.col("tm")).alias("source"),
    ).where(sf.col("decision").isNotNull())
