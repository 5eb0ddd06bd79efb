"""Messages of a transaction that the broker validates later."""

import asyncio
from asyncio import Future
from typing import Any

import pytest

from dtx.server.amqp10.addresses import QueueAddress
from dtx.server.amqp10.links import CREDIT, Incoming
from dtx.store.work import HeldPublish
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.coordination import Amqp10Transaction
from dtx.wire.amqp10.endpoint import Delivered
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import ACCEPTED, DeliveryState, Rejected, TransactionalState

NUMBER = 7


class Place:
    """Connection, session, link, node and transaction in one: all that the link's shell uses."""

    credit = CREDIT
    channel = handle = 0

    def __init__(self) -> None:
        self.coordination = self.transactions = self
        self.transaction = Amqp10Transaction(b"txn", (0, 0), None)
        self.held: list[HeldPublish] = []
        self.doomed: list[str] = []
        self.said: list[DeliveryState] = []
        self.verdict: Future[AmqpError | None] = asyncio.get_running_loop().create_future()

    def posting(self, *_: object) -> Amqp10Transaction:
        return self.transaction

    def begin(self, _: object) -> None: ...

    def pump(self) -> None: ...

    def wait_for(self, _: object) -> None: ...

    def close(self) -> None: ...

    def work(self, _: object) -> "Place":
        return self

    def address(self, _: object, subject: object, content: Any) -> HeldPublish:
        return HeldPublish(b"", b"q", False, content.properties, content.body)

    def validate(self, _: HeldPublish) -> Future[AmqpError | None]:
        return self.verdict

    def publish(self, held: HeldPublish) -> None:
        self.held.append(held)

    def withdraw(self, held: HeldPublish) -> None:
        self.held.remove(held)

    def doom(self, reason: str) -> None:
        self.doomed.append(reason)

    def dispose(self, role: object, deliveries: object, state: DeliveryState, *, settled: bool) -> None:
        assert settled
        self.said.append(state)


def posted(*, settled: bool) -> Place:
    """A place where a message has been posted."""
    return posting(settled=settled)[0]


def posting(*, settled: bool) -> tuple[Place, Incoming]:
    """The same, with the link on which the message arrived."""
    place: Any = Place()
    shell = Incoming(place, place, place, QueueAddress(b"q"), place)
    payload = memoryview(message.data(b"one"))
    shell.delivered(
        Delivered(
            session=0,
            link=0,
            delivery_id=NUMBER,
            tag=b"t",
            message_format=0,
            payload=payload,
            settled=settled,
            states=(),
        )
    )
    assert len(place.held) == 1, "it keeps its place until it is judged"
    assert place.said == []
    found: Place = place
    return found, shell


async def judged(place: Place) -> None:
    """Wait until the judgement has been handled."""
    await asyncio.wait([place.verdict])
    await asyncio.sleep(0)


async def test_a_message_that_is_judged_good_is_accepted_then() -> None:
    place = posted(settled=False)
    place.verdict.set_result(None)
    await judged(place)
    assert place.said == [TransactionalState(txn_id=b"txn", outcome=ACCEPTED)]
    assert (len(place.held), place.doomed) == (1, [])


@pytest.mark.parametrize("settled", [False, True])
async def test_a_message_that_is_refused_is_left_out(settled: bool) -> None:
    """4.4.4.1: what was sent settled "MUST NOT allow the successful discharge"; else the client is told."""
    place = posted(settled=settled)
    place.verdict.set_result(AmqpError(Condition.PRECONDITION_FAILED, "no"))
    await judged(place)
    assert place.held == []
    assert bool(place.doomed) is settled
    assert (place.transaction.doom is not None) is settled
    assert [isinstance(state, TransactionalState) and type(state.outcome) for state in place.said] == (
        [] if settled else [Rejected]
    )


async def test_a_message_without_validation_dooms_its_transaction() -> None:
    """Its connection to the broker is lost. Without the judgement it would be published with dtx's permissions."""
    place = posted(settled=False)
    place.verdict.cancel()
    await judged(place)
    assert place.doomed
    assert place.said == []


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("by_client", [False, True])
async def test_a_message_validated_late_is_reported_or_not_committed(by_client: bool, settled: bool) -> None:
    """4.4.1: it "must inform the controller … before it can successfully discharge", unless that has ended the link."""
    place, shell = posting(settled=settled)
    shell.shut_down(by_client=by_client)
    place.verdict.set_result(None)
    await judged(place)
    spoiled = not settled and not by_client
    assert (len(place.held), bool(place.doomed)) == (1, spoiled)
    assert (place.transaction.doom is not None) is spoiled
    assert place.said == []
