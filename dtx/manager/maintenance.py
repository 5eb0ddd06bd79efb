"""Maintenance of branches without requests: after a restart, by timeout, and by expiry.

A branch that was decided or unfinished when the predecessor ended continues as soon as it is loaded. One whose
operation ended in a failed write is resumed after a while. Neither waits for a request of the transaction manager.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import LogError, TransactionLog
from dtx.log.records import BranchRecord
from dtx.manager.branch_persistence import DTX, BranchPersistence
from dtx.manager.branch_runtime import TAKING, UNFINISHED, BranchRuntime
from dtx.manager.branches import Branches
from dtx.manager.broker import UNDOING, unsure_units
from dtx.manager.effects import Effects, Reply
from dtx.manager.limits import Limits
from dtx.store.slices import in_slices
from dtx.telemetry import Metrics, get_logger
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.model import Event, Happened, Operation, Request, State

_log = get_logger(part="manager")

_TICK: Final = 0.25
"""Interval of checking timeouts; they are whole seconds, so this is precise enough."""
_PAUSE_OF_EACH: Final = 1e-5
"""Addition to that interval for each branch that has not voted. With very many branches timeouts are less precise, and
checks take at most a tenth of a processor."""
_AT_ONCE: Final = 25
"""Branches in one turn of the event loop: all may time out at the same time."""
_POLL: Final = 0.01
"""Seconds between two looks at branches that resume at the start."""
_REVIVE: Final = 5.0
"""Seconds after which a decided branch without an operation is resumed."""

Run = Callable[[BranchRuntime, Event, Reply, str], Coroutine[Any, Any, None]]
"""Runs an event on a branch, and answers with the result."""
Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a task of the manager."""


class Maintenance:
    """Loads the branches at startup, and maintains them until shutdown.

    Args:
        log: has the branches.
        durable: for the kind of store that has their messages.
        branches: gets the branches.
        effects: resumes interrupted operations.
        limits: of the manager.
        metrics: numbers.
        run: runs an event on a branch.
        spawn: runs a task in the background.
    """

    def __init__(
        self,
        log: TransactionLog,
        durable: BranchPersistence,
        branches: Branches,
        effects: Effects,
        limits: Limits,
        metrics: Metrics,
        run: Run,
        spawn: Spawn,
    ) -> None:
        self._log = log
        self._durable = durable
        self._branches = branches
        self._effects = effects
        self._limits = limits
        self._metrics = metrics
        self._run = run
        self._spawn = spawn
        self._clock = time.monotonic
        self._quiet_until = 0.0
        self._resumed: list[BranchRuntime] = []
        """Branches that were unfinished when they were loaded."""

    # -- restart

    async def load(self) -> None:
        """Load the log; resume every branch that was decided or unfinished when the predecessor ended.

        Returns as soon as all branches are known. Work at the broker goes on in the background; requests for such a
        branch wait for it.

        Raises:
            LogError: the log cannot be read, or has branches of the other mode.
        """
        pending: list[BranchRuntime] = []
        strangers = 0
        local = self._durable.local
        async for record in self._log.load(self._log.member):
            if (record.published is not None) is not local:
                strangers += 1
                continue
            self._restore(record, pending)
        if strangers:
            mode, remedy = ("a broker", "with") if local else ("dtx's own store", "without")
            raise LogError(
                f"{strangers} branches in the log have their messages in {mode}: start dtx {remedy} --broker and "
                "finish them, or give this dtx a resource manager name of its own (--rm)"
            )
        failpoint.at(Point.RESTART_LOADED)
        async for entry in in_slices(pending, _AT_ONCE):
            self._spawn(self._resume_operation(entry))
        _log.info("branches loaded", in_doubt=len(self._branches) - len(pending), unfinished=len(pending))

    async def take_over(self) -> None:
        """Load the branches that this member has taken from others, and resume those that were unfinished.

        Raises:
            LogError: the log cannot be read.
            XaError: 541, a branch with the xid of one of them is under way here. Call it again.
        """
        pending: list[BranchRuntime] = []
        before = len(self._branches)
        try:
            with self._branches.noting_ends() as ended:
                async for record in self._log.load(self._log.member):
                    known = self._branches.get(record.vhost, record.xid)
                    if known is not None and known.record is None and known.id != record.id not in ended:
                        await self._branches.give_way(known)
                    if record.id not in ended and self._branches.get(record.vhost, record.xid) is None:
                        self._restore(record, pending)
        finally:  # also after an error: the next attempt finds them known
            for entry in pending:
                self._spawn(self._resume_operation(entry))
        failpoint.at(Point.ADOPT_LOADED)
        _log.info("branches taken over", branches=len(self._branches) - before, unfinished=len(pending))

    def _restore(self, record: BranchRecord, pending: list[BranchRuntime]) -> None:
        """Add a branch of the log; if its operation is unfinished, claim it and append it to *pending*."""
        entry = BranchRuntime.restored(record)
        self._branches.add(entry)
        failpoint.at(Point.RESTART_ROW)
        self._durable.restore(entry, record)
        if entry.branch.state in UNFINISHED:
            self._resumed.append(entry)
            entry.claim()  # no other operation may run until this one has ended
            pending.append(entry)

    async def takings_decided(self, seconds: float) -> None:
        """Wait until all messages that branches have perhaps taken are taken or put back, at most *seconds*.

        Then no client gets a message from its queue that is put back as well.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.is_decided:  # noqa: ASYNC110 - seldom, and few
                    await asyncio.sleep(_POLL)

    @property
    def is_decided(self) -> bool:
        """Whether no loaded branch has perhaps taken messages."""
        self._resumed = [entry for entry in self._resumed if _is_undecided(entry)]
        return not self._resumed

    async def _resume_operation(self, entry: BranchRuntime) -> None:
        """Resume the operation that the predecessor began (the entry is claimed)."""
        failpoint.at(Point.RESTART_DECIDE_BEFORE)
        try:
            if entry.branch.state in TAKING and entry.cached is None:
                entry.cached = await self._effects.broker.read_work(entry)
            request = Request(operation=UNFINISHED[entry.branch.state], vote=self._durable.vote(entry))
            await self._effects.run(entry, request, self._reply(entry), DTX)
        except XaError as error:
            self._metrics.replays_failed.inc()
            _log.warning("branch could not be resumed", xid=entry.xid, vhost=entry.vhost, reason=error.reason)
        else:
            failpoint.at(Point.RESTART_DECIDE_AFTER)
        finally:
            self._branches.finish_operation(entry)

    # -- time

    async def watch(self) -> None:
        """Time out and expire branches, and resume interrupted ones, until cancelled."""
        revive_at = self._clock() + _REVIVE
        while True:
            await asyncio.sleep(max(_TICK, len(self._branches.open) * _PAUSE_OF_EACH))
            now = self._clock()
            async for entry in in_slices(await self._due(now), _AT_ONCE):
                self._age(entry, now)
            if now >= revive_at:
                revive_at = now + _REVIVE
                await self._resume_decided()
                await self._branches.clear_tombstones()

    def _reply(self, entry: BranchRuntime) -> Reply:
        log_error = _log_error(entry)

        def reply(answer: XaFlag | XaError) -> None:
            if isinstance(answer, XaError):
                self._metrics.replays_failed.inc()
            log_error(answer)

        return reply

    async def _due(self, now: float) -> list[BranchRuntime]:
        return [entry async for entry in in_slices(self._branches.open) if self._due_operation(entry, now)]

    def _due_operation(self, entry: BranchRuntime, now: float) -> Operation | None:
        branch = entry.branch
        since = self._branches.open.get(entry)
        if since is None or not entry.idle:
            return None
        if branch.state in (State.ROLLBACK_ONLY, State.TIMED_OUT):
            if not since:
                self._branches.open[entry] = now
            elif now - since > self._limits.tombstone_ttl and not branch.associations:
                return Operation.EXPIRE
        elif branch.deadline is not None and max(branch.deadline, self._quiet_until) <= now:
            return Operation.TIMEOUT
        return None

    def _age(self, entry: BranchRuntime, now: float) -> None:
        operation = self._due_operation(entry, now)  # other tasks have run since the first check
        if operation is Operation.TIMEOUT:
            _log.info("branch timed out", xid=entry.xid, vhost=entry.vhost, timeout=entry.branch.timeout)
        if operation is not None:
            self._begin(entry, operation)

    def _begin(self, entry: BranchRuntime, operation: Operation) -> None:
        log_error = _log_error(entry)

        def reply(answer: XaFlag | XaError) -> None:
            self._quiet_until = self._clock() + _REVIVE  # do not try each branch in each tick while the log is away
            log_error(answer)

        entry.claim()  # now, not when the task runs
        self._spawn(self._run(entry, Happened(operation=operation, vote=self._durable.vote(entry)), reply, DTX))

    async def _resume_decided(self) -> None:
        """Resume decided branches whose operation ended in a failed log write.

        A stuck branch waits for a request, unless phase two has finished since, and only the log does not have that.
        Then the client was told that it is done, and will not ask again.
        """
        async for entry in in_slices(self._branches, _AT_ONCE):
            if entry.busy or not self._branches.has(entry):
                continue
            if entry.uncertain:
                self._spawn(self._recheck(entry))
            else:
                self._resume(entry)

    def _resume(self, entry: BranchRuntime) -> None:
        if entry.branch.state in UNFINISHED and (entry.applied or not (entry.record and entry.record.stuck)):
            entry.claim()
            self._spawn(self._resume_operation(entry))

    async def _recheck(self, entry: BranchRuntime) -> None:
        try:
            if entry.uncertain and not entry.busy:
                await self._branches.reread(entry)
        except XaError as error:
            _log.warning("branch is still in doubt", xid=entry.xid, vhost=entry.vhost, reason=error.reason)
        else:
            if entry.idle and self._branches.has(entry):
                self._resume(entry)


def _log_error(entry: BranchRuntime) -> Reply:
    def reply(answer: XaFlag | XaError) -> None:
        if isinstance(answer, XaError):
            _log.warning("branch could not be finished", xid=entry.xid, vhost=entry.vhost, reason=answer.reason)

    return reply


def _is_undecided(entry: BranchRuntime) -> bool:
    """Whether clients may get a message from its queue that the branch puts back, or has taken."""
    if entry.branch.state not in UNDOING:
        return entry.branch.state in TAKING
    record = entry.record
    return record is not None and bool(unsure_units(record)) and not record.stuck and not entry.applied
