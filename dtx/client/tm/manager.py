"""Transaction managers: what those for threads and for asyncio have in common, and the one for threads.

The order of durable steps is in :mod:`~dtx.client.tm.commitment` and :mod:`~dtx.client.tm.recovery`; here is what comes
before and after: who takes part, time-outs, sessions that go back, what is counted. The shells are thin;
:mod:`~dtx.client.tm.asynchronous` has the one for asyncio.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from datetime import timedelta
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, ParamSpec, Self, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from dtx.client.tm import commitment
from dtx.client.tm.commitment import CommitPlan, EnlistedBranch, Outcome
from dtx.client.tm.databases import open_log
from dtx.client.tm.decisions import Decision, DecisionLog
from dtx.client.tm.errors import (
    HeuristicOutcome,
    Misuse,
    OutcomeUnknown,
    RolledBack,
    TimedOut,
    TransactionError,
)
from dtx.client.tm.recovery import FORMAT_ID, Gtrid, RecoveryReport, RecoveryRound, ResourceIdentity
from dtx.client.tm.resources import Handle, Resource
from dtx.client.tm.steps import CommitPoint, Work, access, drive, reach
from dtx.xa.xid import Xid

_log: Final = logging.getLogger("dtx.client.tm")
TX = TypeVar("TX", bound="BaseTransaction")
_P = ParamSpec("_P")
_R = TypeVar("_R")
KEEP: Final = timedelta(days=7)
"""How long finished decisions are kept: an operator wants to look at them, and so does reconciliation."""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ManagerMetrics:
    """The metrics of all transaction managers of a registry, told apart by their node.

    Args:
        registry: where they are exposed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transactions: Final = Counter(
            "dtx_tm_transactions",
            "Transactions that ended, by outcome (committed, rolled-back, heuristic, unknown).",
            ("node", "outcome"),
            registry=registry,
        )
        self.seconds: Final = Histogram(
            "dtx_tm_commit_seconds", "Seconds from commit to its end.", ("node",), buckets=_SECONDS, registry=registry
        )
        self.running: Final = Gauge("dtx_tm_running", "Transactions under way.", ("node",), registry=registry)
        self.heuristics: Final = Counter(
            "dtx_tm_heuristics", "Heuristic outcomes that were recorded.", ("node", "outcome"), registry=registry
        )
        self.recovered: Final = Counter(
            "dtx_tm_recovered_branches", "Branches that recovery completed.", ("node", "decision"), registry=registry
        )
        self.waiting: Final = Gauge(
            "dtx_tm_waiting_branches",
            "Branches left open by the last round of recovery.",
            ("node",),
            registry=registry,
        )
        self.unreachable: Final = Gauge(
            "dtx_tm_unreachable_resources",
            "Resources that the last round of recovery could not ask.",
            ("node",),
            registry=registry,
        )


_ALL: Final[WeakKeyDictionary[CollectorRegistry, ManagerMetrics]] = WeakKeyDictionary()


def metrics_of(registry: CollectorRegistry | None) -> ManagerMetrics:
    """The metrics of *registry*, ``None``: of the default one; made once."""
    where = REGISTRY if registry is None else registry
    known = _ALL.get(where)
    if known is None:
        known = _ALL[where] = ManagerMetrics(where)
    return known


class TransactionState(Enum):
    """Where a transaction is."""

    ACTIVE = "active"
    COMPLETING = "completing"
    OVER = "over"


class BaseTransactionManager(ABC, Generic[TX]):
    """What both transaction managers have in common; arguments as of :class:`~dtx.client.tm.TransactionManager`."""

    where: ClassVar[str]
    """What a transaction belongs to, for messages."""

    def __init__(
        self,
        *,
        node: str,
        log: str | Path | DecisionLog,
        resources: Iterable[Any] = (),
        timeout: float | None = 300.0,
        interval: float = 60.0,
        recover_every: float | None = 60.0,
        keep: timedelta = KEEP,
        format_id: int = FORMAT_ID,
        forget_heuristics: bool = True,
        one_phase: bool = True,
        registry: CollectorRegistry | None = None,
    ) -> None:
        if timeout is not None and timedelta(seconds=timeout) * 2 > keep:
            raise Misuse("decisions must be kept for twice the time-out at least")
        self.identity: Final = ResourceIdentity(node, format_id)
        self.log: Final = open_log(log)
        self.interval: Final = interval
        self.timeout: Final = timeout
        self.metrics: Final[ManagerMetrics] = metrics_of(registry)
        self._resources: dict[str, Any] = {}
        self._recover_every = recover_every
        self._keep = keep
        self._forget = forget_heuristics
        self._one_phase = one_phase
        self._running: set[bytes] = set()
        self._first_seen: dict[Xid, float] = {}
        self._alone: set[Xid] = set()
        self._current: ContextVar[TX | None] = ContextVar("dtx_tm_transaction", default=None)
        for resource in resources:
            self.register(resource)
        self.log.claim(self.node, self.identity.process)

    @abstractmethod
    def begin(self, *, timeout: float | None = None) -> TX:
        """A new transaction."""

    @abstractmethod
    def write(self, call: Callable[[DecisionLog], Any]) -> Any:
        """Call the log; awaited with asyncio."""

    @property
    def node(self) -> str:
        """The name of the node."""
        return self.identity.node

    def register(self, resource: Any) -> Any:
        """Make a resource known, so that it can be enlisted, and recovered; returns it.

        Raises:
            Misuse: another one has the name.
        """
        if self._resources.setdefault(resource.name, resource) is not resource:
            raise Misuse(f"there are two resources called {resource.name}")
        return resource

    def known(self, resource: Any) -> Any:
        """*resource*, given itself or by its name.

        Raises:
            Misuse: it is not registered: recovery would not know where its branches are.
        """
        found = self._resources.get(resource if isinstance(resource, str) else resource.name)
        if found is None or not (isinstance(resource, str) or found is resource):
            raise Misuse(f"{resource!r} is not registered with this transaction manager")
        return found

    # -- transactions -------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout: float | None = None) -> TX:
        """``with tm.transaction() as tx:`` commits at the end, and rolls back on an exception.

        Args:
            timeout: seconds, instead of the transaction manager's.
        """
        return self.begin(timeout=timeout)

    @property
    def current(self) -> TX:
        """The transaction that this thread or task is in.

        Raises:
            Misuse: none is under way.
        """
        found = self._current.get()
        if found is None:
            raise Misuse(f"no transaction is under way in this {self.where}")
        return found

    def enter(self, transaction: TX) -> "Token[TX | None]":
        """*transaction* is the current one."""
        if self._current.get() is not None:
            raise Misuse(f"a transaction is under way in this {self.where} already; there are no nested ones")
        return self._current.set(transaction)

    def leave(self, token: "Token[TX | None]") -> None:
        """There is no current one any more."""
        self._current.reset(token)

    def begun(self, gtrid: bytes) -> None:
        """A transaction is under way."""
        self._running.add(gtrid)
        self.metrics.running.labels(self.node).inc()

    def over(self, gtrid: bytes) -> None:
        """It is over: what it left open is recovery's."""
        if gtrid in self._running:
            self._running.discard(gtrid)
            self.metrics.running.labels(self.node).dec()

    def plan(self, gtrid: bytes, branches: list[EnlistedBranch]) -> CommitPlan:
        """How a transaction is to be completed."""
        return CommitPlan(
            gtrid=gtrid,
            format_id=self.identity.format_id,
            node=self.node,
            branches=branches,
            log=access(self.write),
            forget=self._forget,
            one_phase=self._one_phase,
        )

    def count(self, gtrid: bytes, ended: Outcome | TransactionError, seconds: float) -> None:
        """Count and log how a transaction ended."""
        name = gtrid.decode("ascii")
        match ended:
            case Outcome():
                label = "committed" if ended.decision is Decision.COMMIT else "rolled-back"
                if ended.unfinished:
                    resources = ", ".join(ended.unfinished)
                    _log.warning("%s: %s could not be told of the %s yet", name, resources, ended.decision.value)
            case HeuristicOutcome():
                label = "heuristic"
                _log.error("%s: %s", name, ended)
            case OutcomeUnknown():
                label = "unknown"
                _log.error("%s: %s", name, ended)
            case _:
                label = "rolled-back"
        for report in ended.reports:
            self.metrics.heuristics.labels(self.node, report.outcome.value).inc()
        self.metrics.transactions.labels(self.node, label).inc()
        self.metrics.seconds.labels(self.node).observe(seconds)

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recovering(self) -> Work[RecoveryReport]:
        """One round of recovery; see :meth:`dtx.client.tm.TransactionManager.recover`."""
        work = RecoveryRound(
            identity=self.identity,
            resources=dict(self._resources),
            log=access(self.write),
            running=self._running.__contains__,
            interval=self.interval,
            first_seen=self._first_seen,
            alone=self._alone,
            forget=self._forget,
        )
        try:
            report = yield from work.steps()
        finally:
            for name, session in work.sessions.items():
                if session is not None:
                    yield partial(self._resources[name].release, session)
        report.pruned = yield partial(self.write, lambda log: log.prune(self._keep))
        return self.recovered(report)

    def recovered(self, report: RecoveryReport) -> RecoveryReport:
        """Count and log what a round has come to."""
        node, metrics = self.node, self.metrics
        metrics.recovered.labels(node, Decision.COMMIT.value).inc(len(report.committed))
        metrics.recovered.labels(node, Decision.ROLLBACK.value).inc(len(report.rolled_back))
        metrics.waiting.labels(node).set(len(report.waiting))
        metrics.unreachable.labels(node).set(len(report.unreachable))
        for found in report.heuristics:
            metrics.heuristics.labels(node, found.outcome.value).inc()
            level = logging.ERROR if found.damaging else logging.WARNING
            _log.log(level, "%s: recovery found a heuristic outcome: %s", found.gtrid.decode("ascii"), found)
        if report.committed or report.rolled_back or report.one_phase:
            _log.info("recovered: %s", report)
        for name, why in report.unreachable.items():
            _log.warning("recovery cannot reach %s: %s", name, why)
        return report


class BaseTransaction:
    """What transactions with threads and with asyncio have in common; see :class:`~dtx.client.tm.Transaction`.

    Args:
        manager: whose.
        gtrid: its id.
        timeout: seconds.
    """

    def __init__(self, manager: BaseTransactionManager[Any], gtrid: bytes, timeout: float | None) -> None:
        self.gtrid: Final = gtrid
        self.state = TransactionState.ACTIVE
        self.outcome: Outcome | None = None
        """How it ended, once it has."""
        self._manager = manager
        self._timeout = timeout
        self._begun = time.monotonic()
        self._branches: dict[str, EnlistedBranch] = {}
        self._token: Token[Any] | None = None
        self._rollback_only: str | None = None
        manager.begun(gtrid)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.gtrid.decode('ascii')!r}, {self.state.value})"

    def set_rollback_only(self, reason: str) -> None:
        """From now on, ``commit`` rolls back instead, and raises RolledBack.

        Args:
            reason: why it cannot commit; the first one is told.

        Raises:
            Misuse: it is over.
        """
        self._require_active("be marked")
        self._rollback_only = self._rollback_only or reason

    def _enlisting(self, resource: Any, handle: Any) -> Work[Any]:
        """Let a resource take part; what the application is to work with."""
        self._require_active("enlist a resource")
        known = self._manager.known(resource)
        branch = self._branches.get(known.name)
        if branch is not None:
            if handle is not None and handle is not branch.session.handle:
                raise Misuse(f"{known.name} takes part in the transaction already, with another handle")
            return branch.session.handle
        xid = self._manager.identity.xid(self.gtrid, known.name)
        if handle is None:
            session = yield partial(known.started, xid)
        else:
            session = known.around(handle)
            yield partial(session.start, xid)
        self._branches[known.name] = EnlistedBranch(known, session, xid)
        reach(CommitPoint.BEGUN)
        return session.handle

    def _committing(self) -> Work[Outcome]:
        self._require_active("commit")
        elapsed = time.monotonic() - self._begun
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        begun = Gtrid.read(self.gtrid)
        # Two clocks: the monotonic one stands still while some machines sleep.
        if begun is not None:
            elapsed = max(elapsed, time.time() - begun.begun)
        if self._timeout is not None and elapsed > self._timeout:
            yield from self._completing(commitment.rollback(plan))
            raise TimedOut(f"after {elapsed:.1f} s, the time-out is {self._timeout:g} s", gtrid=self.gtrid)
        if self._rollback_only is not None:
            yield from self._completing(commitment.rollback(plan))
            raise RolledBack(self._rollback_only, gtrid=self.gtrid)
        return (yield from self._completing(commitment.commit(plan)))

    def _rolling_back(self) -> Work[Outcome]:
        self._require_active("roll back")
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        return (yield from self._completing(commitment.rollback(plan)))

    def _completing(self, work: Work[Outcome]) -> Work[Outcome]:
        """Carry out *work*, give sessions back. After an interruption close them: what is not prepared is undone."""
        self.state = TransactionState.COMPLETING
        began = time.perf_counter()
        ended: Outcome | TransactionError | None = None
        try:
            self.outcome = ended = yield from work
        except TransactionError as error:
            ended = error
            raise
        finally:
            self.state = TransactionState.OVER
            for branch in self._branches.values():
                healthy = ended is not None
                yield partial(branch.resource.release, branch.session) if healthy else branch.session.close
            self._manager.over(self.gtrid)
            if ended is not None:
                self._manager.count(self.gtrid, ended, time.perf_counter() - began)
        return ended

    def _require_active(self, what: str) -> None:
        if self.state is not TransactionState.ACTIVE:
            raise Misuse(f"cannot {what}: the transaction is {self.state.value} (gtrid {self.gtrid.decode('ascii')})")

    def _enter(self) -> None:
        self._token = self._manager.enter(self)

    def _leave(self) -> bool:
        """It is not the current one any more; whether it is to be completed yet."""
        if self._token is not None:
            self._manager.leave(self._token)
            self._token = None
        return self.state is TransactionState.ACTIVE


class TransactionManager(BaseTransactionManager["Transaction"]):
    """A transaction manager for programs with threads.

    Any thread may begin transactions; each transaction, and what it enlists, belongs to the thread that began it. Make
    it after a fork, one in each process: processes of one node share its log.

    Args:
        node: 1 to 24 letters, digits, ``-`` or ``_``; the same over restarts, different between nodes with own logs.
        log: ``postgresql://…``, or the path of a SQLite file on a local disk.
        resources: to be registered.
        timeout: seconds from begin to commit; then a transaction is rolled back instead. ``None``: any time.
        interval: seconds for which recovery leaves an undecided branch alone.
        recover_every: seconds between rounds of recovery in the background, from :meth:`open` on; ``None``: none, and
            ``dtx tm recover --watch`` does it elsewhere.
        keep: how long finished decisions stay in the log.
        format_id: of all xids.
        forget_heuristics: whether a resource forgets a heuristic outcome as soon as the log has it.
        one_phase: whether a resource that is alone commits in one phase, without the log.
        registry: for metrics; the default one otherwise.

    Raises:
        Misuse: an argument is out of range.
        LogFailed: the log cannot be opened.
    """

    where = "thread"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stop = threading.Event()
        self._recovering = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> Self:
        """Recover, now and in the background. A resource or a log that is out of reach now is tried again later."""
        if self._recover_every is not None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dtx tm recovery", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """End recovery, close free sessions and the log. Transactions must be over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for resource in self._resources.values():
            resource.close()
        self.log.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, call: Callable[[DecisionLog], Any]) -> Any:
        """Call the log."""
        return call(self.log)

    def begin(self, *, timeout: float | None = None) -> "Transaction":
        """A new transaction; ``with tm.transaction()`` completes it by itself.

        Args:
            timeout: seconds, instead of the transaction manager's.
        """
        return Transaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    def transactional(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorator: the function runs in a transaction; in the current one, where there is one."""

        @wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return function(*args, **kwargs)
            with self.transaction():
                return function(*args, **kwargs)

        return within

    def enlist(self, resource: Resource[Handle] | str, handle: Handle | None = None) -> Handle:
        """:meth:`Transaction.enlist` of the current transaction."""
        return self.current.enlist(resource, handle)

    def recover(self) -> RecoveryReport:
        """One round of recovery, see :mod:`dtx.client.tm.recovery`. Transactions go on meanwhile.

        Raises:
            LogFailed: the log is out of reach; without it nothing is decided.
        """
        with self._recovering:
            return drive(self.recovering())

    def _watch(self) -> None:
        assert self._recover_every is not None
        while not self._stop.is_set():
            try:
                self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed, it is tried again: %s", error)
            self._stop.wait(self._recover_every)


class Transaction(BaseTransaction):
    """One global transaction. Of one thread; not to be used after its end.

    Args:
        manager: whose.
        gtrid: its id.
        timeout: seconds.
    """

    def enlist(self, resource: Resource[Handle] | str, handle: Handle | None = None) -> Handle:
        """Let a resource take part. A second time gives the same handle.

        Args:
            resource: registered; itself or its name.
            handle: a channel or connection of the application's own to work with, outside of any transaction; it stays
                open. Without it a free one of the resource is taken, which goes back at the end.

        Returns:
            What to work with: a channel of pika, a connection of the database.

        Raises:
            Misuse: the transaction is over, or the resource is not registered.
            XAException: the resource manager refuses, or is out of reach.
        """
        found: Handle = drive(self._enlisting(resource, handle))
        return found

    def commit(self) -> Outcome:
        """Commit all of it or none. When it returns, all resources commit: at once, or (``unfinished``) by recovery.

        Raises:
            RolledBack: a resource could not, or it was marked so; nothing has happened. TimedOut: it took too long.
            HeuristicOutcome: somebody completed branches otherwise than was decided.
            OutcomeUnknown: whether it is committed is not known here. Where the log of decisions was out of reach,
                recovery completes it; of a resource that committed alone no log has anything.
            Misuse: it is over.
        """
        return drive(self._committing())

    def rollback(self) -> Outcome:
        """Undo all of it.

        Raises:
            HeuristicOutcome: somebody committed branches.
            Misuse: it is over.
        """
        return drive(self._rolling_back())

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._leave():
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()
