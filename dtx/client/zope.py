"""Queues in the transactions of the package ``transaction`` (ZODB, zope.sqlalchemy, pyramid_tm); extra ``dtx[zope]``.

::

    tm = TransactionManager(node="web-1", log="/var/lib/web/tm.db", resources=[DtxResource("queue", "amqp://…")])

    with transaction.manager:
        channel = join(tm, "queue")
        channel.basic_publish("", "shipping", b"1")

Theory of operation. The package asks each data manager for its vote (``tpc_vote``), and when all have voted yes tells
all to finish (``tpc_finish``), which must not fail. Everything that can be known is known at the vote: the branch is
prepared, and the log of decisions can be written. ``tpc_finish`` makes the decision durable and commits; a dtx that is
out of reach at that moment is told by the recovery of *tm*, and nothing is raised.

The package keeps no log of its own. What the process has prepared and not decided when it dies is rolled back by the
recovery of *tm*, here; other data managers are left to their own means. So where a crash between two ``tpc_finish``
must not tell queue and database apart, let *tm* commit both (:mod:`dtx.client.tm`).

A savepoint ends the branch and begins a further one of the same global transaction; rolling back to it rolls back the
branches since. All that are left are prepared and committed together.

The vote comes before that of a one-phase session of zope.sqlalchemy, which commits in its vote: the one resource that
cannot prepare is to be the last one.
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
    """Let a dtx take part in the current transaction of *transaction_manager*; once or repeatedly.

    Args:
        tm: gives names to the branches, decides and recovers. Open.
        resource: registered with *tm*; itself or its name.
        transaction_manager: of the package ``transaction``; pyramid_tm's is ``request.tm``. The thread's otherwise.

    Returns:
        The channel whose publishes and acks belong to the transaction. Call this again after a rollback to a savepoint
        from before the first call.

    Raises:
        Misuse: the resource is not registered.
        XAException: dtx refuses, or is out of reach.
    """
    known = tm.known(resource)
    current = (transaction_manager or transaction.manager).get()
    joined = _JOINED.setdefault(current, {})
    manager = joined.get((id(tm), known.name))
    if manager is None:
        manager = QueueDataManager(tm, known, transaction_manager or transaction.manager, joined)
        try:
            current.join(manager)
        except BaseException:  # it has failed already: nobody would end what has just begun
            manager.abort(current)
            raise
        joined[id(tm), known.name] = manager
    return manager.channel


@implementer(ISavepointDataManager)
class QueueDataManager:
    """One dtx in one transaction. Made by :func:`join`.

    Args:
        tm: the transaction manager of dtx.
        resource: where the session comes from.
        transaction_manager: the one of the package ``transaction``.
        joined: those of the same transaction; this one is taken out when it is over.
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
        """What the application works with."""
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
        """Before ``~sqlalchemy``: a session that commits in its vote has to be the last to vote."""
        return f"dtx:{self._resource.name}"

    def tpc_begin(self, transaction: Any) -> None:
        """Nothing to do: the branch has been there since :func:`join`."""

    def commit(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """The work is complete: the channel is dissociated from the branch.

        Raises:
            RolledBack: the branch cannot be committed.
        """
        try:
            self._end()
        except XAException as error:
            raise RolledBack(f"{self._resource.name} cannot commit: {error}", gtrid=self._gtrid) from error

    def tpc_vote(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Prepare, and see that a decision can be written.

        Raises:
            RolledBack: it cannot be committed; the package aborts the transaction.
            LogFailed: the log of decisions is out of reach.
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
        """Decide and commit. What cannot be told now is told by recovery.

        Raises:
            OutcomeUnknown: the log was lost since the vote.
            HeuristicOutcome: somebody rolled a prepared branch back.
        """
        voted = [branch for branch in self._branches if branch.live]
        self._run(decide(self._plan(voted), voted) if voted else _nothing())

    def _run(self, work: Work[Outcome]) -> None:
        """Carry out *work*, which end the transaction."""
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
        """Roll back, prepared or not."""
        self._roll_back_all()

    def abort(self, transaction: Any) -> None:  # noqa: ARG002 - the interface's argument
        """Roll back before the first phase."""
        self._roll_back_all()

    def should_retry(self, error: BaseException) -> bool:
        """Of ``IRetryDataManager``: nothing has happened of what was rolled back."""
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
        """What is done from here on can be undone alone."""
        with self._between_branches():
            self._end()
            kept = len(self._branches)
            self._start()
        return QueueSavepoint(self, kept)

    def roll_back_to(self, kept: int) -> None:
        """Undo all but the first *kept* branches.

        Raises:
            RolledBack: one of them could not be undone: then nothing can be committed.
        """
        with self._between_branches():
            try:
                self._end()
            except XAException as error:
                _log.info("a branch that is rolled back anyway could not be ended: %s", error)
            undone, self._branches = self._branches[kept:], self._branches[:kept]
            drive(rollback(self._plan(undone)))
            self._start()

    @contextmanager
    def _between_branches(self) -> Iterator[None]:
        """Where the next branch is not started, close the channel: work on it would be outside the transaction."""
        try:
            yield
        except BaseException:
            with suppress(*FAILURES):
                self.channel.close()
            raise


def _nothing() -> Work[Outcome]:
    """All branches were read-only."""
    yield from ()
    return Outcome(decision=Decision.COMMIT)


@implementer(IDataManagerSavepoint)
class QueueSavepoint:
    """A savepoint of a :class:`QueueDataManager`.

    Args:
        manager: whose.
        kept: how many branches were there.
    """

    def __init__(self, manager: QueueDataManager, kept: int) -> None:
        self._manager = manager
        self._kept = kept

    def rollback(self) -> None:
        """Undo what was done since."""
        self._manager.roll_back_to(self._kept)
