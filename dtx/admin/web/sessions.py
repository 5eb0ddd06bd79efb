"""Browsers that have signed in.

A session is known by 256 random bits in a cookie that scripts cannot read; only a hash of them is kept, in memory. So a
restart of dtx signs everybody out, and nothing in the database lets anybody in. Who somebody is and what that permits
is looked at again with each request (:meth:`~dtx.admin.identity.Gate.again`): a user that is removed, or a token that
is revoked, is out at once.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dtx.admin.identity import Badge

IDLE_SECONDS: Final = 3600.0
"""Without a request for this long a session ends; pages that keep themselves up to date do not count."""
LONGEST_SECONDS: Final = 12 * 3600.0
"""However busy it is: a working day."""
MOST_DRY_RUNS: Final = 20
"""Of one session, to be followed by their orders: one in each of its windows."""
MOST: Final = 1000
"""At the same time, of about 1 KiB each; beyond it the one that was not used for longest ends."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One browser that has signed in.

    Args:
        badge: as whom.
        begun, used: seconds of the clock.
        mark: that every form of its pages sends back, so that no other page can send one.
        notice: what the next page says first.
    """

    badge: Badge
    begun: float
    used: float
    mark: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    notice: str | None = None
    _dry_runs: list[bytes] = field(default_factory=list, repr=False)

    def take_notice(self) -> str | None:
        """What is to be said, once."""
        notice, self.notice = self.notice, None
        return notice

    def add_dry_run(self, order: str, version: str) -> None:
        """The dry run of an order has been shown.

        Args:
            order: what was asked for.
            version: of the branch that the dry run saw.
        """
        self._dry_runs = [*self._dry_runs[-MOST_DRY_RUNS + 1 :], _hash(f"{version} {order}")]

    def take_dry_run(self, order: str, version: str) -> bool:
        """Whether the dry run of just that was shown; once."""
        key = _hash(f"{version} {order}")
        if key not in self._dry_runs:
            return False
        self._dry_runs.remove(key)
        return True


class Sessions:
    """All of them.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        """By the hash of the cookie; what was used last comes last."""

    def begin(self, badge: Badge) -> str:
        """A new session; the text of its cookie is told this once."""
        secret = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_hash(secret)] = Session(badge=badge, begun=now, used=now)
        while len(self._sessions) > MOST:
            self._sessions.popitem(last=False)
        return secret

    def find(self, secret: str, *, touch: bool = True) -> Session | None:
        """The session of a cookie, unless it has ended.

        Args:
            secret: the cookie's text.
            touch: whether this counts as use.
        """
        key = _hash(secret)
        session = self._sessions.get(key)
        if session is None:
            return None
        now = self._clock()
        if now - session.used >= IDLE_SECONDS or now - session.begun >= LONGEST_SECONDS:
            del self._sessions[key]
            return None
        if touch:
            session.used = now
            self._sessions.move_to_end(key)
        return session

    def end(self, secret: str) -> None:
        """Sign out. Idempotent."""
        self._sessions.pop(_hash(secret), None)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
