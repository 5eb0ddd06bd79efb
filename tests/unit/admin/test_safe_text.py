"""Text on a terminal: data that a client chose cannot move the cursor or forge a line."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.admin.message_properties import decode_properties
from dtx.admin.safe_text import (
    _ESCAPES,
    _MOST_ESCAPES,
    human_duration,
    human_size,
    iso_time,
    json_line,
    name_text,
    preview,
    safe,
)
from dtx.cli.branches import message_value
from dtx.log.records import WorkKind, WorkRow
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.properties import Property


@given(st.binary(max_size=600), st.integers(2, 200), st.integers(0, 10))
def test_a_preview_is_always_printable_and_short(body: bytes, limit: int, more: int) -> None:
    shown = preview(body, limit, len(body) + more)
    assert shown.isprintable()
    assert len(shown) <= limit * 1.25 + 8


@given(st.binary(max_size=300))
def test_a_name_is_always_printable(name: bytes) -> None:
    assert name_text(name).isprintable()


@given(st.text())
def test_text_that_is_shown_has_no_control_characters(text: str) -> None:
    assert safe(text).isprintable()
    assert safe(text) == "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def test_many_different_characters_fill_no_memory() -> None:
    assert safe("".join(map(chr, range(0xE000, 0xE000 + 2 * _MOST_ESCAPES)))).isprintable()
    assert len(_ESCAPES) <= _MOST_ESCAPES


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", ""),
        (b"hello", "hello"),
        ("grüße, 世界".encode(), "grüße, 世界"),
        (b'{"a": 1}\n', '{"a": 1}\\n'),
        (b"\x1b[2Jgone" + b"x" * 20, "\\x1b[2Jgone" + "x" * 20),
        ("abc\u202edcba".encode() * 3, "abc\\u202edcba" * 3),
        (b"\x00\x01\x02\xff", "hex 000102ff"),
        (b"\x00" * 16, "hex " + " ".join(["00000000"] * 4)),
    ],
)
def test_a_short_body_is_shown_whole(body: bytes, expected: str) -> None:
    assert preview(body) == expected


def test_a_long_body_is_cut_with_an_ellipsis() -> None:
    assert preview(b"a" * 500, 10) == "a" * 10 + "…"
    assert preview(b"\xff" * 500, 10) == "hex ff ffffffff…"


def test_text_that_is_cut_within_a_character_is_still_text() -> None:
    body = "世".encode() * 100
    for cut in range(30, 40):
        assert preview(body[:cut], 20, len(body)).startswith("世世")


def test_the_beginning_of_a_body_is_marked_as_cut() -> None:
    assert preview(b"abc", 10, 3) == "abc"
    assert preview(b"abc", 10, 9) == "abc…"
    assert preview(b"\xff", 10, 9) == "hex ff…"


@pytest.mark.parametrize(
    ("octets", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (3 << 30, "3 GiB")],
)
def test_sizes_are_for_people(octets: int, expected: str) -> None:
    assert human_size(octets) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (0.25, "0.25s"),
        (12.4, "12s"),
        (59.6, "60s"),
        (61, "1m 1s"),
        (3600, "1h"),
        (90061, "1d 1h"),
        (86460, "1d"),
    ],
)
def test_durations_are_for_people(seconds: float, expected: str) -> None:
    assert human_duration(seconds) == expected


def test_times_are_utc() -> None:
    assert iso_time(0.5) == "1970-01-01T00:00:00.500000Z"
    assert iso_time(None) is None


def test_json_is_ascii_on_one_line() -> None:
    line = json_line({"a": "\n\u202e\x1b", "n": None})
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {"a": "\n\u202e\x1b", "n": None}


def entry(key: bytes, kind: bytes, value: bytes) -> bytes:
    return tables.entry(key, kind, value)


HEADERS = {
    b"S": (b"caf\xc3\xa9\x00", "café\\x00"),
    b"x": (b"\xff", "\\xff"),
    b"I": (b"\xff\xff\xff\xfe", -2),
    b"i": (b"\xff\xff\xff\xfe", 4294967294),
    b"l": (b"\x00" * 7 + b"\x05", 5),
    b"s": (b"\xff\xff", -1),
    b"u": (b"\xff\xff", 65535),
    b"b": (b"\xff", -1),
    b"B": (b"\xff", 255),
    b"t": (b"\x01", True),
    b"V": (b"", None),
    b"d": (b"\x3f\xf8" + b"\x00" * 6, 1.5),
    b"f": (b"\x7f\xc0\x00\x00", "nan"),
    b"D": (b"\x02\x00\x00\x00\x0f", "15e-2"),
    b"T": (b"\x00" * 8, "1970-01-01T00:00:00.000000Z"),
    b"F": (tables.entry(b"k", b"S", b"v"), {"k": "v"}),
    b"A": (b"S\x00\x00\x00\x01aI\x00\x00\x00\x01V", ["a", 1, None]),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_every_type_is_shown(kind: bytes) -> None:
    value, expected = HEADERS[kind]
    raw = properties.build({}, {})
    raw = properties.set_header(raw, b"h", value, kind)
    assert decode_properties(raw) == {"headers": {"h": expected}}


def test_a_time_beyond_the_calendar_is_shown_as_a_number() -> None:
    raw = properties.set_header(properties.build({}, {}), b"h", b"\x7f" + b"\xff" * 7, b"T")
    assert decode_properties(raw) == {"headers": {"h": 0x7FFFFFFFFFFFFFFF}}


def test_properties_are_shown_by_name() -> None:
    raw = properties.build(
        {
            Property.CONTENT_TYPE: b"text/plain",
            Property.DELIVERY_MODE: b"\x02",
            Property.USER_ID: b"al\x1bice",
            Property.TIMESTAMP: b"\x00" * 8,
        }
    )
    assert decode_properties(raw) == {
        "content_type": "text/plain",
        "delivery_mode": 2,
        "timestamp": "1970-01-01T00:00:00.000000Z",
        "user_id": "al\\x1bice",
    }


@given(st.binary(max_size=200))
def test_any_properties_are_shown_as_json_without_control_characters(raw: bytes) -> None:
    shown = json.dumps(decode_properties(raw), allow_nan=False, ensure_ascii=False)
    assert shown.isprintable()


@given(st.binary(max_size=200))
def test_any_headers_are_shown_as_json_without_control_characters(table: bytes) -> None:
    raw = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    shown = json.dumps(decode_properties(raw), allow_nan=False, ensure_ascii=False)
    assert shown.isprintable()


def test_a_message_is_shown_with_destination_and_size() -> None:
    work = WorkRow(
        position=3,
        kind=WorkKind.PUBLISH,
        exchange=b"ex\n",
        routing_key=b"k",
        flags=1,
        properties=b"\x00\x00",
        body=b"hi",
    )
    assert message_value(work, 9, 80) == {
        "position": 3, "kind": "publish", "exchange": "ex\\n", "routing_key": "k", "queue": None, "unit": None,
        "bytes": 9, "properties": {}, "preview": "hi…", "mandatory": True,
    }  # fmt: skip
    taken = WorkRow(
        position=0, kind=WorkKind.CONSUME, exchange=b"", routing_key=b"q", queue=b"q", properties=b"\x00\x00", body=b"",
        unit=1,
    )  # fmt: skip
    assert message_value(taken, 0, 80)["redelivered"] is False
    assert message_value(replace(taken, flags=None), 0, 80)["redelivered"] is None  # not known
    assert message_value(replace(work, flags=None), 0, 80)["mandatory"] is None
    assert re.fullmatch(r"[a-z_]+", "".join(message_value(taken, 0, 80)))
