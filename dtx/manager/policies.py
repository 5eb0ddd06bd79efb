"""Policies: what happens to branches that have been prepared for long and that nobody asks about.

Theory of operation. A policy decides as an operator would, by the same path; so the question is only how old a branch
is. A clock that jumps must not make all of them old at once, and no clock of one machine is to be believed alone:

- a branch is as old as the database's clock says, and
- one that was prepared while this dtx was the active one is also as old as this dtx has seen it, by a clock that
  nobody sets;
- for one that was there before, what the database's clock has gained on that clock since dtx looked first is taken off;
- dtx waits a while after it has become the active one: transaction managers come back first;
- while the clock of dtx's own machine and the database's disagree, nothing is decided; and never more than some
  branches a minute, so that people can see what happens, and stop it.
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
from dtx.store.slices import in_turns
from dtx.telemetry import Metrics, get_logger
from dtx.xa.codes import XaError
from dtx.xa.model import State

_log = get_logger(part="policies")

PAUSE: Final = 5.0
"""Seconds between two looks, or a fifth of the shortest time that is set."""
GRACE: Final = 300.0
"""Seconds after dtx has become the active one in which nothing is decided, unless a policy's own time is shorter."""
MOST_A_MINUTE: Final = 60
"""Branches that all policies together decide in a minute."""
DISAGREEMENT: Final = 60.0
"""Seconds between dtx's wall clock and the database's beyond which neither is believed."""
TOLERANCE: Final = 2.0
"""Seconds that the database's clock may gain: it is being slewed, and asking takes time."""
_MOST_ASKED: Final = 1_000
_MOST_TOLD: Final = 50
"""Branches that are named in the log in one look; the others are counted."""


class Log(Protocol):
    """What policies ask the log."""

    async def clock(self) -> float:
        """The time of the database, seconds since the epoch."""

    async def of_ids(self, ids: Sequence[UUID]) -> list[AgedBranch]:
        """Those of *ids* that are prepared."""

    async def older_than(self, seconds: float, limit: int) -> tuple[int, list[AgedBranch]]:
        """How many votes are older than *seconds*, and the oldest *limit* of them."""


Decide = Callable[[Policy, AgedBranch], Awaitable[str]]
"""Carries out what a policy says about a branch, as it is in that version; returns the answer, or raises XaError."""


class Policies:
    """Looks for branches that are due, for ever.

    Args:
        policies: what is decided.
        alert_after: seconds after which a prepared branch is told of; 0 for never.
        entries: asks for all branches that are known.
        active: whether this dtx is the active one, and takes orders.
        log: is asked for ages.
        decide: see :data:`Decide`.
        metrics: numbers.
        clock: seconds that only grow.
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
        """The database's clock less the steady one, when it was looked at first."""
        self._seen: dict[UUID, tuple[Policy, float]] = {}
        """Since when each branch that is meant has been seen to be prepared; those that were there before: for ever."""
        self._told: set[UUID] = set()
        self._decided: deque[float] = deque()
        times = [alert_after, *(policy.after for policy in policies)]
        self._pause = min([PAUSE, *(seconds / 5 for seconds in times if seconds)])

    async def watch(self) -> None:
        """Look now and then, whatever goes wrong."""
        while True:
            try:
                await self.look()
            except LogError as error:
                _log.warning("policies cannot look at the log", reason=str(error))
            except Exception:  # noqa: BLE001 - logged; one look that fails stops no other
                _log.exception("policies failed")
            await asyncio.sleep(self._pause)

    async def look(self) -> None:
        """Tell of what is overdue, and decide what is due.

        Raises:
            LogError: the log does not say.
        """
        if not self._active():
            self._metrics.overdue.set(0)
            return
        if self._alert_after:
            await self._alert()
        if self._by_kind:
            await self._judge()

    async def _alert(self) -> None:
        count, oldest = await self._log.older_than(self._alert_after, _MOST_TOLD)
        self._metrics.overdue.set(count)
        for due in oldest:
            if due.id not in self._told:
                _log.warning(
                    "branch has been prepared for long",
                    xid=due.xid, vhost=due.vhost, user=due.owner, branch=due.id, seconds=round(due.age),
                )  # fmt: skip
                self._metrics.policy_actions["alert", "done"].inc()
        self._told = {due.id for due in oldest}

    async def _judge(self) -> None:
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
            _log.warning("policies rest: the clocks of this machine and of the database disagree", seconds=behind)
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
        """See which branches are meant; those that are new have been seen since *now*."""
        seen: dict[UUID, tuple[Policy, float]] = {}
        async for entry in in_turns(self._entries()):
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
                "policies rest: they have decided as many branches as they may in a minute", decided=len(decided)
            )
            return False
        decided.append(now)
        return True

    async def _carry_out(self, policy: Policy, found: AgedBranch) -> None:
        try:
            answer = await self._decide(policy, found)
        except XaError as error:
            self._seen[found.id] = policy, self._clock()  # it has changed, or is being worked on: not at once again
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
