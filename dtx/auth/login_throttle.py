"""The order in which passwords are verified, which is costly. A client that tries many passwords does not delay others.

There are three gates. One attempt at a time passes for a user name from one source, one for a source, and a limited
number for all. Attempts pass each gate in the order of arrival. So one attempt for each name waits at the gate of a
source, and one for each source waits at the gate for all.

A flood of attempts from one source uses only the slots of that source. A flood for one name does not use the slots of
other names of its source (clients behind a proxy share an address). A source that fails with many names is slowed down
as a whole: after a number of failures it has one attempt in each pause.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

FAILURES_AT_ONCE: Final = 20
"""Failed attempts of one source without a pause for the whole source: many clients may have an old password."""
MOST_NAMES: Final = 500
"""Names of one source that wait at the same time: they take ten seconds, a third of the limit for a handshake."""
_REMEMBERED: Final = 10_000
"""Sources that have failed, of about 100 bytes each."""
_Key = tuple[str, bytes | None]


class TooManyWait(Exception):
    """The maximum number of names of one source waits already."""


@dataclass(slots=True)
class _Gate:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    visitors: int = 0
    """Attempts that have passed or that wait. A gate without any is removed."""


@dataclass(slots=True)
class LoginSlot:
    """One attempt that has passed the gates.

    Args:
        pause: seconds that the same user from the same source waits for the next one, beginning with its end; 0 after a
            success. Too many failures make the source wait as well.
    """

    pause: float = 0.0


class LoginThrottle:
    """The gates for login attempts.

    Args:
        most: attempts at a time.
    """

    def __init__(self, most: int) -> None:
        self._all = asyncio.Semaphore(most)
        self._gates: dict[_Key, _Gate] = {}
        self._paid: OrderedDict[str, float] = OrderedDict()
        """By source, the end of all pauses for its failures, one after another, in seconds of the event loop."""

    def __len__(self) -> int:
        """The number of gates that are in use."""
        return len(self._gates)

    @asynccontextmanager
    async def slot(self, source: str, user: bytes) -> AsyncIterator[LoginSlot]:
        """Wait for a slot. The slot is held as long as the block runs.

        Args:
            source: where the client connects from.
            user: the user name that it gives.

        Raises:
            TooManyWait: too many other names of that source wait.
        """
        given, of_source = LoginSlot(), LoginSlot()
        async with self._pass_gate((source, user), given):
            gate = self._gates.get((source, None))
            if gate is not None and gate.visitors >= MOST_NAMES:
                raise TooManyWait
            async with self._pass_gate((source, None), of_source), self._all:
                try:
                    yield given
                finally:
                    if given.pause:
                        of_source.pause = self._pause(source, given.pause)

    def _pause(self, source: str, pause: float) -> float:
        """The pause of a source for one more failure: 0 for the first few."""
        now = asyncio.get_running_loop().time()
        self._paid[source] = paid = max(self._paid.pop(source, 0.0), now) + pause
        if len(self._paid) > _REMEMBERED:
            self._paid.popitem(last=False)
        return max(0.0, paid - now - FAILURES_AT_ONCE * pause)

    @asynccontextmanager
    async def _pass_gate(self, key: _Key, slot: LoginSlot) -> AsyncIterator[None]:
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
            if slot.pause:
                asyncio.get_running_loop().call_later(slot.pause, self._release, key, gate)
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
    """The key of *peer* for limits by address: its IPv4 address, or the /64 network of its IPv6 address.

    A single customer usually has a /64 network at least, and can use all its addresses.
    """
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return str(address)
