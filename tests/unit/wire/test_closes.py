"""Every failure has an answer: the error map is total."""

import pytest
from pika import frame, spec

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.closes import channel_close, close_frame, facts_of, reply_text
from dtx.wire.amqp09.errors import FrameError, HardCode, WireError, syntax_error
from dtx.xa.codes import ReplyCode, XaError


def decoded(data: bytes) -> frame.Method:
    consumed, result = frame.decode_frame(data)
    assert consumed == len(data)
    return result


@pytest.mark.parametrize("code", ReplyCode)
def test_every_error_of_the_core_is_a_channel_exception(code: ReplyCode) -> None:
    """The XML: "the server MUST raise a channel exception with reply code …"."""
    error = XaError(code, "commit is illegal in state idle")
    answer = decoded(close_frame(error, 9, 0x0069000A))
    assert answer.channel_number == 9
    assert answer.method == spec.Channel.Close(code, f"{code.name} - commit is illegal in state idle", 105, 10)


def test_facts_come_before_the_sentence_and_are_never_cut_off() -> None:
    error = XaError(ReplyCode.NOT_FOUND, "x" * 300, {"ended": "rolled-back", "at": "2026-01-01T00:00:00Z"})
    text = decoded(close_frame(error, 9)).method.reply_text
    assert text == f"NOT_FOUND - ended=rolled-back; at=2026-01-01T00:00:00Z; {'x' * 300}"[:255]
    assert facts_of(text) == error.facts


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("COMMAND_INVALID - state=idle; commit is illegal", {"state": "idle"}),
        ("NOT_FOUND - unknown xid 1:6774:62", {}),
        ("NOT_FOUND - no queue 'ended=committed; '", {}),
        ("state=idle; without a name", {"state": "idle"}),
        # facts in the sentence do not count
        ("NOT_FOUND - ended=forgotten; unknown xid, completed: committed at T", {"ended": "forgotten"}),
        # servers of dtx 0.1
        ("NOT_FOUND - unknown xid, completed: committed at T (xid 1:61:62)", {"ended": "committed", "at": "T"}),
        ("COMMAND_INVALID - one-phase commit is illegal in state idle (xid 1:61:62)", {"state": "idle"}),
        ("COMMAND_INVALID - commit is illegal while 1 channel(s) are associated", {}),
    ],
)
def test_programs_read_the_facts_alone(text: str, facts: dict[str, str]) -> None:
    assert facts_of(text) == facts


@pytest.mark.parametrize("code", HardCode)
def test_every_protocol_error_closes_the_connection_with_its_code(code: HardCode) -> None:
    error = WireError(code, "that is no frame")
    answer = decoded(close_frame(error, 9))
    assert answer.channel_number == 0
    assert answer.method == spec.Connection.Close(code, f"{code.name} - that is no frame", 0, 0)


@pytest.mark.parametrize("error", [ValueError("secret"), OSError("secret"), ExceptionGroup("secret", [KeyError("a")])])
def test_an_unexpected_error_is_sent_as_internal_only(error: Exception) -> None:
    answer = decoded(close_frame(error, 9, methods.BasicPublish.KEY))
    assert answer.method == spec.Connection.Close(541, "INTERNAL_ERROR - internal error", 60, 40)


def test_a_frame_error_carries_the_frames_before_it() -> None:
    error = FrameError(HardCode.FRAME_ERROR, "bad", b"abc", [(8, 0, 0, 8)])
    assert (error.buffer, error.frames) == (b"abc", [(8, 0, 0, 8)])
    assert FrameError(HardCode.FRAME_ERROR, "bad").frames == []


def test_an_error_reads_as_code_and_reason() -> None:
    assert str(syntax_error("bad table")) == "502: bad table"


@pytest.mark.parametrize(
    ("text", "octets"), [("a" * 300, 255), ("a" + "é" * 200, 255), ("é" * 200, 254), ("€" * 100, 255), ("short", 5)]
)
def test_a_reply_text_is_cut_between_two_characters(text: str, octets: int) -> None:
    cut = reply_text(text)
    assert len(cut) == octets
    assert text.startswith(cut.decode("utf-8"))


def test_a_reply_text_that_is_no_unicode_is_still_sent() -> None:
    assert reply_text("bad \udcff") == b"bad ?"


def test_a_long_reply_text_makes_a_whole_frame() -> None:
    answer = decoded(channel_close(1, 404, "x" * 1000))
    assert answer.method.reply_text == "x" * 255
