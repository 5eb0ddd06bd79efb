"""The transaction manager for threads: transactions, their resources, recovery in the background."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from datetime import timedelta
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar

from prometheus_client import CollectorRegistry

from dtx.client.tm import commitment, points
from dtx.client.tm.commitment import Branch, Outcome, Plan
from dtx.client.tm.decisions import Decision, DecisionLog, open_log
from dtx.client.tm.errors import (
    HeuristicOutcome,
    Misuse,
    OutcomeUnknown,
    TimedOut,
    TransactionError,
)
from dtx.client.tm.metrics import Metrics, metrics_of
from dtx.client.tm.names import FORMAT_ID, Gtrid, Identity
from dtx.client.tm.points import Point
from dtx.client.tm.recovery import RecoveryReport, Round
from dtx.client.tm.resources import Handle, Resource
from dtx.client.tm.steps import Steps, run
from dtx.xa.xid import Xid

_log: Final = logging.getLogger("dtx.client.tm")
_P = ParamSpec("_P")
_R = TypeVar("_R")

KEEP: Final = timedelta(days=7)
"""How long finished decisions are kept: an operator wants to look at them, and so does reconciliation."""


class TransactionState(Enum):
    """Where a transaction is."""

    ACTIVE = "active"
    COMPLETING = "completing"
    OVER = "over"


class BaseTransactionManager:
    """What the transaction managers for threads and for asyncio have in common; see :class:`TransactionManager`."""

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
        self.identity: Final = Identity(node, format_id)
        self.log: Final = open_log(log)
        self.interval: Final = interval
        self.timeout: Final = timeout
        self.metrics: Final[Metrics] = metrics_of(registry)
        self._resources: dict[str, Any] = {}
        self._recover_every = recover_every
        self._keep = keep
        self._forget = forget_heuristics
        self._one_phase = one_phase
        self._running: set[bytes] = set()
        self._first_seen: dict[Xid, float] = {}
        self._alone: set[Xid] = set()
        for resource in resources:
            self.register(resource)

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

    def begun(self, gtrid: bytes) -> None:
        """A transaction is under way."""
        self._running.add(gtrid)
        self.metrics.running.labels(self.node).inc()

    def over(self, gtrid: bytes) -> None:
        """It is over: what it left open is recovery's."""
        if gtrid in self._running:
            self._running.discard(gtrid)
            self.metrics.running.labels(self.node).dec()

    def plan(self, gtrid: bytes, branches: list[Branch]) -> Plan:
        """How a transaction is to be completed."""
        return Plan(
            gtrid=gtrid,
            format_id=self.identity.format_id,
            node=self.node,
            branches=branches,
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

    def round(self) -> Round:
        """A round of recovery, to be run."""
        return Round(
            identity=self.identity,
            resources=dict(self._resources),
            running=self._running.__contains__,
            interval=self.interval,
            first_seen=self._first_seen,
            alone=self._alone,
            forget=self._forget,
        )

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


class TransactionManager(BaseTransactionManager):
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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._current: ContextVar[Transaction | None] = ContextVar("dtx_tm_transaction", default=None)
        self._stop = threading.Event()
        self._recovering = threading.Lock()
        self._thread: threading.Thread | None = None
        self.log.claim(self.node, self.identity.process)

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

    # -- transactions -------------------------------------------------------------------------------------------------

    def begin(self, *, timeout: float | None = None) -> "Transaction":
        """A new transaction; ``with tm.transaction()`` completes it by itself.

        Args:
            timeout: seconds, instead of the transaction manager's.
        """
        return Transaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    def transaction(self, *, timeout: float | None = None) -> "Transaction":
        """``with tm.transaction() as tx:`` commits at the end, and rolls back on an exception."""
        return self.begin(timeout=timeout)

    def transactional(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorator: the function runs in a transaction; in the current one, where there is one."""

        @wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return function(*args, **kwargs)
            with self.transaction():
                return function(*args, **kwargs)

        return within

    @property
    def current(self) -> "Transaction":
        """The transaction that this thread is in.

        Raises:
            Misuse: none is under way.
        """
        found = self._current.get()
        if found is None:
            raise Misuse("no transaction is under way in this thread")
        return found

    def enlist(self, resource: Resource[Handle] | str, handle: Handle | None = None) -> Handle:
        """:meth:`Transaction.enlist` of the current transaction."""
        return self.current.enlist(resource, handle)

    def enter(self, transaction: "Transaction") -> "Token[Transaction | None]":
        """*transaction* is the current one."""
        if self._current.get() is not None:
            raise Misuse("a transaction is under way in this thread already; there are no nested ones")
        return self._current.set(transaction)

    def leave(self, token: "Token[Transaction | None]") -> None:
        """There is no current one any more."""
        self._current.reset(token)

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> RecoveryReport:
        """One round of recovery, see :mod:`dtx.client.tm.recovery`. Transactions go on meanwhile.

        Raises:
            LogFailed: the log is out of reach; without it nothing is decided.
        """
        with self._recovering:
            work = self.round()
            try:
                report = run(work.steps(), self.log)
            finally:
                for name, session in work.sessions.items():
                    if session is not None:
                        self._resources[name].release(session)
            report.pruned = self.log.prune(self._keep)
        return self.recovered(report)

    def _watch(self) -> None:
        assert self._recover_every is not None
        while not self._stop.is_set():
            try:
                self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed, it is tried again: %s", error)
            self._stop.wait(self._recover_every)


class Transaction:
    """One global transaction. Of one thread; not to be used after its end.

    Args:
        manager: whose.
        gtrid: its id.
        timeout: seconds.
    """

    def __init__(self, manager: TransactionManager, gtrid: bytes, timeout: float | None) -> None:
        self.gtrid: Final = gtrid
        self.state = TransactionState.ACTIVE
        self.outcome: Outcome | None = None
        """How it ended, once it has."""
        self._manager = manager
        self._timeout = timeout
        self._begun = time.monotonic()
        self._branches: dict[str, Branch] = {}
        self._token: Token[Transaction | None] | None = None
        manager.begun(gtrid)

    def __repr__(self) -> str:
        return f"Transaction({self.gtrid.decode('ascii')!r}, {self.state.value})"

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
        self._require_active("enlist a resource")
        known = self._manager.known(resource)
        branch = self._branches.get(known.name)
        if branch is not None:
            if handle is not None and handle is not branch.session.handle:
                raise Misuse(f"{known.name} takes part in the transaction already, with another handle")
            return branch.session.handle  # type: ignore[no-any-return]
        xid = self._manager.identity.xid(self.gtrid, known.name)
        if handle is None:
            session = known.started(xid)
        else:
            session = known.around(handle)
            session.start(xid)
        self._branches[known.name] = Branch(known, session, xid)
        points.at(Point.BEGUN)
        return session.handle  # type: ignore[no-any-return]

    def commit(self) -> Outcome:
        """Commit all of it or none. When it returns, all resources commit: at once, or (``unfinished``) by recovery.

        Raises:
            RolledBack: a resource could not; nothing has happened. TimedOut: it took too long.
            HeuristicOutcome: somebody completed branches otherwise than was decided.
            OutcomeUnknown: whether it is committed is not known here; recovery completes it.
            Misuse: it is over.
        """
        self._require_active("commit")
        elapsed = time.monotonic() - self._begun
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        begun = Gtrid.read(self.gtrid)
        # Two clocks: the monotonic one stands still while some machines sleep.
        if begun is not None:
            elapsed = max(elapsed, time.time() - begun.begun)
        if self._timeout is not None and elapsed > self._timeout:
            self._complete(commitment.rollback(plan))
            raise TimedOut(f"after {elapsed:.1f} s, the time-out is {self._timeout:g} s", gtrid=self.gtrid)
        return self._complete(commitment.commit(plan))

    def rollback(self) -> Outcome:
        """Undo all of it.

        Raises:
            HeuristicOutcome: somebody committed branches.
            Misuse: it is over.
        """
        self._require_active("roll back")
        return self._complete(commitment.rollback(self._manager.plan(self.gtrid, list(self._branches.values()))))

    def _complete(self, steps: Steps[Outcome]) -> Outcome:
        self.state = TransactionState.COMPLETING
        began = time.perf_counter()
        ended: Outcome | TransactionError | None = None
        try:
            self.outcome = ended = run(steps, self._manager.log)
        except TransactionError as error:
            ended = error
            raise
        finally:
            self.state = TransactionState.OVER
            self._release(healthy=ended is not None)
            self._manager.over(self.gtrid)
            if ended is not None:
                self._manager.count(self.gtrid, ended, time.perf_counter() - began)
        return ended

    def _release(self, *, healthy: bool) -> None:
        """Give sessions back; after an interruption close them, so that what is not prepared is rolled back."""
        for branch in self._branches.values():
            if healthy:
                branch.resource.release(branch.session)
            else:
                branch.session.close()

    def _require_active(self, what: str) -> None:
        if self.state is not TransactionState.ACTIVE:
            raise Misuse(f"cannot {what}: the transaction is {self.state.value} (gtrid {self.gtrid.decode('ascii')})")

    def __enter__(self) -> Self:
        self._token = self._manager.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._token is not None:
            self._manager.leave(self._token)
            self._token = None
        if self.state is not TransactionState.ACTIVE:
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()
