"""Mutations of members: leases, takeovers, and requests that one member forwards to another."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from dtx.log import lease
from dtx.log.membership import Member, Membership
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord
from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.branches import Elsewhere
from dtx.manager.maintenance import Maintenance
from dtx.server.members import forwarding
from dtx.server.members.client import PeerLost, PeerUnreachable
from dtx.server.members.forwarding import Forwarding
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.members import MemberTable, Takeover
from tests.evidence.sim.mutations import Change, Mutation
from tests.evidence.sim.run import Shape

_MEMBERS: Final = Shape(instances=3, applications=4, troubles=10, database=0.01, joins=0.1, members=True)
_SEPARATED: Final = Shape(
    instances=3, applications=4, troubles=10, database=0.01, joins=0.1, members=True,
    kinds=("two dtx are separated", "dtx is killed", "dtx is stopped"),
)  # fmt: skip
_STALLED: Final = Shape(
    instances=3, applications=4, troubles=14, database=0.01, joins=0.1, members=True,
    kinds=("dtx is stopped", "a dtx and the database are separated"),
)  # fmt: skip
_CUT: Final = Shape(
    instances=3, applications=4, troubles=40, database=0.01, joins=0.1, members=True,
    kinds=("a connection is cut off", "the active dtx is killed at a write"),
)  # fmt: skip
_ENDING: Final = Shape(
    instances=3, applications=4, troubles=14, database=0.01, joins=0.1, members=True,
    kinds=("the active dtx is killed at a write", "dtx is killed", "dtx stops in order"),
)  # fmt: skip

_LOST: Final = Shape(
    instances=3, applications=6, troubles=60, database=0.05, joins=0.0, members=True,
    kinds=("a write is neither done nor answered", "a write is done and not answered"),
)  # fmt: skip


def _not_fenced() -> Sequence[Change]:
    """A member whose branches were taken can still write."""
    return [(MemberTable, "writer", lambda self, epoch: self.former.get(epoch))]


def _taken_early() -> Sequence[Change]:
    """Branches are taken from a member whose lease has not run out."""

    def gone(self: MemberTable, gone: Sequence[UUID], dead: Sequence[UUID]) -> list[UUID]:
        return [instance for instance in (*gone, *dead) if instance in self.rows]

    read = Membership._read

    async def impatient(self: Membership, session: Any) -> tuple[Member, ...]:
        members = await read(self, session)
        self.others = tuple(
            Member(
                instance=member.instance, holder=member.holder, address=member.address,
                expired=member.expired or lease.clock() % 10 < 1, dead=member.dead,
            )
            for member in members
        )  # fmt: skip
        return self.others

    return [(MemberTable, "_gone", gone), (Membership, "_read", impatient)]


def _not_moved() -> Sequence[Change]:
    """The row of a member is deleted, and its branches stay with it."""

    def nothing(self: MemberTable, takeover: Takeover) -> list[UUID]:
        return []

    return [(MemberTable, "_orphans", nothing)]


def _not_loaded() -> Sequence[Change]:
    """Branches that were taken are not loaded."""

    async def nothing(self: BranchManager) -> None:
        return None

    return [(BranchManager, "take_over", nothing)]


def _not_resumed() -> Sequence[Change]:
    """Decided branches that were taken are not resumed."""
    restore = Maintenance._restore

    def forgetful(self: Maintenance, record: BranchRecord, _: list[BranchRuntime]) -> None:
        restore(self, record, [])

    return [(Maintenance, "_restore", forgetful)]


def _not_swept() -> Sequence[Change]:
    """Branches of members that have left in order are not taken."""
    adopt = Membership.adopt

    async def picky(self: Membership, gone: frozenset[UUID] = frozenset(), dead: frozenset[UUID] = frozenset()) -> Any:
        return await adopt(self, gone, dead) if gone else 0

    return [(Membership, "adopt", picky)]


def _ask(change: Any) -> Sequence[Change]:
    ask = Forwarding._ask

    async def changed(self: Forwarding, member: Member, request: Mapping[str, Any], seconds: float) -> Any:
        return change(await ask(self, member, request, seconds))

    return [(Forwarding, "_ask", changed)]


def _silent_is_no() -> Sequence[Change]:
    """A member that does not answer counts as one that does not have the branch."""
    return _ask(lambda found: None if isinstance(found, (PeerUnreachable, PeerLost)) else found)


def _asked_twice() -> Sequence[Change]:
    """A request without an answer is sent again, as one that was not sent."""
    return _ask(lambda found: PeerUnreachable(str(found)) if isinstance(found, PeerLost) else found)


def _old_list() -> Sequence[Change]:
    """Unknown branches are asked for at the members of the last look."""

    async def stale(self: Forwarding, wanted: UUID | None) -> list[Member]:
        others = self._membership.others
        return [member for member in others if wanted is None or member.instance == wanted]

    return [(Forwarding, "_members", stale)]


def _not_asked() -> Sequence[Change]:
    """An xid that the log does not have is unknown; members are not asked."""
    ask = Forwarding.ask

    async def hasty(
        self: Forwarding, who: Requester, xid: Xid, operation: Any, seconds: int, found: Elsewhere, until: float
    ) -> XaFlag | int | None:
        if found.member is None:
            raise XaError(found.code, found.reason, found.facts)
        return await ask(self, who, xid, operation, seconds, found, until)

    return [(Forwarding, "ask", hasty)]


def _answered_before() -> Sequence[Change]:
    """A member that does not have the branch of a forwarded request answers 404."""
    return [(forwarding, "_ELSEWHERE", {"code": 404, "reason": "unknown xid", "facts": {}, "cause": None})]


def _own_only() -> Sequence[Change]:
    """A recovery scan lists only the branches of its member."""

    async def nothing(self: PostgresTransactionLog, vhost: str) -> AsyncIterator[BranchRecord]:
        nobody: list[BranchRecord] = []
        for record in nobody:
            yield record

    return [(PostgresTransactionLog, "load_listed", nothing)]


def _same_epoch() -> Sequence[Change]:
    """A member that connects to the database again keeps its epoch: an earlier session can still write."""

    def same(self: MemberTable, instance: UUID) -> int | None:
        row = self.rows.get(instance)
        return None if row is None else row.epoch

    return [(MemberTable, "raise_epoch", same)]


MEMBERS: Final = (
    Mutation(name="a member is not fenced", changes=_not_fenced, shape=_STALLED),
    Mutation(name="branches are taken before the lease has run out", changes=_taken_early, shape=_MEMBERS),
    Mutation(name="branches of a member that is gone are not moved", changes=_not_moved, shape=_ENDING),
    Mutation(name="branches that were taken are not loaded", changes=_not_loaded, shape=_ENDING),
    Mutation(name="branches that were taken are not resumed", changes=_not_resumed, shape=_ENDING),
    Mutation(name="branches of a member that has left are not taken", changes=_not_swept, shape=_ENDING),
    Mutation(name="a silent member does not count", changes=_silent_is_no, shape=_SEPARATED),
    Mutation(name="a request without an answer is sent again", changes=_asked_twice, shape=_CUT),
    Mutation(name="members of the last look are asked", changes=_old_list, shape=_ENDING),
    Mutation(name="members are not asked", changes=_not_asked, shape=_MEMBERS),
    Mutation(name="the first member answers 404", changes=_answered_before, shape=_MEMBERS),
    Mutation(name="a scan lists the branches of one member", changes=_own_only, shape=_MEMBERS),
    Mutation(name="a member keeps its epoch", changes=_same_epoch, shape=_LOST),
)
