"""Links that try to resume a former link: dtx has kept nothing of it, and its attach says so."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.server.amqp10.links import CREDIT
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.endpoint import AMQP, Attached, Flowed, frame
from dtx.wire.amqp10.performatives import ACCEPTED, Attach, Detach, Role, Source, Target, Transfer
from dtx.wire.amqp10.values import Described, ULong
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import take_all
from tests.support.service import DtxService

HANDLE = 7
_ACCEPTED = Described(ULong(0x24), [])


@pytest.fixture
def raw(service: DtxService) -> Iterator[Raw]:
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


def sent(raw: Raw, number: int, tag: bytes, payload: bytes = b"", **fields: Any) -> None:
    """Send a frame of a delivery on the link with ``HANDLE``."""
    said = Transfer(handle=HANDLE, delivery_id=number, delivery_tag=tag, **fields)
    raw.socket.sendall(frame(AMQP, 0, encode(said) + payload))


def saying(raw: Raw, kind: type[Attach | Detach], patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Set these *fields* in all later frames of that *kind*."""
    send = raw.engine.send

    def changed(channel: int, performative: Composite) -> None:
        send(channel, replace(performative, **fields) if isinstance(performative, kind) else performative)

    patch.setattr(raw.engine, "send", changed)


def test_a_resumed_delivery_is_ignored_and_takes_no_credit(raw: Raw, channel: BlockingChannel, queue: str) -> None:
    """Transport, 2.7.5: "the receiver MUST ignore resumed deliveries that are not in its local unsettled map"."""
    session, other = raw.begin(), raw.begin()
    session.send(
        Attach(
            name="former",
            handle=HANDLE,
            role=Role.SENDER,
            source=Source(),
            target=Target(address=queue),
            unsettled={b"whole": None, b"parts": None, b"settled": _ACCEPTED},
            incomplete_unsettled=True,
            initial_delivery_count=0,
        )
    )
    answer = raw.expect(Attached).attach
    assert (answer.unsettled, answer.incomplete_unsettled) == (None, False)
    assert isinstance(answer.target, Target)
    raw.expect(Flowed)
    old = message.data(b"old")
    sent(raw, 0, b"whole", old, resume=True)
    sent(raw, 1, b"parts", old[:3], resume=True, more=True)
    sent(raw, 1, b"parts", old[3:])
    sent(raw, 2, b"settled", old, resume=True, settled=True)
    sent(raw, 3, b"aborted", old, resume=True, more=True)
    sent(raw, 3, b"aborted", aborted=True)
    for number in range(4, CREDIT):
        sent(raw, number, b"many", old, resume=True)
    assert raw.expect(Flowed, lambda event: (event.flow.link_credit or 0) > 0).flow.delivery_count is not None
    for number in range(CREDIT, CREDIT + 10):
        sent(raw, number, b"more", old, resume=True)
    sent(raw, CREDIT + 10, b"new", message.data(b"new"))
    to = raw.sender(other, queue, name="other")
    assert raw.outcome(other, raw.post(to, b"last")) == ACCEPTED
    assert sorted(take_all(channel, queue, at_least=2)) == [b"last", b"new"]


@pytest.mark.parametrize("closed", [False, True])
def test_an_interrupted_receivers_messages_are_delivered_anew(
    raw: Raw, channel: BlockingChannel, queue: str, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Transport, 2.6.13: without an unsettled map of its own the sender has nothing to resume."""
    channel.basic_publish("", queue, b"one")
    session = raw.begin()
    link, _ = raw.receiver(session, queue, name="former")
    first = raw.take()
    saying(raw, Detach, monkeypatch, closed=closed)
    raw.detach(session, link)
    saying(raw, Attach, monkeypatch, unsettled={first.tag: None, b"in doubt": _ACCEPTED}, incomplete_unsettled=True)
    again = session.new_link("former", Role.RECEIVER)
    again.attach(source=Source(address=queue), target=Target())
    answer = raw.expect(Attached).attach
    assert (answer.unsettled, answer.incomplete_unsettled) == (None, False)
    again.grant(1)
    second = raw.take()  # and no resumed delivery, which the engine would not report
    assert (body(second), message.read(second.payload).header.first_acquirer) == (b"one", False)
    session.dispose(Role.RECEIVER, [second.delivery_id], ACCEPTED, settled=True)
    raw.detach(session, again)
    assert take_all(channel, queue, at_least=0) == []
