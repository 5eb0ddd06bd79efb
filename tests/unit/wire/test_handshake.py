"""The opening of a connection, and who it is that opens it."""

import pytest
from pika import amqp_object, data, frame, spec

from dtx.wire.amqp09 import handshake, methods, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.handshake import Start, StartOk, Tune, user_name

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
    read = handshake.decode_start(start())
    assert read == Start(
        major=0, minor=9, server_properties=table(PROPERTIES), mechanisms=b"PLAIN AMQPLAIN", locales=b"en_US"
    )
    assert handshake.encode_start(read) == start()


def test_start_ok_is_read_and_written() -> None:
    octets = payload(spec.Connection.StartOk({"product": "pika"}, "PLAIN", b"\0guest\0secret", "en_US"))
    read = handshake.decode_start_ok(octets)
    assert read == StartOk(
        client_properties=table({"product": "pika"}), mechanism=b"PLAIN", response=b"\0guest\0secret", locale=b"en_US"
    )
    assert handshake.encode_start_ok(read) == octets


def test_tune_is_read_and_written() -> None:
    tune = Tune(channel_max=2047, frame_max=131_072, heartbeat=60)
    assert handshake.encode_tune(tune) == payload(spec.Connection.Tune(2047, 131_072, 60))
    assert handshake.encode_tune_ok(tune) == payload(spec.Connection.TuneOk(2047, 131_072, 60))
    assert handshake.decode_tune(handshake.encode_tune(tune)) == tune
    assert handshake.decode_tune(handshake.encode_tune_ok(tune)) == tune


def test_open_is_read_and_written() -> None:
    assert handshake.encode_open(b"/") == payload(spec.Connection.Open("/"))
    assert handshake.decode_open(payload(spec.Connection.Open("v", capabilities="c", insist=True))) == b"v"
    assert handshake.encode_open_ok() == payload(spec.Connection.OpenOk())


READERS = [
    (handshake.decode_start, start()),
    (handshake.decode_start_ok, payload(spec.Connection.StartOk({"a": 1}, "PLAIN", b"\0guest\0secret", "en_US"))),
    (handshake.decode_tune, payload(spec.Connection.Tune(1, 2, 3))),
    (handshake.decode_open, payload(spec.Connection.Open("/"))),
]


@pytest.mark.parametrize(("read", "octets"), READERS)
def test_a_truncated_or_too_long_handshake_is_a_syntax_error_without_the_password(read, octets: bytes) -> None:  # type: ignore[no-untyped-def]
    for bad in [*(octets[:length] for length in range(4, len(octets))), octets + b"\x00"]:
        with pytest.raises(WireError) as caught:
            read(bad)
        assert caught.value.code == 502
        assert "secret" not in str(caught.value)


def test_a_response_is_not_shown() -> None:
    """Secrets are in no repr."""
    assert "secret" not in repr(
        StartOk(client_properties=b"", mechanism=b"PLAIN", response=b"\0guest\0secret", locale=b"")
    )


def test_dtx_is_added_to_the_capabilities_and_everything_else_stays() -> None:
    changed = seen(handshake.advertise(start()))
    capabilities = changed.server_properties.pop("capabilities")
    assert capabilities == {"publisher_confirms": True, "per_consumer_qos": True, "dtx": True}
    assert changed.server_properties == {key: PROPERTIES[key] for key in ("product", "version", "cluster_name")}
    assert (changed.version_major, changed.version_minor, changed.locales) == (0, 9, b"en_US")


@pytest.mark.parametrize("properties", [{}, {"capabilities": "text"}, {"capabilities": {"dtx": False}}])
def test_dtx_is_said_once_whatever_the_capabilities_were(properties: dict[str, object]) -> None:
    octets = handshake.advertise(start(properties=properties))
    assert seen(octets).server_properties == {"capabilities": {"dtx": True}}
    assert octets.count(b"dtx") == 1
    assert handshake.has_capability(handshake.decode_start(octets).server_properties, b"dtx")


def test_mechanisms_that_cannot_pass_a_proxy_are_not_offered() -> None:
    assert seen(handshake.advertise(start("EXTERNAL AMQPLAIN RABBIT-CR-DEMO PLAIN"))).mechanisms == b"AMQPLAIN PLAIN"


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
    assert handshake.has_capability(table(properties), b"dtx") is expected


def test_malformed_server_properties_are_a_syntax_error() -> None:
    octets = handshake.encode_start(
        Start(major=0, minor=9, server_properties=b"\x05x", mechanisms=b"PLAIN", locales=b"")
    )
    with pytest.raises(WireError, match="field table"):
        handshake.advertise(octets)


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
def test_the_user_is_who_the_broker_takes_the_response_for(mechanism: bytes, response: bytes, name: str | None) -> None:
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
def test_a_response_that_names_nobody_is_nobodys(mechanism: bytes, response: bytes) -> None:
    """RFC 4616 with an authorization identity among them: brokers refuse it."""
    assert handshake.credentials(mechanism, response) is None


def test_another_mechanism_is_not_offered() -> None:
    with pytest.raises(handshake.NotOffered, match=r"mechanism 'EXTERNAL' was not offered"):
        handshake.credentials(b"EXTERNAL", b"")


def test_a_new_secret_is_read() -> None:
    payload = methods.ConnectionUpdateSecret.HEAD + tables.put_long(b"new") + tables.put_short(b"why")
    assert handshake.decode_update_secret(payload) == b"new"
    for malformed in (payload[:-1], payload + b"x", payload[:9]):
        with pytest.raises(WireError, match="502"):
            handshake.decode_update_secret(malformed)


def test_a_server_tells_what_it_is_and_what_it_can_do() -> None:
    octets = handshake.server_properties({b"product": b"dtx", b"version": b"1"}, [b"dtx", b"basic.nack"])
    start = Start(major=0, minor=9, server_properties=octets, mechanisms=b"PLAIN", locales=b"en_US")
    assert seen(handshake.encode_start(start)).server_properties == {
        "capabilities": {"dtx": True, "basic.nack": True},
        "product": "dtx",
        "version": "1",
    }
    assert handshake.has_capability(octets, b"dtx")
