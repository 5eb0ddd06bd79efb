"""Hashes of passwords, and their verification without repeated cost.

Argon2id takes milliseconds and megabytes on purpose. A thousand clients that reconnect at once must not cost that
again. So the result of each verification is kept, by a hash (HMAC) of user, password and *stored hash*. The key is
random for each process. A changed password has another stored hash, so its result is not found. Wrong passwords are
kept in the same way: a client that reconnects again and again with an old password costs nothing.

After a new wrong password, the next attempt for its user name from the same address is delayed. After some of them, all
attempts from that address are delayed (see :mod:`~dtx.auth.login_throttle`).
"""

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import sys
import threading
from base64 import b64decode, b64encode
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import ARGON2_VERSION

from dtx.auth.login_throttle import LoginThrottle

MEMORY_KIB: Final = 19 * 1024
"""With two passes and a parallelism of 1, the minimum of OWASP's password storage recommendation: about 20 ms."""
WORKERS: Final = 2
"""Verifications at a time. Each needs MEMORY_KIB; more would take processor time from connected clients."""
REMEMBERED: Final = 10_000
"""Results kept for right credentials, and as many for wrong ones, of about 150 bytes each."""
PAUSE: Final = 1.0
"""Seconds after a wrong password before the next one of the same user from the same source is verified."""

_NICE: Final = 10
"""Nice value of the threads: commits have priority."""

_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=MEMORY_KIB, parallelism=1)


def hash_password(password: bytes) -> str:
    """The text to store: algorithm, parameters, salt and hash. Takes milliseconds of processor time."""
    return _HASHER.hash(password)


def is_password(password: bytes, stored: str) -> bool:
    """Whether *stored* is the text for *password*. Takes as long as :func:`hash_password`."""
    imported = _IMPORTED.fullmatch(stored)
    if imported is not None:
        stored, algorithm, salt = imported.groups()
        password = hashlib.new(algorithm, bytes.fromhex(salt) + password).digest()
    try:
        return _HASHER.verify(stored, password)
    except (VerificationError, InvalidHashError):
        return False


_ALGORITHMS: Final = {
    "rabbit_password_hashing_sha256": ("sha256", 32),
    "rabbit_password_hashing_sha512": ("sha512", 64),
}
"""RabbitMQ's algorithms, and the bytes of their hashes."""
_OWN: Final = rf"\$argon2id\$v={ARGON2_VERSION}\$m={MEMORY_KIB},t=2,p=1\$[A-Za-z0-9+/]{{22}}\$[A-Za-z0-9+/]{{43}}"
_IMPORTED: Final = re.compile(rf"({_OWN})\$(sha256|sha512)\$([0-9a-f]{{8}})")
"""The hash of a hash that RabbitMQ has made with that algorithm and salt."""
_STORED: Final = re.compile(rf"{_OWN}(?:\$(?:sha256|sha512)\$[0-9a-f]{{8}})?")


def imported_hash(given: str, algorithm: str) -> str:
    """The text to store for a hash from definitions. The hash of RabbitMQ is hashed again: it is cheap to try.

    Args:
        given: the hash: of dtx (``argon2id``), or of RabbitMQ in base64; empty for a user that cannot log in.
        algorithm: its name in definitions.

    Raises:
        ValueError: the hash or the algorithm cannot be used.
    """
    if not given:
        return _decoy()
    if algorithm == "argon2id" and _STORED.fullmatch(given):
        return given
    name, size = _ALGORITHMS.get(algorithm, ("", 0))
    try:
        raw = b64decode(given, validate=True)
    except ValueError:
        raw = b""
    if not name or len(raw) != _SALT + size:
        raise ValueError(f"password_hash is no hash of {algorithm:.50} that dtx can use")
    salt, digest = raw[:_SALT], raw[_SALT:]
    if hashlib.new(name, salt).digest() == digest:
        return _decoy()  # the hash of no password: RabbitMQ does not let such a user log in
    return f"{_HASHER.hash(digest)}${name}${salt.hex()}"


_SALT: Final = 4
"""Bytes of RabbitMQ's salt."""


def _decoy() -> str:
    """A random text that no password matches, and whose verification takes as long. Made without hashing."""
    salt, digest = (
        b64encode(secrets.token_bytes(size)).rstrip(b"=").decode() for size in (_HASHER.salt_len, _HASHER.hash_len)
    )
    costs = f"m={_HASHER.memory_cost},t={_HASHER.time_cost},p={_HASHER.parallelism}"
    return f"$argon2id$v={ARGON2_VERSION}${costs}${salt}${digest}"


def _lower_priority() -> None:
    if sys.platform == "linux":  # other systems have no priority for a thread
        with suppress(OSError):  # not essential
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class Verifier:
    """Verifies passwords in threads of its own."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._answers: dict[bool, OrderedDict[bytes, None]] = {True: OrderedDict(), False: OrderedDict()}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="password", initializer=_lower_priority)
        self._throttle = LoginThrottle(WORKERS)
        self._decoy = _decoy()

    def close(self) -> None:
        """End the threads, and cancel waiting verifications."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def verify(self, user: bytes, password: bytes, stored: str | None, *, source: str = "") -> bool:
        """Whether *password* is the one whose hash is *stored*.

        Args:
            user: name of the user.
            password: as the client sent it.
            stored: from :func:`hash_password`; ``None`` for an unknown user. That takes as long as a wrong password, so
                the time does not show whether the user exists.
            source: see :func:`~dtx.auth.login_throttle.source_of`.

        Raises:
            TooManyWait: too many names of that source wait.
        """
        digest = self._digest(user, password, stored or "")
        known = self._remembered(digest)
        if known is not None:
            return known
        async with self._throttle.slot(source, user) as slot:
            known = self._remembered(digest)  # another login may have verified the same meanwhile
            if known is not None:
                return known
            slot.pause = PAUSE
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._verify, password, stored)
            try:
                right = await asyncio.shield(running)
            finally:  # also after a cancellation: the turn lasts as long as the thread is busy
                await asyncio.wait((running,))
                if not running.cancelled() and running.result():
                    slot.pause = 0.0
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
