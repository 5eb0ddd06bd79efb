"""One algorithm for threads and for asyncio: it yields calls, and whoever drives it makes them, or awaits them.

An algorithm is a generator. What a call returns or raises comes back from its ``yield``, so ``try`` and ``finally``
mean what they always mean, and nothing of it knows whether its calls are functions or coroutines.
"""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Work = Generator[Callable[[], Any], Any, T]
"""Calls in their order, and a result."""


def drive(work: Work[T]) -> T:
    """Make the calls of *work* in this thread; its result."""
    try:
        call = next(work)
        while True:
            try:
                answer = call()
            except BaseException as error:  # noqa: BLE001 - it goes to where the call was made
                call = work.throw(error)
            else:
                call = work.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def drive_async(work: Work[T]) -> T:
    """Make the calls of *work* in this task, and await each; its result."""
    try:
        call = next(work)
        while True:
            try:
                answer = await call()
            except BaseException as error:  # noqa: BLE001 - it goes to where the call was made
                call = work.throw(error)
            else:
                call = work.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
