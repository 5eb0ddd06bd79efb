"""The transaction manager for threads: a shell around :mod:`dtx.client.tm.core`, with recovery in a thread."""

import logging
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, ParamSpec, Self, TypeVar

from dtx.client.tm.commitment import Outcome
from dtx.client.tm.core import BaseTransaction, BaseTransactionManager
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.recovery import RecoveryReport
from dtx.client.tm.resources import Handle, Resource
from dtx.client.tm.steps import drive

_log: Final = logging.getLogger("dtx.client.tm")
_P = ParamSpec("_P")
_R = TypeVar("_R")


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
