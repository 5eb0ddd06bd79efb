"""Second copies of messages that dtx had to send again, and the proof that a consumer needs only one of them.

Theory of operation. If the outcome of a unit is not known, dtx sends the unit again: a repeat, never a loss. Both
copies of a message have the same ``x-dtx-id``, or ``x-dtx-put-back``, and different attempts. A copy is suppressed only
if a consumer has settled another attempt of the same message in the same queue. So dtx must know of that settlement,
even after a crash. While the branch of a message may still be sent again, its settlement is written to the log before
the broker gets it. Most branches end before their messages are settled: then nothing is written. In every doubt, the
copy is delivered.

Several members share the queues. Each one records the settlements of messages whose branches another member has, as
long as the log has these branches. All members know what is sent again before it is sent. And a member delivers such a
message only after the others have said that no consumer of theirs has another copy of it (:class:`CopyMembers`).

A message that an application published itself with the headers of another one is none of the copies. So exchange,
routing key and body of all three must agree: of the message in the log, of the settled copy, and of the second copy.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from dtx.log.api import LogConflict, LogError, LogUnavailable
from dtx.log.records import (
    MOVED,
    Duplicate,
    DuplicateWrite,
    LoggedCopies,
    LogWrite,
    Replay,
    SettledCopy,
    SettlementsWrite,
    WorkRow,
)
from dtx.store.rabbitmq import messages
from dtx.telemetry import get_logger

_log = get_logger(part="copies")
_PATIENCE: Final = 0.05
"""Seconds that a settlement waits for the end of the branch, which makes a row in the log unnecessary."""
_ANSWER: Final = 2.0
"""Seconds in which the other members must say what they have delivered; otherwise the copy waits."""
_SILENCE: Final = 0.5
"""Seconds in which the other members are not asked again after they have not answered: all copies wait."""
_COMES_AGAIN: Final = 600.0
"""Seconds in which a copy that has waited long enough comes again, and is delivered."""
_RETRY: Final = 0.5
"""Seconds between two attempts to write a settlement while the log is away."""
_UUID: Final = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Key(NamedTuple):
    """A message that dtx published or put back; its copies have the same key."""

    branch: bytes
    """The id of the branch, as in the header."""
    position: int


class CopyPlace(NamedTuple):
    """A message in one queue."""

    key: Key
    vhost: str
    queue: bytes


class MovedMessage(NamedTuple):
    """A message that a branch puts back, at the place from which it was perhaps not taken."""

    place: CopyPlace
    digest: bytes


@dataclass(slots=True, eq=False)
class Copy:
    """One copy of a message that was delivered.

    Args:
        place: its message and queue.
        attempt: the attempt of the unit that sent it.
        digest: of its content; ``None`` while that is not known.
        holder: the channel that delivered it.
    """

    place: CopyPlace
    attempt: int
    digest: bytes | None
    holder: "CopyHolder | None"
    """``None`` for a delivery of a predecessor."""
    is_pinned: bool = False
    """It is being settled: it counts as delivered, even if its channel ends."""

    @property
    def is_out(self) -> bool:
        """Whether it is unsettled, or its outcome is not known."""
        return self.is_pinned or (self.holder is not None and not self.holder.has_ended)


class CopyHolder(Protocol):
    """A channel that delivered copies."""

    @property
    def has_ended(self) -> bool:
        """Whether the channel has ended: the broker has its unsettled deliveries again."""


class OtherCopies(NamedTuple):
    """What other members know about a message in a queue."""

    is_out: bool = False
    """A consumer of theirs may have another copy."""
    in_doubt: bool = False
    """A branch of theirs takes it now, or has perhaps taken it, and may put it back."""


_NOWHERE: Final = OtherCopies()


class CopyMembers(Protocol):
    """The other members of the resource manager."""

    def has_ended(self, branch: bytes) -> bool:
        """Whether a branch of any member is known to have ended."""

    def ended(self, branch: bytes) -> None:
        """Note that a branch has ended."""

    async def unended(self, branches: Collection[bytes]) -> Collection[bytes]:
        """Those of *branches* that the log has now; the others have ended. All of them if it cannot be read."""

    async def announce(self, branches: Collection[bytes]) -> None:
        """Return when all members know what the log has about copies of these branches."""

    async def ask(self, copy: Copy, *, redelivered: bool) -> OtherCopies:
        """Ask the others about a copy, and load what the log has about it. Only one that comes again can be in doubt.

        Raises:
            LogUnavailable: a member does not answer, or the log does not.
        """


class CopyVerdict(Enum):
    """What to do with a delivery of a replayed message."""

    DELIVER = auto()
    SUPPRESS = auto()
    """Another copy was settled: the consumer must not get this one."""
    WAIT = auto()
    """Another copy is delivered and unsettled."""


def key_of(properties: bytes) -> Key | None:
    """The key of a message with these properties; ``None`` for a message that dtx did not send."""
    name = messages.ID
    found = properties.find(name)
    if found < 0:
        return None
    if (put_back := properties.find(messages.PUT_BACK)) >= 0:
        name, found = messages.PUT_BACK, put_back
    start = found + len(name)
    if properties[start : start + 1] != b"S":
        return None
    end = start + 5 + int.from_bytes(properties[start + 1 : start + 5], "big")
    branch, slash, position = properties[start + 5 : end].partition(b"/")
    if not slash or not _UUID.fullmatch(branch) or not position.isdigit() or len(position) > 9:
        return None
    return Key(branch, int(position))


class CopyRegister:
    """The messages that were sent more than once, and what consumers have settled of them.

    Args:
        write: writes to the log.
        is_active: whether this dtx certainly has the lease. Without it, any branch may be sent again by another dtx.
        enabled: whether copies are suppressed.
        window: seconds after which a second copy is not expected any more; 0: no limit.
        replayed: called with the number of messages that are sent again.
        suppressed: called for each suppressed copy.
    """

    def __init__(
        self,
        write: Callable[[LogWrite], Awaitable[None]],
        is_active: Callable[[], bool],
        *,
        enabled: bool = True,
        window: float = 7 * 86_400,
        replayed: Callable[[int], None] = lambda _: None,
        suppressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._write = write
        self._is_active = is_active
        self._on_replayed = replayed
        self._on_suppressed = suppressed
        self._window = window
        self.enabled = enabled
        self.members: CopyMembers | None = None
        self._open: dict[bytes, asyncio.Event] = {}
        """Branches whose messages may be sent again, with an event that is set at their end."""
        self._replayed: dict[bytes, dict[int, bytes]] = {}
        """The digests of messages that were sent more than once, by branch and position."""
        self._settled: dict[bytes, dict[CopyPlace, tuple[int, bytes]]] = {}
        """The attempt and digest of the first copy that was settled, by branch and place."""
        self._suppressed: dict[bytes, dict[tuple[CopyPlace, int], bool]] = {}
        """The suppressed copies by branch: whether a further message with the same attempt was delivered."""
        self._doubtful: dict[Key, dict[CopyPlace, bytes]] = {}
        """The digests of messages that branches have perhaps taken, while that is being found out."""
        self._silent_until = self._written_at = float("-inf")
        self._retrying = asyncio.Lock()
        self._waited: set[tuple[CopyPlace, int]] = set()
        """Copies that have waited for another one long enough."""
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._out: dict[CopyPlace, list[Copy]] = {}
        """Delivered copies that are not settled."""
        self.holding: set[CopyHolder] = set()
        """Channels that hold the frames of an unfinished delivery."""
        self._waiting: dict[CopyPlace, list[Callable[[], None]]] = {}

    @classmethod
    def disabled(cls) -> "CopyRegister":
        """A register that suppresses nothing."""

        async def write(_: LogWrite) -> None:
            raise AssertionError("nothing is recorded")

        return cls(write, lambda: True, enabled=False)

    def load(self, logged: LoggedCopies) -> None:
        """Add what the log has, at startup."""
        for branch_id, replay in logged.replays:
            self._add(branch_id, (replay,))
        for row in logged.settlements:
            self._settled.setdefault(_name(row.branch_id), {})[_place(row)] = row.attempt, row.digest
            if row.attempt == MOVED:
                self._know(_name(row.branch_id), {row.position: row.digest})
        for row in logged.suppressed:
            self._suppressed.setdefault(_name(row.branch_id), {}).setdefault((_place(row), row.attempt), False)

    # -- branches

    @property
    def filters(self) -> bool:
        """Whether a delivery must be held until its header shows which message it is."""
        return self.enabled and bool(self._replayed or self._doubtful or self.is_fenced)

    @property
    def is_fenced(self) -> bool:
        """Whether another member may have taken over from this one, and may send any message again."""
        return self.members is not None and not self._is_active()

    @property
    def is_shared(self) -> bool:
        """Whether other members may deliver copies, or take messages that come again here."""
        return self.enabled and self.members is not None

    @property
    def may_concern(self) -> bool:
        """Whether :meth:`concerns` may be true for any message."""
        is_known = bool(self._open or self._replayed or self._doubtful)
        return self.enabled and (is_known or self.members is not None or not self._is_active())

    def begin(self, branch_id: UUID) -> None:
        """The messages of a branch may become visible, and may be sent again until :meth:`end`."""
        self._open.setdefault(_name(branch_id), asyncio.Event())

    def end(self, branch_id: UUID) -> None:
        """The log has the end of a branch: its messages are never sent again."""
        branch = _name(branch_id)
        if (event := self._open.pop(branch, None)) is not None:
            event.set()
        if self.members is not None:
            self.members.ended(branch)
        if branch not in self._replayed:
            self._settled.pop(branch, None)

    async def replay(self, branch_id: UUID, replays: Collection[Replay]) -> None:
        """The log has *replays*: the messages are about to be sent again. Returns when that may happen."""
        if replays:
            self._on_replayed(len(replays))
            self._add(branch_id, replays)
            if self.members is not None:
                await self.members.announce((_name(branch_id),))

    def _add(self, branch_id: UUID, replays: Iterable[Replay]) -> None:
        self._know(_name(branch_id), {replay.position: replay.digest for replay in replays})

    def _know(self, branch: bytes, digests: dict[int, bytes]) -> None:
        if self._window:
            if (timer := self._timers.pop(branch, None)) is not None:
                timer.cancel()
            self._timers[branch] = asyncio.get_running_loop().call_later(self._window, self._forget, branch)
        known = self._replayed.setdefault(branch, {})
        for position, digest in digests.items():
            known.setdefault(position, digest)

    def _forget(self, branch: bytes) -> None:
        self._timers.pop(branch, None)
        self._replayed.pop(branch, None)
        self._suppressed.pop(branch, None)
        if branch not in self._open:
            self._settled.pop(branch, None)

    # -- deliveries

    def concerns(self, key: Key) -> bool:
        """Whether there is, or may come, another copy of a message."""
        known = self._is_known(key.branch) or key in self._doubtful
        return self.enabled and (known or not self._is_active() or self._may_be_elsewhere(key.branch))

    def _is_known(self, branch: bytes) -> bool:
        return branch in self._open or branch in self._replayed

    def _may_be_elsewhere(self, branch: bytes) -> bool:
        """Whether another member may have a branch."""
        return self.members is not None and branch not in self._open and not self.members.has_ended(branch)

    def may_be_repeated(self, key: Key) -> bool:
        """Whether a message was sent more than once, or was perhaps taken, or another member may do so now."""
        return key.position in self._replayed.get(key.branch, ()) or key in self._doubtful or self.is_fenced

    async def decide(self, copy: Copy, properties: bytes, *, redelivered: bool) -> CopyVerdict:
        """As :meth:`verdict`, with the knowledge of all members."""
        if self.is_fenced and not _is_exempt(properties):
            return CopyVerdict.WAIT
        may_be_elsewhere = self._is_replayed_copy(copy, properties) or (redelivered and not _is_exempt(properties))
        if self.members is None or not may_be_elsewhere or (copy.place, copy.attempt) in self._waited:
            return self.verdict(copy, properties, redelivered=redelivered)
        if self.is_deaf:
            return CopyVerdict.WAIT
        try:
            async with asyncio.timeout(_ANSWER):
                elsewhere = await self.members.ask(copy, redelivered=redelivered)
        except Exception as error:  # noqa: BLE001 - also a member of another version has answered something else
            self._silent_until = asyncio.get_running_loop().time() + _SILENCE
            if isinstance(error, LogError | TimeoutError):
                _log.warning("a copy waits for the other members", reason=str(error) or "they do not answer")
            else:
                _log.exception("the other members cannot be asked about a copy")
            return CopyVerdict.WAIT
        if not self._is_active():
            return CopyVerdict.WAIT
        return self.verdict(copy, properties, redelivered=redelivered, elsewhere=elsewhere)

    def verdict(
        self, copy: Copy, properties: bytes, *, redelivered: bool, elsewhere: OtherCopies = _NOWHERE
    ) -> CopyVerdict:
        """What to do with a whole delivery.

        Args:
            copy: with its digest.
            properties: of its content header.
            redelivered: as the broker says.
            elsewhere: what the other members know.
        """
        place = copy.place
        if elsewhere.in_doubt or self._doubtful.get(place.key, {}).get(place) == copy.digest:
            return CopyVerdict.DELIVER if self._has_waited(copy) else CopyVerdict.WAIT
        if not self._is_replayed_copy(copy, properties):
            self._waited.discard((copy.place, copy.attempt))
            return CopyVerdict.DELIVER
        attempt, settled = self._settled.get(place.key.branch, {}).get(place, (copy.attempt, b""))
        if attempt != copy.attempt:
            if settled != copy.digest:
                return CopyVerdict.DELIVER
            # One copy came with each attempt. A further one was published by an application, and may come again.
            suppressed = self._suppressed.get(place.key.branch, {})
            further = suppressed.get((place, copy.attempt))
            if further is None or (redelivered and not further):
                return CopyVerdict.SUPPRESS
            suppressed[place, copy.attempt] = True
            return CopyVerdict.DELIVER
        if self._has_waited(copy):
            return CopyVerdict.DELIVER
        return CopyVerdict.WAIT if elsewhere.is_out or self.is_out(place, copy.attempt) else CopyVerdict.DELIVER

    @property
    def is_deaf(self) -> bool:
        """Whether copies wait because nothing can be learned from the other members now."""
        return self.is_fenced or asyncio.get_running_loop().time() < self._silent_until

    def _is_replayed_copy(self, copy: Copy, properties: bytes) -> bool:
        known = self._replayed.get(copy.place.key.branch, {}).get(copy.place.key.position)
        return known == copy.digest and not _is_exempt(properties)

    def is_out(self, place: CopyPlace, attempt: int) -> bool:
        """Whether a consumer has another copy than that of *attempt*."""
        return any(each.attempt != attempt and each.is_out for each in self._out.get(place, ()))

    def is_in_doubt(self, place: CopyPlace) -> bool:
        """Whether a branch takes a message now, or has perhaps taken it."""
        return place in self._doubtful.get(place.key, {})

    def _has_waited(self, copy: Copy) -> bool:
        has_waited = (copy.place, copy.attempt) in self._waited
        self._waited.discard((copy.place, copy.attempt))
        return has_waited

    def delivered(self, copy: Copy) -> None:
        """A consumer gets *copy*."""
        self._out.setdefault(copy.place, []).append(copy)

    def release(self, copies: Iterable[Copy]) -> None:
        """No consumer has *copies* any more: they are settled, or back in their queues."""
        for copy in copies:
            out = self._out.get(copy.place, [])
            with suppress(ValueError):
                out.remove(copy)
            if not out:
                self._out.pop(copy.place, None)
            self.end_wait(copy.place)

    def end_wait(self, place: CopyPlace) -> None:
        """Another copy in *place* is settled or returned: those that wait for it go back to the queue."""
        for act in self._waiting.pop(place, ()):
            act()

    def wait(self, copy: Copy, seconds: float, act: Callable[[], None]) -> None:
        """Call *act* when another copy has been settled or returned, or after *seconds*: then *copy* is delivered."""
        place = copy.place

        def waited() -> None:
            acts = self._waiting.get(place, [])
            with suppress(ValueError):
                acts.remove(released)
            if not acts:
                self._waiting.pop(place, None)
            if not self.is_fenced:
                self._waited.add((place, copy.attempt))
                loop.call_later(_COMES_AGAIN, self._waited.discard, (place, copy.attempt))
            act()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, waited)

        def released() -> None:
            timer.cancel()
            act()

        self._waiting.setdefault(place, []).append(released)

    # -- settlements

    def copy_of(self, vhost: str, work: WorkRow) -> Copy | None:
        """The copy that a branch has consumed, if its message may be sent again."""
        key = key_of(work.properties)
        if key is None or work.queue is None or not self.concerns(key):
            return None
        digest = messages.digest_of(work.exchange, work.routing_key, work.body)
        return Copy(CopyPlace(key, vhost, work.queue), messages.attempt_of(work.properties), digest, None)

    def movable(self, vhost: str, work: WorkRow) -> MovedMessage | None:
        """What :meth:`move` needs of a consumed message; ``None`` if no branch has published it."""
        key = key_of(work.properties)
        if key is None or work.queue is None or not self.enabled:
            return None
        digest = messages.digest_of(work.exchange, work.routing_key, work.body)
        return MovedMessage(CopyPlace(key, vhost, work.queue), digest)

    def doubt(self, messages: Iterable[MovedMessage]) -> None:
        """A branch has perhaps taken *messages*. Those that are delivered again wait until :meth:`end_doubt`."""
        for message in messages:
            self._doubtful.setdefault(message.place.key, {})[message.place] = message.digest

    def end_doubt(self, messages: Iterable[MovedMessage]) -> None:
        """It is known whether the branch has taken *messages*, or they are moved."""
        for message in messages:
            places = self._doubtful.get(message.place.key, {})
            places.pop(message.place, None)
            if not places:
                self._doubtful.pop(message.place.key, None)
            self.end_wait(message.place)

    async def move(self, messages: Collection[MovedMessage]) -> None:
        """A branch puts *messages* back that it has perhaps not taken: no consumer needs those in the queues.

        The log must have that they are put back, with keys of their own. It also gets a settlement of each one in its
        place: after a crash, dtx knows that it is not needed.

        Raises:
            LeaseLost: another dtx is the active one.
        """
        rows = []
        for place, digest in messages:
            self._know(place.key.branch, {place.key.position: digest})
            self._settled.setdefault(place.key.branch, {})[place] = MOVED, digest
            rows.append(_settlement(place, MOVED, digest))
        if rows:
            await self._write_surely(SettlementsWrite(settlements=tuple(rows)))

    async def announce(self, messages: Collection[MovedMessage]) -> None:
        """Return when all members know that *messages* are moved."""
        if messages and self.members is not None:
            await self.members.announce({message.place.key.branch for message in messages})

    def must_record(self, copies: Collection[Copy]) -> bool:
        """Whether the log must have the settlement of any of *copies* first: the caller then calls :meth:`settle`."""
        if not any(self.concerns(copy.place.key) for copy in copies):
            return False
        for copy in copies:
            copy.is_pinned = True
        return True

    async def settle(self, copies: Sequence[Copy]) -> None:
        """Record that consumers have settled *copies* for good. After that, the broker may get the settlement.

        Raises:
            LeaseLost: another dtx is the active one, and the settlement must not be sent.
        """
        try:
            await self._record(copies)
        finally:
            self.release(copies)

    async def settle_unacknowledged(self, copy: Copy) -> None:
        """Record a delivery without acknowledgement, which the client already has.

        Raises:
            LeaseLost: as :meth:`settle`.
        """
        try:
            await self._wait_for_ends((copy,))
            await self._write_settled((copy,))
        finally:
            self.release((copy,))

    async def _record(self, copies: Sequence[Copy]) -> None:
        await self._wait_for_ends(copies)
        fresh = [copy for copy in copies if copy.place not in self._settled.get(copy.place.key.branch, ())]
        await self._write_settled(fresh)
        for copy in fresh:
            self.add_settled(copy)

    async def _wait_for_ends(self, copies: Sequence[Copy]) -> None:
        """Wait a moment until the branches have ended: then most settlements need no record."""
        branches = {copy.place.key.branch for copy in copies} - self._replayed.keys()
        theirs = await self._unended(branches - self._open.keys())
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                for event in [self._open[branch] for branch in branches if branch in self._open]:
                    await event.wait()
                if theirs:
                    await asyncio.sleep(_PATIENCE)
        await self._unended(theirs)

    async def _unended(self, branches: Collection[bytes]) -> Collection[bytes]:
        """Those of *branches* that the log has with another member."""
        found = [branch for branch in branches if self._may_be_elsewhere(branch)]
        return await self.members.unended(found) if found and self.members is not None else ()

    async def _write_settled(self, copies: Sequence[Copy]) -> None:
        rows = [
            _settlement(copy.place, copy.attempt, copy.digest)
            for copy in copies
            if copy.digest is not None and self.concerns(copy.place.key)
        ]
        if rows:
            await self._write_surely(SettlementsWrite(settlements=tuple(rows)))

    def add_settled(self, copy: Copy) -> bool:
        """Note that *copy* is settled, if it is the first one. Returns whether it is."""
        if copy.digest is None or not self.concerns(copy.place.key):  # its branch has ended meanwhile
            return False
        if not self._is_known(copy.place.key.branch):  # another member needs it, from the log
            return True
        settled = self._settled.setdefault(copy.place.key.branch, {})
        first = settled.setdefault(copy.place, (copy.attempt, copy.digest))
        return first == (copy.attempt, copy.digest)

    async def _write_surely(self, record: LogWrite) -> None:
        """Write *record*. While the log is away, only one of those that wait tries it, however many there are."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._write(record)
            except LogUnavailable as error:
                failed = loop.time()
                async with self._retrying:
                    if self._written_at < failed:
                        _log.warning("settlements wait for the log", reason=str(error))
                        await asyncio.sleep(_RETRY)
            except LogConflict as error:  # a value that no column takes: a client wrote the header
                _log.warning("a settlement is not recorded", reason=str(error))
                return
            else:
                self._written_at = loop.time()
                return

    async def suppress(self, copy: Copy, properties: bytes, body: bytes, exchange: bytes, routing_key: bytes) -> None:
        """Keep the suppressed *copy* in the log. After that, dtx may acknowledge it.

        Raises:
            LeaseLost: another dtx is the active one.
        """
        place = copy.place
        known = self._suppressed.setdefault(place.key.branch, {})
        if (place, copy.attempt) not in known:
            known[place, copy.attempt] = False
            self._on_suppressed()
            _log.info(
                "second copy suppressed",
                id=f"{place.key.branch.decode()}/{place.key.position}",
                vhost=place.vhost,
                queue=place.queue,
                attempt=copy.attempt,
            )
        await self._write_surely(
            DuplicateWrite(
                duplicate=Duplicate(
                    branch_id=UUID(place.key.branch.decode()),
                    position=place.key.position,
                    vhost=place.vhost,
                    queue=place.queue,
                    attempt=copy.attempt,
                    exchange=exchange,
                    routing_key=routing_key,
                    properties=properties,
                    body=body,
                )
            )
        )


def _is_exempt(properties: bytes) -> bool:
    """Whether a message is never suppressed. RabbitMQ ends the connection for a return of what a stream delivered."""
    return b"x-death" in properties or b"x-stream-offset" in properties  # also messages put back after a death


def _name(branch_id: UUID) -> bytes:
    return str(branch_id).encode()


def _settlement(place: CopyPlace, attempt: int, digest: bytes) -> SettledCopy:
    return SettledCopy(
        branch_id=UUID(place.key.branch.decode()),
        position=place.key.position,
        vhost=place.vhost,
        queue=place.queue,
        attempt=attempt,
        digest=digest,
    )


def _place(row: SettledCopy) -> CopyPlace:
    return CopyPlace(Key(_name(row.branch_id), row.position), row.vhost, row.queue)
