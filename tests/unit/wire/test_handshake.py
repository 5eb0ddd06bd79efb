"""The opening of a connection, and the user that opens it."""

import pytest
from pika import amqp_object, data, frame, spec

from dtx.wire.amqp09 import handshake, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.handshake import user_name
from dtx.wire.amqp09.methods import ConnectionStart, ConnectionStartOk

PROPERTIES: dict[str, object] = {
    "capabilities": {"publisher_confirms": True, "per_consumer_qos": True},
    "product": "RabbitMQ",
    "version": "3.10.8",
    "cluster_name": "rabbit@é",
}


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(0, method).marshal()
    return marshalled[7:-1]


def table(values: dict[str, object]) -> bytes:
    pieces: list[bytes] = []
    data.encode_table(pieces, values)
    return b"".join(pieces)[4:]


def start(mechanisms: str = "PLAIN AMQPLAIN", properties: dict[str, object] = PROPERTIES) -> bytes:
    return payload(spec.Connection.Start(0, 9, properties, mechanisms, "en_US"))


def seen(octets: bytes) -> spec.Connection.Start:
    return spec.Connection.Start().decode(octets, 4)


def test_start_is_read_and_written() -> None:
    read = ConnectionStart.decode(start())
    assert read == ConnectionStart(0, 9, table(PROPERTIES), b"PLAIN AMQPLAIN", b"en_US")
    assert read.encode() == start()


def test_start_ok_is_read_and_written() -> None:
    octets = payload(spec.Connection.StartOk({"product": "pika"}, "PLAIN", b"\0guest\0secret", "en_US"))
    read = ConnectionStartOk.decode(octets)
    assert read == ConnectionStartOk(table({"product": "pika"}), b"PLAIN", b"\0guest\0secret", b"en_US")
    assert read.encode() == octets


def test_a_malformed_login_is_a_syntax_error_without_the_password() -> None:
    octets = payload(spec.Connection.StartOk({"a": 1}, "PLAIN", b"\0guest\0secret", "en_US"))
    for bad in [*(octets[:length] for length in range(4, len(octets))), octets + b"\x00"]:
        with pytest.raises(WireError) as caught:
            ConnectionStartOk.decode(bad)
        assert caught.value.code == 502
        assert "secret" not in str(caught.value)


def test_dtx_is_added_to_the_capabilities_and_everything_else_stays() -> None:
    changed = seen(handshake.advertise(start()).encode())
    capabilities = changed.server_properties.pop("capabilities")
    assert capabilities == {"publisher_confirms": True, "per_consumer_qos": True, "dtx": True}
    assert changed.server_properties == {key: PROPERTIES[key] for key in ("product", "version", "cluster_name")}
    assert (changed.version_major, changed.version_minor, changed.locales) == (0, 9, b"en_US")


@pytest.mark.parametrize("properties", [{}, {"capabilities": "text"}, {"capabilities": {"dtx": False}}])
def test_dtx_is_listed_once_in_the_capabilities(properties: dict[str, object]) -> None:
    octets = handshake.advertise(start(properties=properties)).encode()
    assert seen(octets).server_properties == {"capabilities": {"dtx": True}}
    assert octets.count(b"dtx") == 1
    assert b"dtx" in handshake.capabilities(ConnectionStart.decode(octets).server_properties)


def test_mechanisms_that_cannot_pass_a_proxy_are_not_offered() -> None:
    assert handshake.advertise(start("EXTERNAL AMQPLAIN RABBIT-CR-DEMO PLAIN")).mechanisms == b"AMQPLAIN PLAIN"


def test_a_broker_with_other_mechanisms_only_is_refused() -> None:
    with pytest.raises(WireError, match="neither PLAIN nor AMQPLAIN") as caught:
        handshake.advertise(start("EXTERNAL"))
    assert caught.value.code == 540


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"capabilities": {"a": None, "dtx": True}}, True),
        ({"capabilities": {"dtx": False}}, False),
        ({"capabilities": {"dtx": "yes"}}, False),
        ({"capabilities": True, "dtx": True}, False),
        ({}, False),
    ],
)
def test_a_capability_is_true_or_it_is_not_there(properties: dict[str, object], expected: bool) -> None:
    assert (b"dtx" in handshake.capabilities(table(properties))) is expected


def test_malformed_server_properties_are_a_syntax_error() -> None:
    with pytest.raises(WireError, match="field table"):
        handshake.advertise(ConnectionStart(0, 9, b"\x05x", b"PLAIN", b"").encode())


LOGIN = tables.entry(b"LOGIN", b"S", b"alice")
PASSWORD = tables.entry(b"PASSWORD", b"S", b"secret")


@pytest.mark.parametrize(
    ("mechanism", "response", "name"),
    [
        (b"PLAIN", handshake.plain(b"alice", b"secret"), "alice"),
        (b"PLAIN", "\0ålice\0pass\u00f6".encode(), "ålice"),
        (b"PLAIN", b"\0alice\0", "alice"),
        (b"PLAIN", b"\0\0token", None),
        (b"PLAIN", b"\0alice\0eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJib2IifQ.c2lnbmF0dXJl", None),
        (b"PLAIN", b"\0alice\0eyJust.a.password", None),
        (b"PLAIN", b"\0alice\0my.dotted.password", "alice"),
        (b"PLAIN", b"admin\0alice\0secret", None),
        (b"PLAIN", b"\0alice\0sec\0ret", None),
        (b"PLAIN", b"\0alice", None),
        (b"PLAIN", b"", None),
        (b"PLAIN", b"\0\xff\xfe\0secret", None),
        (b"AMQPLAIN", LOGIN + PASSWORD, "alice"),
        (b"AMQPLAIN", PASSWORD + LOGIN, "alice"),
        (b"AMQPLAIN", LOGIN + tables.entry(b"PASSWORD", b"S", b"eyJh.eyJz.c2ln"), None),
        (b"AMQPLAIN", PASSWORD, None),
        (b"AMQPLAIN", LOGIN + LOGIN, None),
        (b"AMQPLAIN", tables.entry(b"LOGIN", b"S", b"") + PASSWORD, None),
        (b"AMQPLAIN", tables.entry(b"LOGIN", b"x", b"alice") + PASSWORD, None),
        (b"AMQPLAIN", LOGIN[:-1], None),
        (b"EXTERNAL", b"alice", None),
        (b"plain", handshake.plain(b"alice", b"secret"), None),
    ],
)
def test_the_user_is_the_one_that_the_broker_authenticates(mechanism: bytes, response: bytes, name: str | None) -> None:
    assert user_name(mechanism, response) == name


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [(b"PLAIN", b"\0guest\0secret"), (b"AMQPLAIN", table({"LOGIN": "guest", "PASSWORD": "secret"}))],
)
def test_a_server_learns_user_and_password(mechanism: bytes, response: bytes) -> None:
    found = handshake.credentials(mechanism, response)
    assert found == handshake.Credentials(b"guest", b"secret")
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("mechanism", "response"),
    [
        (b"PLAIN", b""),
        (b"PLAIN", b"\0guest"),
        (b"PLAIN", b"admin\0guest\0secret"),
        (b"PLAIN", b"\0guest\0secret\0more"),
        (b"AMQPLAIN", table({"PASSWORD": "secret"})),
        (b"AMQPLAIN", b"\x05LOGIN"),
    ],
)
def test_a_response_without_a_name_has_no_user(mechanism: bytes, response: bytes) -> None:
    """Some are RFC 4616 with an authorization identity, which brokers refuse."""
    assert handshake.credentials(mechanism, response) is None


def test_another_mechanism_is_not_offered() -> None:
    with pytest.raises(handshake.NotOffered, match=r"mechanism 'EXTERNAL' was not offered"):
        handshake.credentials(b"EXTERNAL", b"")


def test_a_server_states_its_product_and_capabilities() -> None:
    octets = handshake.server_properties({b"product": b"dtx", b"version": b"1"}, [b"dtx", b"basic.nack"])
    assert seen(ConnectionStart(0, 9, octets, b"PLAIN", b"en_US").encode()).server_properties == {
        "capabilities": {"dtx": True, "basic.nack": True},
        "product": "dtx",
        "version": "1",
    }
    assert b"dtx" in handshake.capabilities(octets)
