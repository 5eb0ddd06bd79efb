"""Conversations of clients that use all features without waiting for answers, and their mutations by frame."""

import random
import struct
from collections.abc import Callable, Sequence

from dtx.client import pika_methods
from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxSelect,
    DtxSetTimeout,
    DtxStart,
)
from dtx.xa.xid import Xid
from tests.support.raw import body_frames, message

Mutation = Callable[[random.Random, list[bytes]], list[bytes]]


def any_xid(rng: random.Random) -> Xid:
    """Return an xid that is unique, and the same for the same seed."""
    return Xid(1, rng.randbytes(16), rng.randbytes(4))


def conversation(rng: random.Random, queue: bytes) -> list[bytes]:
    """Return frames of a client that uses all features, on channels 1 and 2, without waiting for answers.

    basic.cancel is missing: RabbitMQ 3.10 loses the channel if it directly follows basic.consume.
    """
    xid, other = any_xid(rng), any_xid(rng)
    raw = properties.build({properties.Property.USER_ID: b"guest"})
    rich = (
        methods.BasicPublish(b"", queue, 1).frame(2)
        + header_frame(2, 60, 5, raw)
        + b"".join(body_frames(2, b"12345", 4096))
    )
    plain = [
        methods.QueueDeclare(b"", exclusive=True).frame(1),
        methods.BasicQos(0, rng.randrange(50)).frame(1),
        message(1, queue, rng.randbytes(rng.choice((0, 1, 5000)))),
        methods.QueueBind(b"", b"amq.fanout", b"").frame(1),
        message(1, b"", b"to itself", exchange=b"amq.fanout"),
        methods.BasicGet(b"").frame(1),
        methods.BasicAck(1).frame(1),
        message(1, b"", b"to itself", exchange=b"amq.fanout"),
        methods.BasicConsume(b"", b"tag-1").frame(1),
    ]
    work = [
        DtxSelect().frame(2),
        *[message(2, queue, b"%d" % number) for number in range(5)],
        methods.BasicGet(queue).frame(2),
        methods.BasicConsume(queue, b"tag-2").frame(2),
        message(2, queue, b"outside"),
        DtxStart(xid=xid).frame(2),
        rich,
        methods.BasicAck(1).frame(2),
        message(2, queue, rng.randbytes(9000), frame_max=4096),
        DtxEnd(xid=xid).frame(2),
        DtxGetTimeout(xid=xid).frame(2),
        DtxSetTimeout(xid=xid, timeout=30).frame(2),
        DtxRollback(xid=xid).frame(2),
        DtxStart(xid=other).frame(2),
        methods.BasicReject(2).frame(2),
        methods.BasicAck(0, multiple=True).frame(2),
        DtxEnd(xid=other, suspend=True).frame(2),
        DtxEnd(xid=other).frame(2),
        *coordination(rng, other),
        method_frame(2, methods.BasicRecover.HEAD + b"\x01"),
    ]
    frames = [frame for pair in zip(plain, work, strict=False) for frame in pair] + work[len(plain) :]
    return [*frames, methods.ChannelClose(200, b"").frame(rng.choice((1, 2)))]


def broker_of_its_own(rng: random.Random, queue: bytes) -> list[bytes]:
    """Return frames of a client that uses features which dtx implements only without a broker."""
    exchange = b"fuzzed-" + rng.randbytes(4).hex().encode()
    limits = tables.entry(b"x-max-length", b"l", (3).to_bytes(8, "big"))
    limits += tables.entry(b"x-dead-letter-exchange", b"S", exchange)
    limits += tables.entry(b"x-max-priority", b"b", b"\x05") + tables.entry(b"x-message-ttl", b"s", b"\x03\xe8")
    nested = tables.entry(b"deep", b"F", tables.entry(b"list", b"A", b"t\x01S" + tables.put_long(b"x")))
    headers = tables.entry(b"CC", b"A", b"S" + tables.put_long(b"one") + b"S" + tables.put_long(b"two")) + nested
    rich = properties.build(
        {properties.Property.PRIORITY: b"\x07", properties.Property.EXPIRATION: b"50"},
    )
    rich = properties.put(rich, properties.Property.HEADERS, headers)
    asking = properties.build({properties.Property.REPLY_TO: b"amq.rabbitmq.reply-to"})

    def method(key: int, arguments: bytes) -> bytes:
        return key.to_bytes(4, "big") + b"\x00\x00" + arguments

    def publish(channel: int, exchange: bytes, key: bytes, raw: bytes, flags: int = 0) -> bytes:
        parts = (methods.BasicPublish(exchange, key, flags).frame(channel), header_frame(channel, 60, 5, raw))
        return b"".join((*parts, *body_frames(channel, b"12345", 4096)))

    kind = rng.choice((b"direct", b"fanout", b"topic", b"headers"))
    name = tables.put_short(exchange)
    first = [
        methods.ConfirmSelect().encode(),
        methods.BasicConsume(b"amq.rabbitmq.reply-to", b"replies", no_ack=True).encode(),
        method(methods.AccessRequest.KEY, tables.put_short(b"/data") + b"\x1f")[:4]
        + tables.put_short(b"/data")
        + b"\x1f",
        method(methods.ExchangeDeclare.KEY, name + tables.put_short(kind) + b"\x04" + tables.put_long(b"")),
        methods.QueueDeclare(b"", exclusive=True, arguments=limits).encode(),
        methods.QueueBind(b"", exchange, b"one.*", arguments=nested).encode(),
        method(
            methods.ExchangeBind.KEY, tables.put_short(b"amq.fanout") + name + tables.put_short(b"k") + b"\x00\0\0\0\0"
        ),
        method(methods.ExchangeBind.KEY, name),  # exchange.query of the preview
        method(
            methods.BindingQuery.KEY,
            name + tables.put_short(b"") + tables.put_short(b"one.*") + tables.put_long(nested),
        ),
        methods.ExecutionFlush().encode(),
        methods.BasicGet(b"").encode(),
        methods.QueuePurge(b"").encode(),
        methods.QueueDelete(b"", if_unused=True).encode(),
    ]
    publishes = [
        publish(1, exchange, b"one.two", rich, rng.randrange(2)),
        publish(1, b"", b"nowhere", asking, 1),
        publish(2, exchange, b"one.three", rich),
        publish(2, b"", queue, b"\x00\x00"),
    ]
    second = [
        methods.TxSelect().encode(),
        methods.BasicGet(queue).encode(),
        methods.BasicNack(1, multiple=True, requeue=rng.random() < 0.5).encode(),
        rng.choice((methods.TxCommit().encode(), methods.TxRollback().encode())),
        methods.ChannelFlow.HEAD + b"\x00",
        methods.QueueDeclare(queue, passive=True).encode(),
        methods.TxCommit().encode(),
    ]
    frames = [method_frame(1, payload) for payload in first]
    others = [*publishes, *(method_frame(2, payload) for payload in second), *publishes]
    places = sorted((rng.randrange(4, len(frames) + 1) for _ in others), reverse=True)
    for place, frame in zip(places, reversed(others), strict=True):  # the frames of each channel keep their order
        frames.insert(place, frame)
    return frames


def coordination(rng: random.Random, xid: Xid) -> Sequence[bytes]:
    """Return frames that end a branch, always by rollback: the queue must not change."""
    calls: list[DtxCall] = [
        DtxPrepare(xid=xid),
        DtxRecover(startscan=True, endscan=rng.random() < 0.5),
        DtxForget(xid=xid),
        DtxRollback(xid=xid),
    ]
    return [call.frame(rng.choice((1, 2))) for call in calls]


def flip(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    data = bytearray(b"".join(frames))
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    return [bytes(data)]


def flip_arguments(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Change arguments within a frame."""
    position = rng.randrange(len(frames))
    frame = bytearray(frames[position])
    for _ in range(rng.choice((1, 3)) if len(frame) > 8 else 0):
        frame[rng.randrange(7, len(frame) - 1)] = rng.randrange(256)
    return [*frames[:position], bytes(frame), *frames[position + 1 :]]


def cut_arguments(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Shorten the arguments of a frame; the frame stays complete."""
    position = rng.randrange(len(frames))
    kind, channel, size = struct.unpack_from(">BHI", frames[position])
    payload = frames[position][7 : 7 + rng.randrange(size + 1)]
    short = struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"
    return [*frames[:position], short, *frames[position + 1 :]]


def drop(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    return [frame for frame in frames if rng.random() > 0.2]


def repeat(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    return [frame for frame in frames for _ in range(rng.choice((1, 1, 1, 2, 3)))]


def shuffle(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    return rng.sample(frames, len(frames))


def truncate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    data = b"".join(frames)
    return [data[: rng.randrange(len(data))]]


def change_channel(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    position = rng.randrange(len(frames))
    frame = frames[position]
    other = struct.pack(">H", rng.choice((0, 1, 2, 3, 2047, 2046, 2045, 2048, 65535)))
    return [*frames[:position], frame[:1] + other + frame[3:], *frames[position + 1 :]]


def insert_call(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Insert a method of one of the dtx classes with random arguments."""
    key = rng.choice(
        (*sorted(pika_methods.METHODS), 101 << 16 | rng.randrange(65536), 105 << 16 | rng.randrange(65536))
    )
    call = method_frame(rng.choice((1, 2)), key.to_bytes(4, "big") + rng.randbytes(rng.randrange(40)))
    position = rng.randrange(len(frames))
    return [*frames[:position], call, *frames[position:]]


MUTATIONS: Sequence[Mutation] = (
    flip, flip_arguments, cut_arguments, drop, repeat, shuffle, truncate, change_channel, insert_call,
    lambda _, frames: frames,
)  # fmt: skip
