"""Policies: automatic decisions about branches that have been prepared for long, without requests.

Theory of operation. A policy decides as an operator would, by the same path. So the only question is the age of a
branch. A clock that jumps must not make all branches old at once, and the clock of one machine is never enough:

- a branch is as old as the database's clock says, and
- a branch prepared while this dtx was active must also be as old by a steady clock of this dtx, which cannot be set;
- for an earlier branch, the time that the database's clock has gained on the steady one since the first check is
  subtracted;
- dtx waits a while after it has become active: transaction managers reconnect first;
- while the clocks of dtx's machine and of the database disagree, nothing is decided. There is also a limit of branches
  in a minute, so that people can see the decisions, and stop them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol
from uuid import UUID

from dtx.config.rules import Policy
from dtx.log.api import LogError
from dtx.log.lease import clock as steady_clock
from dtx.log.reader import AgedBranch
from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.slices import in_slices
from dtx.telemetry import Metrics, get_logger
from dtx.xa.codes import XaError
from dtx.xa.model import State

_log = get_logger(part="policies")

PAUSE: Final = 5.0
"""Interval of checks, seconds; or a fifth of the shortest time that is set."""
GRACE: Final = 300.0
"""Seconds after dtx has become active in which nothing is decided, unless a policy's own time is shorter."""
MOST_A_MINUTE: Final = 60
"""Branches that all policies together may decide in a minute."""
DISAGREEMENT: Final = 60.0
"""Difference, seconds, between dtx's wall clock and the database's above which nothing is decided."""
TOLERANCE: Final = 2.0
"""Seconds that the database's clock may gain: it may be slewed, and queries take time."""
_MOST_ASKED: Final = 1_000
_MOST_REPORTED: Final = 50
"""Branches that one check names in the log; the others are counted."""


class Log(Protocol):
    """The queries of policies to the log."""

    async def clock(self) -> float:
        """The time of the database, seconds since the epoch."""

    async def of_ids(self, ids: Sequence[UUID]) -> list[AgedBranch]:
        """Those of *ids* that are prepared."""

    async def older_than(self, seconds: float, limit: int) -> tuple[int, list[AgedBranch]]:
        """The number of votes older than *seconds*, and the oldest *limit* of these branches."""


Decide = Callable[[Policy, AgedBranch], Awaitable[str]]
"""Carries out a policy for a branch, if it still has this version; returns the answer, or raises XaError."""


class Policies:
    """Finds branches that are due, and decides them.

    Args:
        policies: the policies.
        alert_after: seconds after which a prepared branch is reported; 0 for never.
        entries: returns all known branches.
        active: whether this dtx is active and accepts orders.
        log: for ages.
        decide: see :data:`Decide`.
        metrics: numbers.
        clock: seconds of a steady clock.
        wall: the wall clock of this machine, seconds since the epoch.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        alert_after: float,
        entries: Callable[[], Iterable[BranchRuntime]],
        active: Callable[[], bool],
        log: Log,
        decide: Decide,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = steady_clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._by_kind = {(policy.vhost, number): policy for policy in policies for number in policy.formats}
        self._alert_after = alert_after
        self._entries = entries
        self._active = active
        self._log = log
        self._decide = decide
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._began: float | None = None
        self._database_ahead = 0.0
        """The database's clock minus the steady one, at the first check."""
        self._seen: dict[UUID, tuple[Policy, float]] = {}
        """For each branch with a policy, since when it was seen prepared; for earlier ones, since minus infinity."""
        self._reported: set[UUID] = set()
        self._decided: deque[float] = deque()
        times = [alert_after, *(policy.after for policy in policies)]
        self._pause = min([PAUSE, *(seconds / 5 for seconds in times if seconds)])

    async def watch(self) -> None:
        """Check at intervals, also after errors, until cancelled."""
        while True:
            try:
                await self.check()
            except LogError as error:
                _log.warning("policies cannot read the log", reason=str(error))
            except Exception:  # noqa: BLE001 - logged; a failed check does not stop later ones
                _log.exception("policies failed")
            await asyncio.sleep(self._pause)

    async def check(self) -> None:
        """Report overdue branches, and decide those that are due.

        Raises:
            LogError: the log cannot be read.
        """
        if not self._active():
            self._metrics.overdue.set(0)
            return
        if self._alert_after:
            await self._alert()
        if self._by_kind:
            await self._decide_due()

    async def _alert(self) -> None:
        count, oldest = await self._log.older_than(self._alert_after, _MOST_REPORTED)
        self._metrics.overdue.set(count)
        for due in oldest:
            if due.id not in self._reported:
                _log.warning(
                    "branch has been prepared for long",
                    xid=due.xid, vhost=due.vhost, user=due.owner, branch=due.id, seconds=round(due.age),
                )  # fmt: skip
                self._metrics.policy_actions["alert", "done"].inc()
        self._reported = {due.id for due in oldest}

    async def _decide_due(self) -> None:
        database = await self._log.clock()
        now = self._clock()
        if self._began is None:
            self._began, self._database_ahead = now, database - now
            await self._notice(float("-inf"))
        else:
            await self._notice(now)
        due = [branch for branch, (policy, since) in self._seen.items() if self._is_due(policy, since, now)]
        if not due:
            return
        behind = self._wall() - database
        if abs(behind) > DISAGREEMENT:
            _log.warning("policies are paused: the clocks of this machine and of the database disagree", seconds=behind)
            return
        gained = database - now - self._database_ahead
        for found in await self._log.of_ids(due[:_MOST_ASKED]):
            policy, _ = self._seen[found.id]
            if found.age - (gained if gained > TOLERANCE else 0.0) < policy.after:
                continue
            if not self._may_decide(now) or not self._active():
                return
            await self._carry_out(policy, found)

    async def _notice(self, now: float) -> None:
        """Find the branches with a policy; new ones are seen since *now*."""
        seen: dict[UUID, tuple[Policy, float]] = {}
        async for entry in in_slices(self._entries()):
            if entry.branch.state is State.PREPARED:
                policy = self._by_kind.get((entry.vhost, entry.xid.format_id))
                if policy is not None:
                    seen[entry.id] = self._seen.get(entry.id, (policy, now))
        self._seen = seen

    def _is_due(self, policy: Policy, since: float, now: float) -> bool:
        assert self._began is not None
        return now - since >= policy.after and now - self._began >= min(GRACE, policy.after)

    def _may_decide(self, now: float) -> bool:
        decided = self._decided
        while decided and now - decided[0] > 60.0:
            decided.popleft()
        if len(decided) >= MOST_A_MINUTE:
            _log.warning(
                "policies are paused: they have decided the maximum of branches in a minute", decided=len(decided)
            )
            return False
        decided.append(now)
        return True

    async def _carry_out(self, policy: Policy, found: AgedBranch) -> None:
        try:
            answer = await self._decide(policy, found)
        except XaError as error:
            self._seen[found.id] = policy, self._clock()  # changed, or has an operation: wait before the next try
            self._metrics.policy_actions[policy.action, "refused"].inc()
            _log.warning(
                "a policy could not decide", policy=policy.name, xid=found.xid, vhost=found.vhost, reason=error.reason
            )
        else:
            self._metrics.policy_actions[policy.action, "done"].inc()
            _log.warning(
                "a policy has decided", policy=policy.name, action=policy.action, xid=found.xid, vhost=found.vhost,
                answer=answer,
            )  # fmt: skip
