"""Passwords: their hashes, and verifying them without doing the costly work twice.

Argon2id takes milliseconds and megabytes on purpose. A thousand clients that come back at once with passwords that were
verified before must not pay it again, so what was verified is remembered: as a keyed hash (HMAC) of user, password and
*stored hash*, with a key of this process alone. A password that was changed has another stored hash, and is not found.
What was wrong is remembered in the same way: a client that comes back with its old password again and again costs
nothing. A new wrong password costs its user name, from the address it came from, a pause before the next one is looked
at, and after some of them it costs all of that address one (see :mod:`~dtx.auth.login_throttle`): guessing is slow,
and does not hold up others.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
import sys
import threading
from base64 import b64encode
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import ARGON2_VERSION

from dtx.auth.login_throttle import Turns

MEMORY_KIB: Final = 19 * 1024
"""With two passes and one lane the least that OWASP's password storage recommendation allows: about 20 ms."""
WORKERS: Final = 2
"""Verifications at a time. Each holds MEMORY_KIB; more would take processor time from connected clients."""
REMEMBERED: Final = 10_000
"""Credentials kept as right, and as many as wrong, of about 150 bytes: more users than connect at once to one dtx."""
PAUSE: Final = 1.0
"""Seconds after a wrong password before the next one of the same user from the same source is verified."""

_NICE: Final = 10
"""Priority of the threads: commits come first where processors are scarce."""

_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=MEMORY_KIB, parallelism=1)


def hash_password(password: bytes) -> str:
    """The text to store: algorithm, parameters, salt and hash. Takes milliseconds of processor time."""
    return _HASHER.hash(password)


def is_password(password: bytes, stored: str) -> bool:
    """Whether *stored* is the text for *password*. Takes as long."""
    try:
        return _HASHER.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False


def _decoy() -> str:
    """A text that no password has, and that costs as much to verify; made without the costly work."""
    salt, digest = (
        b64encode(secrets.token_bytes(size)).rstrip(b"=").decode() for size in (_HASHER.salt_len, _HASHER.hash_len)
    )
    costs = f"m={_HASHER.memory_cost},t={_HASHER.time_cost},p={_HASHER.parallelism}"
    return f"$argon2id$v={ARGON2_VERSION}${costs}${salt}${digest}"


def _be_nice() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):  # a thread that cannot change it does its work all the same
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class Verifier:
    """Verifies passwords in threads of its own."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._answers: dict[bool, OrderedDict[bytes, None]] = {True: OrderedDict(), False: OrderedDict()}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="password", initializer=_be_nice)
        self._turns = Turns(WORKERS)
        self._decoy = _decoy()

    def close(self) -> None:
        """Let go of the threads; what waits for one is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def verify(self, user: bytes, password: bytes, stored: str | None, *, source: str = "") -> bool:
        """Whether *password* is the one whose hash is *stored*.

        Args:
            user: its name.
            password: as the client sent it.
            stored: of :func:`hash_password`; ``None`` for an unknown user, which takes as long as a wrong password
                does: a client that guesses names learns nothing from the time.
            source: where the client connects from.

        Raises:
            TooManyWait: with too many names at the same time.
        """
        digest = self._digest(user, password, stored or "")
        known = self._remembered(digest)
        if known is not None:
            return known
        async with self._turns.turn(source, user) as turn:
            known = self._remembered(digest)  # another login asked the same meanwhile
            if known is not None:
                return known
            turn.pause = PAUSE
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._verify, password, stored)
            try:
                right = await asyncio.shield(running)
            finally:  # also of a client that has gone: the turn lasts as long as the thread is busy
                await asyncio.wait((running,))
                if not running.cancelled() and running.result():
                    turn.pause = 0.0
        answers = self._answers[right]
        answers[digest] = None
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)
        return right

    def _remembered(self, digest: bytes) -> bool | None:
        for answer, digests in self._answers.items():
            if digest in digests:
                digests.move_to_end(digest)
                return answer
        return None

    def _verify(self, password: bytes, stored: str | None) -> bool:
        right = is_password(password, self._decoy if stored is None else stored)
        return right and stored is not None

    def _digest(self, user: bytes, password: bytes, stored: str) -> bytes:
        lengths = len(user).to_bytes(4) + len(password).to_bytes(4)
        return hmac.digest(self._key, lengths + user + password + stored.encode(), hashlib.sha256)
