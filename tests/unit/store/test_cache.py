"""The cache of messages of several queues: shared bodies count once, and are freed with their last queue."""

from dtx.log.changes import StoredMessage
from dtx.store.postgres.cache import OVERHEAD, SLACK, Bodies, MessageCache
from dtx.store.postgres.consumers import DispatchRound

SIZE = 5000


def a_message(position: int, shared: int | None) -> StoredMessage:
    return StoredMessage(1, position, b"", b"q", 1, b"", bytes(SIZE), None, shared)


def test_a_shared_body_is_charged_and_kept_once() -> None:
    """Every budget counts the memory that is really used."""
    cache = MessageCache(1 << 30)
    queues = [Bodies(cache, DispatchRound(), []) for _ in range(3)]
    for number, queue in enumerate(queues):
        queue.keep(a_message(number, 9))
    queues[0].keep(a_message(7, None))
    assert cache.used == 4 * OVERHEAD + 2 * SIZE
    kept = [queue.find(number) for number, queue in enumerate(queues)]
    assert len({id(message.body) for message in kept if message is not None}) == 1
    assert queues[0].take(0) is not None
    queues[1].clear()
    assert cache.used == 2 * OVERHEAD + 2 * SIZE
    for queue in queues:
        queue.close()
    assert cache.used == 0
    assert [queue.cached for queue in queues] == [0, 0, 0]


def test_a_body_that_arrives_again_is_shared() -> None:
    cache = MessageCache(1 << 30)
    first, second = (Bodies(cache, DispatchRound(), []) for _ in range(2))
    first.keep(a_message(1, 9))
    assert second.ask(lambda _: [2]) == [2]
    second.arrived([2], [a_message(2, 9)])
    assert cache.used == 2 * OVERHEAD + SIZE
    assert second.take(2) is not None
    assert first.take(1) is not None
    assert cache.used == 0


def test_a_full_cache_evicts_the_same_end_of_each_queue() -> None:
    """A shared body is freed only when no queue has it any more."""
    count = 100
    cache = MessageCache((count - 1) * (SIZE + 3 * OVERHEAD))
    queues = [Bodies(cache, DispatchRound(), []) for _ in range(3)]
    for position in range(count):
        for queue in queues:
            queue.keep(a_message(position, position))
    assert cache.used <= cache.limit
    assert min(map(len, queues)) >= count * (SLACK - 2) // SLACK
    assert all(queue.find(0) is not None for queue in queues)
