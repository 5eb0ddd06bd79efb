"""The AMQP 1.0 targets: the codec, and an engine with a small shell."""

import random
from contextlib import suppress
from typing import Final

from dtx.wire.amqp10 import codec, message
from dtx.wire.amqp10.codec import encode as encode_value
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER, Connection
from dtx.wire.amqp10.coordination import CoordinationEngine
from dtx.wire.amqp10.endpoint import AMQP, SASL, Delivered, frame
from dtx.wire.amqp10.errors import AmqpError
from dtx.wire.amqp10.performatives import (
    Declare,
    Detach,
    Discharge,
    Disposition,
    Open,
    Role,
    SaslInit,
    TransactionalState,
    TransactionCapability,
    read_performative,
    read_sasl,
)
from tests.unit.wire.amqp10.peer import BEGIN, attach, flow, settings, transfer
from tests.unit.wire.amqp10.shell import Shell

LOGIN: Final = SASL_HEADER + frame(SASL, 0, encode(SaslInit(mechanism="ANONYMOUS")))
_ENTER: Final = b"".join(frame(AMQP, 0, encode(said)) for said in (Open(container_id="c"), BEGIN))
_LINKS: Final = b"".join(
    frame(AMQP, 0, encode(said)) for said in (attach("in", Role.SENDER, 0), attach("out", Role.RECEIVER, 1))
)
STAGES: Final = (b"", SASL_HEADER, LOGIN + AMQP_HEADER, LOGIN + AMQP_HEADER + _ENTER)
"""The input of the engine before the fuzzed bytes; the last stage is followed by two links."""
_LARGEST_NOTHING: Final = 8
"""Bytes that a value takes when it is written, though it took none: an empty list in an array, as ``list32``."""


def value(data: bytes) -> None:
    """Any bytes are a value, a performative, a message, or an error; encoding and decoding again gives the same."""
    with suppress(AmqpError):
        found, end = codec.read(data, 0, len(data))
        written = encode_value(found)
        assert encode_value(codec.read(written, 0, len(written))[0]) == written
        assert codec.skip(written, 0) == len(written)
        assert len(written) <= 2 * end + 24 + _LARGEST_NOTHING * codec.MAX_NOTHING
    for read in (read_performative, read_sasl):
        with suppress(AmqpError):
            said = read(data, 0, len(data))
            performative = said[0] if isinstance(said, tuple) else said
            again = encode(performative)
            assert encode(type(performative).layout.read(again, 3, codec.CodecRoom())[0]) == again
    with suppress(AmqpError):
        whole = message.read(data)
        assert bytes(whole.bare) in data
        assert sum(map(len, whole.data or ())) <= len(data)
    request = Delivered(
        session=0, link=0, delivery_id=0, tag=b"", message_format=0, payload=memoryview(data), settled=False, states=()
    )
    CoordinationEngine(frozenset(TransactionCapability)).asked(request)


def peer(data: bytes) -> None:
    """The engine answers any bytes at any stage, raises only AmqpError, and keeps its limits of memory."""
    chosen, seed = (*data[:2], 0, 0)[:2]
    octets = data[2:]
    engine = Connection(settings(mechanisms=("ANONYMOUS",), max_frame_size=4096, max_message_size=8192), 0.0)
    shell = Shell(engine, credit=5, greeting=message.data(b"greeting" * 100))
    stage = chosen % (len(STAGES) + 1)
    for said in STAGES[min(stage, len(STAGES) - 1)], _LINKS if stage == len(STAGES) else b"":
        shell.take(said)
    dice = random.Random(seed)
    places = sorted(dice.randrange(len(octets) + 1) for _ in range(dice.randrange(6))) if seed else []
    for start, end in zip([0, *places], [*places, len(octets)], strict=True):
        with suppress(AmqpError):  # an answer of the shell may not fit the peer's frames
            shell.take(octets[start:end])
        assert 0 <= engine.unfinished <= engine.settings.max_partial
        assert engine._splitter.pending <= 4096
        engine.tick(0.0)
    held = sum(len(link.partial.octets) for link in engine.names.values() if link.partial is not None)
    assert held == engine.unfinished


def seeds(name: str) -> list[bytes]:
    """Return the first inputs of a target."""
    state = TransactionalState(txn_id=b"t")
    said = [
        transfer(0, more=True, state=state),
        transfer(None),
        flow(1, delivery_count=0, link_credit=5, echo=True, drain=True),
        Disposition(role=Role.SENDER, first=0, last=9, settled=True, state=state),
        Detach(handle=0),
    ]
    frames = b"".join(frame(AMQP, 0, encode(one) + b"x" * 9) for one in said)
    if name == "amqp10-peer":
        return [bytes((stage, 1)) + frames for stage in range(len(STAGES) + 1)] + [b"\x00\x00" + LOGIN + AMQP_HEADER]
    everything = message.head(message.Header(durable=True), {"a": 1}) + message.bare(
        message.Properties(message_id="m"), {"k": [None, True, 1.5]}, message.data(b"x")
    )
    return [
        everything,
        message.value(Declare(global_id=b"g")),
        message.value(Discharge(txn_id=b"t")),
        *(encode(one) for one in (*said, attach("l", Role.SENDER, 0), BEGIN, SaslInit(mechanism="PLAIN"))),
    ]


def _list(items: bytes, count: int) -> bytes:
    return b"\xd0" + (len(items) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + items


def _talk(*said: Composite) -> bytes:
    """Return an input of a peer with two links."""
    return bytes((len(STAGES), 0)) + b"".join(frame(AMQP, 0, encode(one)) for one in said)


LONG_VALUES: Final = {
    "as many empty lists as may be": _list(b"\x45" * 32_000, 32_000),
    "empty maps": _list(b"\xc1\x01\x00" * 10_000, 10_000),
    "arrays of nothing": _list(b"\xe0\x02\xff\x40" * 8000, 8000),
    "an array of as much nothing as may be": b"\xf0\x00\x00\x00\x05\x00\x00\x04\x00\x40",
    "lists in lists": b"\xc0\xff\x01" * 10_000,
    "sections of nothing": message.data(b"") * 6000,
}
"""The most expensive values."""
LONG_TALK: Final = {
    "endless fragments": _talk(transfer(0, more=True), *[transfer(None, more=True)] * 1500),
    "a flood of handles": _talk(*(attach(f"l{n}", Role.SENDER, n) for n in range(2, 250))),
    "one link, attached again and again": _talk(
        *(one for _ in range(200) for one in (attach("again", Role.SENDER, 9), Detach(handle=9, closed=True)))
    ),
    "a link that is stolen again and again": _talk(*(attach("mine", Role.SENDER, n) for n in range(2, 250))),
    "echoes": _talk(*[flow(1, delivery_count=0, link_credit=5, echo=True)] * 1000),
    "endless ranges": _talk(*[Disposition(role=Role.SENDER, first=0, last=0x7FFFFFFF, settled=True)] * 1500),
}
"""The most expensive inputs of a peer."""
