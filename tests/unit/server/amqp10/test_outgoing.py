"""The credit of a link to a receiver, and that of its consumer at the queue."""

import asyncio
from asyncio import Future
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtx.log.api import LogUnavailable
from dtx.log.changes import StoredMessage
from dtx.server.amqp10.links import OutgoingLink, _InWork
from dtx.server.standalone.nodes import QueueOrigin
from dtx.store.postgres.consumers import Consumer, QueueDelivery
from dtx.store.slices import Slices
from dtx.wire.amqp09.properties import EMPTY
from dtx.wire.amqp10.coordination import CoordinationEngine
from dtx.wire.amqp10.endpoint import Flowed
from dtx.wire.amqp10.errors import Condition
from dtx.wire.amqp10.performatives import Accepted, Flow, Modified, Rejected, Released


class Link:
    """The link of the engine."""

    name, handle, drain, credit, queued = "link", 0, False, 0, 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.drains = 0

    def send(self, tag: bytes, payload: bytes, *, settled: bool, state: object) -> int:
        assert self.credit > 0, "sent without credit"
        assert state is None, "sent in a transaction"
        self.credit -= 1
        self.sent.append(payload)
        return len(self.sent)

    def drained(self) -> None:
        self.drains += 1
        self.credit = 0


class Index:
    """A queue that delivers when the test calls for it."""

    closed = False

    def __init__(self) -> None:
        self.consumer: Consumer | None = None
        self.getters: list[Any] = []

    def consume(self, consumer: Consumer) -> None:
        self.consumer = consumer

    def get(self, getter: Any, now: float) -> None:
        self.getters.append(getter)


class Place:
    """Connection, nodes, session, queue and outbox in one: all that the link's shell uses."""

    has_room, backlog, channel = True, 0, 0

    def __init__(self) -> None:
        self.index = Index()
        self.outbox = self.connection = self
        self.coordination = CoordinationEngine(frozenset())

    def now(self) -> float:
        return 0.0

    def pump(self) -> None:
        pass


def flowing(shell: OutgoingLink, link: Link, credit: int, *, drain: bool) -> None:
    """The client sends a flow."""
    link.credit, link.drain = credit, drain
    flow = Flow(next_incoming_id=0, incoming_window=1, next_outgoing_id=0, outgoing_window=1, handle=0)
    shell.flowed(Flowed(session=0, link=0, flow=flow))


def opened() -> tuple[OutgoingLink, Link, Index, Consumer]:
    place: Any = Place()
    link: Any = Link()
    node = QueueOrigin(place, place)
    shell = OutgoingLink(place, place, link, node, settled=False, default=Released())
    consumer = place.index.consumer
    assert consumer is not None
    return shell, link, place.index, consumer


def room(consumer: Consumer) -> int:
    """The number of deliveries that the consumer can take now."""
    return consumer.credit.limit - consumer.credit.used


def a_message() -> tuple[QueueDelivery, StoredMessage]:
    queue: Any = object()
    message: Any = type("Message", (), {"properties": EMPTY, "body": b"", "exchange": b"", "routing_key": b"q"})()
    return QueueDelivery(queue, 1, False, None), message


async def test_a_consumer_takes_its_links_credit() -> None:
    shell, link, index, consumer = opened()
    assert room(consumer) == 0
    flowing(shell, link, 5, drain=False)
    assert room(consumer) == 5
    consumer.charge()
    consumer.sink.deliver(consumer, *a_message())
    assert (room(consumer), link.credit) == (4, 4)
    flowing(shell, link, 0, drain=False)
    assert room(consumer) == 0
    assert not index.getters


async def test_a_drain_gets_single_messages_then_returns_the_rest() -> None:
    shell, link, index, consumer = opened()
    flowing(shell, link, 5, drain=True)
    assert (room(consumer), len(index.getters)) == (0, 1)
    index.getters.pop().got(None, 0)
    assert (link.drains, link.credit) == (1, 0)


async def test_a_cancelled_drain_leaves_no_credit_twice() -> None:
    """The answer to the last get arrives when the consumer has the credit again: it uses one of that."""
    shell, link, index, consumer = opened()
    flowing(shell, link, 1, drain=True)
    flowing(shell, link, 1, drain=False)
    assert room(consumer) == 1
    index.getters.pop().got(a_message(), 0)
    assert (room(consumer), link.credit, len(link.sent)) == (0, 0, 1)


async def test_a_drain_that_was_taken_back_gives_nothing_back() -> None:
    shell, link, index, _ = opened()
    flowing(shell, link, 1, drain=True)
    flowing(shell, link, 7, drain=False)
    index.getters.pop().got(None, 0)
    assert (link.drains, link.credit) == (0, 7)


class Rejecting:
    """A transaction that rejects, the messages that it holds, and the queue."""

    arguments = SimpleNamespace(dead_letter_exchange=b"dead")

    def __init__(self) -> None:
        self.published: list[object] = []
        self.doomed: list[str] = []
        self.waits: list[Future[Any]] = []
        self.held: list[object] = []

    def fits(self, _: int) -> bool:
        return True

    def hold(self, delivery: object) -> None:
        self.held.append(delivery)

    def add_consume(self, _: object) -> None: ...

    def publish(self, letter: object) -> None:
        self.published.append(letter)

    def wait_for(self, reason: Future[Any]) -> None:
        self.waits.append(reason)

    def doom(self, reason: str) -> None:
        self.doomed.append(reason)


@pytest.mark.parametrize("error", [LogUnavailable("away"), RuntimeError("a mistake")])
async def test_an_unreadable_rejected_message_is_not_committed(error: Exception) -> None:
    """A commit would consume it without a dead letter."""
    answers: list[Any] = [["first"], error]

    async def dead_letters(deliveries: list[QueueDelivery], _: object) -> list[object]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert len(deliveries) == 2
        return list(answer)

    place: Any = Place()
    place.home = place.manager = place
    place.broker = SimpleNamespace(dead_letters=dead_letters)
    place.spawn = asyncio.ensure_future
    node = QueueOrigin(place, place)
    first, second = Rejecting(), Rejecting()
    for number, work in enumerate((first, second)):
        queue: Any = SimpleNamespace(id=1, hold=work.hold, arguments=work.arguments)
        of: Any = work
        node.postpone(QueueDelivery(queue, number, False, None), of, of, lambda _: None, Rejected())
    (waited,) = {*first.waits, *second.waits}
    await asyncio.wait([waited])
    assert (first.published, first.doomed) == (["first"], [])
    assert second.published == []
    assert len(second.doomed) == 1
    assert waited.done()
    assert isinstance(error, LogUnavailable) or waited.exception() is error


class Failing:
    """Nodes, connection and queue. The test decides when a write succeeds or fails."""

    where = "queue 'q'"

    def __init__(self) -> None:
        self.home = self.manager = self.broker = self.spec = self.writes = self.index = self
        self.slices = Slices(lambda error: self.done.append(str(error)))
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: list[asyncio.Future[None]] = []
        self.done: list[str] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def revise(self, _deliveries: object, _revised: object) -> None:
        await self.written

    def suspend(self) -> None: ...

    def proceed(self, _now: float) -> None: ...

    def requeue(self, _deliveries: object, _now: float, *, limited: bool) -> None:
        self.done.append("returned")

    def reject(self, _deliveries: object) -> None:
        self.done.append("rejected")

    def then(self, act: Callable[[], None], _failed: Callable[[], None]) -> None:
        act()

    def now(self) -> float:
        return 0.0


@pytest.mark.parametrize("error", [None, LogUnavailable("the database is away")])
async def test_a_modified_message_returns_after_its_write_ends(error: LogUnavailable | None) -> None:
    """A failed write may lose the change, but not the message. The outcome is reported after it."""
    place: Any = Failing()
    node = QueueOrigin(place, place)
    for position, undeliverable in enumerate((False, True)):
        delivery = QueueDelivery(place, position, False, None)
        node.modify([delivery], Modified(delivery_failed=True, undeliverable_here=undeliverable))
    node.then(lambda: place.done.append("told"))
    await asyncio.sleep(0)
    assert place.done == []
    if error is None:
        place.written.set_result(None)
    else:
        place.written.set_exception(error)
    await asyncio.gather(*place.tasks)
    assert place.done == ["returned", "rejected", "told"]
    node.then(lambda: place.done.append("at once"))
    assert place.done[-1] == "at once"


class Over:
    """A transaction that has ended and holds nothing."""

    def retire(self, *_: object, **__: object) -> None:
        raise AssertionError("an outcome is held for a transaction that is over")


@pytest.mark.parametrize("committed", [True, False])
async def test_an_outcome_behind_the_discharge_is_the_clients_own(committed: bool) -> None:
    """The rest of the discharge takes several turns. Nothing would release a message held for it."""
    shell, _, _, _ = opened()
    done: list[tuple[str, object]] = []
    later: list[Any] = []
    work: Any = Over()
    place: Any = shell._connection
    place.slices = SimpleNamespace(run=later.append)
    place.abort, place.flush_soon = (lambda _: False), (lambda *_: None)
    node: Any = SimpleNamespace(
        accept=lambda taken: done.append(("accept", taken)), requeue=lambda taken: done.append(("requeue", taken))
    )
    link: Any = SimpleNamespace(dispose=lambda *_: None)
    shell.node, shell._link = node, link
    shell.unsettled[1] = "message"
    shell._acquired[1] = _InWork(cast("Any", None), work)
    shell.discharged(work, committed=committed)
    shell._finish((1,), Accepted(), settled=True)
    for rest in later:
        for _ in rest:
            pass
    assert done == [("accept" if committed else "requeue", ["message"])]
    assert not shell.unsettled


def test_an_outcome_that_may_not_be_durable_is_not_settled() -> None:
    """The link ends with an error instead, because the outcome is not known."""
    heard: list[Any] = []
    place: Any = Place()
    place.writes = SimpleNamespace(then=lambda act, failed: heard.append((act, failed)))
    place.spec = SimpleNamespace(where="queue 'q'")
    place.detach = lambda shell, error: heard.append((shell, error))
    node = QueueOrigin(place, place)
    link: Any = Link()
    shell = OutgoingLink(place, place, link, node, settled=False, default=Released())
    node.then(lambda: heard.append("settled"))
    act, failed = heard.pop()
    failed()
    ((ended, error),) = heard
    assert (ended, error.condition) == (shell, Condition.INTERNAL_ERROR)
    act()
    assert heard[1:] == ["settled"]
