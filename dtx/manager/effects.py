"""Running what the core returns: each effect in turn, none skipped, nothing after one that failed.

Effects are run in one place, a generator that stops where one waits. A request for which one write is all that is
waited for takes no task: the log's word that it is durable, or not, goes straight to the generator. For all others a
task waits. Effects that wait for the broker come back as an event, and the next step answers. Whoever asked is told
after a while that it is still under way; the effect itself goes on for as long as it takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, assert_never

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import InFlight, LogError, TransactionLog
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
    Note,
    NoteStuck,
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
"""What a request without a task begins with."""
_UNKNOWN: Final = State.UNKNOWN
"""Reading a member of an enum costs as much as a call in Python 3.11, and this is read for each branch."""

Reply = Callable[[XaFlag | XaError], None]
"""Called once with the answer; further calls must be ignored."""


def release(entry: BranchRuntime) -> None:
    """Discard what the branch holds, and give deliveries back that were not taken."""
    entry.conclude(committed=False)
    if entry.work is not None:
        if failpoint.armed:
            failpoint.at(Point.RELEASE_BEFORE)
        entry.work.discard()
        if failpoint.armed:
            failpoint.at(Point.RELEASE_AFTER)


def give(entry: BranchRuntime, reply: Reply, flag: XaFlag) -> None:
    """Answer: all that *flag* promises is durable. What comes behind happens, whatever becomes of the answer."""
    if failpoint.armed:
        failpoint.at(Point.ANSWER_BEFORE)
    try:
        reply(flag)
    except Exception:  # noqa: BLE001 - logged; the branch has no part in it
        _log.exception("an answer could not be given", xid=entry.xid, vhost=entry.vhost)
        with suppress(Exception):
            reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
    if failpoint.armed:
        failpoint.at(Point.ANSWER_AFTER)


Wait = LogWrite | Awaitable[Event | None]
"""What the effects of a branch wait for: a write, or something else; sent in is the event that this ends in, if any."""
Steps = Generator[Wait, Event | None, None]
_Other = Apply | PutBack | Take | NoteStuck | Release | Remember | Refuse


class Effects:
    """Runs the steps of branches.

    Args:
        log: the transaction log.
        durable: says what is written to it.
        broker: for effects that wait for a broker; ``None`` where messages live in the log's own database.
        patience: seconds after which a requester is told that its request is still under way.
        remember: leaves a tombstone for a branch.
        answered: told of a branch whose end is about to be answered: it counts no more, though the log may have it.
        done: told that the operation on a branch is through, where no task has run it.
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
        """Requests without a task, whose writes nobody has heard of yet."""

    @property
    def broker(self) -> BrokerEffects:
        """Asked for by rows of the table that local work does not have."""
        assert self._broker is not None
        return self._broker

    def close(self) -> None:
        """Writes that are under way go on; their requests are not answered any more."""
        self._closed = True

    async def know_what_was_taken(self, entry: BranchRuntime, reply: Reply) -> None:
        """A taking that was broken off is looked into before anything is decided on it."""
        await self._patiently(entry, self.broker.take(entry), reply)

    def begin(self, entry: BranchRuntime, request: Request, reply: Reply, actor: str) -> bool:
        """Begin a request without a task, if one write is all that stands between it and its answer.

        Where messages live in the log's own database, that is what nearly every prepare, commit and rollback is; with a
        broker it is the prepare of a branch that has only published, and its rollback.

        Args:
            entry: nothing runs on it, and nothing about it is in doubt.
            request: what is asked.
            reply: gets the answer, after this returned.
            actor: who asks.

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
            return False  # whoever runs it in a task says so
        if not isinstance(record, LogWrite):
            return False  # that comes before it
        entry.claim()
        self._log.post(record, partial(self._go_on, entry, steps, reply))
        self.under_way.begin()
        return True

    def _go_on(self, entry: BranchRuntime, steps: Steps, reply: Reply, error: LogError | None) -> None:
        """The write of a request without a task is durable, or may not be: the effects behind it."""
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
        except Exception:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("request failed", xid=entry.xid, vhost=entry.vhost)
            reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
        finally:
            self._done(entry)

    async def run(self, entry: BranchRuntime, event: Event, reply: Reply, actor: str) -> None:
        """Step the branch and run the effects in order, until nothing is left to do.

        Raises:
            XaError: a step that is not in the table, or an effect that failed: nothing after it has run.
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

        A write and the answer behind it, which is all that most branches need, are here; the others are a step away.
        """
        while True:
            event = None
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
                            raise log_failed(error, _what(effect), entry.xid) from error
                        record = self._durable.writing(entry, effect, time.time(), actor)
                        try:
                            yield record
                        except LogError as error:
                            raise self._durable.failed(entry, record, _what(effect), error) from error
                        self._durable.written(entry, effect, record)
                        if isinstance(effect, Persist):
                            entry.branch = branch
                    case _:
                        event = (yield from self._other(entry, effect, reply, actor)) or event
            entry.branch = branch
            if event is None:
                return
            branch, effects = step(branch, event, self._clock())

    def _other(
        self, entry: BranchRuntime, effect: _Other, reply: Reply, actor: str
    ) -> Generator[Wait, Event | None, Event | None]:
        """Run an effect that is no write and no answer; returns the event that it ends in, if any."""
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
        """Run an effect that waits for the broker; after a while the requester is told that it is still under way."""
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


def _what(effect: LoggedEffect) -> str:
    match effect:
        case Persist():
            return f"writing {effect.state}"
        case Complete():
            return f"writing the end ({effect.ending})"
        case Note():
            return f"noting {effect.ending}"
