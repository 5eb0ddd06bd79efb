"""Policies: which branches are due, by which clock, and what must not make a branch due."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from dtx.config.rules import Policy, parse_policies
from dtx.log.reader import AgedBranch
from dtx.log.records import BranchRecord, LogState
from dtx.manager import policies
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.policies import GRACE, MOST_A_MINUTE, Policies
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import Xid
from tests.support.branches import a_branch

HOUR = 3600.0
ORPHANS = "orphans rollback format=1 vhost=/ after=1h"


@dataclass
class World:
    """Clocks, and the branches that policies see."""

    steady: float = 1_000.0
    wall: float = 1_700_000_000.0
    ahead: float = 0.0
    """How far the database's clock is ahead, in seconds."""
    active: bool = True
    records: list[BranchRecord] = field(default_factory=list)
    decided: list[tuple[str, int]] = field(default_factory=list)
    refused: set[UUID] = field(default_factory=set)

    def passes(self, seconds: float) -> None:
        self.steady += seconds
        self.wall += seconds

    def prepared(self, *, ago: float = 0.0, format_id: int = 1, vhost: str = "/", **more: object) -> BranchRecord:
        xid = Xid(format_id, len(self.records).to_bytes(4, "big"))
        record = a_branch(xid=xid, vhost=vhost, prepared_at=self.wall - ago, started_at=self.wall - ago, **more)
        self.records.append(record)
        return record

    async def clock(self) -> float:
        return self.wall + self.ahead

    async def of_ids(self, ids: Sequence[UUID]) -> list[AgedBranch]:
        return [self._due(record) for record in self.records if record.id in ids]

    async def older_than(self, seconds: float, limit: int) -> tuple[int, list[AgedBranch]]:
        found = [due for due in map(self._due, self.records) if due.age >= seconds]
        return len(found), found[:limit]

    def _due(self, record: BranchRecord) -> AgedBranch:
        assert record.prepared_at is not None
        age = self.wall + self.ahead - record.prepared_at
        return AgedBranch(
            id=record.id, vhost=record.vhost, xid=record.xid, owner=record.owner, version=record.version, age=age
        )

    async def decide(self, policy: Policy, due: AgedBranch) -> str:
        if due.id in self.refused:
            raise XaError(ReplyCode.PRECONDITION_FAILED, "the branch has changed")
        (record,) = [record for record in self.records if record.id == due.id]
        self.records.remove(record)
        self.decided.append((policy.name, due.xid.format_id))
        return "xa-heurrb"

    def watch(self, *texts: str, alert_after: float = 0.0, metrics: Metrics | None = None) -> Policies:
        return Policies(
            parse_policies(texts or (ORPHANS,)),
            alert_after,
            lambda: map(BranchRuntime.restored, self.records),
            lambda: self.active,
            self,
            self.decide,
            metrics or Metrics(),
            clock=lambda: self.steady,
            wall=lambda: self.wall,
        )


async def test_a_branch_is_decided_only_when_old_enough() -> None:
    world = World()
    watch = world.watch()
    await watch.check()
    world.prepared()
    await watch.check()
    world.passes(HOUR - 1)
    await watch.check()
    assert world.decided == []
    world.passes(1)
    await watch.check()
    assert world.decided == [("orphans", 1)]


async def test_branches_of_others_are_never_meant() -> None:
    """Not branches of another vhost or format id, younger ones, or ones that are not prepared."""
    world = World()
    world.prepared(ago=9 * HOUR, format_id=2)
    world.prepared(ago=9 * HOUR, vhost="other")
    world.prepared(ago=9 * HOUR, state=LogState.COMMITTING)
    world.prepared(ago=0.5 * HOUR)
    mine = world.prepared(ago=9 * HOUR)
    watch = world.watch()
    for _ in range(3):
        await watch.check()
        world.passes(GRACE)
    assert len(world.decided) == 1
    assert mine not in world.records


async def test_earlier_branches_wait_for_returning_transaction_managers() -> None:
    world = World()
    world.prepared(ago=9 * HOUR)
    watch = world.watch()
    await watch.check()
    world.passes(GRACE - 1)
    await watch.check()
    assert world.decided == []
    world.passes(1)
    await watch.check()
    assert len(world.decided) == 1


async def test_a_database_clock_that_jumps_makes_nothing_old() -> None:
    world = World()
    world.prepared(ago=0.5 * HOUR)
    watch = world.watch()
    await watch.check()
    world.prepared()
    world.passes(GRACE)
    world.ahead = world.wall  # centuries
    await watch.check()
    world.ahead = 30.0  # a jump that the wall clocks agree with, nearly
    world.passes(HOUR - 2 * GRACE)
    await watch.check()
    assert world.decided != []  # the one that is: 0.5 hours and 0.9 hours
    assert len(world.decided) == 1


async def test_a_jump_of_all_wall_clocks_makes_nothing_old() -> None:
    """Database and dtx share a machine whose clock is set. Only the steady clock is unchanged."""
    world = World()
    world.prepared(ago=0.5 * HOUR)
    watch = world.watch()
    await watch.check()
    world.prepared()
    world.passes(GRACE)
    world.wall += 1000 * HOUR
    await watch.check()
    assert world.decided == []
    world.passes(0.5 * HOUR)
    await watch.check()
    assert len(world.decided) == 1, "the older one is an hour old by now"


async def test_after_a_wrong_clock_age_counts_from_first_sight() -> None:
    world = World()
    watch = world.watch()
    await watch.check()
    world.passes(GRACE)
    world.prepared(ago=99 * HOUR)
    await watch.check()
    world.passes(HOUR - 1)
    await watch.check()
    assert world.decided == []
    world.passes(1)
    await watch.check()
    assert len(world.decided) == 1


async def test_nothing_is_decided_without_the_lease() -> None:
    world = World()
    world.prepared(ago=9 * HOUR)
    watch = world.watch()
    await watch.check()
    world.passes(HOUR)
    world.active = False
    await watch.check()
    assert world.decided == []


async def test_only_so_many_are_decided_in_a_minute() -> None:
    world = World()
    for _ in range(MOST_A_MINUTE + 5):
        world.prepared(ago=9 * HOUR)
    watch = world.watch()
    await watch.check()
    world.passes(GRACE)
    await watch.check()
    world.passes(30)
    await watch.check()
    assert len(world.decided) == MOST_A_MINUTE
    world.passes(31)
    await watch.check()
    assert len(world.decided) == MOST_A_MINUTE + 5


async def test_a_branch_changed_meanwhile_is_skipped_and_counted() -> None:
    world = World()
    metrics = Metrics()
    record = world.prepared(ago=9 * HOUR)
    world.refused.add(record.id)
    watch = world.watch(metrics=metrics)
    await watch.check()
    world.passes(GRACE)
    await watch.check()
    await watch.check()
    assert 'dtx_policy_actions_total{action="rollback",result="refused"} 1.0' in metrics.render().decode()


async def test_each_policy_decides_its_own() -> None:
    world = World()
    world.prepared(ago=9 * HOUR, format_id=1)
    world.prepared(ago=9 * HOUR, format_id=7)
    watch = world.watch(ORPHANS, "jobs commit format=7,8 vhost=/ after=2h")
    await watch.check()
    world.passes(GRACE)
    await watch.check()
    assert sorted(world.decided) == [("jobs", 7), ("orphans", 1)]


async def test_overdue_branches_are_logged_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    metrics = Metrics()
    world.prepared(ago=9 * HOUR, format_id=5)
    world.prepared(format_id=5)
    monkeypatch.setattr(policies, "PAUSE", 0.0)
    watch = Policies((), HOUR, lambda: (), lambda: True, world, world.decide, metrics)
    await watch.check()
    await watch.check()
    text = metrics.render().decode()
    assert "dtx_policy_overdue_branches 1.0" in text
    assert 'dtx_policy_actions_total{action="alert",result="done"} 1.0' in text
    assert world.decided == []


async def test_a_look_that_fails_is_followed_by_another() -> None:
    world = World()
    looks = 0
    looked = asyncio.Event()

    async def clock() -> float:
        nonlocal looks
        looks += 1
        if looks == 3:
            looked.set()
        raise RuntimeError("the database is on fire")

    world.clock = clock  # type: ignore[method-assign]
    watch = world.watch("quick rollback format=1 vhost=/ after=1s")
    watch._pause = 0.0
    task = asyncio.create_task(watch.watch())
    async with asyncio.timeout(30):
        await looked.wait()
    task.cancel()


@pytest.mark.parametrize(
    "text",
    [
        "x", "x rollback", "x forget format=1 vhost=/ after=1h", "X rollback format=1 vhost=/ after=1h",
        "x rollback format=1 after=1h", "x rollback format= vhost=/ after=1h", "x rollback format=-1 vhost=/ after=1h",
        "x rollback format=4294967296 vhost=/ after=1h", "x rollback format=1 vhost=/ after=soon",
        "x rollback format=1 vhost=/ after=0", "x rollback format=1 vhost=/ after=1h color=red",
        "x rollback format=1 format=2 vhost=/ after=1h", "x rollback format=1 vhost='/ after=1h",
        f"{ORPHANS};{ORPHANS}", f"{ORPHANS};other commit format=2,1 vhost=/ after=2h",
    ],
)  # fmt: skip
def test_an_invalid_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"polic|duration"):
        parse_policies(text)


def test_a_policy_converts_to_its_text() -> None:
    (policy,) = parse_policies("x commit format=2,1 vhost='a b' after=2m")
    assert policy == Policy(name="x", action="commit", formats=frozenset({1, 2}), vhost="a b", after=120.0)
    assert parse_policies(str(policy)) == parse_policies((policy,)) == (policy,)
