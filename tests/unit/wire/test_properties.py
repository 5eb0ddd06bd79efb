"""Properties are edited in place: unchanged parts keep their bytes."""

import pytest
from pika import spec

from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import EMPTY, Property, build, put, read, without

FULL = spec.BasicProperties(
    content_type="text/plain",
    content_encoding="utf-8",
    headers={"CC": ["a", "b"], "n": 1, "BCC": ["c"], "last": {"deep": None}},
    delivery_mode=2,
    priority=9,
    correlation_id="corr",
    reply_to="amq.rabbitmq.reply-to",
    expiration="60000",
    message_id="id",
    timestamp=1_600_000_000,
    type="kind",
    user_id="guest",
    app_id="app",
    cluster_id="old",
)


def raw_of(values: spec.BasicProperties) -> bytes:
    return b"".join(values.encode())


def pika_view(raw: bytes) -> spec.BasicProperties:
    return spec.BasicProperties().decode(raw)


RAW = raw_of(FULL)
KEY = {which: which.name.lower() for which in Property}


def test_every_property_is_found() -> None:
    view = read(RAW)
    assert (view.delivery_mode, view.priority, view.timestamp) == (2, 9, 1_600_000_000)
    assert (view.user_id, view.expiration) == (b"guest", b"60000")
    assert (view.reply_to, view.message_id, view.correlation_id) == (b"amq.rabbitmq.reply-to", b"id", b"corr")
    assert view.value(Property.CONTENT_TYPE) == b"text/plain"
    assert view.value(Property.CLUSTER_ID) == b"old"
    assert [entry.key for entry in view.headers] == [b"CC", b"n", b"BCC", b"last"]


def test_a_missing_property_is_none() -> None:
    view = read(EMPTY)
    assert (view.delivery_mode, view.user_id, view.headers, view.header(b"CC")) == (None, None, [], None)


@pytest.mark.parametrize("which", Property)
def test_each_property_alone_is_found(which: Property) -> None:
    value = bytes(1) if which in (12, 11) else bytes(8) if which == 6 else b"\x01aV"
    raw = build({which: value})
    assert read(raw).value(which) == value
    assert list(read(raw).spans) == [which]
    assert without(raw, which) == EMPTY


def test_properties_built_in_any_order_are_written_in_theirs() -> None:
    raw = build(
        {Property.USER_ID: b"guest", Property.PRIORITY: b"\x09", Property.CONTENT_TYPE: b"text/plain"}, {b"k": b"v"}
    )
    assert raw == raw_of(
        spec.BasicProperties(user_id="guest", priority=9, content_type="text/plain", headers={"k": "v"})
    )


@pytest.mark.parametrize("length", range(len(RAW)))
def test_truncated_properties_are_a_syntax_error(length: int) -> None:
    with pytest.raises(WireError) as caught:
        read(RAW[:length])
    assert caught.value.code == 502


def test_bytes_after_the_last_property_are_a_syntax_error() -> None:
    with pytest.raises(WireError, match="2 bytes after the last property"):
        read(RAW + b"ab")


@pytest.mark.parametrize("flags", [b"\x00\x01", b"\x00\x02"])
def test_flags_unknown_to_class_basic_are_a_syntax_error(flags: bytes) -> None:
    with pytest.raises(WireError, match="not of class basic"):
        read(flags)


def test_malformed_headers_are_found_when_they_are_asked_for() -> None:
    raw = build({Property.HEADERS: b"\x05ab"})
    assert read(raw).value(Property.HEADERS) == b"\x05ab"
    for ask in (lambda: read(raw).headers, lambda: properties.checked(raw), lambda: properties.has_header(raw, b"a")):
        with pytest.raises(WireError, match="field table"):
            ask()


@pytest.mark.parametrize("which", [which for which in Property if which not in (13, 12, 11, 6)])
def test_a_changed_property_leaves_all_others(which: Property) -> None:
    changed = pika_view(put(RAW, which, b"new"))
    removed = pika_view(without(RAW, which))
    assert getattr(changed, KEY[which]) == "new"
    assert getattr(removed, KEY[which]) is None
    for other in Property:
        if other is not which:
            assert getattr(changed, KEY[other]) == getattr(removed, KEY[other]) == getattr(FULL, KEY[other])


def test_a_number_must_have_its_size() -> None:
    with pytest.raises(WireError, match="property delivery-mode of 2 bytes"):
        put(EMPTY, Property.DELIVERY_MODE, b"\x00\x01")


def test_removing_a_missing_header_changes_nothing() -> None:
    assert without(EMPTY, Property.EXPIRATION) == EMPTY
    assert properties.remove_headers(RAW, [b"x"]) == RAW
    assert properties.rename_headers(RAW, {b"x": b"y"}) == RAW
    assert properties.rename_headers(EMPTY, {b"x": b"y"}) == EMPTY


def test_a_header_is_added_to_properties_without_headers() -> None:
    raw = raw_of(spec.BasicProperties(content_type="text/plain", delivery_mode=2))
    assert properties.set_header(raw, b"x-dtx-id", b"1") == raw_of(
        spec.BasicProperties(content_type="text/plain", delivery_mode=2, headers={"x-dtx-id": "1"})
    )


def test_a_header_is_added_after_the_others() -> None:
    changed = pika_view(properties.set_header(RAW, b"x-dtx-id", b"1"))
    assert list(changed.headers.items()) == [*FULL.headers.items(), ("x-dtx-id", "1")]


def test_a_header_is_replaced_in_place_without_its_repetitions() -> None:
    entries = [(b"a", b"V", b""), (b"k", b"t", b"\x01"), (b"b", b"V", b""), (b"k", b"S", b"again")]
    raw = build({Property.HEADERS: b"".join(tables.entry(*entry) for entry in entries)})
    changed = properties.set_header(raw, b"k", b"\x07", kind=b"B")
    assert [entry[:3] for entry in read(changed).headers] == [entries[0], (b"k", b"B", b"\x07"), entries[2]]


def test_headers_are_renamed_with_their_values() -> None:
    changed = pika_view(properties.rename_headers(RAW, {b"CC": b"x-dtx-cc", b"BCC": b"x-dtx-bcc"}))
    assert list(changed.headers.items()) == [
        ("x-dtx-cc", ["a", "b"]),
        ("n", 1),
        ("x-dtx-bcc", ["c"]),
        ("last", {"deep": None}),
    ]


def test_a_renamed_header_replaces_one_with_that_name() -> None:
    raw = build({}, {b"x-dtx-cc": b"old", b"k": b"v", b"CC": b"new"})
    changed = properties.rename_headers(raw, {b"CC": b"x-dtx-cc"})
    assert [(entry.key, entry.value) for entry in read(changed).headers] == [(b"k", b"v"), (b"x-dtx-cc", b"new")]


def test_headers_are_removed() -> None:
    changed = pika_view(properties.remove_headers(RAW, [b"CC", b"last"]))
    assert list(changed.headers) == ["n", "BCC"]
    assert properties.has_header(RAW, b"CC")
    assert not properties.has_header(properties.remove_headers(RAW, [b"CC"]), b"CC")


def test_properties_checked_by_a_broker_form_one_key() -> None:
    plain = raw_of(spec.BasicProperties(content_type="a", delivery_mode=2))
    assert properties.checked(plain) == properties.checked(EMPTY) == b""
    base = properties.checked(RAW)
    assert base == properties.checked(put(RAW, Property.MESSAGE_ID, b"other"))
    assert base == properties.checked(properties.set_header(RAW, b"n", b"other"))
    different = [
        put(RAW, Property.USER_ID, b"other"),
        without(RAW, Property.USER_ID),
        put(RAW, Property.EXPIRATION, b"1"),
        without(RAW, Property.EXPIRATION),
        properties.set_header(RAW, b"CC", b"a"),
        properties.remove_headers(RAW, [b"BCC"]),
    ]
    assert len({base, *map(properties.checked, different)}) == len(different) + 1


def test_user_id_and_expiration_are_not_mistaken_for_each_other() -> None:
    user, expiration = build({Property.USER_ID: b"1"}), build({Property.EXPIRATION: b"1"})
    assert properties.checked(user) != properties.checked(expiration)
