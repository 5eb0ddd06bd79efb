"""Queues are dispatched in turn. A failure of one does not affect the others."""

import asyncio
from typing import Any

from dtx.store.postgres.dispatcher import Dispatcher


class Index:
    """A queue that records its turns, or raises."""

    def __init__(self, turns: list[str], name: str, *, raises: bool = False) -> None:
        self._turns = turns
        self._name = name
        self._raises = raises

    def dispatch(self, now: float) -> float | None:
        """Record the turn. No timer is needed."""
        if self._raises:
            raise RuntimeError("a mistake of ours")
        self._turns.append(self._name)
        return None


async def test_a_queue_that_raises_leaves_the_turns_of_others() -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    nothing: Any = None
    pump = Dispatcher(nothing, nothing, nothing, lambda: 0.0)
    turns: list[str] = []
    indexes: list[Any] = [Index(turns, "one"), Index(turns, "two", raises=True), Index(turns, "three")]
    for index in indexes:
        pump.schedule(index)
    for _ in range(3):
        await asyncio.sleep(0)
    assert turns == ["one", "three"]
    assert len(raised) == 1
    pump.schedule(indexes[0])
    await asyncio.sleep(0)
    assert turns == ["one", "three", "one"]
