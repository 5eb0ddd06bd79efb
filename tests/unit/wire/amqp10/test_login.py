"""Protocol headers and SASL: the answers, and data that a client sends early is kept."""

import pytest

from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER
from dtx.wire.amqp10.endpoint import AMQP, MAX_EARLY, MAX_SASL, SASL, Closed, LoginAsked, Opened, frame
from dtx.wire.amqp10.errors import Condition
from dtx.wire.amqp10.performatives import (
    Anonymous,
    Close,
    External,
    Open,
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    read_login,
)
from tests.unit.wire.amqp10.peer import Heard, Peer

MECHANISMS = ("PLAIN", "EXTERNAL", "ANONYMOUS")
INIT = SaslInit(mechanism="PLAIN", initial_response=b"\x00u\x00p", hostname="vhost")
ASKED = LoginAsked(mechanism="PLAIN", response=b"\x00u\x00p", hostname="vhost")
OPEN = frame(AMQP, 0, encode(Open(container_id="peer")))


def sasl(said: SaslInit | SaslResponse | SaslOutcome) -> bytes:
    return frame(SASL, 0, encode(said))


def over(events: list[object]) -> bool:
    """Whether this end has closed the stream with an error, as the only event."""
    (event,) = events
    return isinstance(event, Closed) and event.error is not None and not event.by_peer


def test_a_client_logs_in_and_opens() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    assert peer.raw(SASL_HEADER) == []
    assert peer.octets().startswith(SASL_HEADER)
    assert peer.raw(sasl(INIT)) == [ASKED]
    assert peer.heard() == []
    assert peer.server.login() == []
    assert peer.said() == [SaslOutcome(code=SaslCode.OK)]
    assert peer.raw(AMQP_HEADER) == []
    assert peer.octets() == AMQP_HEADER
    assert peer.raw(OPEN) == [Opened(open=Open(container_id="peer"))]


def test_the_mechanisms_are_offered() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER)
    assert peer.heard() == [Heard(0, SaslMechanisms(sasl_server_mechanisms=MECHANISMS))]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_client_may_send_everything_together(size: int) -> None:
    """5.3: a client need not wait for the outcome before it sends the next header and open."""
    stream = SASL_HEADER + sasl(INIT) + AMQP_HEADER + OPEN
    peer = Peer(mechanisms=MECHANISMS)
    events = [event for at in range(0, len(stream), size) for event in peer.raw(stream[at : at + size])]
    assert events == [ASKED]
    assert peer.server.login() == [Opened(open=Open(container_id="peer"))]
    assert peer.server.login() == []


def test_a_client_without_a_response_is_asked_for_it() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER)
    peer.heard()
    assert peer.raw(sasl(SaslInit(mechanism="PLAIN"))) == []
    assert peer.said() == [SaslChallenge(challenge=b"")]
    (asked,) = peer.raw(sasl(SaslResponse(response=b"\x00u\x00p")))
    assert asked == LoginAsked(mechanism="PLAIN", response=b"\x00u\x00p", hostname=None)


def test_anonymous_needs_no_response() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER)
    assert peer.raw(sasl(SaslInit(mechanism="ANONYMOUS"))) == [
        LoginAsked(mechanism="ANONYMOUS", response=b"", hostname=None)
    ]


def test_a_login_is_refused_and_that_is_the_end() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER + sasl(INIT) + AMQP_HEADER)
    peer.heard()
    peer.server.refuse_login(SaslCode.AUTH)
    assert peer.said() == [SaslOutcome(code=SaslCode.AUTH)]
    assert peer.server.over
    assert peer.raw(OPEN) == []
    assert peer.server.login() == []
    peer.server.refuse_login(SaslCode.AUTH)
    assert peer.said() == []


def test_a_mechanism_that_was_not_offered_is_refused() -> None:
    peer = Peer(mechanisms=("EXTERNAL",))
    assert peer.raw(SASL_HEADER + sasl(INIT)) == []
    assert peer.said()[-1] == SaslOutcome(code=SaslCode.AUTH)
    assert peer.server.over


@pytest.mark.parametrize(
    ("mechanisms", "header", "answer"),
    [
        (MECHANISMS, AMQP_HEADER, SASL_HEADER),
        (MECHANISMS, b"AMQP\x02\x01\x00\x00", SASL_HEADER),
        ((), SASL_HEADER, AMQP_HEADER),
        ((), b"AMQP\x00\x01\x00\x01", AMQP_HEADER),
        ((), b"GET / HTTP/1.1\r\n", AMQP_HEADER),
    ],
)
def test_an_unsupported_header_is_answered_with_the_supported_one(
    mechanisms: tuple[str, ...], header: bytes, answer: bytes
) -> None:
    """2.2: a server that does not support the header sends one that it does, and closes."""
    peer = Peer(mechanisms=mechanisms)
    assert over(list(peer.raw(header)))
    assert peer.octets() == answer
    assert peer.server.over
    assert peer.raw(b"more") == []


def test_the_header_behind_the_login_must_be_that_of_amqp() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER + sasl(INIT) + SASL_HEADER)
    assert over(list(peer.server.login()))


@pytest.mark.parametrize(
    "octets",
    [
        b"\x00\x00\x00\x00\x00\x00\x00\x00",
        (MAX_SASL + 1).to_bytes(4, "big") + b"\x02\x01\x00\x00",
        frame(SASL, 0, b"\x40"),
        frame(SASL, 0, b""),
        sasl(SaslOutcome(code=SaslCode.OK)),
        sasl(SaslResponse(response=b"")),
        OPEN,
    ],
)
def test_anything_else_than_the_frames_of_sasl_ends_the_stream(octets: bytes) -> None:
    peer = Peer(mechanisms=MECHANISMS)
    assert over(list(peer.raw(SASL_HEADER + octets)))
    assert peer.server.over


def test_a_choice_is_made_once() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER + sasl(SaslInit(mechanism="PLAIN")))
    assert over(list(peer.raw(sasl(INIT))))


def test_a_choice_in_pieces_is_kept_until_it_is_whole() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    stream = SASL_HEADER + sasl(INIT)
    events = [event for octet in stream for event in peer.raw(bytes((octet,)))]
    assert events == [ASKED]


def test_bytes_before_the_login_is_decided_are_limited() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.raw(SASL_HEADER + sasl(INIT))
    assert peer.raw(bytes(MAX_EARLY)) == []
    assert over(list(peer.raw(b"x")))
    assert peer.server.login() == []


def test_frames_of_sasl_behind_the_login_are_framing_errors() -> None:
    peer = Peer().open()
    (closed,) = peer.raw(sasl(INIT))
    assert isinstance(closed, Closed)
    assert peer.said() == [Close(error=closed.error)]
    assert closed.error is not None
    assert closed.error.condition == Condition.FRAMING_ERROR


def test_a_close_before_any_frame_sends_nothing() -> None:
    peer = Peer(mechanisms=MECHANISMS)
    peer.server.close()
    assert peer.server.over
    assert peer.octets() == b""


def test_responses_are_parsed() -> None:
    assert read_login("PLAIN", b"\x00u\x00p") == Credentials(b"u", b"p")
    assert read_login("PLAIN", b"u\x00p") is None
    assert read_login("ANONYMOUS", b"trace") == Anonymous()
    assert read_login("EXTERNAL", b"") == External(None)
    assert read_login("EXTERNAL", b"u") == External(b"u")
    assert read_login("GSSAPI", b"") is None


def test_passwords_are_not_shown() -> None:
    assert "secret" not in repr(LoginAsked(mechanism="PLAIN", response=b"\x00u\x00secret", hostname=None))
