"""The short way of a request: one write stands between it and its answer, and nothing else has to be waited for.

Where messages live in the log's own database, that is what nearly every prepare, commit and rollback is; with a broker
it is the prepare of a branch that has only published, and its roll-back. Such a request takes no task: its effects are
the same, in the same order, and the rest of them runs when the log says that the write is durable, or not. What is not
that simple is not begun here.
"""

import time
from collections.abc import Callable
from typing import Final

from dtx.log.api import LogError, TransactionLog
from dtx.log.records import Insert, LogWrite
from dtx.log.underway import UnderWay
from dtx.manager.durable import Durable
from dtx.manager.effects import Reply, give
from dtx.manager.entry import Entry
from dtx.store.api import UnitProgress
from dtx.telemetry import get_logger
from dtx.xa.branch import Branch, step
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Answer, Complete, Ending, Operation, Persist, Request, State

_log = get_logger(part="manager")


class Quick:
    """Runs such requests.

    Args:
        log: the transaction log.
        durable: says what is to be written, and hears of it.
        done: the operation on a branch is through.
    """

    def __init__(self, log: TransactionLog, durable: Durable, done: Callable[[Entry], None]) -> None:
        self._log = log
        self._durable = durable
        self._done = done
        self._clock = time.monotonic
        self._closed = False
        self.under_way: Final = UnderWay()
        """Writes that nobody has heard of yet."""

    def close(self) -> None:
        """Nobody waits any more: what is under way goes on, and nobody hears of it."""
        self._closed = True

    def begin(self, entry: Entry, operation: Operation, reply: Reply, actor: str) -> bool:
        """Begin a request, unless it has to wait for something else than one write.

        Args:
            entry: nothing runs on it, and nothing about it is in doubt.
            operation: what is asked.
            reply: gets the answer, after this returned.
            actor: who asks.

        Returns:
            Whether it is under way; otherwise nothing has happened.
        """
        try:
            branch, effects = step(entry.branch, Request(operation=operation, vote=entry.vote), self._clock())
            if len(effects) != 2 or self._log.congested or not self._durable.is_defined(entry):
                return False
            write, answer = effects
            if not isinstance(answer, Answer):
                return False
            ending: Ending | None = None
            record: LogWrite
            if isinstance(write, Persist) and write.state is State.PREPARED:
                record = self._durable.voting(entry, time.time(), actor)
            elif isinstance(write, Complete):
                ending = write.ending
                record = self._durable.ending(entry, ending, time.time(), actor)
            else:
                return False
        except XaError:
            return False  # the long way says so
        entry.claim()
        self._log.post(record, _Rest(self, entry, branch, record, ending, answer.flag, reply))
        self.under_way.begin()
        return True

    def finish(self, rest: "_Rest", error: LogError | None) -> None:
        """The write is durable, or may not be: the effects behind it."""
        self.under_way.end()
        if self._closed:
            return
        entry, record, ending = rest.entry, rest.record, rest.ending
        try:
            if error is not None:
                what = f"writing {State.PREPARED}" if ending is None else f"writing the end ({ending})"
                rest.reply(self._durable.failed(entry, record, what, error))
            else:
                if ending is not None:
                    self._durable.ended(entry, ending)
                    entry.move_units(UnitProgress.ANSWERED)
                elif isinstance(record, Insert):
                    self._durable.voted(entry, record)
                entry.branch = rest.branch
                give(rest.reply, rest.flag)
        except Exception:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("request failed", xid=entry.xid, vhost=entry.vhost)
            rest.reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
        finally:
            self._done(entry)


class _Rest:
    """What is left of a request when its write is under way."""

    __slots__ = ("branch", "ending", "entry", "flag", "quick", "record", "reply")

    def __init__(
        self,
        quick: Quick,
        entry: Entry,
        branch: Branch,
        record: LogWrite,
        ending: Ending | None,
        flag: XaFlag,
        reply: Reply,
    ) -> None:
        self.quick = quick
        self.entry = entry
        self.branch = branch
        self.record = record
        self.ending = ending
        self.flag = flag
        self.reply = reply

    def __call__(self, error: LogError | None) -> None:
        self.quick.finish(self, error)
