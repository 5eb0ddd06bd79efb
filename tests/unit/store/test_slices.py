"""Long work in slices: turns of the event loop between them, their order, and errors."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from dtx.store.slices import SLICE_SECONDS, Slices, in_slices


class Clock:
    """A clock that advances by a third of a slice with each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def work(self, name: str, steps: int, done: list[str]) -> Iterator[None]:
        for _ in range(steps):
            done.append(name)
            self.now += SLICE_SECONDS / 3
            yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_long_work_is_done_in_several_turns(clock: Clock) -> None:
    done: list[str] = []
    failures: list[Exception] = []
    slices = Slices(failures.append)
    slices.run(clock.work("a", 7, done))
    assert done == ["a"] * 3
    await asyncio.sleep(0)
    assert done == ["a"] * 6
    await asyncio.sleep(0)
    assert done == ["a"] * 7


async def test_short_work_is_done_at_once(clock: Clock) -> None:
    done: list[str] = []
    failures: list[Exception] = []
    slices = Slices(failures.append)
    slices.run(clock.work("a", 1, done))
    slices.then(lambda: done.append("then"))
    assert done == ["a", "then"]


async def test_later_work_is_done_afterwards(clock: Clock) -> None:
    done: list[str] = []
    failures: list[Exception] = []
    slices = Slices(failures.append)
    slices.run(clock.work("a", 4, done))
    slices.then(lambda: done.append("then"))
    slices.run(clock.work("b", 1, done))
    while len(done) < 6:
        await asyncio.sleep(0)
    assert done == ["a", "a", "a", "a", "then", "b"]


async def test_work_that_fails_keeps_no_other_from_its_turn(clock: Clock) -> None:
    done: list[str] = []
    failures: list[Exception] = []
    slices = Slices(failures.append)

    def fails() -> Iterator[None]:
        slices.run(clock.work("behind", 1, done))
        yield
        raise RuntimeError("a mistake of ours")

    slices.run(fails())
    slices.run(clock.work("later", 1, done))
    assert done == ["behind", "later"]
    assert [str(failure) for failure in failures] == ["a mistake of ours"]


async def test_clients_with_long_work_take_turns(clock: Clock) -> None:
    """Together they take no more of a turn of the event loop than one of them."""
    done: list[str] = []
    clients = [Slices(_fail) for _ in range(3)]
    for name, slices in zip("abc", clients, strict=True):
        slices.run(clock.work(name, 7, done))
    assert done == [*"aaabbbccc"]
    turns = []
    while len(done) < 21:
        before = len(done)
        await asyncio.sleep(0)
        turns.append("".join(done[before:]))
    assert turns == ["aaa", "bbb", "ccc", "a", "b", "c"]


async def test_a_client_that_fails_leaves_the_turn_to_others(clock: Clock) -> None:
    def failing() -> Iterator[None]:
        yield from clock.work("a", 3, done)
        raise ValueError

    done: list[str] = []
    broken, sound = Slices(_fail), Slices(_fail)
    broken.run(failing())
    sound.run(clock.work("b", 4, done))
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    while len(done) < 7:
        await asyncio.sleep(0)
    assert [type(error) for error in failed] == [ValueError]


def _fail(error: Exception) -> None:
    raise error


async def test_others_have_turns_while_very_many_are_checked() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    given = list(range(10))
    found = []
    async for item in in_slices(given, 3):
        given.clear()
        found.append((item, turns))
    task.cancel()
    assert found == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2), (8, 2), (9, 3)]
