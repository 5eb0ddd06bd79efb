"""Turns are shared fairly among sources and users."""

import asyncio

import pytest

from dtx.auth.login_throttle import LoginThrottle, source_of


class Crowd:
    """Tasks that wait for a turn. Each keeps its turn until ``leave``."""

    def __init__(self, most: int) -> None:
        self.throttle = LoginThrottle(most)
        self.inside: list[str] = []
        self._go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Start tasks, named ``source/user#number``."""
        for name in names:
            self._go[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._stay(name))
        await self.settle()

    async def _stay(self, name: str) -> None:
        source, _, user = name.partition("#")[0].partition("/")
        async with self.throttle.slot(source, user.encode()):
            self.inside.append(name)
            await self._go[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        """End the task, whether it had a turn or not."""
        self._go[name].set()
        if name not in self.inside:
            self._tasks[name].cancel()
        await asyncio.gather(self._tasks.pop(name), return_exceptions=True)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_source_has_one_turn_at_a_time() -> None:
    crowd = Crowd(2)
    await crowd.come("a/x#1", "a/y#1", "b/x#1")
    assert crowd.inside == ["a/x#1", "b/x#1"]


async def test_sources_take_turns_and_so_do_the_users_of_one() -> None:
    crowd = Crowd(1)
    await crowd.come("a/x#1", "a/x#2", "a/x#3", "a/y#1", "b/z#1")
    order = []
    while crowd.inside:
        order += crowd.inside
        await crowd.leave(crowd.inside[0])
    assert order == ["a/x#1", "b/z#1", "a/y#1", "a/x#2", "a/x#3"]
    assert len(crowd.throttle) == 0


async def test_a_client_that_leaves_while_waiting_is_skipped() -> None:
    crowd = Crowd(1)
    await crowd.come("a/x#1", "a/x#2", "a/y#1", "b/z#1", "b/w#1")
    for name in ("a/x#2", "a/y#1", "b/z#1"):
        await crowd.leave(name)
    assert crowd.inside == ["a/x#1"]
    await crowd.leave("a/x#1")
    assert crowd.inside == ["b/w#1"]
    await crowd.leave("b/w#1")
    assert len(crowd.throttle) == 0


async def test_a_pause_is_for_that_user_and_source_alone() -> None:
    throttle = LoginThrottle(1)
    async with throttle.slot("a", b"x") as slot:
        slot.pause = 60.0
    waiting = asyncio.create_task(_take(throttle, "a", b"x"))
    await _take(throttle, "a", b"y")
    await _take(throttle, "b", b"x")
    assert not waiting.done()
    waiting.cancel()


async def test_a_pause_ends() -> None:
    throttle = LoginThrottle(1)
    async with throttle.slot("a", b"x") as slot:
        slot.pause = 0.01
    await asyncio.wait_for(_take(throttle, "a", b"x"), 20)
    assert len(throttle) == 0


async def _take(throttle: LoginThrottle, source: str, user: bytes) -> None:
    async with throttle.slot(source, user):
        pass


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::1", "2001:db8:1:2::"),
        ("", ""),
    ],
)
def test_attempts_are_counted_by_address_or_by_network(peer: str, source: str) -> None:
    assert source_of(peer) == source
