"""Conversations of AMQP 1.0 clients with a whole dtx in this process: see :mod:`.server`."""

import random
from collections.abc import Iterable, Sequence
from typing import Final

from dtx.server.amqp10.connection import Amqp10Connection, Amqp10Limits
from dtx.server.standalone.nodes import StandaloneNodes
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER
from dtx.wire.amqp10.endpoint import AMQP, HEAD, SASL, Amqp10FrameSplitter, frame
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Begin,
    Close,
    Coordinator,
    Declare,
    Detach,
    Discharge,
    Disposition,
    End,
    Flow,
    Modified,
    Open,
    Role,
    SaslInit,
    Source,
    Target,
    TransactionalState,
    read_performative,
    read_sasl,
)
from dtx.wire.amqp10.values import Described, Symbol
from dtx.xa.xid import Xid
from tests.evidence.fuzz import conversations
from tests.evidence.fuzz.conversations import Mutation
from tests.evidence.fuzz.server import FRAME_MAX, Wire, check_nothing_is_left, hear, leave, whole
from tests.unit.wire.amqp10.peer import attach, transfer

TXN: Final = b"the last txn-id!"
"""A placeholder in the client's frames for the last transaction id that it received."""
_DECLARED: Final = b"\x00\x53\x33\xc0\x13\x01\xa0\x10"
_LOGIN: Final = frame(SASL, 0, encode(SaslInit(mechanism="PLAIN", initial_response=b"\x00guest\x00guest")))
_BEGIN: Final = Begin(remote_channel=None, next_outgoing_id=0, incoming_window=1000, outgoing_window=1000)
ENTER: Final = (_LOGIN, AMQP_HEADER + frame(AMQP, 0, encode(Open(container_id="fuzz"))))
_BOUNDS: Final = Amqp10Limits(
    max_channels=100,
    frame_max=FRAME_MAX,
    max_message_bytes=1 << 20,
    handshake_timeout=60,
    control_errors="lenient",
)
_CONTROL, _SENDER, _RECEIVER, _DYNAMIC, _ANYWHERE, _SUBSCRIBER = range(6)
_CHANGE: Final = Modified(delivery_failed=True, message_annotations={"x-opt-why": "late", "x-delivery-count": 7})
_FILTER: Final = {"key": Described(Symbol("apache.org:legacy-amqp-topic-binding:string"), "a.*")}


async def converse(reads: Iterable[bytes]) -> bytes:
    """Run one client's conversation with a new server that has a queue ``q``.

    Args:
        reads: the result of each read of the socket.

    Returns:
        The bytes that the client received.

    Raises:
        Complaint: an unexpected error was logged.
        AssertionError: the server kept state of the client.
    """
    async with whole() as (parts, store):
        store.virtual_host("/").declare_queue(b"q", None, durable=True)
        wire = Wire()
        connection = Amqp10Connection(
            parts.manager, _BOUNDS, lambda home: StandaloneNodes(parts, home), wire, SASL_HEADER
        )
        try:
            for data in reads:
                at = wire.sent.rfind(_DECLARED)
                txn_id = bytes(wire.sent[at + len(_DECLARED) :][: len(TXN)]) if at >= 0 else TXN
                await hear(connection, wire, data.replace(TXN, txn_id))
            sent = bytes(wire.sent)
            await leave(connection, parts.manager, lambda: getattr(connection.nodes, "writes", None))
            check(sent)
            check_nothing_is_left(connection, parts.manager, store)
            return sent
        finally:
            connection.client_disconnected()


def check(sent: bytes) -> list[Composite]:
    """Check that the client received complete frames, and return their performatives."""
    found: list[Composite] = []
    rest = sent
    while rest:
        if rest.startswith(b"AMQP"):
            rest = rest[8:]
            continue
        size = int.from_bytes(rest[:4], "big")
        assert HEAD <= size <= len(rest), "half a frame was sent"
        buffer, ((kind, _, start, end),) = Amqp10FrameSplitter(FRAME_MAX).feed(rest[:size])
        if kind == SASL:
            found.append(read_sasl(buffer, start, end))
        elif start < end:
            found.append(read_performative(buffer, start, end)[0])
        rest = rest[size:]
    return found


def conversation(rng: random.Random) -> list[bytes]:
    """Return frames of a client that uses all features, on channels 0 and 1, without waiting for answers."""
    state = TransactionalState(txn_id=TXN)
    retired = TransactionalState(txn_id=TXN, outcome=rng.choice((ACCEPTED, RELEASED, _CHANGE)))
    xid = Xid(1, rng.randbytes(16), rng.randbytes(4)).to_wire()
    body = message.data(rng.randbytes(rng.choice((0, 1, 5000))))
    to_queue = message.bare(message.Properties(to="/queues/q"), {"k": 1}, body)
    numbers = iter(range(1000))
    flow = Flow(next_incoming_id=0, incoming_window=rng.choice((1, 1000)), next_outgoing_id=0, outgoing_window=9)

    def say(performative: Composite, payload: bytes = b"", channel: int = 0) -> bytes:
        return frame(AMQP, channel, encode(performative) + payload)

    def ask(request: Composite) -> bytes:
        return say(transfer(next(numbers), _CONTROL), message.value(request))

    def work() -> Iterable[bytes]:
        if rng.random() < 0.3:
            yield say(_credit(flow, _RECEIVER, rng.randrange(10), drain=False, txn_id=TXN))
        yield say(transfer(next(numbers), _SENDER, state=state), body)
        yield say(transfer(next(numbers), _ANYWHERE, state=state, settled=True), to_queue)
        first = rng.randrange(6)
        role, settled = Role.RECEIVER, rng.random() < 0.5
        yield say(Disposition(role=role, first=first, last=first + rng.randrange(3), settled=settled, state=retired))

    queue = Target(address="/queues/q")
    begun = [say(_BEGIN), say(_BEGIN, channel=1)]
    attached = [
        say(attach("control", Role.SENDER, _CONTROL, target=Coordinator())),
        say(attach("to q", Role.SENDER, _SENDER, target=queue)),
        say(attach("from q", Role.RECEIVER, _RECEIVER, source=Source(address="q"))),
        say(attach("replies", Role.RECEIVER, _DYNAMIC, source=Source(dynamic=True))),
        say(attach("anywhere", Role.SENDER, _ANYWHERE, target=Target())),
        say(
            attach("topics", Role.RECEIVER, _SUBSCRIBER, source=Source(address="/exchanges/amq.topic", filter=_FILTER))
        ),
        say(attach("elsewhere", Role.SENDER, _SENDER, target=Target(address="/exchanges/amq.fanout")), channel=1),
    ]
    plain = [
        say(flow),
        say(_credit(flow, _RECEIVER, rng.randrange(10), drain=rng.random() < 0.3)),
        *(say(transfer(next(numbers), _SENDER, settled=rng.random() < 0.5), body) for _ in range(6)),
        say(transfer(next(numbers), _SENDER, more=True), body),
        say(transfer(None, _SENDER), body),
        say(Disposition(role=Role.RECEIVER, first=0, settled=True, state=rng.choice((ACCEPTED, _CHANGE)))),
    ]
    end = rng.choice((Detach(handle=_CONTROL, closed=True), Detach(handle=_RECEIVER), End(), Close()))
    return [
        *begun,
        *attached,
        *plain,
        ask(Declare()),
        *work(),
        ask(Discharge(txn_id=TXN, fail=rng.random() < 0.5)),
        ask(Declare(global_id=xid)),
        *work(),
        ask(Discharge(txn_id=TXN, fail=True)),
        ask(Declare()),
        *work(),
        say(end),
    ]


def _credit(flow: Flow, handle: int, credit: int, *, drain: bool, txn_id: bytes | None = None) -> Flow:
    return Flow(
        next_incoming_id=flow.next_incoming_id,
        incoming_window=flow.incoming_window,
        next_outgoing_id=flow.next_outgoing_id,
        outgoing_window=flow.outgoing_window,
        handle=handle,
        delivery_count=0,
        link_credit=credit,
        drain=drain,
        echo=True,
        properties=None if txn_id is None else {"txn-id": txn_id},
    )


def cut_body(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Shorten the body of a frame; the frame stays complete."""
    position = rng.randrange(len(frames))
    found = frames[position]
    short = found[: rng.randrange(HEAD, max(HEAD + 1, len(found)))]
    return [*frames[:position], len(short).to_bytes(4, "big") + short[4:], *frames[position + 1 :]]


def change_channel(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    position = rng.randrange(len(frames))
    found = frames[position]
    other = rng.choice((0, 1, 2, 99, 100, 65535)).to_bytes(2, "big")
    return [*frames[:position], found[:6] + other + found[8:], *frames[position + 1 :]]


def change_handle(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Change a small number: a handle, delivery id, credit, or constructor, among others."""
    position = rng.randrange(len(frames))
    found = bytearray(frames[position])
    places = [place for place in range(HEAD, len(found)) if found[place] == 0x52]
    if places:
        found[min(rng.choice(places) + 1, len(found) - 1)] = rng.randrange(8)
    return [*frames[:position], bytes(found), *frames[position + 1 :]]


MUTATIONS: Final[Sequence[Mutation]] = (
    conversations.flip,
    conversations.flip_arguments,
    conversations.drop,
    conversations.repeat,
    conversations.shuffle,
    conversations.truncate,
    cut_body,
    change_channel,
    change_handle,
    lambda _, frames: frames,
)
