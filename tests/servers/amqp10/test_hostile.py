"""Peers that exceed their limits: each gets the error of the specification, and other clients are not affected."""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.coordination import MAX_LIVE
from dtx.wire.amqp10.endpoint import AMQP, Attached, Closed, Detached, Disposed, Ended, Event, frame
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import ACCEPTED, Declare, Disposition, Flow, Rejected, Role, Source, Target, Transfer
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw, body
from tests.support.broker import only_standalone
from tests.support.client import take_all
from tests.support.processes import resident
from tests.support.service import DtxService

MEGABYTE: Final = 1 << 20
MUCH: Final = 96 * MEGABYTE
"""Bytes: far above what one connection may use, and far below what these peers ask for."""


@pytest.fixture(autouse=True)
def neighbour(service: DtxService, channel: BlockingChannel) -> Iterator[Callable[[], None]]:
    """A client that connected before: it can do a transaction during the attack, and does one afterwards."""
    name = f"neighbour-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    with Raw(service) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, name)
        done = 0

        def transact() -> None:
            nonlocal done
            txn_id = raw.declare(session, control)
            raw.outcome(session, raw.post(sender, b"mine", txn_id))
            assert raw.discharge(session, control, txn_id) == ACCEPTED
            done += 1

        yield transact
        transact()
    assert take_all(channel, name) == [b"mine"] * done
    channel.queue_delete(name)


def say(raw: Raw, session: Session, *frames: bytes) -> None:
    """Send frames without the engine of the client."""
    raw.flush()
    assert session.channel == 0
    raw.socket.sendall(b"".join(frames))


def transfer(link: Link, number: int | None, *, payload: bytes = b"", **fields: Any) -> bytes:
    tag = None if number is None else b"%d" % number
    said = Transfer(handle=link.handle, delivery_id=number, delivery_tag=tag, **fields)
    return frame(AMQP, 0, encode(said) + payload)


def heard(raw: Raw, *kinds: type[Event]) -> Any:
    """Wait for the first event of these kinds."""
    while True:
        for event in raw.events:
            if isinstance(event, kinds):
                raw.events.remove(event)
                return event
        data = raw.socket.recv(1 << 16)
        assert data, "the server has closed the connection without a reason"
        raw.events += raw.engine.receive(data, 0.0)


def test_a_client_that_exceeds_the_window_loses_the_session(service: DtxService, queue: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        link = raw.sender(session, queue)
        more = transfer(link, None, more=True)
        say(raw, session, transfer(link, 0, more=True), *[more] * 50_000)
        ended = heard(raw, Ended, Closed)
        assert isinstance(ended, Ended)
        assert ended.error is not None
        assert ended.error.condition == "amqp:session:window-violation"
        raw.begin()  # the connection is still open


def test_a_client_that_exceeds_the_credit_loses_the_link(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        link = raw.sender(session, queue)
        other = raw.sender(session, queue, name="other")
        payload = message.data(b"greedy")
        frames = [transfer(link, number, payload=payload, settled=True) for number in range(10_000, 11_800)]
        say(raw, session, *frames)
        detached = heard(raw, Detached, Ended, Closed)
        assert isinstance(detached, Detached)
        assert detached.error is not None
        assert detached.error.condition == "amqp:link:transfer-limit-exceeded"
        assert raw.outcome(session, raw.post(other, b"good")) == ACCEPTED
    assert take_all(channel, queue)[-1] == b"good"


def fields(count: int, octets: bytes) -> bytes:
    """A list that claims *count* fields."""
    return b"\xd0" + (len(octets) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + octets


@pytest.mark.parametrize(
    "value",
    [
        b"\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40",
        b"\xf0\xff\xff\xff\xff\xff\xff\xff\xff\xa3",
        b"\xd0\x00\x01\x00\x00\xff\xff\xff\xff" + b"\x40" * 1000,
        b"\xd1\xff\xff\xff\xff\x00\x01\x00\x00" + b"\x45" * 1000,
        b"\xc0\xff\x01" * 10_000,
    ],
    ids=["four thousand million nulls", "a giant array", "a giant list", "a giant map", "lists in lists"],
)
def test_values_that_claim_more_than_there_is_are_decode_errors(service: DtxService, queue: str, value: bytes) -> None:
    """In a message, which is rejected, and in the properties of a flow, which closes the connection."""
    with Raw(service) as raw:
        before = resident(service.pid)
        session = raw.opened().begin()
        control = raw.control(session)
        declare = b"\x00\x53\x77\x00\x53\x31" + fields(1, value)
        outcome = raw.outcome(session, control.send(b"t", declare))
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == "amqp:decode-error"
        flow = b"\x00\x53\x13" + fields(11, b"\x43" * 4 + b"\x40" * 6 + value)
        say(raw, session, frame(AMQP, 0, flow))
        closed = heard(raw, Closed)
        assert closed.error.condition == "amqp:decode-error"
        assert resident(service.pid) - before < MUCH


def test_floods_of_handles_and_sessions_end_at_their_limits(service: DtxService) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        for number in range(300):
            session.new_link(f"l{number}", Role.SENDER).attach(source=Source(), target=Target())
            if number == 255:
                session._remote_handle_max = 1000  # a hostile client ignores the limit of the server
        raw.flush()
        assert heard(raw, Closed).error.condition == "amqp:connection:framing-error"


def test_transactions_that_are_declared_and_never_discharged_have_a_limit(service: DtxService) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        for number in range(MAX_LIVE):
            raw.until(lambda: control.credit > 0)
            control.send(b"%d" % number, message.value(Declare()))
        refused = raw.ask(session, control, Declare())
        assert isinstance(refused, Rejected)
        assert refused.error is not None
        assert refused.error.condition == "amqp:resource-limit-exceeded"


def processor_seconds(pid: int) -> float:
    """The processor time of a process, seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def link_of(session: Session, handle: int) -> Link:
    """The attached link with this handle."""
    link = session.link(handle)
    assert link is not None
    return link


@only_standalone
@pytest.mark.parametrize("how", ["detached", "their queue deleted"])
def test_many_links_end_with_little_work(service: DtxService, channel: BlockingChannel, queue: str, how: str) -> None:
    """Thousands of links end at once. If the work were quadratic, all clients would wait for it."""
    sessions, links = 15, 250
    name = f"{queue}-many"
    channel.queue_declare(name, durable=True)
    with Raw(service) as raw:
        raw.opened()
        begin = processor_seconds(service.pid)
        each = [raw.begin() for _ in range(sessions)]
        for number, session in enumerate(each):
            for link in range(links):
                session.new_link(f"{number}-{link}", Role.RECEIVER).attach(source=Source(address=name), target=Target())
            for _ in range(links):
                raw.expect(Attached)
            for handle in range(links):
                link_of(session, handle).grant(1)
        raw.begin()  # the answer shows that all credit has arrived
        began = processor_seconds(service.pid)
        if how == "detached":
            for session in each:
                for handle in range(links):
                    link_of(session, handle).detach()
            raw.until(lambda: not any(session.link(handle) for session in each for handle in range(links)))
        else:
            channel.queue_delete(name)
            for _ in range(sessions * links):
                raw.expect(Detached)
        raw.close()
        assert processor_seconds(service.pid) - began < 2 * (began - begin)  # quadratic work takes many times that
    channel.queue_delete(name)


def fill(channel: BlockingChannel, queue: str, count: int, size: int) -> None:
    for number in range(count):
        channel.basic_publish("", queue, number.to_bytes(4, "big") * (size // 4))


def test_dispositions_for_all_deliveries_do_not_block_other_clients(
    service: DtxService, channel: BlockingChannel, queue: str, neighbour: Callable[[], None]
) -> None:
    """Frames of one read name more than a million deliveries. dtx never holds all of them in memory."""
    count = 4000
    fill(channel, queue, count, 4)
    with Raw(service, window=2 * count) as raw:
        session = raw.opened().begin()
        raw.receiver(session, queue, count)
        for _ in range(count):
            raw.take()
        before = resident(service.pid)
        everything = Disposition(role=Role.RECEIVER, first=0, last=0x7FFF_FFFF)
        say(raw, session, frame(AMQP, 0, encode(everything)) * 400)
        neighbour()
        assert resident(service.pid) - before < MUCH
        accepted = Disposition(role=Role.RECEIVER, first=0, last=count - 1, state=ACCEPTED)
        say(raw, session, frame(AMQP, 0, encode(accepted)))
        settled = 0
        while settled < count:
            settled += len(raw.expect(Disposed).deliveries)
    assert take_all(channel, queue) == []


def test_a_client_that_does_not_read_is_not_read_from(service: DtxService, neighbour: Callable[[], None]) -> None:
    with Raw(service) as raw:
        raw.opened().begin()
        echo = Flow(next_incoming_id=0, incoming_window=10, next_outgoing_id=0, outgoing_window=10, echo=True)
        block = frame(AMQP, 0, encode(echo)) * 4000
        before = resident(service.pid)
        raw.flush()
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.socket.settimeout(2)
        with contextlib.suppress(TimeoutError):
            for _ in range(2000):  # hundreds of megabytes
                raw.socket.sendall(block)
            pytest.fail("dtx read everything from a client that reads nothing")
        neighbour()
        assert resident(service.pid) - before < MUCH


def test_windows_that_stay_closed_keep_messages_in_their_queue(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    """All sessions of a client together get few messages into the memory of dtx. Other clients get the rest."""
    count, size = 120, 64 * 1024
    fill(channel, queue, count, size)
    with Raw(service, window=0) as raw, Raw(service) as healthy:
        raw.opened()
        sessions = [raw.begin() for _ in range(20)]
        for number, session in enumerate(sessions):
            raw.receiver(session, queue, count, name=f"l{number}")
        raw.begin()  # the answer shows that all credit has arrived
        healthy.opened()
        session = healthy.begin()
        healthy.receiver(session, queue, count)
        got = 0
        while got < count // 2:
            healthy.take()
            got += 1
        for each in sessions:
            each.end()
        raw.flush()
        while got < count:
            assert len(body(healthy.take())) == size
            got += 1
