"""A transaction over hundreds of links, some of which have an incomplete delivery at the discharge."""

from collections.abc import AsyncIterator

import pytest

from dtx.server.standalone.client import Parts
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Delivered, Detached
from dtx.wire.amqp10.link import Link, Outgoing
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Discharge,
    Rejected,
    Role,
    Source,
    Target,
    TransactionalState,
    Transfer,
)
from dtx.wire.amqp10.session import Session
from tests.evidence.fuzz.server import whole
from tests.unit.server.amqp10.inside import Inside

pytestmark = pytest.mark.usefixtures("one_slice")

LINKS = 200
EVERY = 10
"""Every tenth link has a part of a second delivery."""


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    """A server with a queue."""
    async with whole() as (found, store):
        store.virtual_host("/").declare_queue(b"q", None, durable=True)
        yield found


async def senders(client: Inside) -> list[tuple[Session, Link]]:
    """Links to the queue, on two sessions."""
    sessions = [await client.begin(), await client.begin()]
    found = []
    for number in range(LINKS):
        session = sessions[number % 2]
        link = session.new_link(f"sender-{number}", Role.SENDER)
        link.attach(source=Source(), target=Target(address="q"))
        found.append((session, link))
    await client.turn()
    return found


def post(link: Link, body: str, txn_id: bytes | None) -> int | None:
    state = None if txn_id is None else TransactionalState(txn_id=txn_id)
    payload = message.head(message.Header(durable=True)) + message.data(body.encode())
    return link.send(body.encode(), payload, state=state)


def post_a_part(session: Session, link: Link, txn_id: bytes) -> int:
    """Send the first frame of a message."""
    number = session._next_delivery
    session._next_delivery += 1
    session._next_outgoing += 1
    session._remote_window -= 1
    link.credit -= 1
    link.delivery_count += 1
    post = Outgoing(link, next(session._numbers), b"", memoryview(b""), False, None, 0)
    assert post.number == number
    session.outgoing[number] = link.unsettled[number] = post
    state = TransactionalState(txn_id=txn_id)
    session.send(Transfer(handle=link.handle, delivery_id=number, delivery_tag=b"part", state=state, more=True))
    return number


def post_the_rest(session: Session, link: Link, *, aborted: bool = False) -> None:
    payload = memoryview(b"" if aborted else message.data(b"rest"))
    fields = {"handle": link.handle, "aborted": True} if aborted else {"handle": link.handle}
    session.connection.send_transfer(session.channel, fields, payload)
    session._next_outgoing += 1
    session._remote_window -= 1


async def bodies(parts: Parts) -> list[str]:
    """The messages in the queue."""
    reader = await Inside(parts).open()
    session = await reader.begin()
    link = await reader.receiver(session, "q", settled=True)
    link.grant(2 * LINKS, drain=True)
    await reader.turn()
    return [bytes(b"".join(message.read(event.payload).data or ())).decode() for event in reader.among(Delivered)]


async def test_an_incomplete_delivery_rolls_back_and_links_continue(parts: Parts) -> None:
    """4.4.1: "the control link MUST be terminated with the transaction-rollback error"."""
    client = await Inside(parts).open()
    links = await senders(client)
    session = await client.begin()
    control = await client.control(session)
    txn_id = await client.declare(session, control)
    for number, (_, link) in enumerate(links):
        post(link, f"lost {number}", txn_id)
    halves = [(one, link, post_a_part(one, link, txn_id)) for one, link in links[::EVERY]]
    control.send(b"d", message.value(Discharge(txn_id=txn_id)))
    await client.turn()
    (detached,) = client.among(Detached)
    assert detached.error is not None
    assert detached.error.condition == "amqp:transaction:rollback"
    for one, link, _ in halves:
        post_the_rest(one, link)
    await client.turn()
    for one, _, number in halves:
        outcome = client.outcome(one, number)
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == "amqp:transaction:unknown-id"
    for number, (_, link) in enumerate(links):
        post(link, f"later {number}", None)
    await client.turn()
    assert client.among(Detached) == [detached]
    assert sorted(await bodies(parts)) == sorted(f"later {number}" for number in range(LINKS))


@pytest.mark.parametrize("how", ["completed", "aborted", "detached"])
async def test_completed_or_failed_transactions_are_no_obstacle(parts: Parts, how: str) -> None:
    client = await Inside(parts).open()
    links = await senders(client)
    session = await client.begin()
    control = await client.control(session)
    txn_id = await client.declare(session, control)
    whole_ones = [f"{number}" for number in range(LINKS) if number % EVERY]
    for body in whole_ones:
        post(links[int(body)][1], body, txn_id)
    for one, link in links[::EVERY]:
        post_a_part(one, link, txn_id)
    await client.turn()
    for one, link in links[::EVERY]:
        if how == "detached":
            link.detach()
        else:
            post_the_rest(one, link, aborted=how == "aborted")
    assert await client.ask(session, control, Discharge(txn_id=txn_id)) == ACCEPTED
    rest = ["rest"] * (LINKS // EVERY if how == "completed" else 0)
    assert sorted(await bodies(parts)) == sorted([*whole_ones, *rest])


async def test_a_discharged_id_belongs_to_no_transaction(parts: Parts) -> None:
    """A client that uses the id again adds nothing to the next transaction."""
    client = await Inside(parts).open()
    session = await client.begin()
    control = await client.control(session)
    sender = await client.sender(session, "q")
    first = await client.declare(session, control)
    assert await client.ask(session, control, Discharge(txn_id=first)) == ACCEPTED
    second = await client.declare(session, control)
    assert second != first
    stray = post(sender, "stray", first)
    kept = post(sender, "kept", second)
    await client.turn()
    outcome = client.outcome(session, stray)
    assert isinstance(outcome, Rejected)
    assert client.outcome(session, kept) == TransactionalState(txn_id=second, outcome=ACCEPTED)
    assert isinstance(await client.ask(session, control, Discharge(txn_id=first)), Rejected)
    assert await client.ask(session, control, Discharge(txn_id=second)) == ACCEPTED
    assert await bodies(parts) == ["kept"]
