"""Memory that is shared by work at the same time."""

import asyncio

import pytest

from dtx.store.rabbitmq.memory_quota import MemoryQuota, Share


async def turns() -> None:
    """Let all tasks run as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


def asking(share: Share) -> asyncio.Task[None]:
    return asyncio.create_task(share.take())


async def test_small_requests_pass_and_large_ones_wait_for_room() -> None:
    room = MemoryQuota(10)
    first, second, third = room.share(6), room.share(4), room.share(7)
    await first.take()
    await second.take()
    waiting = asking(third)
    await turns()
    second.release()
    await turns()
    assert not waiting.done()
    first.release()
    await waiting
    fourth = asking(room.share(4))
    await turns()
    assert not fourth.done()
    third.release()
    await fourth


async def test_more_than_there_is_gets_all_of_it_alone() -> None:
    room = MemoryQuota(10)
    small, large, next_one = room.share(1), room.share(1000), room.share(1)
    await small.take()
    waiting = asking(large)
    behind = asking(next_one)
    await turns()
    assert (waiting.done(), behind.done()) == (False, False)
    small.release()
    await waiting
    assert not behind.done()
    large.release()
    await behind


async def test_a_large_request_is_not_overtaken() -> None:
    room = MemoryQuota(10)
    held = room.share(8)
    await held.take()
    large = asking(room.share(9))
    small = asking(room.share(1))
    await turns()
    assert (large.done(), small.done()) == (False, False)
    held.release()
    await large
    await small


async def test_a_share_is_given_back_once() -> None:
    room = MemoryQuota(10)
    share, never_taken, whole = room.share(6), room.share(6), room.share(10)
    await share.take()
    share.release()
    share.release()
    never_taken.release()
    await whole.take()
    waiting = asking(room.share(1))
    await turns()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("given", [False, True])
async def test_a_cancelled_request_keeps_nothing_and_releases_others(given: bool) -> None:
    room = MemoryQuota(10)
    held = room.share(5)
    await held.take()
    large = asking(room.share(9))
    small = asking(room.share(5))
    await turns()
    if given:
        held.release()  # it has its share, but has not resumed
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await small
    if not given:
        held.release()
    await room.share(5).take()
