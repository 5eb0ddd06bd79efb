"""The code that reads from the wire raises only the documented errors, whatever arrives."""

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pika import frame

from dtx.client import pika_methods
from dtx.wire.amqp09 import (
    content,
    handshake,
    methods,
    properties,
    tables,
)
from dtx.wire.amqp09.closes import reply_text
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError
from dtx.wire.amqp09.frames import FrameSplitter, header_frame, method_frame, protocol_header
from dtx.wire.amqp09.methods import decode_call
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.recovery import recover_ok, split_recover
from dtx.xa.codes import ReplyCode
from dtx.xa.xid import MAX_WIRE, Xid
from tests.evidence.fuzz.targets import READERS, nothing_but
from tests.support import preview
from tests.support.preview import with_ticket
from tests.support.raw import body_frames

channels = st.integers(0, 0xFFFF)
octets = st.binary(max_size=200)
names = st.binary(max_size=12)
flags = st.booleans()
xids = st.builds(Xid, st.integers(0, 0xFFFFFFFF), st.binary(min_size=1, max_size=64), st.binary(max_size=64))


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A whole frame of any type."""
    channel = draw(channels)
    match draw(st.integers(1, 4)):
        case 1:
            return method_frame(channel, draw(st.binary(min_size=4, max_size=60)))
        case 2:
            return header_frame(channel, 60, draw(st.integers(0, 2**64 - 1)), draw(octets))
        case 3:
            return b"".join(body_frames(channel, draw(st.binary(min_size=1, max_size=5000)), 0))
        case _:
            return bytes.fromhex("08 0000 00000000 ce")


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    ends = sorted({place % (len(stream) + 1) for place in places} | {len(stream)})
    return [stream[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@given(st.lists(frames(), max_size=8), st.lists(st.integers(0, 1 << 20), max_size=30))
def test_any_chunking_of_a_stream_gives_its_frames(whole: list[bytes], places: list[int]) -> None:
    splitter = FrameSplitter(131_072)
    found: list[bytes] = []
    for chunk in cut(b"".join(whole), places):
        buffer, entries = splitter.feed(chunk)
        found += [buffer[start:end] for *_, start, end in entries]
    assert found == whole
    assert splitter.pending == 0


@given(st.lists(frames(), max_size=4), octets, st.lists(st.integers(0, 1 << 20), max_size=10))
def test_garbage_after_frames_never_loses_them(whole: list[bytes], garbage: bytes, places: list[int]) -> None:
    splitter = FrameSplitter(4096 * 2)
    found: list[bytes] = []
    held = len(garbage)
    try:
        for chunk in cut(b"".join(whole) + garbage, places):
            buffer, entries = splitter.feed(chunk)
            found += [buffer[start:end] for *_, start, end in entries]
        held = splitter.pending
    except FrameError as error:
        found += [error.buffer[start:end] for *_, start, end in error.frames]
    assert found[: len(whole)] == whole
    assert held <= len(garbage)


@given(st.lists(st.tuples(st.integers(0, 30), octets), max_size=20))
def test_the_splitter_keeps_at_most_one_frame(steps: list[tuple[int, bytes]]) -> None:
    splitter = FrameSplitter(4096)
    with suppress(FrameError):
        for size, chunk in steps:
            splitter.feed(size.to_bytes(1, "big") + chunk)
            assert splitter.pending <= 4096 + 8


@given(octets)
def test_any_start_of_a_stream_is_classified(data: bytes) -> None:
    protocol_header(data)


EVERY_READER: list[Callable[[bytes], object]] = [
    *READERS,
    tables.entries,
    tables.items,
    methods.ConnectionStartOk.decode,
    handshake.capabilities,
    lambda data: handshake.credentials(handshake.PLAIN, data),
    lambda data: handshake.credentials(handshake.AMQPLAIN, data),
    properties.checked,
    lambda data: properties.read(data).headers,
    lambda data: properties.set_header(data, b"k", b"v"),
    lambda data: properties.rename_headers(data, {b"CC": b"x"}),
    lambda data: properties.remove_headers(data, [b"CC"]),
    lambda data: properties.put(data, Property.TYPE, b"v"),
]


@pytest.mark.parametrize("reader", EVERY_READER)
@given(data=st.one_of(octets, st.binary(min_size=4, max_size=60)))
def test_reading_anything_raises_nothing_but_a_syntax_error(reader: Callable[[bytes], object], data: bytes) -> None:
    with nothing_but(HardCode.SYNTAX_ERROR, HardCode.NOT_IMPLEMENTED):
        reader(data)


VALID: list[tuple[Callable[[bytes], object], bytes]] = [
    (methods.BasicPublish.decode, methods.BasicPublish(b"exchange", b"key", 1).encode()),
    (methods.BasicDeliver.decode, methods.BasicDeliver(b"tag", 7, True, b"exchange", b"key").encode()),
    (
        methods.BasicConsume.decode,
        methods.BasicConsume(b"queue", b"tag", arguments=b"\x01aS\x00\x00\x00\x01b").encode(),
    ),
    (methods.QueueDeclare.decode, methods.QueueDeclare(b"queue", arguments=b"\x01aS\x00\x00\x00\x01b").encode()),
    (
        methods.QueueBind.decode,
        methods.QueueBind(b"queue", b"exchange", b"key", arguments=b"\x01aS\x00\x00\x00\x01b").encode(),
    ),
    (methods.ExchangeDeclare.decode, methods.ExchangeDeclare(b"exchange", b"topic").encode()),
    (
        handshake.advertise,
        methods.ConnectionStart(
            version_major=0,
            version_minor=9,
            server_properties=tables.entry(b"capabilities", b"F", tables.entry(b"a", b"t", b"\x01")),
            mechanisms=b"PLAIN",
            locales=b"en_US",
        ).encode(),
    ),
    (
        lambda data: properties.set_header(data, b"k", b"v"),
        properties.build({Property.USER_ID: b"guest", Property.PRIORITY: b"\x01"}, {b"CC": b"v", b"k": b"w"}),
    ),
    (properties.checked, properties.build({Property.EXPIRATION: b"1"}, {b"CC": b"v"})),
]


@pytest.mark.parametrize(("reader", "valid"), VALID)
@given(seed=st.integers(0, 1 << 32), strokes=st.integers(1, 4))
def test_changed_bytes_raise_nothing_but_a_syntax_error(
    reader: Callable[[bytes], object], valid: bytes, seed: int, strokes: int
) -> None:
    dice = random.Random(seed)
    data = bytearray(valid)
    for _ in range(strokes):
        data[dice.randrange(len(data))] = dice.randrange(256)
    with suppress(WireError):
        reader(bytes(data))


@given(
    st.one_of(
        octets,
        st.sampled_from(sorted(pika_methods.METHODS)).flatmap(
            lambda method: octets.map(lambda rest: method.to_bytes(4, "big") + rest)
        ),
    ).filter(lambda data: len(data) >= 4)
)
def test_any_dtx_method_is_read_or_is_a_channel_exception(data: bytes) -> None:
    with nothing_but(ReplyCode.SYNTAX_ERROR, ReplyCode.COMMAND_INVALID, ReplyCode.NOT_IMPLEMENTED):
        call = decode_call(data)
        assert decode_call(call.encode()) == call


dtx_calls: st.SearchStrategy[methods.DtxCall] = st.one_of(
    st.just(methods.DtxSelect()),
    st.builds(methods.DtxStart, xid=xids, join=flags, resume=flags),
    st.builds(methods.DtxEnd, xid=xids, fail=flags, suspend=flags),
    st.builds(methods.DtxCommit, xid=xids, one_phase=flags),
    st.builds(methods.DtxForget, xid=xids),
    st.builds(methods.DtxGetTimeout, xid=xids),
    st.builds(methods.DtxPrepare, xid=xids),
    st.builds(methods.DtxRecover, startscan=flags, endscan=flags),
    st.builds(methods.DtxRollback, xid=xids),
    st.builds(methods.DtxSetTimeout, xid=xids, timeout=st.integers(0, 0xFFFFFFFF)),
)


@given(dtx_calls, st.integers(0, 0xFFFF), channels)
def test_client_and_server_agree_about_every_call(call: methods.DtxCall, ticket: int, channel: int) -> None:
    framed = method_frame(channel, with_ticket(call, ticket))
    consumed, decoded = frame.decode_frame(framed)
    assert consumed == len(framed)
    assert decoded.marshal() == framed
    assert decode_call(framed[7:-1]) == call


@pytest.mark.parametrize(
    "method", [*pika_methods.METHODS.values(), *preview.METHODS.values()], ids=lambda method: method.NAME
)
@given(data=octets)
def test_pika_methods_read_anything_or_raise_a_syntax_error(method: type[Any], data: bytes) -> None:
    with nothing_but(HardCode.SYNTAX_ERROR):
        decoded = method().decode(data)
        assert method().decode(b"".join(decoded.encode())) == decoded


@given(channels, octets, st.integers(0, 2**64 - 1), flags, names, names, octets, octets, st.sampled_from([0, 4096]))
def test_client_and_server_agree_about_every_delivery(
    channel: int,
    consumer_tag: bytes,
    delivery_tag: int,
    redelivered: bool,
    exchange: bytes,
    key: bytes,
    raw: bytes,
    body: bytes,
    frame_max: int,
) -> None:
    method = methods.BasicDeliver(consumer_tag, delivery_tag, redelivered, exchange, key)
    assert packer(methods.BasicDeliver)(channel, consumer_tag, delivery_tag, redelivered, exchange, key) == (
        method.frame(channel)
    )
    assert content.message(method.frame(channel), channel, b"\x00\x00" + raw, body, frame_max) == b"".join(
        (
            method.frame(channel),
            header_frame(channel, methods.BasicDeliver.KEY >> 16, len(body), b"\x00\x00" + raw),
            *body_frames(channel, body, frame_max),
        )
    )


@given(st.lists(xids, max_size=200), st.sampled_from([4096, 8192, 0]), st.integers(0, 50))
def test_a_scan_in_batches_gives_every_xid_once(snapshot: list[Xid], frame_max: int, first: int) -> None:
    position, found = min(first, len(snapshot)), []
    while position < len(snapshot):
        count = split_recover(snapshot, frame_max, position)
        framed = recover_ok(1, snapshot[position : position + count])
        assert count > 0
        assert len(framed) <= (frame_max or len(framed))
        found += frame.decode_frame(framed)[1].method.decoded()
        position += count
    assert found == snapshot[first:]


@given(xids)
def test_an_xid_survives_the_wire_and_its_form_for_people(xid: Xid) -> None:
    assert Xid.from_wire(xid.to_wire()) == xid == Xid.parse(str(xid))


@given(st.binary(max_size=MAX_WIRE + 3))
@example(bytes(MAX_WIRE))
def test_any_bytes_are_an_xid_or_a_syntax_error(data: bytes) -> None:
    with nothing_but(ReplyCode.SYNTAX_ERROR):
        xid = Xid.from_wire(data)
        assert xid.to_wire() == data


@given(st.text(max_size=40))
def test_any_text_is_an_xid_or_a_syntax_error(text: str) -> None:
    with nothing_but(ReplyCode.SYNTAX_ERROR):
        Xid.parse(text)


scalars = st.one_of(
    *(
        st.binary(min_size=size, max_size=size).map(lambda value, kind=kind: (kind, value))  # type: ignore[misc]
        for kinds, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
        for kind in (letter.encode() for letter in kinds)
    ),
    octets.map(lambda value: (b"S", value)),
    octets.map(lambda value: (b"x", value)),
)


def _nest(inner: st.SearchStrategy[tuple[bytes, bytes]]) -> st.SearchStrategy[tuple[bytes, bytes]]:
    return st.one_of(
        st.lists(inner, max_size=3).map(
            lambda values: (b"A", b"".join(tables.entry(b"", *value)[1:] for value in values))
        ),
        st.lists(st.tuples(names, inner), max_size=3).map(
            lambda pairs: (b"F", b"".join(tables.entry(key, *value) for key, value in pairs))
        ),
    )


values = st.recursive(scalars, _nest, max_leaves=8)
header_tables = st.lists(st.tuples(st.one_of(names, st.sampled_from([b"CC", b"BCC", b"x-dtx-cc"])), values), max_size=6)


def _property(which: Property) -> st.SearchStrategy[bytes]:
    size = {Property.DELIVERY_MODE: 1, Property.PRIORITY: 1, Property.TIMESTAMP: 8}.get(which)
    return st.binary(max_size=20) if size is None else st.binary(min_size=size, max_size=size)


others = st.fixed_dictionaries(
    {}, optional={which: _property(which) for which in Property if which is not Property.HEADERS}
)


@given(header_tables)
def test_a_table_gives_back_each_entry_as_it_was(table: list[tuple[bytes, tuple[bytes, bytes]]]) -> None:
    raw = b"".join(tables.entry(key, *value) for key, value in table)
    found = tables.entries(raw)
    assert [(entry.key, (entry.kind, entry.value)) for entry in found] == table
    assert b"".join(entry.raw for entry in found) == raw


@given(others, header_tables, names, octets)
def test_setting_a_header_keeps_every_other_byte(
    basic: dict[Property, bytes], table: list[tuple[bytes, tuple[bytes, bytes]]], key: bytes, value: bytes
) -> None:
    raw = properties.build(basic)
    if table:
        raw = properties.put(raw, Property.HEADERS, b"".join(tables.entry(name, *rest) for name, rest in table))
    changed = properties.read(properties.set_header(raw, key, value))
    entry = changed.header(key)
    assert entry is not None
    assert (entry.kind, entry.value) == (b"S", value)
    assert [entry for entry in changed.headers if entry.key != key] == [
        entry for entry in properties.read(raw).headers if entry.key != key
    ]
    for which in Property:
        if which is not Property.HEADERS:
            assert changed.value(which) == basic.get(which)


@given(others, header_tables)
def test_renaming_there_and_back_keeps_every_byte(
    basic: dict[Property, bytes], table: list[tuple[bytes, tuple[bytes, bytes]]]
) -> None:
    there = {b"CC": b"x-dtx-cc", b"BCC": b"x-dtx-bcc"}
    back = {new: old for old, new in there.items()}
    kept = [(key, rest) for key, rest in table if key not in back]
    raw = properties.put(
        properties.build(basic), Property.HEADERS, b"".join(tables.entry(key, *rest) for key, rest in kept)
    )
    assert properties.rename_headers(properties.rename_headers(raw, there), back) == raw


@given(octets, octets)
def test_a_plain_response_gives_its_user(user: bytes, password: bytes) -> None:
    name = handshake.user_name(b"PLAIN", handshake.plain(user, password))
    if b"\x00" in user or b"\x00" in password:
        assert name is None
    else:
        assert name is None or name.encode() == user


@given(st.sampled_from([b"PLAIN", b"AMQPLAIN", b"EXTERNAL"]), octets)
def test_a_response_that_is_anything_raises_nothing(mechanism: bytes, response: bytes) -> None:
    assert handshake.user_name(mechanism, response) != ""


@given(st.text(max_size=400))
def test_any_text_fits_a_reply(text: str) -> None:
    cut_text = reply_text(text)
    assert len(cut_text) <= 255
    cut_text.decode("utf-8")
