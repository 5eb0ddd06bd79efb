"""Mutations of dtx in pages of recover, tombstones, suspended branches and timeouts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.branches import Branches
from dtx.manager.maintenance import Maintenance
from dtx.manager.scan import Scan
from dtx.server import demarcation
from dtx.server.coordination import CoordinationHandler
from dtx.server.demarcation import DemarcationHandler
from dtx.wire.amqp09 import methods
from dtx.xa import branch
from dtx.xa.codes import XaFlag
from dtx.xa.model import Answer, Association, ChannelLost, Happened, Operation, end_operation
from dtx.xa.model import Demarcation as Demarcated
from dtx.xa.table import ASSOCIATIONS, TRANSITIONS
from dtx.xa.xid import Xid
from tests.evidence.sim.mutations import Change, Mutation
from tests.evidence.sim.run import Shape

_EXPLORED: Final = Shape(troubles=0, applications=1, explorers=3, seconds=10.0)
_HOARDED: Final = Shape(troubles=0, applications=1, hoards=True, seconds=4.0)


def _skipped() -> Sequence[Change]:
    """A page of recover skips one xid after the page before."""
    turn = Scan.next

    def hasty(self: Scan, fits: Callable[[Sequence[Xid], int], int], *, end: bool) -> Sequence[Xid]:
        batch = turn(self, fits, end=end)
        self._position += bool(self._snapshot)
        return batch

    return [(Scan, "next", hasty)]


def _no_snapshot() -> Sequence[Change]:
    """A scan continues in a list that is newer than its start."""
    recover = CoordinationHandler._recover

    async def fresh(self: CoordinationHandler, call: methods.DtxRecover, who: Requester, frame_max: int) -> bytes:
        if self.scan is not None and not call.startscan:
            self.scan._snapshot = await self._manager.in_doubt(who)
        return await recover(self, call, who, frame_max)

    return [(CoordinationHandler, "_recover", fresh)]


def _always_the_first_page() -> Sequence[Change]:
    """A client that starts and ends a scan with each call always gets the first page."""
    turn = Scan.next

    def forgetful(self: Scan, fits: Callable[[Sequence[Xid], int], int], *, end: bool) -> Sequence[Xid]:
        batch = turn(self, fits, end=end)
        self.after = None
        return batch

    return [(Scan, "next", forgetful)]


def _tombstones_stay() -> Sequence[Change]:
    """A tombstone answers every rollback, not only the first."""
    take = Branches._take_tombstone

    def lasting(self: Branches, who: Requester, xid: Xid) -> XaFlag | None:
        tombstone = self._tombstones.get((who.vhost, xid))
        flag = take(self, who, xid)
        if tombstone is not None:
            self._tombstones[who.vhost, xid] = tombstone
        return flag

    return [(Branches, "_take_tombstone", lasting)]


def _no_tombstones() -> Sequence[Change]:
    """A branch that voted no is unknown to the rollback after the vote."""
    return [(Branches, "leave_tombstone", lambda *_: None)]


def _tombstones_outlive() -> Sequence[Change]:
    """A new branch with a used xid finds the old tombstone."""
    return [(Branches, "reuse", lambda *_: None)]


def _suspended_is_ended() -> Sequence[Change]:
    """A suspended branch counts as ended: it can vote."""
    suspends = Association.ASSOCIATED, Operation.SUSPEND
    return [(branch, "ASSOCIATIONS", ASSOCIATIONS | {suspends: Association.NONE})]


def _anybody_resumes() -> Sequence[Change]:
    """A channel resumes a branch that another one has suspended."""
    resumes = Association.NONE, Operation.RESUME
    return [(branch, "ASSOCIATIONS", ASSOCIATIONS | {resumes: Association.ASSOCIATED})]


def _resumed_in_name() -> Sequence[Change]:
    """Work after resume is not part of the branch."""
    run = DemarcationHandler._run

    def absent(
        self: DemarcationHandler, call: methods.DtxStart | methods.DtxEnd, who: Requester, is_new: bool
    ) -> bytes | None:
        frame = run(self, call, who, is_new)
        if isinstance(call, methods.DtxStart) and call.resume:
            self.branch = None
        return frame

    return [(DemarcationHandler, "_run", absent)]


def _suspended_in_name() -> Sequence[Change]:
    """Work while the branch is suspended is part of it."""
    run = DemarcationHandler._run

    def present(
        self: DemarcationHandler, call: methods.DtxStart | methods.DtxEnd, who: Requester, is_new: bool
    ) -> bytes | None:
        worked_for = self.branch
        if isinstance(call, methods.DtxStart):
            self.branch = None
        frame = run(self, call, who, is_new)
        if isinstance(call, methods.DtxEnd) and call.suspend:
            self.branch = worked_for
        return frame

    return [(DemarcationHandler, "_run", present)]


def _failure_is_success() -> Sequence[Change]:
    """end(fail) has the effect of end."""

    def mild(*, fail: bool, suspend: bool) -> Operation:
        return end_operation(fail=False, suspend=suspend)

    return [(demarcation, "end_operation", mild)]


def _doomed_is_joined() -> Sequence[Change]:
    """A join of a rollback-only branch is answered with xa-ok."""
    joins = {
        key: replace(rule, effects=(Answer(flag=XaFlag.OK),))
        for key, rule in TRANSITIONS.items()
        if key[1] is Operation.JOIN
    }
    return [(branch, "TRANSITIONS", TRANSITIONS | joins)]


def _death_is_an_end() -> Sequence[Change]:
    """The death of a channel in a branch counts as end."""
    apply = Branches.apply_event

    def mild(self: Branches, entry: BranchRuntime, event: ChannelLost | Happened) -> None:
        if isinstance(event, ChannelLost) and event.channel in entry.branch.associations and not entry.busy:
            ended = Demarcated(operation=Operation.END, channel=event.channel)
            entry.branch, _ = branch.step(entry.branch, ended, self._clock())
        else:
            apply(self, entry, event)

    return [(Branches, "apply_event", mild)]


def _timeout_in_name() -> Sequence[Change]:
    """A new timeout is returned, but the old one applies."""
    set_timeout: Any = BranchManager.set_timeout

    async def deaf(self: BranchManager, who: Requester, xid: Xid, seconds: int) -> None:
        entry = await self.find(who, xid)
        deadline = entry.branch.deadline
        await set_timeout(self, who, xid, seconds)
        if deadline is not None:
            entry.branch = entry.branch._replace(deadline=deadline)

    return [(BranchManager, "set_timeout", deaf)]


def _no_ceiling() -> Sequence[Change]:
    """A timeout may exceed the maximum."""
    set_timeout: Any = BranchManager.set_timeout

    async def generous(self: BranchManager, who: Requester, xid: Xid, seconds: int) -> None:
        kept = self.limits
        self.limits = replace(kept, max_timeout=1 << 31)
        try:
            await set_timeout(self, who, xid, seconds)
        finally:
            self.limits = kept

    return [(BranchManager, "set_timeout", generous)]


def _strikes_early() -> Sequence[Change]:
    """A timeout ends a branch 0.7 s early."""
    due_operation = Maintenance._due_operation
    return [(Maintenance, "_due_operation", lambda self, entry, now: due_operation(self, entry, now + 0.7))]


def _never_strikes() -> Sequence[Change]:
    """Timeouts have no effect."""
    return [(Maintenance, "_age", lambda *_: None)]


_PAGES: Final = (
    ("a page of recover is not begun where the last one ended", _skipped),
    ("a scan goes on in another list", _no_snapshot),
    ("each scan of one call is its first page", _always_the_first_page),
)
_ANSWERS: Final = (
    ("a tombstone answers for ever", _tombstones_stay),
    ("there are no tombstones", _no_tombstones),
    ("a tombstone outlives its xid", _tombstones_outlive),
    ("what is suspended is ended", _suspended_is_ended),
    ("anybody resumes", _anybody_resumes),
    ("work behind a resume is nobody's", _resumed_in_name),
    ("work is the branch's while it is suspended", _suspended_in_name),
    ("end with fail is end", _failure_is_success),
    ("what is doomed is joined", _doomed_is_joined),
    ("a death is an end", _death_is_an_end),
    ("a timeout is told and does not count", _timeout_in_name),
    ("a timeout has no ceiling", _no_ceiling),
    ("timeouts strike early", _strikes_early),
    ("timeouts never strike", _never_strikes),
)
DEMARCATION: Final = tuple(
    Mutation(name=f"{name}, {mode}", changes=changes, shape=replace(shape, broker=mode == "alongside"), seeds=40)
    for mode in ("alongside", "standalone")
    for shape, mistakes in ((_HOARDED, _PAGES), (_EXPLORED, _ANSWERS))
    for name, changes in mistakes
)
"""Each in both modes: their channel handlers have little code in common."""
