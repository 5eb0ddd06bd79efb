"""Composite types: performatives, states, termini, SASL frames; omitted fields and mandatory fields."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10 import composite, performatives
from dtx.wire.amqp10.codec import encode as encode_value
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.errors import AmqpError, Condition, malformed
from dtx.wire.amqp10.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Coordinator,
    Declare,
    Declared,
    Detach,
    Discharge,
    Disposition,
    Durability,
    End,
    Error,
    ExpiryPolicy,
    Flow,
    Modified,
    Open,
    Received,
    ReceiverSettles,
    Rejected,
    Released,
    Role,
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    SenderSettles,
    Source,
    Target,
    TransactionalState,
    TransactionCapability,
    Transfer,
    peer_error,
    read_performative,
    read_sasl,
)
from dtx.wire.amqp10.values import Array, Described, Symbol, UInt, ULong

ERROR = Error(condition="amqp:not-found", description="no queue 'q'", info={"volatile": True})

WRITTEN: list[tuple[Composite, str]] = [
    (Open(container_id="c"), "00 53 10 c0 04 01 a1 01 63"),
    (
        Open(container_id="c", hostname="v", max_frame_size=512, channel_max=7, idle_time_out=0),
        "00 53 10 c0 10 05 a1 01 63 a1 01 76 70 00000200 60 0007 43",
    ),
    (Open(container_id="c", desired_capabilities=("a",)), "00 53 10 c0 0e 09 a1 01 63 40 40 40 40 40 40 40 a3 01 61"),
    (
        Begin(remote_channel=None, next_outgoing_id=0, incoming_window=1, outgoing_window=2),
        "00 53 11 c0 07 04 40 43 52 01 52 02",
    ),
    (
        Attach(name="l", handle=0, role=Role.RECEIVER, source=Source(address="q"), target=Target()),
        "00 53 12 c0 15 07 a1 01 6c 43 41 40 40 00 53 28 c0 04 01 a1 01 71 00 53 29 45",
    ),
    (
        Attach(name="l", handle=1, role=Role.SENDER, target=Coordinator(capabilities=("a", "b"))),
        "00 53 12 c0 18 07 a1 01 6c 52 01 42 40 40 40 00 53 30 c0 09 01 e0 06 02 a3 01 61 01 62",
    ),
    (
        Flow(next_incoming_id=None, incoming_window=1, next_outgoing_id=0, outgoing_window=1, echo=True),
        "00 53 13 c0 0d 0a 40 52 01 43 52 01 40 40 40 40 40 41",
    ),
    (Transfer(handle=0, delivery_id=1, delivery_tag=b"t"), "00 53 14 c0 07 03 43 52 01 a0 01 74"),
    (
        Transfer(handle=0, delivery_id=0, delivery_tag=b"", state=TransactionalState(txn_id=b"x")),
        "00 53 14 c0 12 08 43 43 a0 00 40 40 40 40 00 53 34 c0 04 01 a0 01 78",
    ),
    (Disposition(role=Role.RECEIVER, first=1, state=Accepted()), "00 53 15 c0 0a 05 41 52 01 40 40 00 53 24 45"),
    (Detach(handle=0, closed=True), "00 53 16 c0 03 02 43 41"),
    (End(), "00 53 17 45"),
    (Close(error=Error(condition="a")), "00 53 18 c0 0a 01 00 53 1d c0 04 01 a3 01 61"),
    (SaslMechanisms(sasl_server_mechanisms=("PLAIN",)), "00 53 40 c0 08 01 a3 05 504c41494e"),
    (SaslOutcome(code=SaslCode.OK), "00 53 44 c0 03 01 50 00"),
    (Declare(), "00 53 31 45"),
    (Discharge(txn_id=b"x", fail=True), "00 53 32 c0 05 02 a0 01 78 41"),
]


def packed(octets: str) -> bytes:
    return bytes.fromhex(octets)


def read_any(data: bytes) -> Any:
    found, position = composite.decode(data, 0, len(data), EVERYTHING)
    assert position == len(data)
    return found


EVERYTHING = frozenset(layout.cls for layout in composite._BY_CODE.values())


@pytest.mark.parametrize(("value", "octets"), WRITTEN, ids=lambda case: type(case).__name__)
def test_composites_are_written_without_default_values(value: Composite, octets: str) -> None:
    assert encode(value).hex() == octets.replace(" ", "")
    assert read_any(packed(octets)) == value


def test_descriptors_may_be_symbolic_or_wide() -> None:
    for described_by in (ULong(0x18), Symbol("amqp:close:list")):
        assert read_any(b"\x00" + encode_value(described_by) + b"\x45") == Close()
    assert read_any(packed("00 80 0000000000000018 45")) == Close()
    assert read_any(packed("00 53 18 d0 00000004 00000000")) == Close()


def test_several_values_may_be_one_an_array_or_none() -> None:
    one = read_any(packed("00 53 30 c0 04 01 a3 01 61"))
    array = read_any(packed("00 53 30 c0 07 01 e0 04 01 a3 01 61"))
    wide = read_any(packed("00 53 30 c0 10 01 f0 0000000a 00000001 b3 00000001 61"))
    assert one == array == wide == Coordinator(capabilities=("a",))
    none = read_any(packed("00 53 30 c0 05 01 e0 02 00 a3"))
    assert none == read_any(packed("00 53 30 c0 02 01 40")) == Coordinator()
    assert encode(SaslMechanisms(sasl_server_mechanisms=())).hex() == "005340c00501e00200a3"


def test_values_known_only_to_the_peer_are_kept() -> None:
    unknown = Described(Symbol("peer:state"), [UInt(1)])
    for value in (
        Transfer(handle=0, state=unknown),
        Attach(name="l", handle=0, role=Role.SENDER, source=unknown, target=Described(ULong(0x999), [])),
        Attach(name="l", handle=0, role=Role.SENDER, source=Source(filter={"f": Described(ULong(1 << 40), "x")})),
        Transfer(handle=0, state=Described(UInt(5), None)),
    ):
        assert read_any(encode(value)) == value


@pytest.mark.parametrize(
    ("octets", "words"),
    [
        ("40", "without a descriptor"),
        ("00 53 99 45", "not expected"),
        ("00 a3 01 61 45", "not expected"),
        ("00 43 45", "not expected"),
        ("00 53 18 40", "no list"),
        ("00 53 18 c1 01 00", "no list"),
        ("00 53 18 c0 03 02 40 40", "has 1 fields, not 2"),
        ("00 53 10 45", "open without its container-id"),
        ("00 53 10 c0 02 01 40", "open without its container-id"),
        ("00 53 11 c0 04 03 40 43 43", "begin without its outgoing-window"),
        ("00 53 10 c0 02 01 43", "container-id of open is no string"),
        ("00 53 10 c0 05 01 a1 01 63", "the size of open is wrong"),
        ("00 53 18 c0 04 01 00 53 1d", "truncated"),
        ("00 53 18 c0 05 01 00 53 24 45", "a value that is no error"),
        ("00 53 30 c0 05 01 e0 02 01 40", "array of something else"),
        ("00 53 25 c0 0f 01 00 53 1d c0 09 03 a3 01 61 40 c1 02 01 40", "key that has no value"),
        ("00 53 25 c0 11 01 00 53 1d c0 0b 03 a3 01 61 40 c1 04 02 41 40", "the size of a map is wrong"),
        ("00 53 25 c0 10 01 00 53 1d c0 0a 03 a3 01 61 40 c1 03 02 41 40", "key that is no symbol"),
        ("00", "truncated"),
        ("", "truncated"),
    ],
)
def test_a_malformed_composite_is_a_decode_error(octets: str, words: str) -> None:
    with pytest.raises(AmqpError, match=words) as caught:
        composite.decode(packed(octets), 0, len(packed(octets)), EVERYTHING)
    assert caught.value.condition is Condition.DECODE_ERROR


def test_a_role_may_be_any_boolean() -> None:
    for octets, role in (("41", Role.RECEIVER), ("42", Role.SENDER), ("56 01", Role.RECEIVER), ("56 00", Role.SENDER)):
        size = len(packed(octets))
        said = read_any(packed("00 53 15") + bytes((0xC0, size + 2, 2)) + packed(octets + "43"))
        assert said == Disposition(role=role, first=0)


def test_an_outcome_without_fields_is_the_same_in_every_width() -> None:
    for octets in ("00 53 24 45", "00 53 24 c0 01 00", "00 53 24 d0 00000004 00000000"):
        assert read_any(packed(octets)) == Accepted()


def test_a_value_that_is_no_choice_is_an_invalid_field() -> None:
    with pytest.raises(AmqpError, match="SaslCode has no value 9") as caught:
        read_any(packed("00 53 44 c0 03 01 50 09"))
    assert caught.value.condition is Condition.INVALID_FIELD


def test_a_performative_must_end_in_its_frame() -> None:
    data = encode(Close(error=ERROR))
    with pytest.raises(AmqpError, match="longer than its frame"):
        read_performative(data, 0, len(data) - 1)
    assert read_performative(b"xx" + data + b"payload", 2, len(data) + 9) == (Close(error=ERROR), 2 + len(data))


def test_sasl_frames_have_no_payload_and_are_separate() -> None:
    data = encode(SaslInit(mechanism="PLAIN", initial_response=b"\x00u\x00p", hostname="h"))
    assert read_sasl(data, 0, len(data)) == SaslInit(mechanism="PLAIN", initial_response=b"\x00u\x00p", hostname="h")
    with pytest.raises(AmqpError, match="bytes after sasl-init"):
        read_sasl(data + b"\x40", 0, len(data) + 1)
    with pytest.raises(AmqpError, match="not expected here"):
        read_performative(data, 0, len(data))
    with pytest.raises(AmqpError, match="not expected here"):
        read_sasl(encode(End()), 0, 4)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in repr(SaslInit(mechanism="PLAIN", initial_response=b"\x00u\x00secret"))
    assert "secret" not in repr(SaslResponse(response=b"secret"))


def test_states_are_deep_but_not_endless() -> None:
    nested = TransactionalState(txn_id=b"x", outcome=Rejected(error=ERROR))
    assert read_any(encode(Disposition(role=Role.RECEIVER, first=0, state=nested))).state == nested
    with pytest.raises(AmqpError, match="nested deeper"):
        read_any(b"\x00\x53\x34\xc0\xff\x02\xa0\x00" + b"\x00\x53\x99" * 60 + b"\x40")


def test_descriptions_are_shortened_to_the_smallest_frame() -> None:
    close = Close(error=peer_error(malformed("x" * 10_000)))
    assert len(encode(close)) < 512
    assert Role.SENDER.other is Role.RECEIVER
    assert performatives.NO_LIMIT == 0xFFFFFFFF
    assert performatives.SOURCE.name == "source"
    assert encode(performatives.ACCEPTED) == encode(Accepted())


def test_written_composites_of_every_type_are_read() -> None:
    fields = {"p": Array(UInt, (UInt(1),)), "q": [Symbol("x")]}
    for value in (
        Open(container_id="é", max_frame_size=0, incoming_locales=("en", "de"), properties=fields),
        Attach(
            name="l" * 300,
            handle=300,
            role=Role.SENDER,
            snd_settle_mode=SenderSettles.SETTLED,
            rcv_settle_mode=ReceiverSettles.SECOND,
            source=Source(
                address=b"odd",
                durable=Durability.UNSETTLED_STATE,
                expiry_policy=ExpiryPolicy.NEVER,
                dynamic=True,
                default_outcome=Released(),
                outcomes=("amqp:accepted:list", "amqp:rejected:list"),
            ),
            target=Target(timeout=5, dynamic_node_properties=fields),
            unsettled={b"tag": None},
            incomplete_unsettled=True,
            initial_delivery_count=0,
            max_message_size=1 << 40,
        ),
        Transfer(handle=0, settled=False, more=True, rcv_settle_mode=ReceiverSettles.FIRST, resume=True, aborted=True),
        Disposition(role=Role.SENDER, first=1, last=5, settled=True, state=Modified(message_annotations=fields)),
        Disposition(role=Role.SENDER, first=1, state=Received(section_number=1, section_offset=1 << 33)),
        Disposition(role=Role.SENDER, first=1, state=Declared(txn_id=bytes(32))),
        SaslChallenge(challenge=b"?"),
        SaslResponse(response=b"!"),
        Coordinator(capabilities=tuple(sorted(item.value for item in TransactionCapability))),
        Declare(global_id=b"xid"),
    ):
        assert read_any(encode(value)) == value


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for prefix in (b"", b"\x00\x53\x12\xc0", b"\x00\x53\x14\xc0\x30\x08"):
        octets = prefix + data
        with suppress(AmqpError):
            found, position = read_performative(octets, 0, len(octets))
            assert read_any(encode(found)) == found
            assert position <= len(octets)
