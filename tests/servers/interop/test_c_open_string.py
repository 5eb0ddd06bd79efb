"""Open strings of the XA switch, and errors that it finds without the server: flags, arguments."""

import contextlib
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.client import XAER_INVAL
from dtx.client.xa_switch import messages
from dtx.client.xa_switch.interface import ANSWER_SECONDS, POSSIBLE, TMASYNC, XAER_ASYNC, SwitchCall, check_flags, parse

URL = "amqp://user:secret@example.org:5673/orders"


def test_a_url_is_enough() -> None:
    info = parse(f"url={URL}")
    assert (info.work.host, info.work.port, info.work.virtual_host) == ("example.org", 5673, "orders")
    assert (info.work.credentials.username, info.work.credentials.password) == ("user", "secret")
    assert info.coordination is None
    assert (info.answer_timeout, info.transaction_timeout) == (ANSWER_SECONDS, 0)


def test_the_open_string_can_set_every_option() -> None:
    text = f" url = {URL} ;coordination=amqps://tm:x@other/orders; answer-timeout=0;transaction-timeout=30;"
    info = parse(text)
    assert info.coordination.host == "other"
    assert (info.answer_timeout, info.transaction_timeout) == (None, 30)


def test_no_heartbeat_is_required_between_two_calls() -> None:
    """TCP finds broken connections, unless the URL sets a heartbeat."""
    assert parse(f"url={URL}").work.heartbeat == 0
    assert "TCP_USER_TIMEOUT" in parse(f"url={URL}").work.tcp_options
    assert parse(f"url={URL}?heartbeat=30").work.heartbeat == 30


def test_a_semicolon_of_a_password_is_escaped() -> None:
    assert parse("url=amqp://u:a%3Bb%3D@h/").work.credentials.password == "a;b="


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "url is missing"),
        ("coordination=amqp://h/", "url is missing"),
        ("url", "unknown key"),
        ("URL=amqp://h/", "unknown key"),
        ("url=amqp://h/;url=amqp://h/", "given twice"),
        ("url=http://h/", "no amqp:// or amqps:// URL"),
        ("url=amqp:///", "no amqp:// or amqps:// URL"),
        ("url=amqp://[::1/", "pika cannot parse the URL"),
        ("url=amqp://h:99999/", "pika cannot parse the URL"),
        ("url=amqp://h/?heartbeat=x", "pika cannot parse the URL"),
        (f"url={URL};coordination=amqp://other/", "the same virtual host"),
        (f"url={URL};answer-timeout=soon", "not a number of seconds"),
        (f"url={URL};answer-timeout=-1", "not a number of seconds"),
        (f"url={URL};answer-timeout=nan", "not a number of seconds"),
        (f"url={URL};transaction-timeout=1.5", "whole seconds"),
        (f"url={URL};transaction-timeout=4294967296", "not a number of seconds"),
    ],
)
def test_an_unreadable_option_is_named_without_its_password(text: str, words: str) -> None:
    with pytest.raises(XAER_INVAL, match=words) as raised:
        parse(text)
    assert "secret" not in str(raised.value)


@given(st.text() | st.text(alphabet="url=amqp:/;@%?&[]0") | st.builds("url=amqp://{}".format, st.text()))
def test_nothing_but_its_own_error_comes_out(text: str) -> None:
    with contextlib.suppress(XAER_INVAL):
        parse(text)


@given(st.sampled_from(SwitchCall), st.integers(0, (1 << 33) - 1))
def test_flags_are_possible_or_named(call: SwitchCall, flags: int) -> None:
    try:
        check_flags(call.name, flags, POSSIBLE[call])
    except XAER_ASYNC:
        assert flags & TMASYNC
    except XAER_INVAL:
        assert flags not in POSSIBLE[call]
        assert not flags & TMASYNC
    else:
        assert flags in POSSIBLE[call]


def test_strings_that_amqp_cannot_carry_are_refused() -> None:
    assert messages.short("queue", "ü".encode()) == "ü"
    with pytest.raises(XAER_INVAL, match="256 bytes, 255 are possible"):
        messages.short("queue", b"q" * 256)
    with pytest.raises(XAER_INVAL, match="not UTF-8"):
        messages.short("queue", b"\xff")
    with pytest.raises(XAER_INVAL, match="a priority of -1"):
        messages.properties_of({}, -1)
    with pytest.raises(XAER_INVAL, match="before 1970"):
        messages.properties_of({}, timestamp=-1)


def test_messages_are_persistent_unless_they_are_not_to_be() -> None:
    assert messages.properties_of({}).delivery_mode == 2
    transient = messages.properties_of({"message_id": b"m"}, 9, transient=True)
    assert (transient.delivery_mode, transient.message_id, transient.priority) == (None, "m", 9)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("blau", b"blau"),
        (b"\xff", b"\xff"),
        (-7, b"-7"),
        (True, b"true"),
        (False, b"false"),
        (1.5, b"1.5"),
        (Decimal("2.50"), b"2.50"),
        (datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC), b"1700000000"),
        (None, None),
    ],
    ids=repr,
)
def test_a_header_is_returned_as_text(value: object, expected: bytes | None) -> None:
    mine: Any = SimpleNamespace(unsettled={1: {"colour": value}}, xid="")
    assert messages.header(mine, 1, "colour") == expected
    with pytest.raises(XAER_INVAL, match="no unsettled message"):
        messages.header(mine, 2, "colour")


@pytest.mark.parametrize("value", [{}, []], ids=repr)
def test_a_header_that_has_no_text_is_refused(value: object) -> None:
    mine: Any = SimpleNamespace(unsettled={1: {"colour": value}}, xid="")
    with pytest.raises(XAER_INVAL, match="header colour is a table or an array"):
        messages.header(mine, 1, "colour")
