"""Heartbeats of one side of a connection (AMQP 0-9-1, 4.2.7)."""

import asyncio
from collections.abc import Callable
from typing import Final

_MISSED: Final = 4
"""Half intervals without a sign of the peer after which it is taken for dead: two whole ones."""


class Pulse:
    """Sends a sign of life when nothing else was sent, and notices a peer that gives none.

    Args:
        beat: sends a heartbeat.
        dead: the peer is dead.
    """

    __slots__ = ("_beat", "_dead", "_pause", "_silent", "_timer", "paused", "read", "wrote")

    def __init__(self, beat: Callable[[], None], dead: Callable[[], None]) -> None:
        self.wrote = True
        """Something was sent since the last look."""
        self.read = True
        """Something was received since the last look."""
        self.paused = False
        """Nothing is read at present, so silence says nothing about the peer."""
        self._beat = beat
        self._dead = dead
        self._pause = 0.0
        self._silent = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, interval: int) -> None:
        """Begin; *interval* in seconds, 0 for no heartbeats."""
        if interval:
            self._pause = interval / 2
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)

    def stop(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if not self.wrote:
            self._beat()
        self.wrote = False
        self._silent = 0 if self.read or self.paused else self._silent + 1
        self.read = False
        if self._silent >= _MISSED:
            self._timer = None
            self._dead()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)
