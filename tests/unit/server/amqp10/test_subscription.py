"""The binding of a link from an exchange, and the filters that are in place with it."""

from typing import Any

import pytest

from dtx.server.amqp10.addresses import ExchangeAddress, check_terminus, known_kind, stream_offset, subscription
from dtx.wire.amqp09 import tables
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Durability, ExpiryPolicy, Source
from dtx.wire.amqp10.values import Described, Int, Symbol, Timestamp, ULong

EXCHANGE = ExchangeAddress(b"x", None)
DIRECT, TOPIC = "apache.org:legacy-amqp-direct-binding:string", "apache.org:legacy-amqp-topic-binding:string"
HEADERS = "apache.org:legacy-amqp-headers-binding:map"
SELECTOR = "apache.org:selector-filter:string"


def said(kind: str, value: Any) -> Described:
    return Described(Symbol(kind), value)


@pytest.mark.parametrize(
    ("kind", "key"), [("topic", b"#"), ("fanout", b""), ("headers", b""), (None, b"#"), ("x-custom", b"#")]
)
def test_a_link_without_a_key_gets_everything(kind: str | None, key: bytes) -> None:
    asked: dict[str, Any] | None
    for asked in (None, {}):
        assert subscription(EXCHANGE, asked, kind) == (key, b"", {})


def test_a_direct_exchange_needs_a_key() -> None:
    with pytest.raises(AmqpError, match="exchange 'x' is direct: name a key, /exchanges/NAME/KEY") as refusal:
        subscription(EXCHANGE, {"s": said(SELECTOR, "a = 1")}, "direct")
    assert refusal.value.condition is Condition.PRECONDITION_FAILED


@pytest.mark.parametrize(
    ("kind", "which", "value", "in_place"),
    [
        ("topic", TOPIC, "a.*", True),
        ("direct", DIRECT, "a.*", True),
        ("topic", DIRECT, "a.b", True),
        ("direct", TOPIC, "a.b", True),
        ("direct", TOPIC, "a*b", True),
        ("topic", TOPIC, "", True),
        ("topic", DIRECT, "a.#", False),
        ("fanout", TOPIC, "a.b", False),
        ("headers", DIRECT, "a.b", False),
    ],
)
def test_a_filter_is_in_place_where_the_exchange_applies_it(kind: str, which: str, value: str, in_place: bool) -> None:
    asked = {"mine": said(which, value)}
    found = subscription(EXCHANGE, asked, kind)
    assert found.filters == (asked if in_place else {})
    assert (found.key == value.encode()) is (in_place or (kind == "fanout" and not value))


def test_a_pattern_is_none_of_a_direct_exchange() -> None:
    """A message passes "if and only if" it matches the filters. A direct exchange takes a pattern literally."""
    with pytest.raises(AmqpError, match="is direct"):
        subscription(EXCHANGE, {"f": said(TOPIC, "a.*")}, "direct")


@pytest.mark.parametrize("code", [ULong(0x468C00000001), Symbol(TOPIC)])
def test_a_filter_has_two_names(code: ULong | Symbol) -> None:
    asked = {"f": Described(code, "a.b")}
    assert subscription(EXCHANGE, asked, "topic") == (b"a.b", b"", asked)


def test_one_filter_is_in_place_and_the_others_are_not() -> None:
    """3.5.8: a message passes a set if it passes each of its filters; a second binding would add messages."""
    asked = {"s": said(SELECTOR, "a = 1"), "one": said(TOPIC, "a.*"), "two": said(TOPIC, "*.b")}
    assert subscription(EXCHANGE, asked, "topic") == (b"a.*", b"", {"one": asked["one"]})


def test_the_key_of_the_address_counts_before_filters() -> None:
    address = ExchangeAddress(b"x", b"a.b")
    asked = {"other": said(TOPIC, "c"), "same": said(TOPIC, "a.b")}
    assert subscription(address, asked, "topic") == (b"a.b", b"", {"same": asked["same"]})
    assert subscription(address, asked, None) == (b"a.b", b"", {})
    assert subscription(ExchangeAddress(b"x", b""), None, "direct") == (b"", b"", {})


def test_headers_are_arguments_of_the_binding() -> None:
    asked = {"h": said(HEADERS, {"x-match": "any", "region": "eu"})}
    found = subscription(EXCHANGE, asked, "headers")
    assert found.filters == asked
    assert [(entry.key, entry.kind, entry.value) for entry in tables.entries(found.arguments)] == [
        (b"x-match", b"S", b"any"),
        (b"region", b"S", b"eu"),
    ]
    assert subscription(EXCHANGE, asked, "topic") == (b"#", b"", {})


@pytest.mark.parametrize(
    "value",
    [
        None, "a.b", 7, Described(7, "a.b"), Described(Symbol("other"), "a.b"), said(TOPIC, 7), said(TOPIC, "a" * 256),
        said(HEADERS, "a"), said(HEADERS, {"a": [1]}), said(HEADERS, {7: "a"}), said(HEADERS, {"a" * 256: 1}),
    ],
)  # fmt: skip
def test_an_unknown_filter_is_not_in_place(value: Any) -> None:
    for kind in ("topic", "headers"):
        assert subscription(EXCHANGE, {"f": value}, kind).filters == {}


def test_no_filter_is_in_place_at_an_unknown_exchange_type() -> None:
    assert subscription(EXCHANGE, {"f": said(TOPIC, "a.*")}, None) == (b"a.*", b"", {})
    assert subscription(EXCHANGE, {"f": said(HEADERS, {})}, None) == (b"#", b"", {})


def test_the_types_of_predeclared_exchanges_are_known() -> None:
    assert (known_kind(b"amq.topic"), known_kind(b"amq.match"), known_kind(b"x")) == ("topic", "headers", None)


@pytest.mark.parametrize(
    "source",
    [
        Source(durable=Durability.CONFIGURATION), Source(durable=Durability.UNSETTLED_STATE), Source(timeout=1),
        Source(expiry_policy=ExpiryPolicy.NEVER), Source(expiry_policy=ExpiryPolicy.CONNECTION_CLOSE),
    ],
)  # fmt: skip
def test_a_link_from_an_exchange_lasts_no_longer_than_itself(source: Source) -> None:
    with pytest.raises(AmqpError, match="declare a queue, bind it, and attach to /queues/NAME") as refusal:
        check_terminus(source, exchange=True)
    assert refusal.value.condition is Condition.NOT_IMPLEMENTED
    check_terminus(source, exchange=False)


def test_browsing_a_queue_is_refused() -> None:
    with pytest.raises(AmqpError, match="browsing"):
        check_terminus(Source(distribution_mode="copy"), exchange=False)
    check_terminus(Source(distribution_mode="copy"), exchange=True)
    check_terminus(Source(expiry_policy=ExpiryPolicy.LINK_DETACH), exchange=True)


@pytest.mark.parametrize("value", ["first", "last", "next", "7D", ULong(0), Int(5), Timestamp(1_700_000_000_000)])
def test_the_reader_of_a_stream_states_its_start(value: Any) -> None:
    asked = {"s": said(SELECTOR, "a = 1"), "offset": said("rabbitmq:stream-offset-spec", value)}
    assert stream_offset(asked) == (
        value if isinstance(value, str | Timestamp) else int(value),
        {"offset": asked["offset"]},
    )


@pytest.mark.parametrize(
    "value", ["", "bogus", "0D", "7x", "7D ", Int(-1), ULong(2**63), Timestamp(-1), True, None, 1.5]
)
def test_an_invalid_stream_position_is_none(value: Any) -> None:
    """RabbitMQ 3.10 ends the whole connection (541) for some of them."""
    assert stream_offset({"offset": said("rabbitmq:stream-offset-spec", value), "o": value}) == (None, {})
