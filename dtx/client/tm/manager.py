"""The base of both transaction managers, and the transaction manager for threads.

:mod:`~dtx.client.tm.commitment` and :mod:`~dtx.client.tm.recovery` define the order of the durable steps. This module
contains the steps before and after: enlistment, time-outs, the return of sessions, metrics. The classes for threads and
for asyncio add little code. The one for asyncio is in :mod:`~dtx.client.tm.asynchronous`.
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
"""The time for which the log keeps finished decisions. Operators and reconciliation read them."""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ManagerMetrics:
    """The metrics of all transaction managers of a registry. The label ``node`` distinguishes them.

    Args:
        registry: the registry that exposes the metrics.
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
    """Return the metrics of *registry*, or of the default registry for ``None``. They are made once per registry."""
    where = REGISTRY if registry is None else registry
    known = _ALL.get(where)
    if known is None:
        known = _ALL[where] = ManagerMetrics(where)
    return known


class TransactionState(Enum):
    """The state of a transaction."""

    ACTIVE = "active"
    COMPLETING = "completing"
    OVER = "over"


class BaseTransactionManager(ABC, Generic[TX]):
    """The base of both transaction managers. Arguments are those of :class:`~dtx.client.tm.TransactionManager`."""

    where: ClassVar[str]
    """The owner of a transaction (thread or task), for messages."""

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
        """Begin a new transaction.

        Args:
            timeout: seconds, instead of the time-out of the transaction manager.
        """

    @abstractmethod
    def write(self, call: Callable[[DecisionLog], Any]) -> Any:
        """Call the log. With asyncio the call is awaited."""

    @property
    def node(self) -> str:
        """The name of the node."""
        return self.identity.node

    def register(self, resource: Any) -> Any:
        """Register a resource. Transactions can then enlist it, and recovery completes its branches.

        Args:
            resource: the resource.

        Returns:
            The resource.

        Raises:
            Misuse: another resource has the same name.
        """
        if self._resources.setdefault(resource.name, resource) is not resource:
            raise Misuse(f"there are two resources with the name {resource.name}")
        return resource

    def known(self, resource: Any) -> Any:
        """Return a registered resource.

        Args:
            resource: the resource or its name.

        Raises:
            Misuse: it is not registered. Recovery would not find its branches.
        """
        found = self._resources.get(resource if isinstance(resource, str) else resource.name)
        if found is None or not (isinstance(resource, str) or found is resource):
            raise Misuse(f"{resource!r} is not registered with this transaction manager")
        return found

    # -- transactions -------------------------------------------------------------------------------------------------

    def transaction(self, *, timeout: float | None = None) -> TX:
        """Begin a transaction for a ``with`` block.

        ``with tm.transaction() as tx:`` commits at the end of the block, and rolls back on an exception.

        Args:
            timeout: seconds, instead of the time-out of the transaction manager.
        """
        return self.begin(timeout=timeout)

    @property
    def current(self) -> TX:
        """The current transaction of this thread or task.

        Raises:
            Misuse: this thread or task has no transaction.
        """
        found = self._current.get()
        if found is None:
            raise Misuse(f"no transaction is under way in this {self.where}")
        return found

    def enter(self, transaction: TX) -> "Token[TX | None]":
        """Make *transaction* the current one.

        Raises:
            Misuse: this thread or task has a transaction already.
        """
        if self._current.get() is not None:
            raise Misuse(f"a transaction is under way in this {self.where} already; there are no nested ones")
        return self._current.set(transaction)

    def leave(self, token: "Token[TX | None]") -> None:
        """End the state that :meth:`enter` began: there is no current transaction any more."""
        self._current.reset(token)

    def begun(self, gtrid: bytes) -> None:
        """Record that a transaction is running."""
        self._running.add(gtrid)
        self.metrics.running.labels(self.node).inc()

    def over(self, gtrid: bytes) -> None:
        """Record that a transaction is over. Recovery completes the branches that it left open."""
        if gtrid in self._running:
            self._running.discard(gtrid)
            self.metrics.running.labels(self.node).dec()

    def plan(self, gtrid: bytes, branches: list[EnlistedBranch]) -> CommitPlan:
        """Return the plan for the completion of a transaction."""
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
        """Update the metrics and the log messages for the end of a transaction.

        Args:
            gtrid: the transaction.
            ended: the outcome, or the error that ended it.
            seconds: the duration of its completion.
        """
        name = gtrid.decode("ascii")
        match ended:
            case Outcome():
                label = "committed" if ended.decision is Decision.COMMIT else "rolled-back"
                if ended.unfinished:
                    resources = ", ".join(ended.unfinished)
                    _log.warning("%s: %s has not received the %s yet", name, resources, ended.decision.value)
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
        """Make one round of recovery; see :meth:`dtx.client.tm.TransactionManager.recover`."""
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
        """Update the metrics and the log messages for a round of recovery, and return its report."""
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
    """The base of transactions with threads and with asyncio; see :class:`~dtx.client.tm.Transaction`.

    Args:
        manager: the transaction manager that began it.
        gtrid: the id of the transaction.
        timeout: seconds from begin to commit; ``None`` sets no limit.
    """

    def __init__(self, manager: BaseTransactionManager[Any], gtrid: bytes, timeout: float | None) -> None:
        self.gtrid: Final = gtrid
        self.state = TransactionState.ACTIVE
        self.outcome: Outcome | None = None
        """The outcome; ``None`` until the transaction has ended with one."""
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
        """Mark the transaction as rollback-only: ``commit`` rolls back and raises RolledBack.

        Args:
            reason: the reason why it cannot commit. The exception contains the reason of the first call.

        Raises:
            Misuse: the transaction is completing or over.
        """
        self._require_active("be marked")
        self._rollback_only = self._rollback_only or reason

    def _enlist_work(self, resource: Any, handle: Any) -> Work[Any]:
        """Enlist a resource and return the handle for the application."""
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

    def _commit_work(self) -> Work[Outcome]:
        self._require_active("commit")
        elapsed = time.monotonic() - self._begun
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        begun = Gtrid.read(self.gtrid)
        # Two clocks: the monotonic clock of some machines stops while they sleep.
        if begun is not None:
            elapsed = max(elapsed, time.time() - begun.begun)
        if self._timeout is not None and elapsed > self._timeout:
            yield from self._complete_work(commitment.rollback(plan))
            raise TimedOut(f"after {elapsed:.1f} s, the time-out is {self._timeout:g} s", gtrid=self.gtrid)
        if self._rollback_only is not None:
            yield from self._complete_work(commitment.rollback(plan))
            raise RolledBack(self._rollback_only, gtrid=self.gtrid)
        return (yield from self._complete_work(commitment.commit(plan)))

    def _rollback_work(self) -> Work[Outcome]:
        self._require_active("roll back")
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        return (yield from self._complete_work(commitment.rollback(plan)))

    def _complete_work(self, work: Work[Outcome]) -> Work[Outcome]:
        """Carry out *work* and release the sessions.

        After an interruption close the sessions instead. Branches that are not prepared are then rolled back.
        """
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
        """Leave the transaction as the current one. Return whether it is still active."""
        if self._token is not None:
            self._manager.leave(self._token)
            self._token = None
        return self.state is TransactionState.ACTIVE


class TransactionManager(BaseTransactionManager["Transaction"]):
    """A transaction manager for programs with threads.

    Any thread may begin transactions. A transaction and its enlisted resources belong to the thread that began it.
    After a fork, make one transaction manager in each process. The processes of one node share its log.

    Args:
        node: the name of the node, 1 to 24 letters, digits, ``-`` or ``_``. It must be the same after a restart. Nodes
            with different logs must have different names.
        log: ``postgresql://…``, or the path of a SQLite file on a local disk.
        resources: the resources to register.
        timeout: seconds from begin to commit. After that, ``commit`` rolls back instead. ``None`` sets no limit.
        interval: seconds for which recovery does not touch an undecided branch.
        recover_every: seconds between rounds of recovery in the background, from :meth:`open` on. ``None`` means no
            rounds here: ``dtx tm recover --watch`` makes them elsewhere.
        keep: the time for which finished decisions stay in the log, at least twice *timeout*.
        format_id: the format id of all xids, 1 to 2147483647.
        forget_heuristics: whether a resource forgets a heuristic outcome after the log has recorded it.
        one_phase: whether the only resource of a transaction commits in one phase, without the log.
        registry: the registry for metrics; ``None`` means the default one.

    Raises:
        Misuse: an argument is out of range, or two resources have the same name.
        LogFailed: the log cannot be opened.
    """

    where = "thread"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stop = threading.Event()
        self._recovering = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> Self:
        """Start recovery in the background. The first round begins at once.

        Later rounds try unreachable resources, or an unreachable log, again.

        Returns:
            The transaction manager.
        """
        if self._recover_every is not None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dtx tm recovery", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """End recovery, and close the free sessions and the log. All transactions must be over."""
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
        """Begin a new transaction. The program completes it; ``with tm.transaction()`` completes it by itself.

        Args:
            timeout: seconds, instead of the time-out of the transaction manager.

        Returns:
            The transaction.

        Raises:
            Misuse: the process is a fork of the process that made the transaction manager.
        """
        return Transaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    def transactional(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function so that it runs in a transaction.

        The function runs in the current transaction if there is one, and otherwise in a new one.
        """

        @wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return function(*args, **kwargs)
            with self.transaction():
                return function(*args, **kwargs)

        return within

    def enlist(self, resource: Resource[Handle] | str, handle: Handle | None = None) -> Handle:
        """Enlist a resource in the current transaction; see :meth:`Transaction.enlist`.

        Raises:
            Misuse: this thread has no transaction.
        """
        return self.current.enlist(resource, handle)

    def recover(self) -> RecoveryReport:
        """Make one round of recovery; see :mod:`dtx.client.tm.recovery`. Transactions continue during the round.

        Returns:
            The report of the round.

        Raises:
            LogFailed: the log is unreachable. Recovery decides nothing without the log.
        """
        with self._recovering:
            return drive(self.recovering())

    def _watch(self) -> None:
        assert self._recover_every is not None
        while not self._stop.is_set():
            try:
                self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed and is tried again later: %s", error)
            self._stop.wait(self._recover_every)


class Transaction(BaseTransaction):
    """One global transaction. It belongs to one thread. Do not use it after its end.

    Args:
        manager: the transaction manager that began it.
        gtrid: the id of the transaction.
        timeout: seconds from begin to commit; ``None`` sets no limit.
    """

    def enlist(self, resource: Resource[Handle] | str, handle: Handle | None = None) -> Handle:
        """Enlist a resource in the transaction. A second call returns the same handle.

        Args:
            resource: a registered resource, or its name.
            handle: a channel or connection of the application that is outside of any transaction. It stays open.
                ``None`` means a free session of the resource, which returns to the resource at the end.

        Returns:
            The handle for the work: a channel of pika, or a connection of the database.

        Raises:
            Misuse: the transaction is over, the resource is not registered, or it is enlisted with another handle.
            XAException: the resource manager refuses, or is unreachable.
        """
        found: Handle = drive(self._enlist_work(resource, handle))
        return found

    def commit(self) -> Outcome:
        """Commit the whole transaction or nothing of it.

        After this call returns, the decision is commit. Each resource has committed, or recovery will commit it
        (``unfinished`` of the outcome).

        Returns:
            The outcome.

        Raises:
            RolledBack: a resource could not commit, or the transaction was marked rollback-only. Nothing took effect.
            TimedOut: the transaction took longer than its time-out and is rolled back.
            HeuristicOutcome: branches were completed contrary to the decision.
            OutcomeUnknown: the outcome is not known here. If the log of decisions was unreachable, recovery completes
                the transaction. If the only resource committed in one phase, the log has no record of it.
            Misuse: the transaction is over.
        """
        return drive(self._commit_work())

    def rollback(self) -> Outcome:
        """Roll the whole transaction back.

        Returns:
            The outcome.

        Raises:
            HeuristicOutcome: branches were committed without the transaction manager.
            Misuse: the transaction is over.
        """
        return drive(self._rollback_work())

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
