"""What members tell each other about second copies of messages, so that the consumers of all of them get one copy.

Theory of operation. Any member may deliver any copy, and one member sends again what may be in the queues already. So
before it sends, it waits until all others have loaded that from the log (:meth:`MemberCopies.announce`). And before a
member delivers a message that was sent again, it asks the others whether a consumer has another copy
(:meth:`MemberCopies.ask`), and loads what consumers have settled.

Two members may ask each other at the same time, each about its own copy. The copy of the earlier attempt is delivered
then: its member is told that the other one has none, and the other one has yielded, and waits.

A message that is delivered again may come from a branch of another member, which is dead, or has lost a connection to
the broker. If it is not known whether that branch has taken it, the branch puts it back under another name. So members
ask each other about every message of a branch that is delivered again.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from dtx.log.api import LogUnavailable, TransactionLog
from dtx.server.members.forwarding import Forwarding
from dtx.store.rabbitmq.copies import Copy, CopyPlace, CopyRegister, Key, OtherCopies
from dtx.telemetry import get_logger

_log = get_logger(part="copies")
_ANSWER: Final = 2.0
"""Seconds in which a member must answer."""
_PAUSE: Final = 0.1
"""Seconds before a member that has not answered is told again."""
_PATIENCE: Final = 60.0
"""Seconds after which messages are sent again, although a living member does not know of them."""
_AT_ONCE: Final = 500
"""Branches in one request."""
_MOST_ENDED: Final = 50_000
"""Ended branches that are remembered: some megabytes."""


@dataclass(slots=True)
class _Decision:
    """A copy about which the others are asked now."""

    attempt: int
    has_yielded: bool = False


@dataclass(slots=True)
class _Batch:
    """Branches that are looked up together."""

    wanted: set[bytes] = field(default_factory=set)
    found: set[bytes] | None = None


class MemberCopies:
    """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`.

    Args:
        log: of all members.
        register: of this member.
        forwarding: asks the other members.
    """

    def __init__(self, log: TransactionLog, register: CopyRegister, forwarding: Forwarding) -> None:
        self.is_ready: Callable[[], bool] = lambda: True
        """Whether this member knows what branches that it has taken over have perhaps taken from queues."""
        self._log = log
        self._register = register
        self._forwarding = forwarding
        self._ended: dict[bytes, None] = {}
        self._decisions: dict[CopyPlace, list[_Decision]] = {}
        self._batch = _Batch()
        self._reading = asyncio.Lock()
        self._given_up: set[UUID] = set()
        """Members that did not answer in time, and have not answered since."""

    def has_ended(self, branch: bytes) -> bool:
        """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`."""
        return branch in self._ended

    def ended(self, branch: bytes) -> None:
        """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`."""
        self._ended[branch] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def unended(self, branches: Collection[bytes]) -> Collection[bytes]:
        """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`. Callers that wait for a read share the next one."""
        batch = self._batch
        batch.wanted.update(branches)
        async with self._reading:
            if batch is self._batch:
                self._batch = _Batch()
                try:
                    found = await self._log.unended([_id(each) for each in batch.wanted if each not in self._ended])
                except LogUnavailable:  # then the settlement cannot be written either, and waits
                    batch.found = batch.wanted
                else:
                    batch.found = {str(branch).encode() for branch in found}
        if batch.found is None:  # the caller that read was cancelled
            return branches
        for branch in branches:
            if branch not in batch.found:
                self.ended(branch)
        return batch.found.intersection(branches)

    async def announce(self, branches: Collection[bytes]) -> None:
        """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`."""
        names = [branch.decode() for branch in branches]
        for start in range(0, len(names), _AT_ONCE):
            await self._announce(names[start : start + _AT_ONCE])

    async def _announce(self, branches: list[str]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE
        told: set[UUID] = set()
        silent: dict[UUID, str] = {}
        while True:
            try:
                answers = await self._forwarding.ask_others({"copies": {"load": branches}}, _ANSWER, but=told)
            except LogUnavailable as error:
                missing = str(error)
            else:
                told |= {member.instance for member, answer in answers if isinstance(answer, dict)}
                self._given_up -= told
                # one whose lease has run out loads it before it delivers anything
                silent = {
                    member.instance: member.holder
                    for member, _ in answers
                    if member.instance not in told and not member.expired and not member.dead
                }
                if silent.keys() <= self._given_up:  # all other branches would wait as long
                    return
                missing = ", ".join(silent.values())
            if loop.time() > until:
                self._given_up |= silent.keys()
                effect = "its consumers may get second copies"
                _log.warning("messages are sent again, and a member does not know of it", member=missing, effect=effect)
                return
            await asyncio.sleep(_PAUSE)

    async def ask(self, copy: Copy, *, redelivered: bool) -> OtherCopies:
        """See :class:`~dtx.store.rabbitmq.copies.CopyMembers`."""
        (branch, position), vhost, queue = copy.place
        asked = [branch.decode(), position, vhost, queue.hex(), copy.attempt]
        decision = _Decision(copy.attempt)
        decisions = self._decisions.setdefault(copy.place, [])
        decisions.append(decision)
        try:
            is_out = False
            in_doubt = redelivered and not self.is_ready()
            for member, answer in await self._forwarding.ask_others({"copies": {"ask": asked}}, _ANSWER):
                if not isinstance(answer, dict):  # also one that is dead, until another one has taken over from it
                    raise LogUnavailable(f"{member.holder} does not answer: {answer}")
                is_out |= answer["out"] is not False
                in_doubt |= redelivered and answer["doubt"] is not False
            if self._register.may_be_repeated(copy.place.key):
                # after the answers: what a consumer has settled since then is in the log
                self._register.load(await self._log.load_copies([_id(branch)], position))
            return OtherCopies(is_out or decision.has_yielded, in_doubt)
        finally:
            decisions.remove(decision)
            if not decisions:
                self._decisions.pop(copy.place, None)

    async def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer another member.

        Raises:
            KeyError, ValueError, TypeError: the request is malformed.
            LogUnavailable: the log cannot be read.
        """
        if "load" in request:
            self._register.load(await self._log.load_copies([UUID(each) for each in request["load"]]))
            return {}
        branch, position, vhost, queue, attempt = request["ask"]
        place = CopyPlace(Key(str(branch).encode(), int(position)), str(vhost), bytes.fromhex(queue))
        return {
            "out": self._register.is_out(place, int(attempt)) or self._is_first(place, int(attempt)),
            "doubt": self._register.is_in_doubt(place) or not self.is_ready(),
        }

    def _is_first(self, place: CopyPlace, attempt: int) -> bool:
        """Whether this member is about to deliver an earlier copy; later ones yield to the one that is asked about."""
        decisions = self._decisions.get(place, ())
        if any(each.attempt < attempt for each in decisions):
            return True
        for each in decisions:
            each.has_yielded |= each.attempt > attempt
        return False


def _id(branch: bytes) -> UUID:
    return UUID(branch.decode())
