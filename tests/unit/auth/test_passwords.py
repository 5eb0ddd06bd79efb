"""Passwords are stored as hashes and verified once. Timing does not show which users exist."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from argon2.exceptions import VerifyMismatchError

from dtx.auth import login_throttle, passwords
from dtx.auth.login_throttle import LoginThrottle, TooManyWait
from dtx.auth.passwords import Verifier, hash_password

STORED = hash_password(b"right")


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifier]:
    monkeypatch.setattr(passwords, "PAUSE", 0.0)
    made = Verifier()
    yield made
    made.close()


class Counter:
    """Counts how often a password is hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[str] = []
        hasher = passwords._HASHER

        class Counting:
            def verify(_, stored: str, password: bytes) -> bool:  # noqa: N805 - the counter is self
                self.runs.append(stored)
                return hasher.verify(stored, password)

            hash = staticmethod(hasher.hash)

        monkeypatch.setattr(passwords, "_HASHER", Counting())


async def test_the_right_password_is_right_and_every_other_is_wrong(verifier: Verifier) -> None:
    assert await verifier.verify(b"u", b"right", STORED)
    for wrong in (b"", b"Right", b"right\x00", b"\xff" * 1000):
        assert not await verifier.verify(b"u", wrong, STORED)
    assert not await verifier.verify(b"u", b"right", "$argon2id$nonsense")


async def test_a_thousand_reconnects_cost_one_run(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Counter(monkeypatch)
    assert await verifier.verify(b"u", b"right", STORED)
    assert all(await asyncio.gather(*(verifier.verify(b"u", b"right", STORED) for _ in range(1000))))
    assert len(count.runs) == 1


async def test_a_thousand_clients_that_come_at_once_cost_one_run(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start of dtx, no password is remembered."""
    count = Counter(monkeypatch)
    assert all(await asyncio.gather(*(verifier.verify(b"u", b"right", STORED) for _ in range(1000))))
    assert len(count.runs) == 1


async def test_a_client_that_repeats_an_old_password_costs_one_verification(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counter(monkeypatch)
    for stored in (STORED, None):
        for _ in range(100):
            assert not await verifier.verify(b"u", b"old", stored)
    assert len(count.runs) == 2
    assert await verifier.verify(b"u", b"old", hash_password(b"old"))


async def test_wrong_passwords_of_one_source_leave_others_their_turns(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order shows it, not the time: the earlier attempts are not all finished."""
    monkeypatch.setattr(passwords, "PAUSE", 60.0)
    flood = [
        asyncio.create_task(verifier.verify(user, str(number).encode(), None, source="10.0.0.1"))
        for number in range(login_throttle.FAILURES_AT_ONCE - 1)
        for user in (b"alice", b"nobody %d" % number)
    ]
    await asyncio.sleep(0)
    for user, source in ((b"alice", "10.0.0.2"), (b"bob", "10.0.0.1"), (b"carol", "10.0.0.3")):
        assert await verifier.verify(user, b"right", STORED, source=source)
    through = [number for number, task in enumerate(flood) if task.done()]
    assert [number for number in through if number % 2 == 0] == [0]  # a name that is tried again pauses
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_an_address_that_tries_many_names_is_slowed_down(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Password spraying: no name is tried twice. Users that are remembered, and other addresses, do not wait."""
    assert await verifier.verify(b"dave", b"right", STORED, source="10.0.0.1")
    monkeypatch.setattr(passwords, "PAUSE", 60.0)
    for number in range(login_throttle.FAILURES_AT_ONCE + 1):
        assert not await verifier.verify(b"nobody %d" % number, b"x", None, source="10.0.0.1")
    next_one = asyncio.create_task(verifier.verify(b"nobody", b"x", None, source="10.0.0.1"))
    assert await verifier.verify(b"dave", b"right", STORED, source="10.0.0.1")
    assert await verifier.verify(b"carol", b"right", STORED, source="10.0.0.2")
    assert not next_one.done()
    next_one.cancel()
    await asyncio.gather(next_one, return_exceptions=True)


async def test_the_names_of_an_address_that_wait_are_bounded(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_throttle, "MOST_NAMES", 3)
    names = [verifier.verify(b"%d" % number, b"x", None, source="10.0.0.1") for number in range(4)]
    *others, last = await asyncio.gather(*names, return_exceptions=True)
    assert others == [False] * 3
    assert isinstance(last, TooManyWait)
    assert await verifier.verify(b"u", b"right", STORED, source="10.0.0.1")


async def test_sources_that_failed_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_throttle, "_REMEMBERED", 2)
    kept = LoginThrottle(1)
    for number in range(5):
        async with kept.slot(f"10.0.0.{number}", b"u") as slot:
            slot.pause = 0.001
    assert len(kept._paid) == 2


def test_the_decoy_is_verified_to_the_end_and_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoy that is refused before it is hashed would show which users exist."""
    monkeypatch.setattr(passwords, "hash_password", None)
    made = Verifier()
    made.close()
    with pytest.raises(VerifyMismatchError):
        passwords._HASHER.verify(made._decoy, b"x")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux alone")
async def test_passwords_are_verified_behind_commits(verifier: Verifier) -> None:
    priority = await asyncio.get_running_loop().run_in_executor(
        verifier._threads, lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    )
    assert priority >= passwords._NICE
    assert os.getpriority(os.PRIO_PROCESS, 0) < priority


async def test_a_client_lost_during_verification_keeps_its_turn(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a source that does not wait for answers could use all threads."""
    begun, may_end, running, most = asyncio.Event(), threading.Event(), 0, 0
    loop = asyncio.get_running_loop()

    def verify(*_: object) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(20)
        running -= 1
        return False

    monkeypatch.setattr(verifier, "_verify", verify)
    for number in range(5):
        attempt = asyncio.create_task(verifier.verify(b"%d" % number, b"x", None, source="here"))
        if not number:
            await begun.wait()
        await asyncio.sleep(0)
        attempt.cancel()
    other = asyncio.create_task(verifier.verify(b"other", b"x", None, source="here"))
    await asyncio.sleep(0)
    may_end.set()
    assert not await other
    assert most == 1


@pytest.mark.parametrize("right", [True, False])
async def test_an_attempt_that_was_given_up_counts_by_its_result(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """A disconnect is not a failed login, but it must not allow more attempts either."""
    monkeypatch.setattr(passwords, "PAUSE", 60.0)
    begun, may_end, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def verify(*_: object) -> bool:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(20)
        return right

    monkeypatch.setattr(verifier, "_verify", verify)
    attempt = asyncio.create_task(verifier.verify(b"u", b"x", None, source="here"))
    await begun.wait()
    attempt.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert (len(verifier._throttle) == 0) is right


async def test_a_changed_password_is_not_among_the_verified_ones(verifier: Verifier) -> None:
    assert await verifier.verify(b"u", b"right", STORED)
    changed = hash_password(b"new")
    assert not await verifier.verify(b"u", b"right", changed)
    assert await verifier.verify(b"u", b"new", changed)


async def test_a_verified_password_counts_for_its_user_alone(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counter(monkeypatch)
    assert await verifier.verify(b"ab", b"right", STORED)
    assert not await verifier.verify(b"a", b"bright", STORED)
    assert len(count.runs) == 2


async def test_an_unknown_user_costs_one_verification_too(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work and its parameters are the same, so the time does not show which users exist."""
    count = Counter(monkeypatch)
    for password in (b"x", b"y"):
        assert not await verifier.verify(b"nobody", password, None)
    decoys = count.runs
    assert len(decoys) == 2
    assert decoys[0].split("$")[:4] == STORED.split("$")[:4]


async def test_memory_of_verified_passwords_is_limited(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "REMEMBERED", 1)
    count = Counter(monkeypatch)
    for user in (b"a", b"b", b"a"):
        assert await verifier.verify(user, b"right", STORED)
    assert len(count.runs) == 3


async def test_neither_hash_nor_memory_holds_the_password(verifier: Verifier) -> None:
    assert await verifier.verify(b"user-name", b"right", STORED)
    assert "right" not in STORED
    assert b"right" not in repr(vars(verifier)).encode()
    assert hash_password(b"right") != STORED
