"""The cost of the frame splitter and of methods in nanoseconds, compared with pika's frame decoder.

It also measures the AMQP 1.0 engine in messages per second, compared with Proton's if that is installed.

Run: python benchmarks/wire.py
"""

import importlib.util
import time
import timeit
from collections.abc import Callable

from pika import frame

from benchmarks.support import amqp10
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.frames import FrameSplitter, header_frame
from dtx.wire.amqp09.methods import DtxStart, DtxStartOk, decode_call
from dtx.wire.amqp09.recovery import recover_ok
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.raw import body_frames

FRAME_MAX = 131_072
MESSAGES = 1000
PROPERTIES = properties.build(
    {properties.Property.CONTENT_TYPE: b"text/plain", properties.Property.DELIVERY_MODE: b"\x02"},
    {b"CC": b"other", b"trace": b"0123456789"},
)
XID = Xid(1, bytes(32), bytes(16))


def best(run: Callable[[], object], number: int) -> float:
    """Return the seconds of one call, the best of five rounds of *number* calls."""
    return min(timeit.repeat(run, number=number, repeat=5)) / number


def message(size: int) -> bytes:
    """Return the frames of one publish."""
    body = bytes(size)
    publish = methods.BasicPublish(b"exchange", b"routing.key").frame(1)
    return publish + header_frame(1, 60, size, PROPERTIES) + b"".join(body_frames(1, body, FRAME_MAX))


def split(chunks: list[bytes]) -> int:
    """Return the number of frames in *chunks*."""
    splitter = FrameSplitter(FRAME_MAX)
    return sum(len(splitter.feed(chunk)[1]) for chunk in chunks)


def decode_with_pika(stream: bytes) -> int:
    """Return the number of frames that pika finds in *stream*."""
    count = 0
    while stream:
        consumed, _ = frame.decode_frame(stream)
        stream = stream[consumed:]
        count += 1
    return count


def messages_a_second(make: Callable[[], amqp10.Ours | amqp10.Theirs], size: int) -> float:
    """Return the AMQP 1.0 messages that an engine decodes and settles in a second of processor time, best of five."""
    streams = [amqp10.messages(number * MESSAGES, MESSAGES, size) for number in range(5)]
    engine = make()
    rates = []
    for stream in streams:
        began = time.process_time()
        assert engine.take(stream) == MESSAGES
        rates.append(MESSAGES / (time.process_time() - began))
    return max(rates)


def main() -> None:
    print(f"{'body':>8} {'read':>8} {'ns/frame':>9} {'GB/s':>6}   splitter")
    for size in (0, 1024, 65_536, 1_048_576):
        stream = message(size) * max(1, MESSAGES * 1024 // (size + 1024))
        for read in (4096, 65_536, 262_144):
            chunks = [stream[start : start + read] for start in range(0, len(stream), read)]
            seconds = best(lambda chunks=chunks: split(chunks), 3)  # type: ignore[misc]
            print(f"{size:8} {read:8} {seconds / split(chunks) * 1e9:9.0f} {len(stream) / seconds / 1e9:6.2f}")
    small = message(1024)
    print(f"{'pika, one message of 1 KB':>34}: {best(lambda: decode_with_pika(small), 2000) / 3 * 1e9:.0f} ns/frame")

    call = DtxStart(xid=XID).encode()
    start_ok = packer(DtxStartOk)
    publish = methods.BasicPublish(b"exchange", b"routing.key").encode()
    deliver = methods.BasicDeliver(b"ctag1.0123456789", 7, False, b"exchange", b"routing.key").encode()
    parts: dict[str, Callable[[], object]] = {
        "read a start": lambda: decode_call(call),
        "answer start-ok": lambda: start_ok(1, XaFlag.OK),
        "answer recover-ok, 100 xids": lambda: recover_ok(1, [XID] * 100),
        "read a publish": lambda: methods.BasicPublish.decode(publish),
        "write a publish": lambda: methods.BasicPublish(b"exchange", b"routing.key").encode(),
        "read a deliver": lambda: methods.BasicDeliver.decode(deliver),
        "write an ack": lambda: methods.BasicAck(7).encode(),
        "find the properties": lambda: properties.read(PROPERTIES),
        "what a broker checks": lambda: properties.checked(PROPERTIES),
        "set a header": lambda: properties.set_header(PROPERTIES, b"x-dtx-id", b"0123456789abcdef"),
    }
    for name, run in parts.items():
        print(f"{name:>34}: {best(run, 5000) * 1e9:.0f} ns")

    engines: dict[str, Callable[[], amqp10.Ours | amqp10.Theirs]] = {"dtx": amqp10.Ours}
    if importlib.util.find_spec("proton"):
        engines["proton"] = amqp10.Theirs
    for size in (0, 1024, 16_384):
        rates = ", ".join(f"{name} {messages_a_second(make, size):,.0f}" for name, make in engines.items())
        print(f"{f'AMQP 1.0, body of {size}':>34}: {rates} frames/s")


if __name__ == "__main__":
    main()
