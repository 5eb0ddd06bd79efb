"""Running what the core returns: each effect in turn, none skipped, nothing after one that failed.

Effects that wait for the broker come back as an event, and the next step answers. Whoever asked is told after a while
that it is still under way; the effect itself goes on for as long as it takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import assert_never

from dtx import failpoint
from dtx.failpoint import Point
from dtx.manager.broker import BrokerEffects
from dtx.manager.durable import Durable
from dtx.manager.entry import Entry
from dtx.store.api import UnitProgress
from dtx.xa.branch import step
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
    State,
    Take,
)

Reply = Callable[[XaFlag | XaError], None]
"""Called once with the answer; further calls must be ignored."""


def release(entry: Entry) -> None:
    """Discard what the branch holds, and give deliveries back that were not taken."""
    entry.conclude(committed=False)
    if entry.work is not None:
        if failpoint.armed:
            failpoint.at(Point.RELEASE_BEFORE)
        entry.work.discard()
        if failpoint.armed:
            failpoint.at(Point.RELEASE_AFTER)


def give(reply: Reply, flag: XaFlag) -> None:
    """Answer: all that *flag* promises is durable."""
    if failpoint.armed:
        failpoint.at(Point.ANSWER_BEFORE)
    reply(flag)
    if failpoint.armed:
        failpoint.at(Point.ANSWER_AFTER)


class Effects:
    """Runs the steps of branches.

    Args:
        durable: writes entries to the log.
        broker: for effects that wait for a broker; ``None`` where messages live in the log's own database.
        patience: seconds after which a requester is told that its request is still under way.
        remember: leaves a tombstone for a branch.
        answered: told of a branch whose end is answered: it counts no more, though the log may have it still.
    """

    def __init__(
        self,
        durable: Durable,
        broker: BrokerEffects | None,
        patience: float,
        remember: Callable[[Entry, XaFlag], None],
        answered: Callable[[Entry], None],
    ) -> None:
        self._durable = durable
        self._broker = broker
        self._patience = patience
        self._remember = remember
        self._answered = answered
        self._clock = time.monotonic

    @property
    def broker(self) -> BrokerEffects:
        """Asked for by rows of the table that local work does not have."""
        assert self._broker is not None
        return self._broker

    async def know_what_was_taken(self, entry: Entry, reply: Reply) -> None:
        """A taking that was broken off is looked into before anything is decided on it."""
        await self._patiently(entry, self.broker.take(entry), reply)

    async def run(self, entry: Entry, event: Event | None, reply: Reply, actor: str) -> None:
        """Step the branch and run the effects in order, until nothing is left to do.

        Raises:
            XaError: a step that is not in the table, or an effect that failed: nothing after it has run.
        """
        while event is not None:
            branch, effects = step(entry.branch, event, self._clock())
            event = None
            for effect in effects:
                match effect:
                    case Persist():
                        await self._durable.persist(entry, effect.state, time.time(), actor, effect.outcome)
                        entry.branch = branch
                    case Complete():
                        await self._durable.complete(entry, effect.ending, time.time(), actor)
                    case Answer():
                        if branch.state is State.UNKNOWN:
                            entry.move_units(UnitProgress.ANSWERED)
                            self._answered(entry)
                        give(reply, effect.flag)
                    case Apply():
                        failpoint.at(Point.APPLY_BEFORE)
                        event = await self._patiently(entry, self.broker.apply(entry), reply)
                        failpoint.at(Point.APPLY_AFTER)
                    case PutBack():
                        failpoint.at(Point.PUT_BACK_BEFORE)
                        event = await self._patiently(entry, self.broker.put_back(entry), reply)
                        failpoint.at(Point.PUT_BACK_AFTER)
                    case Take():
                        failpoint.at(Point.TAKE_BEFORE)
                        event = await self._patiently(entry, self.broker.take(entry), reply)
                        failpoint.at(Point.TAKE_AFTER)
                    case _:
                        await self._small_effect(entry, effect, reply, actor)
            entry.branch = branch

    async def _small_effect(self, entry: Entry, effect: Effect, reply: Reply, actor: str) -> None:
        match effect:
            case Release():
                release(entry)
            case Remember():
                failpoint.at(Point.REMEMBER_BEFORE)
                self._remember(entry, effect.flag)
                failpoint.at(Point.REMEMBER_AFTER)
            case Note():
                await self._durable.note(entry, effect.ending, time.time(), actor)
            case NoteStuck():
                await self.broker.note_stuck(entry, effect.reason, actor)
            case Refuse():
                failpoint.at(Point.REFUSE_BEFORE)
                reply(XaError(effect.code, effect.reason))
                failpoint.at(Point.REFUSE_AFTER)
            case Persist() | Complete() | Answer() | Apply() | PutBack() | Take():  # pragma: no cover
                raise AssertionError(effect)
            case _:  # pragma: no cover
                assert_never(effect)

    async def _patiently(self, entry: Entry, effect: Awaitable[Event], reply: Reply) -> Event:
        """Run an effect that waits for the broker; after a while the requester is told that it is still under way."""
        timer = asyncio.get_running_loop().call_later(self._patience, self._still_under_way, entry, reply)
        try:
            return await effect
        finally:
            timer.cancel()

    def _still_under_way(self, entry: Entry, reply: Reply) -> None:
        reason = (
            f"{entry.branch.state} is not finished, the broker has not answered for {self._patience:g} s; "
            f"it goes on, try again (xid {entry.xid})"
        )
        reply(XaError(ReplyCode.INTERNAL_ERROR, reason))
