"""Recovery, without any I/O. It completes the open branches of its node as decided, and no branches of other nodes.

A round has three passes:

1. The log: recovery commits the branches of unfinished decisions to commit, one by one. It does so even if a resource
   does not list them, because dtx lists only the branches that its user may see.
2. The resources: each resource lists its branches in doubt. A branch of this node without a decision is an orphan.
3. The log again: recovery finishes roll-backs of branches that no resource lists any more.

Recovery rolls an orphan back when three conditions hold:

- Its process is dead or is this one, and the transaction is not running here.
- The branch is older than the interval.
- The log has accepted the roll-back as *the* decision.

Atomicity depends on the third condition. The first two protect the work of processes that are alive.

The gtrid of a branch names its node, so a transaction manager changes only its own branches. A gtrid is
``node.process.begun.number`` in ASCII, at most 64 bytes:

- ``node``: the name of the node.
- ``process``: the incarnation of the transaction manager, random.
- ``begun``: the wall clock at the beginning of the transaction, milliseconds in base 36.
- ``number``: a number in base 36.

The bqual is the name of the resource. Savepoints make further branches, whose bqual has ``/`` and a number after it.

A resource may answer that an orphan commits: its program died during the one-phase commit of that branch. Recovery then
withdraws the roll-back from the log. The log contains only its own decisions.
"""

import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dtx.client.errors import XAException
from dtx.client.tm.commitment import Completion, EnlistedBranch, complete
from dtx.client.tm.decisions import Decision, DecisionRow, now
from dtx.client.tm.errors import HeuristicReport, Misuse, TransactionError
from dtx.client.tm.steps import Access, CommitPoint, Work, ask, reach
from dtx.xa.xid import Xid

FORMAT_ID: Final = 0x0D7C731
"""The default format id of the xids of a transaction manager."""
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_NODE: Final = re.compile(r"[A-Za-z0-9_-]{1,24}")
_PROCESS_OCTETS: Final = 6


@dataclass(frozen=True, slots=True)
class Gtrid:
    """The parts of a gtrid.

    Args:
        node: the node that began the transaction.
        process: the incarnation that began it.
        begun: Unix time of its beginning in seconds, by the clock of the node.
        number: the number of the transaction within the incarnation.
    """

    node: str
    process: str
    begun: float
    number: int

    def to_octets(self) -> bytes:
        """Return the gtrid as bytes, for an xid."""
        return f"{self.node}.{self.process}.{_base36(int(self.begun * 1000))}.{_base36(self.number)}".encode()

    @classmethod
    def read(cls, octets: bytes) -> "Gtrid | None":
        """Return the parts of the gtrid *octets*; ``None`` if no transaction manager of this kind made it."""
        try:
            node, process, begun, number = octets.decode("ascii").split(".")
            return cls(node, process, int(begun, 36) / 1000, int(number, 36))
        except ValueError:
            return None


class ResourceIdentity:
    """Makes unique gtrids.

    Args:
        node: the name of the node, 1 to 24 letters, digits, ``-`` or ``_``. It must be the same after a restart.
            Processes with one node name must share one log. Two nodes with one name and separate logs would roll back
            each other's branches.
        format_id: the format id of all its xids, 1 to 2³¹-1 (psycopg accepts no more).

    Raises:
        Misuse: an argument is out of range.
    """

    def __init__(self, node: str, format_id: int = FORMAT_ID) -> None:
        if not _NODE.fullmatch(node):
            raise Misuse(f"node name {node!r} is not made of 1 to 24 letters, digits, - or _")
        if not 0 < format_id < 0x80000000:
            raise Misuse(f"format id {format_id} is not between 1 and 2147483647")
        self.node = node
        self.format_id = format_id
        self.process = secrets.token_hex(_PROCESS_OCTETS)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)

    def new(self) -> bytes:
        """Make a gtrid for a transaction that begins now.

        Raises:
            Misuse: the process is a fork of the process that made this object. Both would make the same gtrids.
        """
        if os.getpid() != self._pid:
            raise Misuse("the process was forked: make the TransactionManager after the fork, one in each process")
        return Gtrid(self.node, self.process, time.time(), next(self._numbers)).to_octets()

    def xid(self, gtrid: bytes, resource: str) -> Xid:
        """Return the xid of the branch of *gtrid* at a resource.

        Args:
            gtrid: the global transaction.
            resource: the name of the resource. For a further branch ``/`` and a number follow the name.
        """
        return Xid(self.format_id, gtrid, resource.encode("ascii"))

    def owns(self, xid: Xid) -> Gtrid | None:
        """Return the parts of the gtrid of *xid* if the branch belongs to this node; otherwise ``None``.

        The branch may belong to this process or to another process of the node.
        """
        if xid.format_id != self.format_id:
            return None
        parts = Gtrid.read(xid.gtrid)
        return parts if parts is not None and parts.node == self.node else None


@dataclass(slots=True)
class RecoveryReport:
    """The result of a round of recovery."""

    committed: list[Xid] = field(default_factory=list)
    """Branches with a decision to commit that are committed."""
    rolled_back: list[Xid] = field(default_factory=list)
    """Orphans that are rolled back."""
    one_phase: list[Xid] = field(default_factory=list)
    """Branches that their resources commit or have committed in one phase. The program died during that commit.

    These branches are not in doubt. The log has no record of them."""
    waiting: dict[Xid, str] = field(default_factory=dict)
    """Branches of this node that recovery does not complete yet, each with the reason."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Resources that recovery could not ask, each with the reason."""
    heuristics: list[HeuristicReport] = field(default_factory=list)
    """Heuristic outcomes that recovery found and recorded."""
    pruned: int = 0
    """The number of old finished decisions that recovery removed from the log."""

    @property
    def clean(self) -> bool:
        """Whether the resources list no branch of this node in doubt any more, and all resources answered."""
        return not self.waiting and not self.unreachable

    def __str__(self) -> str:
        parts = [f"{len(self.committed)} committed", f"{len(self.rolled_back)} rolled back"]
        parts += [f"{len(self.one_phase)} committed in one phase"] if self.one_phase else []
        parts += [f"{len(self.waiting)} waiting"] if self.waiting else []
        parts += [f"{len(self.heuristics)} heuristic"] if self.heuristics else []
        parts += [f"{name}: {why}" for name, why in self.unreachable.items()]
        return ", ".join(parts)


@dataclass(slots=True, kw_only=True)
class RecoveryRound:
    """One round of recovery.

    Args:
        identity: the node whose branches recovery completes.
        resources: the resources, by name.
        log: a function that calls the log.
        running: a function that tells whether a transaction is running in this process.
        interval: seconds for which recovery does not touch an orphan.
        first_seen: the time at which this process first saw an orphan, on the monotonic clock. It is kept between
            rounds.
        alone: branches that commit in one phase, as reported by their resources. It is kept between rounds.
        forget: whether heuristic outcomes are forgotten after they are recorded.
    """

    identity: ResourceIdentity
    resources: dict[str, Any]
    log: Access
    running: Callable[[bytes], bool]
    interval: float
    first_seen: dict[Xid, float]
    alone: set[Xid] = field(default_factory=set)
    forget: bool = True
    report: RecoveryReport = field(default_factory=RecoveryReport)
    sessions: dict[str, Any] = field(default_factory=dict)
    """The sessions by the name of the resource; ``None`` for an unreachable resource.

    The caller must release them after the round, also after an error."""

    def steps(self) -> Work[RecoveryReport]:
        """Carry out the round.

        Raises:
            LogFailed: the log is unreachable. Nothing can be decided then.
        """
        rows = _raised((yield from self.log(lambda log: log.unfinished(self.identity.node))))
        for row in rows:
            yield from self._finish(row)
        in_doubt: set[Xid] = set()
        for resource in self.resources.values():
            in_doubt.update((yield from self._scan(resource)))
        _raised((yield from self.log(lambda log: log.flush())))
        for row in _raised((yield from self.log(lambda log: log.unfinished(self.identity.node, Decision.ROLLBACK)))):
            yield from self._roll_back(row, in_doubt)
        for xid in [xid for xid in self.first_seen if xid not in in_doubt]:
            del self.first_seen[xid]
        self.alone &= in_doubt
        _raised((yield from self.log(lambda log: log.flush())))
        return self.report

    # -- decisions that are not finished ------------------------------------------------------------------------------

    def _finish(self, row: DecisionRow) -> Work[None]:
        owner = Gtrid.read(row.gtrid)
        if self.running(row.gtrid):
            return  # in its second phase, in this process
        if owner is not None and owner.process != self.identity.process:
            age = (now() - row.at).total_seconds()
            if age < self.interval and (yield from self._alive(owner)):
                return  # in its second phase, in another one
        # If another process then gets "not known" for a branch, this row shows it that recovery completed the branch.
        _raised((yield from self.log(lambda log: log.count_recovery(row.gtrid))))
        reach(CommitPoint.RECOVERY_TAKEN_UP)
        done = True
        for name in row.resources:
            xid = self.identity.xid(row.gtrid, name)
            resource = self.resources.get(name.partition("/")[0])
            if resource is None:
                self.report.waiting[xid] = f"this transaction manager has no resource {name.partition('/')[0]}"
                done = False
            elif not (yield from self._complete(resource, xid, Decision.COMMIT)):
                done = False
        if done:
            yield from self.log(lambda log: log.finish(row.gtrid))
            reach(CommitPoint.RECOVERY_FINISHED)

    def _roll_back(self, row: DecisionRow, in_doubt: set[Xid]) -> Work[None]:
        """Finish a roll-back that the log contains as decided and not as finished: a process died in between."""
        if self.running(row.gtrid):
            return
        for name in row.resources:
            resource = self.resources.get(name.partition("/")[0])
            if resource is None or self.sessions.get(resource.name) is None:
                return
            xid = self.identity.xid(row.gtrid, name)
            if xid in in_doubt:
                return  # the second pass has just handled it: it is done or waits
            if not (yield from self._complete(resource, xid, Decision.ROLLBACK, listed=False)) or xid in self.alone:
                return
        yield from self.log(lambda log: log.finish(row.gtrid))

    # -- what resources have in doubt ---------------------------------------------------------------------------------

    def _scan(self, resource: Any) -> Work[Sequence[Xid]]:
        session = yield from self._session(resource)
        if session is None:
            return ()
        found = yield from ask(session, "recover")
        if isinstance(found, XAException):
            self.report.unreachable[resource.name] = str(found)
            return ()
        reach(CommitPoint.RECOVERY_SCANNED)
        mine = list(_of_node(self.identity, found))
        for xid, owner in mine:
            if xid not in self.report.waiting:
                yield from self._resolve(resource, xid, owner)
        return [xid for xid, _ in mine]

    def _resolve(self, resource: Any, xid: Xid, owner: Gtrid) -> Work[None]:
        """Complete a branch that is in doubt, if recovery may do so now."""
        if self.running(xid.gtrid) or xid in self.alone:
            return
        row = _raised((yield from self.log(lambda log: log.read(xid.gtrid))))
        decision = None if row is None else row.decision
        elsewhere = owner.process != self.identity.process and (yield from self._alive(owner))
        reason = self._patience(xid, owner, decision, elsewhere=elsewhere)
        if reason:
            self.report.waiting[xid] = reason
            return
        if decision is None:
            orphan = self._orphan(xid)
            decision = _raised((yield from self.log(lambda log: log.fence(orphan))))
            reach(CommitPoint.RECOVERY_FENCED)
        if decision is Decision.COMMIT:
            _raised((yield from self.log(lambda log: log.count_recovery(xid.gtrid))))
        done = yield from self._complete(resource, xid, decision)
        if done and decision is Decision.ROLLBACK and xid not in self.alone:
            yield from self.log(lambda log: log.finish(xid.gtrid))

    def _patience(self, xid: Xid, owner: Gtrid, decision: Decision | None, *, elsewhere: bool) -> str:
        """Return the reason why recovery does not complete a branch yet; an empty text if it may complete it.

        Args:
            xid: the branch.
            owner: the parts of its gtrid.
            decision: the decision in the log; ``None`` where there is none.
            elsewhere: whether another process that is alive began it.
        """
        seen = self.first_seen.setdefault(xid, time.monotonic())
        # if the clock was set back, the branch is at least as old as the time since this process first saw it
        age = max(time.time() - owner.begun, time.monotonic() - seen)
        young = age < self.interval
        match decision:
            case Decision.ROLLBACK:
                return ""
            case Decision.COMMIT if not (young and elsewhere):
                return ""
            case None if not young:
                return f"its process {owner.process} is alive" if elsewhere else ""
        return f"{max(age, 0):.0f} s old, not touched until it is {self.interval:g} s old"

    def _orphan(self, xid: Xid) -> DecisionRow:
        return DecisionRow(
            gtrid=xid.gtrid,
            format_id=xid.format_id,
            node=self.identity.node,
            decision=Decision.ROLLBACK,
            at=now(),
            resources=(xid.bqual.decode("ascii", "replace"),),
        )

    def _alive(self, owner: Gtrid) -> Work[bool]:
        """Return whether the process of *owner* is alive."""
        return _raised((yield from self.log(lambda log: log.alive(owner.node, owner.process))))  # type: ignore[no-any-return]

    def _complete(self, resource: Any, xid: Xid, decision: Decision, *, listed: bool = True) -> Work[bool]:
        """Tell a resource the decision about a branch.

        Args:
            resource: the resource of the branch.
            xid: the branch.
            decision: the decision.
            listed: whether the branch is known to exist. Only then the report lists it as completed.

        Returns:
            Whether the branch is complete.
        """
        session = yield from self._session(resource)
        if session is None:
            self.report.waiting[xid] = f"{resource.name} is out of reach"
            return False
        completion = Completion(self.log, self.forget)
        branch = EnlistedBranch(resource, session, xid)
        done = yield from complete(branch, decision, completion, recovering=True)
        self.report.heuristics += completion.reports
        if completion.alone:
            _raised((yield from self.log(lambda log: log.withdraw(xid.gtrid))))
            self.alone.add(xid)
            self.report.one_phase.append(xid)
        elif done:
            completed = self.report.committed if decision is Decision.COMMIT else self.report.rolled_back
            completed += [xid] * listed
        else:
            self.report.waiting[xid] = str(completion.unfinished[branch.name])
        reach(CommitPoint.RECOVERY_COMPLETED)
        return done

    def _session(self, resource: Any) -> Work[Any]:
        """Return the session of this round for *resource*; ``None`` if the resource is unreachable."""
        session = self.sessions.get(resource.name)
        if session is not None and (yield from ask(session, "usable")) is not True:
            yield from ask(resource, "release", session)
            session = self.sessions[resource.name] = None
        if session is None:
            session = yield from ask(resource, "acquire")
            if isinstance(session, XAException):
                self.report.unreachable[resource.name] = str(session)
                session = None
            self.sessions[resource.name] = session
        return session


def _of_node(identity: ResourceIdentity, found: Iterable[Xid]) -> Iterable[tuple[Xid, Gtrid]]:
    for xid in found:
        owner = identity.owns(xid)
        if owner is not None:
            yield xid, owner


def _raised(answer: Any) -> Any:
    """Return *answer*, or raise it if it is an error: a transaction manager decides nothing without its log."""
    if isinstance(answer, TransactionError):
        raise answer
    return answer


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"
