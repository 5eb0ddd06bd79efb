"""Running the effects that the core returns: in order, none skipped, none after one that failed.

One generator runs the effects, and stops where one must wait. A request that waits for one write only needs no task:
the log's callback resumes the generator. For all other requests a task waits. Effects that wait for the broker end in
an event, and the next step answers. After a while the client is told that its request is still under way; the effect
itself goes on for as long as it takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, assert_never

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import DuplicateXid, InFlight, LogError, TransactionLog
from dtx.log.records import LogWrite
from dtx.manager.branch_persistence import BranchPersistence, LoggedEffect, log_failed
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.broker import BrokerEffects
from dtx.telemetry import get_logger
from dtx.xa.branch import Branch, step
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import (
    Answer,
    Apply,
    Complete,
    Effect,
    Event,
    Happened,
    Note,
    NoteStuck,
    Operation,
    Persist,
    PutBack,
    Refuse,
    Release,
    Remember,
    Request,
    State,
    Take,
)

_log = get_logger(part="manager")
_FIRST: Final = (Persist, Complete)
"""The first effect of a request without a task."""
_UNKNOWN: Final = State.UNKNOWN
"""Reading a member of an enum costs as much as a call in Python 3.11, and each branch reads this."""

Reply = Callable[[XaFlag | XaError], None]
"""Called once with the answer; further calls must be ignored."""


def release(entry: BranchRuntime) -> None:
    """Discard the messages of the branch in memory, and return deliveries that were not taken."""
    entry.conclude(committed=False)
    if entry.work is not None:
        if failpoint.armed:
            failpoint.at(Point.RELEASE_BEFORE)
        entry.work.discard()
        if failpoint.armed:
            failpoint.at(Point.RELEASE_AFTER)


def give(entry: BranchRuntime, reply: Reply, flag: XaFlag) -> None:
    """Send an answer: all that *flag* promises is durable. A failure of *reply* does not stop later effects."""
    if failpoint.armed:
        failpoint.at(Point.ANSWER_BEFORE)
    try:
        reply(flag)
    except Exception:  # noqa: BLE001 - logged; it does not concern the branch
        _log.exception("an answer could not be sent", xid=entry.xid, vhost=entry.vhost)
        with suppress(Exception):
            reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
    if failpoint.armed:
        failpoint.at(Point.ANSWER_AFTER)


Wait = LogWrite | Awaitable[Event | None]
"""What effects wait for: a write, or an awaitable, whose result is the event that it ends in, if any."""
Steps = Generator[Wait, Event | None, None]
_Other = Apply | PutBack | Take | NoteStuck | Release | Remember | Refuse


class Effects:
    """Runs the steps of branches.

    Args:
        log: the transaction log.
        durable: converts effects to writes.
        broker: for effects that wait for a broker; ``None`` where messages are in the log's own database.
        patience: seconds after which a client is told that its request is still under way.
        remember: leaves a tombstone for a branch.
        answered: called before the end of a branch is answered: it no longer counts, though the log may still have it.
        done: called when an operation on a branch without a task has finished.
    """

    def __init__(
        self,
        log: TransactionLog,
        durable: BranchPersistence,
        broker: BrokerEffects | None,
        patience: float,
        *,
        remember: Callable[[BranchRuntime, XaFlag], None],
        answered: Callable[[BranchRuntime], None],
        done: Callable[[BranchRuntime], None],
    ) -> None:
        self._log = log
        self._durable = durable
        self._broker = broker
        self._patience = patience
        self._remember = remember
        self._answered = answered
        self._done = done
        self._clock = time.monotonic
        self._closed = False
        self.under_way: Final = InFlight()
        """Requests without a task whose writes have no outcome yet."""

    @property
    def broker(self) -> BrokerEffects:
        """The effects at the broker; the table has no rows for local work that use them."""
        assert self._broker is not None
        return self._broker

    def close(self) -> None:
        """Stop answering requests without a task; their writes go on."""
        self._closed = True

    async def resolve_take(self, entry: BranchRuntime, reply: Reply) -> None:
        """Find out the outcome of an interrupted take before any decision is based on it."""
        await self._patiently(entry, self.broker.take(entry), reply)

    def begin(self, entry: BranchRuntime, request: Request, reply: Reply, actor: str) -> bool:
        """Begin a request without a task, if it needs just one write before its answer.

        In standalone mode that is true of nearly every prepare, commit and rollback. With a broker it is true of the
        prepare of a branch that has only published, and of its rollback.

        Args:
            entry: idle, with a certain state.
            request: the request.
            reply: called with the answer, after this method has returned.
            actor: the user of the request.

        Returns:
            Whether it is under way; otherwise nothing has happened.
        """
        try:
            branch, effects = step(entry.branch, request, self._clock())
            if (
                len(effects) != 2
                or not isinstance(effects[0], _FIRST)
                or not isinstance(effects[1], Answer)
                or self._log.congested
            ):
                return False
            steps = self._steps(entry, branch, effects, reply, actor)
            record = next(steps)
        except XaError:
            return False  # the task that runs it reports the error
        if not isinstance(record, LogWrite):
            return False  # it waits for something else first
        entry.claim()
        self._log.post(record, partial(self._continue, entry, steps, reply))
        self.under_way.begin()
        return True

    def _continue(self, entry: BranchRuntime, steps: Steps, reply: Reply, error: LogError | None) -> None:
        """Run the effects after the write of a request without a task; *error* is the outcome of the write."""
        self.under_way.end()
        if self._closed:
            return
        try:
            if error is None:
                steps.send(None)
            else:
                steps.throw(error)
        except StopIteration:
            pass
        except XaError as failed:
            reply(failed)
        except Exception:  # noqa: BLE001 - logged; the client gets no details
            _log.exception("request failed", xid=entry.xid, vhost=entry.vhost)
            reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
        finally:
            self._done(entry)

    async def run(self, entry: BranchRuntime, event: Event, reply: Reply, actor: str) -> None:
        """Step the branch and run the effects in order, until there are no more.

        Raises:
            XaError: the table has no such step, or an effect failed: no later effect has run.
        """
        branch, effects = step(entry.branch, event, self._clock())
        steps = self._steps(entry, branch, effects, reply, actor)
        try:
            waits_for = next(steps)
            while True:
                result: Event | None = None
                try:
                    if isinstance(waits_for, LogWrite):
                        await self._log.write(waits_for, urgent=not entry.answered)
                    else:
                        result = await waits_for
                except BaseException as error:  # noqa: BLE001 - raised again there
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(result)
        except StopIteration:
            return

    def _steps(
        self, entry: BranchRuntime, branch: Branch, effects: Sequence[Effect], reply: Reply, actor: str
    ) -> Steps:
        """Run *effects*, which lead to *branch*, and those of the events that they end in.

        A write and the answer after it, enough for most branches, are handled here, all others in :meth:`_other`.
        """
        while True:
            event: Event | None = None
            for effect in effects:
                match effect:
                    case Answer():
                        if branch.state is _UNKNOWN:
                            self._answered(entry)
                        give(entry, reply, effect.flag)
                    case Persist() | Complete() | Note():
                        try:
                            undefined = None if isinstance(effect, Note) else self._durable.undefined(entry)
                            if undefined is not None:
                                yield undefined
                        except LogError as error:
                            raise log_failed(error, _description(effect), entry.xid) from error
                        record = self._durable.writing(entry, effect, time.time(), actor)
                        try:
                            yield record
                        except DuplicateXid as error:
                            _log.warning("branch cannot vote", xid=entry.xid, vhost=entry.vhost, reason=str(error))
                            event = Happened(operation=Operation.DUPLICATE, vote=self._durable.vote(entry))
                            branch = entry.branch
                            self._durable.not_written(entry)
                            break
                        except LogError as error:
                            raise self._durable.failed(entry, record, _description(effect), error) from error
                        self._durable.written(entry, effect, record)
                        if isinstance(effect, Persist):
                            entry.branch = branch
                    case _:
                        event = (yield from self._run_other(entry, effect, reply, actor)) or event
            entry.branch = branch
            if event is None:
                return
            branch, effects = step(branch, event, self._clock())

    def _run_other(
        self, entry: BranchRuntime, effect: _Other, reply: Reply, actor: str
    ) -> Generator[Wait, Event | None, Event | None]:
        """Run an effect that is neither a write nor an answer; returns the event that it ends in, if any."""
        event = None
        match effect:
            case Apply():
                failpoint.at(Point.APPLY_BEFORE)
                event = yield self._patiently(entry, self.broker.apply(entry), reply)
                failpoint.at(Point.APPLY_AFTER)
            case PutBack():
                failpoint.at(Point.PUT_BACK_BEFORE)
                event = yield self._patiently(entry, self.broker.put_back(entry), reply)
                failpoint.at(Point.PUT_BACK_AFTER)
            case Take():
                failpoint.at(Point.TAKE_BEFORE)
                event = yield self._patiently(entry, self.broker.take(entry), reply)
                failpoint.at(Point.TAKE_AFTER)
            case NoteStuck():
                yield self.broker.note_stuck(entry, effect.reason, actor)
            case Release():
                release(entry)
            case Remember():
                failpoint.at(Point.REMEMBER_BEFORE)
                self._remember(entry, effect.flag)
                failpoint.at(Point.REMEMBER_AFTER)
            case Refuse():
                failpoint.at(Point.REFUSE_BEFORE)
                reply(XaError(effect.code, effect.reason))
                failpoint.at(Point.REFUSE_AFTER)
            case _:  # pragma: no cover
                assert_never(effect)
        return event

    async def _patiently(self, entry: BranchRuntime, effect: Awaitable[Event], reply: Reply) -> Event:
        """Run an effect that waits for the broker; after a while, tell the client that it is still under way."""
        timer = asyncio.get_running_loop().call_later(self._patience, self._still_under_way, entry, reply)
        try:
            return await effect
        finally:
            timer.cancel()

    def _still_under_way(self, entry: BranchRuntime, reply: Reply) -> None:
        reason = (
            f"{entry.branch.state} is not finished, the broker has not answered for {self._patience:g} s; "
            f"it goes on, try again (xid {entry.xid})"
        )
        reply(XaError(ReplyCode.INTERNAL_ERROR, reason))


def _description(effect: LoggedEffect) -> str:
    match effect:
        case Persist():
            return f"writing {effect.state}"
        case Complete():
            return f"writing the end ({effect.ending})"
        case Note():
            return f"noting {effect.ending}"
