"""Recovery, without any I/O: what a node left open is completed as it was decided, and never anything of others.

Three passes. First the log: decisions to commit that are not finished; their branches are committed one by one, whether
or not a resource lists them (dtx lists only what its user may see). Then the resources: each lists what it has in
doubt, and every branch of this node for which there is no decision is an orphan. It is rolled back when three things
hold: its process is dead or is this one, and the transaction is not running here; it is older than the interval; and
the log has taken the roll-back as *the* decision. The last one is what atomicity rests on, the others spare the work
of those who live. Last, the log again: roll-backs that are not finished, of branches that no resource lists any more.

Whose a branch is can be read from its gtrid, so a transaction manager only ever touches its own. A gtrid is
``node.process.begun.number`` in ASCII, at most 64 bytes: the node's name; the incarnation of the transaction manager,
random; the wall clock when the transaction began, milliseconds in base 36; a number, base 36. The bqual is the name of
the resource; savepoints make further branches, which have ``/`` and a number after it.

A resource may answer that an orphan commits: its program died while it committed the branch alone, in one phase. Then
the roll-back is withdrawn from the log, which is to say nothing about what it did not decide.
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
"""Of all transactions of this transaction manager, unless it is given another one."""
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_NODE: Final = re.compile(r"[A-Za-z0-9_-]{1,24}")
_PROCESS_OCTETS: Final = 6


@dataclass(frozen=True, slots=True)
class Gtrid:
    """The parts of a gtrid.

    Args:
        node: whose it is.
        process: the incarnation that began it.
        begun: Unix time of its beginning, seconds, by the clock of the node.
        number: within the incarnation.
    """

    node: str
    process: str
    begun: float
    number: int

    def to_octets(self) -> bytes:
        """As it stands in xids."""
        return f"{self.node}.{self.process}.{_base36(int(self.begun * 1000))}.{_base36(self.number)}".encode()

    @classmethod
    def read(cls, octets: bytes) -> "Gtrid | None":
        """The parts of *octets*; ``None`` where no transaction manager of this kind made them."""
        try:
            node, process, begun, number = octets.decode("ascii").split(".")
            return cls(node, process, int(begun, 36) / 1000, int(number, 36))
        except ValueError:
            return None


class ResourceIdentity:
    """Makes gtrids that nobody else makes.

    Args:
        node: 1 to 24 letters, digits, ``-`` or ``_``; the same over restarts. Processes with one node name share one
            log: two nodes with separate logs and one name would roll back each other's branches.
        format_id: of all its xids, 1 to 2³¹-1 (psycopg takes no more).

    Raises:
        Misuse: one of them is out of range.
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
        """A gtrid for a transaction that begins now.

        Raises:
            Misuse: this is a fork of the process that made this object: both would make the same.
        """
        if os.getpid() != self._pid:
            raise Misuse("the process was forked: make the TransactionManager after the fork, one in each process")
        return Gtrid(self.node, self.process, time.time(), next(self._numbers)).to_octets()

    def xid(self, gtrid: bytes, resource: str) -> Xid:
        """The branch of *gtrid* at a resource; with ``/`` and a number after its name: a further one."""
        return Xid(self.format_id, gtrid, resource.encode("ascii"))

    def owns(self, xid: Xid) -> Gtrid | None:
        """The parts of the gtrid of *xid* where the branch is this node's, of this process or another."""
        if xid.format_id != self.format_id:
            return None
        parts = Gtrid.read(xid.gtrid)
        return parts if parts is not None and parts.node == self.node else None


@dataclass(slots=True)
class RecoveryReport:
    """What a round of recovery has come to."""

    committed: list[Xid] = field(default_factory=list)
    """Branches that were decided to commit, and are committed."""
    rolled_back: list[Xid] = field(default_factory=list)
    """Orphans, which are rolled back."""
    one_phase: list[Xid] = field(default_factory=list)
    """Branches that their resources commit or have committed, told so by a program that died in its one-phase commit.
    They are in nobody's doubt; the log has nothing about them."""
    waiting: dict[Xid, str] = field(default_factory=dict)
    """Branches of this node that are left alone for now, and why."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Resources that could not be asked, and why."""
    heuristics: list[HeuristicReport] = field(default_factory=list)
    """Heuristic outcomes that were found and recorded."""
    pruned: int = 0
    """Old finished decisions that were removed from the log."""

    @property
    def clean(self) -> bool:
        """Whether nothing of this node is in doubt any more, as far as all resources say."""
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
        identity: whose branches.
        resources: by name.
        log: calls the log.
        running: whether a transaction is running in this process.
        interval: seconds for which an orphan is left alone.
        first_seen: when an orphan was first seen by this process, on the monotonic clock; kept between rounds.
        alone: branches that commit in one phase, as their resources have said; kept between rounds.
        forget: whether heuristic outcomes are forgotten once they are recorded.
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
    """By the name of the resource, ``None``: out of reach. To be released when the round is over, however it ends."""

    def steps(self) -> Work[RecoveryReport]:
        """The round.

        Raises:
            LogFailed: the log is out of reach; nothing can be decided then.
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
        # Whoever is told afterwards that a branch is not known finds out by this that it was us.
        _raised((yield from self.log(lambda log: log.take_up(row.gtrid))))
        reach(CommitPoint.RECOVERY_TAKEN_UP)
        done = True
        for name in row.resources:
            xid = self.identity.xid(row.gtrid, name)
            resource = self.resources.get(name.partition("/")[0])
            if resource is None:
                self.report.waiting[xid] = f"no resource is called {name.partition('/')[0]} here"
                done = False
            elif not (yield from self._complete(resource, xid, Decision.COMMIT)):
                done = False
        if done:
            yield from self.log(lambda log: log.finish(row.gtrid))
            reach(CommitPoint.RECOVERY_FINISHED)

    def _roll_back(self, row: DecisionRow, in_doubt: set[Xid]) -> Work[None]:
        """It was written that a transaction is rolled back, and not that it is done: somebody died in between."""
        if self.running(row.gtrid):
            return
        for name in row.resources:
            resource = self.resources.get(name.partition("/")[0])
            if resource is None or self.sessions.get(resource.name) is None:
                return
            xid = self.identity.xid(row.gtrid, name)
            if xid in in_doubt:
                return  # it was judged just now, and is done or waits
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
                yield from self._judge(resource, xid, owner)
        return [xid for xid, _ in mine]

    def _judge(self, resource: Any, xid: Xid, owner: Gtrid) -> Work[None]:
        """Complete a branch that is in doubt, if it may be."""
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
            _raised((yield from self.log(lambda log: log.take_up(xid.gtrid))))
        done = yield from self._complete(resource, xid, decision)
        if done and decision is Decision.ROLLBACK and xid not in self.alone:
            yield from self.log(lambda log: log.finish(xid.gtrid))

    def _patience(self, xid: Xid, owner: Gtrid, decision: Decision | None, *, elsewhere: bool) -> str:
        """Why a branch is left alone for now, if it is.

        Args:
            xid: the branch.
            owner: who began it.
            decision: what was decided, if anything was.
            elsewhere: whether it was begun by another process, which lives.
        """
        seen = self.first_seen.setdefault(xid, time.monotonic())
        # where the clock was set back, it is at least as old as we have seen it
        age = max(time.time() - owner.begun, time.monotonic() - seen)
        young = age < self.interval
        match decision:
            case Decision.ROLLBACK:
                return ""
            case Decision.COMMIT if not (young and elsewhere):
                return ""
            case None if not young:
                return f"its process {owner.process} lives" if elsewhere else ""
        return f"{max(age, 0):.0f} s old, left alone until it is {self.interval:g} s old"

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
        """Whether its process lives."""
        return _raised((yield from self.log(lambda log: log.alive(owner.node, owner.process))))  # type: ignore[no-any-return]

    def _complete(self, resource: Any, xid: Xid, decision: Decision, *, listed: bool = True) -> Work[bool]:
        """Tell a resource what was decided.

        Args:
            resource: whose branch.
            xid: the branch.
            decision: what.
            listed: whether there is a branch, as far as is known.
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
            told = self.report.committed if decision is Decision.COMMIT else self.report.rolled_back
            told += [xid] * listed
        else:
            self.report.waiting[xid] = str(completion.unfinished[branch.name])
        reach(CommitPoint.RECOVERY_COMPLETED)
        return done

    def _session(self, resource: Any) -> Work[Any]:
        """The session of this round; ``None`` where the resource is out of reach."""
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
    """*answer*, unless it is an error: without its log a transaction manager decides nothing."""
    if isinstance(answer, TransactionError):
        raise answer
    return answer


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"
