"""Mutations of dtx in what it knows of messages that it has sent again, and of their settlements."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from dtx.log.api import LogError
from dtx.log.records import LoggedCopies
from dtx.store.api import Applied, PhaseTwo, Refused
from dtx.store.rabbitmq import commit_connection, messages
from dtx.store.rabbitmq.copies import Copy, CopyRegister, CopyVerdict
from dtx.store.rabbitmq.store import RabbitStore
from tests.evidence.sim.mutations import Change, Mutation
from tests.evidence.sim.run import Shape

_COPIED: Final = Shape(
    troubles=16,
    exact=False,
    replay="always",
    readers=2,
    kinds=(
        "dtx loses its connections to the broker",
        "the broker is killed",
        "the active dtx is killed at a write",
        "dtx loses the broker at a write and is killed",
    ),
)
"""Many units are sent again."""
_COPIED_SLOWLY: Final = Shape(
    troubles=16,
    exact=False,
    replay="always",
    readers=3,
    database=0.05,
    kinds=("the active dtx is killed at a write", "dtx loses the broker at a write and is killed"),
)
"""As above, and writes take long."""


def _settled_first() -> Sequence[Change]:
    """The broker gets a settlement before the log."""
    settle = CopyRegister.settle
    under_way: set[asyncio.Task[None]] = set()

    async def late(self: CopyRegister, copies: Sequence[Copy]) -> None:
        with suppress(LogError):
            await settle(self, copies)

    async def hasty(self: CopyRegister, copies: Sequence[Copy]) -> None:
        task = asyncio.create_task(late(self, copies))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    return [(CopyRegister, "settle", hasty)]


def _never_open() -> Sequence[Change]:
    """Settlements of branches that have not ended are not recorded."""
    return [(CopyRegister, "begin", lambda *_: None)]


def _ended_early() -> Sequence[Change]:
    """Settlements are recorded until the broker has the messages of a branch, and not until the log has its end."""
    apply = RabbitStore.apply

    async def hasty(self: RabbitStore, phase: PhaseTwo) -> Applied | Refused:
        result = await apply(self, phase)
        self.copies.end(phase.branch_id)
        return result

    return [(RabbitStore, "apply", hasty)]


def _attempt_not_counted() -> Sequence[Change]:
    """All copies of a message have the same attempt."""
    direction = commit_connection._COMMIT

    def first(number: int, frame_max: int, branch_id: Any, work: Any, _: int) -> Any:
        return messages.commit_frames(number, frame_max, branch_id, work)

    return [(commit_connection, "_COMMIT", direction._replace(build=first))]


def _replays_not_recorded() -> Sequence[Change]:
    """The log does not have which messages are sent again."""
    return [(messages, "find_replays", lambda *_: iter(()))]


def _not_loaded() -> Sequence[Change]:
    """A start of dtx does not load replays and settlements."""

    def nothing(self: CopyRegister, _: LoggedCopies) -> None:
        assert not self._replayed

    return [(CopyRegister, "load", nothing)]


def _verdict(change: Any) -> Sequence[Change]:
    verdict = CopyRegister.verdict

    def changed(self: CopyRegister, copy: Copy, properties: bytes, *, redelivered: bool) -> CopyVerdict:
        return change(self, copy, verdict(self, copy, properties, redelivered=redelivered))  # type: ignore[no-any-return]

    return [(CopyRegister, "verdict", changed)]


def _not_waiting() -> Sequence[Change]:
    """A copy is delivered while another one is delivered and unsettled."""
    return _verdict(lambda _, __, found: CopyVerdict.DELIVER if found is CopyVerdict.WAIT else found)


def _not_waited_for() -> Sequence[Change]:
    """A copy is suppressed while another one is delivered and unsettled."""
    return _verdict(lambda _, __, found: CopyVerdict.SUPPRESS if found is CopyVerdict.WAIT else found)


def _any_attempt() -> Sequence[Change]:
    """A copy is suppressed because it was settled itself, and the broker delivers it again."""

    def change(self: CopyRegister, copy: Copy, found: CopyVerdict) -> CopyVerdict:
        settled = self._settled.get(copy.place.key.branch, {}).get(copy.place)
        return CopyVerdict.SUPPRESS if self.may_be_repeated(copy.place.key) and settled is not None else found

    return _verdict(change)


def _digest_ignored() -> Sequence[Change]:
    """Exchange, routing key and body of a copy are not compared."""
    return [
        (messages.Digest, "value", property(lambda _: b"same")),
        (messages, "digest_of", lambda *_: b"same"),
    ]


COPIES: Final = (
    Mutation(name="a settlement is not in the log first", changes=_settled_first, shape=_COPIED_SLOWLY),
    Mutation(name="settlements of open branches are not in the log", changes=_never_open, shape=_COPIED),
    Mutation(name="a branch ends before the log has it", changes=_ended_early, shape=_COPIED_SLOWLY),
    Mutation(name="all copies have the same attempt", changes=_attempt_not_counted, shape=_COPIED),
    Mutation(name="replays are not in the log", changes=_replays_not_recorded, shape=_COPIED),
    Mutation(name="copies are not loaded", changes=_not_loaded, shape=_COPIED),
    Mutation(name="a copy does not wait for another one", changes=_not_waiting, shape=_COPIED),
    Mutation(name="a copy is suppressed too early", changes=_not_waited_for, shape=_COPIED),
    Mutation(name="a copy that was settled itself is suppressed", changes=_any_attempt, shape=_COPIED),
    Mutation(name="the digest of a copy is ignored", changes=_digest_ignored, shape=_COPIED),
)
