"""Inputs that coverage-guided fuzzing found: only documented errors are raised, and memory is bounded."""

import tracemalloc
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from dtx.wire.amqp09 import methods, properties, tables
from dtx.wire.amqp09.frames import FrameSplitter, method_frame
from dtx.wire.amqp09.properties import Property
from tests.evidence.fuzz import amqp10, server
from tests.evidence.fuzz.corpus import DIRECTORY, MOST, stored
from tests.evidence.fuzz.targets import SPARE, TARGETS, Target
from tests.support.raw import body_frames


@pytest.fixture(autouse=True, scope="module")
def _strict() -> Iterator[None]:
    before = structlog.get_config()
    server.be_strict()
    yield
    structlog.configure(**before)


def peak(run: Callable[[], object]) -> int:
    """The peak memory of *run* in bytes."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_memory(target: Target, data: bytes) -> None:
    """The memory for an input is bounded by its size."""
    target.run(data)  # caches are filled before the measurement
    assert peak(lambda: target.run(data)) <= SPARE + target.cost * len(data)


@pytest.mark.parametrize("name", TARGETS)
def test_every_stored_input_raises_nothing_and_keeps_its_limits(name: str) -> None:
    inputs = stored(name)
    assert 0 < len(inputs) <= MOST
    for path in inputs:
        try:
            check_memory(TARGETS[name], path.read_bytes())
        except BaseException as error:
            error.add_note(f"input {path}")
            raise


def test_the_corpus_is_small() -> None:
    """It is part of every checkout, so it keeps only distinct inputs that add coverage."""
    sizes = [path.stat().st_size for path in DIRECTORY.rglob("*") if path.is_file()]
    assert sum(sizes) <= 300_000
    assert {path.name for path in DIRECTORY.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.frames])
@given(data=st.binary(max_size=600))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


_LONGEST = 32 << 10
LONG: dict[str, tuple[str, bytes]] = {
    "entries without name or value": ("table", b"\x00V" * (_LONGEST // 2)),
    "as many entries as may be": ("table", b"\x00t\x01" * (tables.MAX_ENTRIES // 2)),
    "values of nothing in an array": ("table", tables.entry(b"", b"A", b"V" * (_LONGEST // 4))),
    "a table in a table": (
        "table",
        reduce(lambda inner, _: tables.entry(b"k", b"F", inner), range(40), b"\x00V" * 2000),
    ),
    "heartbeats": ("splitter", b"\x02\x07" + bytes.fromhex("08 0000 00000000 ce") * (_LONGEST // 8)),
    "empty methods": ("splitter", b"\x02\x07" + method_frame(1, b"\x00\x0a\x00\x0a") * (_LONGEST // 12)),
    "a body octet by octet": ("splitter", b"\x02\x07" + body_frames(1, bytes(_LONGEST - 9), 0)[0]),
    "headers": ("properties", properties.put(b"\x00\x00", Property.HEADERS, b"\x01aV" * (_LONGEST // 4))),
    "arguments": ("arguments", b"\x80" + b"\x01aV" * (_LONGEST // 4)),
    "a response of nothing": ("sasl", bytes(_LONGEST)),
    "xids of nothing": ("method", bytes((35,)) + b"\x00" * _LONGEST),
    **{what: ("amqp10-value", octets) for what, octets in amqp10.LONG_VALUES.items()},
    **{what: ("amqp10-peer", octets) for what, octets in amqp10.LONG_TALK.items()},
}


@pytest.mark.parametrize("case", LONG)
def test_the_worst_frame_costs_a_multiple_of_its_size(case: str) -> None:
    name, data = LONG[case]
    check_memory(TARGETS[name], data)


@given(st.integers(1, 64), st.integers(1, 4096))
@example(1, 4096)
def test_a_frame_in_pieces_is_held_once(size: int, count: int) -> None:
    """A client that sends byte by byte makes dtx keep the bytes, not an object for each."""
    data = body_frames(1, bytes(65_536), 0)[0][: size * count]

    def feed() -> None:
        splitter = FrameSplitter(131_072)
        for start in range(0, len(data), size):
            splitter.feed(data[start : start + size])

    assert peak(feed) <= 3 * len(data) + 16_384


CROWDED: dict[str, list[bytes]] = {
    "channels": [methods.ChannelOpen().frame(number) for number in range(3, 101)],
    "consumers": [
        methods.QueueDeclare(b"q").frame(1),
        *(methods.BasicConsume(b"q", b"%d" % number).frame(1) for number in range(900)),
    ],
    "bindings": [
        methods.QueueDeclare(b"q").frame(1),
        *(methods.QueueBind(b"q", b"amq.topic", b"%d.*.#" % number).frame(1) for number in range(600)),
    ],
    "the longest patterns": [
        methods.QueueDeclare(b"q").frame(1),
        *(methods.QueueBind(b"q", b"amq.topic", b"%d" % n + b"." * 250).frame(1) for n in range(100)),
    ],
    "questions": [
        methods.QueueDeclare(b"q").frame(1),
        *[methods.BasicGet(b"q").frame(1)] * 1000,
    ],
}


@pytest.mark.parametrize("what", CROWDED)
def test_state_of_a_client_costs_a_multiple_of_its_bytes(what: str) -> None:
    check_memory(TARGETS["conversation"], b"\x00" + b"".join(CROWDED[what]))
