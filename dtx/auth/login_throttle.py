"""Whose turn it is to have a password verified, which is costly: nobody who tries many passwords holds up others.

One at a time for a user name from one source, one at a time for a source, and so many for all; who waits at each of the
three gates goes through in the order of arrival. So at the gate of a source stands one attempt for each name, and at
the gate of all one for each source: a flood from one source takes its own turns only, and a flood for one name leaves
the other names of its source theirs (many clients share an address where it is that of a proxy). A source that fails
with many names is slowed down as a whole: after a number of failures it has one attempt in each pause.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

FAILURES_AT_ONCE: Final = 20
"""Failed attempts of one source before it has to pause after each: a fleet with an old password, and typing errors."""
MOST_NAMES: Final = 500
"""Names of one source that wait at the same time: they take ten seconds, a third of what a handshake may take."""
_REMEMBERED: Final = 10_000
"""Sources that have failed, of about 100 bytes each."""
_Key = tuple[str, bytes | None]


class TooManyWait(Exception):
    """One source has as many names waiting as it may have."""


@dataclass(slots=True)
class _Gate:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    visitors: int = 0
    """Who has passed and who waits: without any, nobody needs the gate."""


@dataclass(slots=True)
class Turn:
    """A turn that has been given.

    Args:
        pause: seconds that the same user from the same source waits for the next one, beginning with its end; 0 after a
            success. Too many failures make the source wait as well.
    """

    pause: float = 0.0


class Turns:
    """The gates.

    Args:
        most: turns at a time.
    """

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._gates: dict[_Key, _Gate] = {}
        self._paid: OrderedDict[str, float] = OrderedDict()
        """By source: when all pauses for its failures would be over, had it made them one by one (loop's seconds)."""

    def __len__(self) -> int:
        """Gates that somebody stands at."""
        return len(self._gates)

    @asynccontextmanager
    async def turn(self, source: str, user: bytes) -> AsyncIterator[Turn]:
        """Wait for a turn, which is the block.

        Args:
            source: where the client connects from.
            user: who it says it is.

        Raises:
            TooManyWait: too many other names of that source do.
        """
        given, of_source = Turn(), Turn()
        async with self._through((source, user), given):
            gate = self._gates.get((source, None))
            if gate is not None and gate.visitors >= MOST_NAMES:
                raise TooManyWait
            async with self._through((source, None), of_source), self._all:
                try:
                    yield given
                finally:
                    if given.pause:
                        of_source.pause = self._pause(source, given.pause)

    def _pause(self, source: str, pause: float) -> float:
        """What a source pays for one more failure: nothing for the first few."""
        now = asyncio.get_running_loop().time()
        self._paid[source] = paid = max(self._paid.pop(source, 0.0), now) + pause
        if len(self._paid) > _REMEMBERED:
            self._paid.popitem(last=False)
        return max(0.0, paid - now - FAILURES_AT_ONCE * pause)

    @asynccontextmanager
    async def _through(self, key: _Key, turn: Turn) -> AsyncIterator[None]:
        gate = self._gates.setdefault(key, _Gate())
        gate.visitors += 1
        try:
            await gate.lock.acquire()
        except BaseException:
            self._leave(key, gate)
            raise
        try:
            yield
        finally:
            if turn.pause:
                asyncio.get_running_loop().call_later(turn.pause, self._release, key, gate)
            else:
                self._release(key, gate)

    def _release(self, key: _Key, gate: _Gate) -> None:
        gate.lock.release()
        self._leave(key, gate)

    def _leave(self, key: _Key, gate: _Gate) -> None:
        gate.visitors -= 1
        if not gate.visitors:
            del self._gates[key]


def source_of(peer: str) -> str:
    """What stands for *peer* where limits count clients by address: its address, or of an IPv6 one the network.

    A /64 network is what a single customer is given at least, with all of its addresses to choose from.
    """
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return str(address)
