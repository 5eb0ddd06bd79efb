"""Passwords: never kept as they are, verified once, and silent about who exists."""

import asyncio
from collections.abc import Iterator

import pytest

from dtx.store.postgres import passwords
from dtx.store.postgres.passwords import Verifier, hash_password

STORED = hash_password(b"right")


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.close()


class Counter:
    """Counts how often the costly work is done."""

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


async def test_a_changed_password_is_not_found_among_those_that_were_verified(verifier: Verifier) -> None:
    assert await verifier.verify(b"u", b"right", STORED)
    changed = hash_password(b"new")
    assert not await verifier.verify(b"u", b"right", changed)
    assert await verifier.verify(b"u", b"new", changed)


async def test_what_was_verified_counts_for_that_user_alone(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counter(monkeypatch)
    assert await verifier.verify(b"ab", b"right", STORED)
    assert not await verifier.verify(b"a", b"bright", STORED)
    assert len(count.runs) == 2


async def test_an_unknown_user_costs_what_a_wrong_password_costs(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same work with the same parameters: the time tells nobody which names there are."""
    count = Counter(monkeypatch)
    for _ in range(2):
        assert not await verifier.verify(b"nobody", b"x", None)
    decoys = count.runs
    assert len(decoys) == 2
    assert decoys[0].split("$")[:4] == STORED.split("$")[:4]


async def test_memory_of_what_was_verified_is_bounded(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
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
