"""Queues in the transactions of the package ``transaction`` (ZODB, zope.sqlalchemy, pyramid_tm); extra ``dtx[zope]``.

::

    tm = TransactionManager(node="web-1", log="/var/lib/web/tm.db", resources=[DtxResource("queue", "amqp://…")])

    with transaction.manager:
        channel = join(tm, "queue")
        channel.basic_publish("", "shipping", b"1")

Theory of operation. The package asks each data manager for its vote (``tpc_vote``). When all have voted yes, it calls
``tpc_finish`` of each, which must not fail. ``tpc_vote`` therefore makes all checks: it prepares the branch, and it
makes sure that the log of decisions can be written. ``tpc_finish`` makes the decision durable and commits. If dtx is
unreachable at that moment, ``tpc_finish`` raises nothing, and the recovery of *tm* commits the branch later.

The package keeps no log of its own. If the process dies after the prepare and before the decision, the recovery of *tm*
rolls the dtx branches back. Other data managers must recover by their own means. A crash between two ``tpc_finish`` can
therefore commit one of queue and database without the other. If that is not acceptable, let *tm* commit both
(:mod:`dtx.client.tm`).

A savepoint ends the branch and begins a further branch of the same global transaction. A rollback to the savepoint
rolls back the branches since then. The remaining branches are prepared and committed together.

The vote comes before the vote of a one-phase session of zope.sqlalchemy. Such a session commits in its vote. The one
resource that cannot prepare must be the last one.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

import transaction
from pika.adapters.blocking_connection import BlockingChannel
from transaction.interfaces import IDataManagerSavepoint, ISavepointDataManager
from zope.interface import implementer

from dtx.client.calls import FAILURES
from dtx.client.errors import XAException
from dtx.client.tm.commitment import CommitPlan, EnlistedBranch, Outcome, decide, rollback
from dtx.client.tm.decisions import Decision
from dtx.client.tm.errors import RolledBack, TransactionError
from dtx.client.tm.manager import TransactionManager
from dtx.client.tm.resources import DtxResource, ResourceSession
from dtx.client.tm.steps import Work, drive
from dtx.xa.codes import XaFlag

_log: Final = logging.getLogger("dtx.client.zope")
_JOINED: Final[WeakKeyDictionary[Any, dict[tuple[int, str], "QueueDataManager"]]] = WeakKeyDictionary()


def join(tm: TransactionManager, resource: DtxResource | str, transaction_manager: Any = None) -> BlockingChannel:
    """Enlist a dtx resource in the current transaction of *transaction_manager*. Repeated calls are allowed.

    Args:
        tm: an open transaction manager. It names the branches, decides and recovers.
        resource: a resource that is registered with *tm*, or its name.
        transaction_manager: a transaction manager of the package ``transaction``. That of pyramid_tm is
            ``request.tm``. ``None`` means the transaction manager of the thread.

    Returns:
        The channel whose publishes and acknowledgements belong to the transaction. Call this function again after a
        rollback to a savepoint from before the first call.

    Raises:
        Misuse: the resource is not registered.
        XAException: dtx refuses, or is unreachable.
    """
    known = tm.known(resource)
    current = (transaction_manager or transaction.manager).get()
    joined = _JOINED.setdefault(current, {})
    manager = joined.get((id(tm), known.name))
    if manager is None:
        manager = QueueDataManager(tm, known, transaction_manager or transaction.manager, joined)
        try:
            current.join(manager)
        except BaseException:  # the transaction has failed already and would not end the new branch
            manager.abort(current)
            raise
        joined[id(tm), known.name] = manager
    return manager.channel


@implementer(ISavepointDataManager)
class QueueDataManager:
    """One dtx resource in one transaction. :func:`join` makes it.

    Args:
        tm: the transaction manager of dtx.
        resource: the resource that provides the session.
        transaction_manager: the transaction manager of the package ``transaction``.
        joined: the data managers of the same transaction. This one is removed at its end.
    """

    def __init__(
        self,
        tm: TransactionManager,
        resource: DtxResource,
        transaction_manager: Any,
        joined: "dict[tuple[int, str], QueueDataManager]",
    ) -> None:
        self.transaction_manager = transaction_manager
        self._joined = joined
        self._tm = tm
        self._resource = resource
        self._gtrid = tm.identity.new()
        self._numbers = itertools.count(2)
        self._branches: list[EnlistedBranch] = []
        self._ended = False
        self._begun = time.monotonic()
        xid = tm.identity.xid(self._gtrid, resource.name)
        session = resource.started(xid)
        self._session: ResourceSession[BlockingChannel] | None = session
        self._branches.append(EnlistedBranch(resource, session, xid))
        tm.begun(self._gtrid)

    @property
    def channel(self) -> BlockingChannel:
        """The channel for the work of the application.

        Raises:
            RolledBack: the transaction is over.
        """
        return self._open_session().handle

    def _open_session(self) -> ResourceSession[BlockingChannel]:
        if self._session is None:
            raise RolledBack("the transaction is over", gtrid=self._gtrid)
        return self._session

    def _start(self) -> None:
        session = self._open_session()
        xid = self._tm.identity.xid(self._gtrid, f"{self._resource.name}/{next(self._numbers)}")
        session.start(xid)
        self._branches.append(EnlistedBranch(self._resource, session, xid))
        self._ended = False

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._open_session().end(self._branches[-1].xid)

    def _plan(self, branches: list[EnlistedBranch]) -> CommitPlan:
        return self._tm.plan(self._gtrid, branches)

    # -- the two phases -----------------------------------------------------------------------------------------------

    def sortKey(self) -> str:  # noqa: N802 - the interface's name
        """Return a key that sorts before ``~sqlalchemy``: a session that commits in its vote must vote last."""
        return f"dtx:{self._resource.name}"

    def tpc_begin(self, transaction: Any) -> None:
        """Do nothing: :func:`join` has begun the branch."""

    def commit(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """End the work: dissociate the channel from the branch.

        Raises:
            RolledBack: the branch cannot be committed.
        """
        try:
            self._end()
        except XAException as error:
            raise RolledBack(f"{self._resource.name} cannot commit: {error}", gtrid=self._gtrid) from error

    def tpc_vote(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Prepare the branches, and check that the log can be written.

        Raises:
            RolledBack: a branch cannot be committed, or the transaction took longer than its time-out. The package
                aborts the transaction.
            LogFailed: the log of decisions is unreachable.
        """
        self._tm.log.flush()
        timeout = self._tm.timeout
        if timeout is not None and time.monotonic() - self._begun > timeout:
            raise RolledBack(f"the transaction took longer than its time-out of {timeout:g} s", gtrid=self._gtrid)
        for branch in self._branches:
            try:
                if branch.session.prepare(branch.xid) is XaFlag.RDONLY:
                    branch.live = False
            except XAException as error:
                raise RolledBack(f"{branch.name} cannot commit: {error}", gtrid=self._gtrid, causes=(error,)) from error

    def tpc_finish(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Decide and commit. Recovery commits the branches that are unreachable now.

        Raises:
            OutcomeUnknown: the log became unreachable after the vote.
            HeuristicOutcome: a prepared branch was rolled back without the transaction manager.
        """
        voted = [branch for branch in self._branches if branch.live]
        self._run(decide(self._plan(voted), voted) if voted else _nothing())

    def _run(self, work: Work[Outcome]) -> None:
        """Carry out *work*, which ends the transaction."""
        began = time.perf_counter()
        ended: Outcome | TransactionError | None = None
        try:
            ended = drive(work)
        except TransactionError as error:
            ended = error
            raise
        finally:
            if ended is not None:
                self._tm.count(self._gtrid, ended, time.perf_counter() - began)
            self._over()

    def tpc_abort(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Roll all branches back, prepared or not."""
        self._roll_back_all()

    def abort(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Roll all branches back before the first phase."""
        self._roll_back_all()

    def should_retry(self, error: BaseException) -> bool:
        """Return whether the transaction may be retried: ``RolledBack`` means that nothing took effect.

        The method belongs to ``IRetryDataManager``.
        """
        return type(error) is RolledBack

    def _roll_back_all(self) -> None:
        if self._session is not None:
            self._run(rollback(self._plan(self._branches)))

    def _over(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._resource.release(session)
        self._tm.over(self._gtrid)
        for key in [key for key, manager in self._joined.items() if manager is self]:
            del self._joined[key]

    # -- savepoints ---------------------------------------------------------------------------------------------------

    def savepoint(self) -> "QueueSavepoint":
        """Make a savepoint. A rollback to it undoes only the later work."""
        with self._between_branches():
            self._end()
            kept = len(self._branches)
            self._start()
        return QueueSavepoint(self, kept)

    def roll_back_to(self, kept: int) -> None:
        """Undo all but the first *kept* branches.

        Raises:
            RolledBack: a branch could not be undone. Nothing can be committed then.
        """
        with self._between_branches():
            try:
                self._end()
            except XAException as error:
                _log.info("a branch could not be ended before its rollback: %s", error)
            undone, self._branches = self._branches[kept:], self._branches[:kept]
            drive(rollback(self._plan(undone)))
            self._start()

    @contextmanager
    def _between_branches(self) -> Iterator[None]:
        """Close the channel if the next branch cannot start: work on it would be outside the transaction."""
        try:
            yield
        except BaseException:
            with suppress(*FAILURES):
                self.channel.close()
            raise


def _nothing() -> Work[Outcome]:
    """Return the outcome of a transaction whose branches were all read-only."""
    yield from ()
    return Outcome(decision=Decision.COMMIT)


@implementer(IDataManagerSavepoint)
class QueueSavepoint:
    """A savepoint of a :class:`QueueDataManager`.

    Args:
        manager: the data manager that made it.
        kept: the number of branches at that time.
    """

    def __init__(self, manager: QueueDataManager, kept: int) -> None:
        self._manager = manager
        self._kept = kept

    def rollback(self) -> None:
        """Undo the work since the savepoint."""
        self._manager.roll_back_to(self._kept)
