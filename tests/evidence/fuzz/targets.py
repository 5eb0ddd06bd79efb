"""The fuzz targets: each takes any bytes, and raises only if dtx is wrong.

The first bytes of an input may be a choice (a limit, a reader); the rest is the input of the peer. Documented errors
are expected; every other exception is a finding. Properties of the results are checked as well: encoding gives the
input again, two readers agree, no byte is lost.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from dtx.client import pika_methods
from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres import matchers
from dtx.store.postgres.arguments import QueueArguments, check_equivalent, queue_arguments
from dtx.wire.amqp09 import content, handshake, methods, properties, recovery, tables
from dtx.wire.amqp09.closes import connection_close, describe
from dtx.wire.amqp09.codec import Fact
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError
from dtx.wire.amqp09.frames import Frame, FrameSplitter
from dtx.wire.amqp09.methods import decode_call
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import Entry
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import Xid
from tests.evidence.fuzz import amqp10, server, server10
from tests.support import preview

FRAME_MAXES: Final = (4096, 8192, 131_072, 0)
_MALFORMED: Final = (HardCode.SYNTAX_ERROR, HardCode.NOT_IMPLEMENTED)


class Target(NamedTuple):
    """One entry point.

    Args:
        run: takes any bytes.
        most: limit of the bytes of one input.
        cost: limit of the memory for each byte of input, in bytes, beyond :data:`SPARE`.
        frames: the input consists of frames, and is mutated by frame.
    """

    run: Callable[[bytes], None]
    most: int = 4096
    cost: int = 200
    frames: bool = False


SPARE: Final = 128 << 10
"""Bytes of memory that any input may take: caches of results, and objects of the test itself."""


@contextmanager
def nothing_but(*codes: HardCode | ReplyCode) -> Iterator[None]:
    """Let errors with these codes end the block, and check that they can be sent to a peer."""
    try:
        yield
    except (WireError, XaError) as error:
        if error.code not in codes:
            raise
        reason = error.reason if isinstance(error, XaError) else str(error)
        connection_close(error.code, describe(error.code, reason))


def _octet(data: bytes) -> tuple[int, bytes]:
    return (data[0], data[1:]) if data else (0, b"")


def _split(data: bytes, frame_max: int, places: list[int]) -> tuple[list[tuple[Frame, bytes]], str, int]:
    """Return frames, the error, and the number of pending bytes after feeding *data* cut at *places*."""
    splitter = FrameSplitter(frame_max)
    found: list[tuple[Frame, bytes]] = []
    position = 0

    def keep(buffer: bytes, frames: list[Frame]) -> None:
        found.extend(((key, channel, 0, end - start), buffer[start:end]) for key, channel, start, end in frames)

    for place in [*places, len(data)]:
        try:
            keep(*splitter.feed(data[position:place]))
        except FrameError as error:
            keep(error.buffer, error.frames)
            return found, str(error), 0
        position = place
        assert not frame_max or splitter.pending < frame_max + 8, splitter.pending
    return found, "", splitter.pending


def splitter(data: bytes) -> None:
    """A stream gives the same frames and the same error however it is cut."""
    chosen, data = _octet(data)
    seed, data = _octet(data)
    dice = random.Random(seed)
    frame_max = FRAME_MAXES[chosen % len(FRAME_MAXES)]
    whole = _split(data, frame_max, [])
    places = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randrange(12)))
    assert _split(data, frame_max, places) == whole
    assert b"".join(octets for _, octets in whole[0]) == data[: sum(len(octets) for _, octets in whole[0])]


def _walk(entries: list[Entry], depth: int = 0) -> int:
    """Return the number of values in a table."""
    assert depth <= tables.MAX_DEPTH
    count = len(entries)
    for entry in entries:
        if entry.kind == b"F":
            count += _walk(tables.entries(entry.value), depth + 1)
        elif entry.kind == b"A":
            count += _walk(tables.items(entry.value), depth + 1)
    return count


def table(data: bytes) -> None:
    """A table is decoded completely, including nested tables and arrays."""
    with nothing_but(*_MALFORMED):
        found = tables.entries(data)
        assert b"".join(entry.raw for entry in found) == data
        assert b"".join(tables.entry(entry.key, entry.kind, entry.value) for entry in found) == data
        assert _walk(found) <= len(data)
    with nothing_but(*_MALFORMED):
        assert b"".join(item.raw for item in tables.items(data)) == data


def xid(data: bytes) -> None:
    """Bytes are one xid or an error, and so is text."""
    with nothing_but(ReplyCode.SYNTAX_ERROR):
        read = Xid.from_wire(data)
        assert read.to_wire() == data
        assert Xid.parse(str(read)) == read
    with nothing_but(ReplyCode.SYNTAX_ERROR):
        parsed = Xid.parse(data.decode("utf-8", "replace"))
        assert Xid.parse(str(parsed)) == parsed == Xid.from_wire(parsed.to_wire())


_CALLS: Final = sorted(pika_methods.METHODS)


def call(data: bytes) -> None:
    """Methods of the dtx classes are decoded by the server's and the client's reader."""
    chosen, rest = _octet(data)
    payload = _CALLS[chosen % len(_CALLS)].to_bytes(4, "big") + rest if chosen else rest.ljust(4, b"\x00")
    with nothing_but(ReplyCode.SYNTAX_ERROR, ReplyCode.COMMAND_INVALID, ReplyCode.NOT_IMPLEMENTED):
        read = decode_call(payload)
        assert decode_call(read.encode()) == read
    method = pika_methods.METHODS.get(int.from_bytes(payload[:4], "big"))
    if method is not None:
        with nothing_but(*_MALFORMED):
            decoded = method().decode(payload[4:])
            assert method().decode(b"".join(decoded.encode())) == decoded


READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    content.header,
    *(row.decode for row in methods.METHODS.values() if not row.FACTS & Fact.SOFT),
    methods.ExchangeQuery.decode,
    methods.ExchangeQueryOk.decode,
    methods.is_query,
    methods.ticket,
    handshake.advertise,
    recovery.split_xids,
    recovery.read_xids,
    *(lambda data, made=made: made().decode(data) for made in preview.METHODS.values()),
)


def method(data: bytes) -> None:
    """All methods that dtx reads, from clients and from brokers; the first byte chooses one."""
    chosen, payload = _octet(data)
    with nothing_but(*_MALFORMED):
        READERS[chosen % len(READERS)](payload.ljust(4, b"\x00"))


def sasl(data: bytes) -> None:
    """start-ok: both readers find the same user, and no password is in a representation."""
    with nothing_but(*_MALFORMED):
        said = methods.ConnectionStartOk.decode(data.ljust(4, b"\x00"))
        with nothing_but(*_MALFORMED):
            handshake.capabilities(said.client_properties)
        for mechanism in (said.mechanism, *handshake.PASSED):
            _respond(mechanism, said.response)
    for mechanism in handshake.PASSED:
        _respond(mechanism, data)


def _respond(mechanism: bytes, response: bytes) -> None:
    name = handshake.user_name(mechanism, response)
    found = None
    try:
        found = handshake.credentials(mechanism, response)
    except handshake.NotOffered:
        assert mechanism not in handshake.PASSED
    if name is not None:  # both modes find the same user
        assert found is not None
        assert found.user == name.encode()
    assert found is None or "password" not in repr(found)


_RENAMED: Final = {b"CC": b"x-dtx-cc", b"BCC": b"x-dtx-bcc"}


def basic_properties(data: bytes) -> None:
    """A change of properties affects only the changed ones."""
    with nothing_but(*_MALFORMED):
        view = properties.read(data)
        for which in Property:
            found = view.value(which)
            if found is not None:
                assert properties.put(properties.without(data, which), which, found) == data
        properties.checked(data)
        headers = view.headers
        changed = properties.read(properties.set_header(data, b"k", b"v"))
        assert [entry for entry in changed.headers if entry.key != b"k"] == [e for e in headers if e.key != b"k"]
        assert properties.has_header(changed.raw, b"k")
        assert not properties.has_header(properties.remove_headers(changed.raw, [b"k"]), b"k")
        properties.rename_headers(data, _RENAMED)


def arguments(data: bytes) -> None:
    """Arguments of queues and bindings, and headers that are matched with them."""
    chosen, data = _octet(data)
    cut = chosen * len(data) // 256
    first, second = data[:cut], data[cut:]
    refused = (*_MALFORMED, ReplyCode.PRECONDITION_FAILED, ReplyCode.NOT_IMPLEMENTED)
    with nothing_but(*refused):
        assert isinstance(queue_arguments(data, "queue 'q' in vhost '/'"), QueueArguments)
        check_equivalent(data, data, "queue 'q' in vhost '/'")
    with nothing_but(*refused):
        check_equivalent(first, second, "queue 'q' in vhost '/'")
    with nothing_but(*refused):
        wanted = matchers._Wanted(first)
        exchange: matchers.Headers[int] = matchers.Headers()
        exchange._bound[NotImplemented] = wanted, 1
        assert list(exchange.match([], second)) in ([], [1])


def topic(data: bytes) -> None:
    """Topic patterns match as specified, and fast."""
    pattern, _, key = data.partition(b"\n")
    pattern, key = pattern[:255], key[:255]
    exchange: matchers.Topic[int] = matchers.Topic()
    row = BindingRow("/", b"x", DestinationKind.QUEUE, b"q", pattern, b"")
    exchange.add(row, 1)
    assert sum(1 for _ in exchange.match([key], b"")) == _matches(pattern, key)
    exchange.remove(row)
    assert not list(exchange.match([key], b""))


def _matches(pattern: bytes, key: bytes) -> int:
    """Match slowly but obviously: a table of the pattern's prefixes that match the key's prefixes."""
    words, key_words = (text.split(b".") if text else [] for text in (pattern, key))
    row = [True] + [False] * len(key_words)
    for word in words:
        following = [row[0] and word == b"#"]
        for position, found in enumerate(key_words):
            if word == b"#":
                following.append(row[position + 1] or following[position])
            else:
                following.append(row[position] and (word == b"*" or (word == found and found not in (b"*", b"#"))))
        row = following
    return int(row[-1])


def _reads(data: bytes) -> list[bytes]:
    """Return the input as reads; the first byte chooses them."""
    seed, data = _octet(data)
    if not seed:
        return [data]
    dice = random.Random(seed)
    places = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randrange(8)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


_loop: Final = asyncio.new_event_loop()


def conversation(data: bytes) -> None:
    """A client that has logged in and opened two channels, and a whole dtx."""
    _loop.run_until_complete(server.converse([server.TWO_CHANNELS, *_reads(data)]))


def conversation10(data: bytes) -> None:
    """An AMQP 1.0 client that has logged in, and a whole dtx."""
    _loop.run_until_complete(server10.converse([*server10.ENTER, *_reads(data)]))


def opening(data: bytes) -> None:
    """A client from its first byte after the protocol header."""
    with suppress(TimeoutError):
        _loop.run_until_complete(server.converse(_reads(data), enter=False))


TARGETS: Final = {
    "splitter": Target(splitter),
    "table": Target(table),
    "xid": Target(xid, most=400),
    "call": Target(call, most=400),
    "method": Target(method, most=1024),
    "sasl": Target(sasl, most=1024),
    "properties": Target(basic_properties),
    "arguments": Target(arguments, most=2048),
    "topic": Target(topic, most=600),
    "amqp10-value": Target(amqp10.value, most=1024),
    "amqp10-peer": Target(amqp10.peer, most=4096, cost=400),
    "amqp10-conversation": Target(conversation10, most=8192, cost=600),
    "opening": Target(opening, most=4096, frames=True),
    # a topic pattern has a node for each of its words: 250 dots take 90 KB
    "conversation": Target(conversation, most=32_768, cost=500, frames=True),
}
