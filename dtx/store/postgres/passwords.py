"""Passwords: their hashes, and verifying them without doing the costly work twice.

Argon2id takes milliseconds and megabytes on purpose. A thousand clients that come back at once with passwords that were
verified before must not pay it again, so what was verified is remembered: as a keyed hash (HMAC) of user, password and
*stored hash*, with a key of this process alone. A password that was changed has another stored hash, and is not found.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

MEMORY_KIB: Final = 19 * 1024
"""With two passes and one lane the least that OWASP's password storage recommendation allows: about 20 ms."""
WORKERS: Final = 2
"""Verifications at a time. Each holds MEMORY_KIB; more would take the processors away from those who are in already."""
REMEMBERED: Final = 10_000
"""Credentials kept as verified, about 150 octets each: more users than connect at once to one dtx."""

_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=MEMORY_KIB, parallelism=1)


def hash_password(password: bytes) -> str:
    """The text to store: algorithm, parameters, salt and hash. Takes milliseconds of processor time."""
    return _HASHER.hash(password)


class Verifier:
    """Verifies passwords in threads of its own."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="password")
        self._decoy: str | None = None

    def close(self) -> None:
        """Let go of the threads; what waits for one is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def verify(self, user: bytes, password: bytes, stored: str | None) -> bool:
        """Whether *password* is the one whose hash is *stored*.

        Args:
            user: its name.
            password: as the client sent it.
            stored: of :func:`hash_password`; ``None`` for an unknown user, which takes as long as a wrong password
                does: who guesses names learns nothing from the time.
        """
        digest = b"" if stored is None else self._digest(user, password, stored)
        if digest in self._verified:
            self._verified.move_to_end(digest)
            return True
        right = await asyncio.get_running_loop().run_in_executor(self._threads, self._verify, password, stored)
        if right:
            self._verified[digest] = None
            if len(self._verified) > REMEMBERED:
                self._verified.popitem(last=False)
        return right

    def _verify(self, password: bytes, stored: str | None) -> bool:
        if stored is None and self._decoy is None:
            self._decoy = hash_password(secrets.token_bytes(32))
        against = self._decoy if stored is None else stored
        assert against is not None
        try:
            _HASHER.verify(against, password)
        except (VerificationError, InvalidHashError):
            return False
        return stored is not None

    def _digest(self, user: bytes, password: bytes, stored: str) -> bytes:
        lengths = len(user).to_bytes(4) + len(password).to_bytes(4)
        return hmac.digest(self._key, lengths + user + password + stored.encode(), hashlib.sha256)
