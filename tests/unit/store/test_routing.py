"""Routing through exchanges to queues, and the additional keys of a message."""

from typing import Any

import pika
import pytest

from dtx.log.changes import DestinationKind
from dtx.store.postgres import exchanges
from dtx.store.postgres.property_scan import sender_selected
from dtx.store.postgres.topology import VirtualHost
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import ReplyCode, XaError
from tests.support.topology import names, table, virtual_host

QUEUE, EXCHANGE = DestinationKind.QUEUE, DestinationKind.EXCHANGE
ME = object()


@pytest.fixture
def vhost() -> VirtualHost:
    """Queues a, b, c and exchanges x, y, z of type fanout, d of type direct."""
    made = virtual_host()
    for name in (b"a", b"b", b"c"):
        made.declare_queue(name, ME)
    for name in (b"x", b"y", b"z"):
        made.declare_exchange(name, b"fanout")
    made.declare_exchange(b"d", b"direct")
    return made


def test_the_default_exchange_leads_to_the_queue_of_that_name(vhost: VirtualHost) -> None:
    """3.1.3.1: "each message queue … bound to the default exchange … using the queue's name as the routing key"."""
    assert names(vhost.route(b"", b"a")) == ["a"]
    assert vhost.route(b"", b"z") == ()
    assert names(vhost.route(b"", b"a", more=(b"c", b"a", b"z"))) == ["a", "c"]


def test_an_exchange_that_is_not_there_leads_nowhere(vhost: VirtualHost) -> None:
    assert vhost.route(b"nope", b"a") == ()
    assert vhost.route(b"nope", b"a", more=(b"b",)) == ()


def test_a_queue_gets_a_message_once_by_however_many_ways(vhost: VirtualHost) -> None:
    vhost.bind(b"x", QUEUE, b"a", b"1")
    vhost.bind(b"x", QUEUE, b"a", b"2")
    vhost.bind(b"x", EXCHANGE, b"y", b"")
    vhost.bind(b"y", QUEUE, b"a", b"")
    vhost.bind(b"y", QUEUE, b"b", b"")
    assert names(vhost.route(b"x", b"")) == ["a", "b"]


def test_bindings_may_form_cycles(vhost: VirtualHost) -> None:
    """RabbitMQ, Exchange to exchange bindings: "cycles … are detected and eliminated"."""
    for source, destination in ((b"x", b"y"), (b"y", b"z"), (b"z", b"x"), (b"y", b"y")):
        vhost.bind(source, EXCHANGE, destination, b"")
    vhost.bind(b"z", QUEUE, b"a", b"")
    assert names(vhost.route(b"y", b"")) == ["a"]


def alternate(vhost: VirtualHost, name: bytes, to: str, kind: bytes = b"direct") -> None:
    vhost.declare_exchange(name, kind, arguments=table({"alternate-exchange": to}))


def test_an_unmatched_message_goes_to_the_alternate_exchange(vhost: VirtualHost) -> None:
    """RabbitMQ, Alternate exchanges: used if an exchange cannot route a message to any queue."""
    alternate(vhost, b"first", "x")
    vhost.bind(b"first", QUEUE, b"a", b"k")
    vhost.bind(b"x", QUEUE, b"b", b"")
    assert names(vhost.route(b"first", b"k")) == ["a"]
    assert names(vhost.route(b"first", b"other")) == ["b"]
    assert names(vhost.route(b"first", b"other", more=(b"k",))) == ["a"]


def test_alternate_exchanges_may_be_missing_or_form_cycles(vhost: VirtualHost) -> None:
    alternate(vhost, b"one", "two")
    alternate(vhost, b"two", "one")
    alternate(vhost, b"self", "self")
    alternate(vhost, b"lost", "nowhere")
    for name in (b"one", b"two", b"self", b"lost"):
        assert vhost.route(name, b"k") == ()
    vhost.declare_exchange(b"nowhere", b"fanout")
    vhost.bind(b"nowhere", QUEUE, b"a", b"")
    assert names(vhost.route(b"lost", b"k")) == ["a"]


def test_an_exchange_without_queues_counts_as_matched(vhost: VirtualHost) -> None:
    """As in RabbitMQ: a binding to an exchange is a match, even if it leads to no queue."""
    alternate(vhost, b"first", "x", b"fanout")
    vhost.bind(b"first", EXCHANGE, b"y", b"")
    vhost.bind(b"x", QUEUE, b"a", b"")
    assert vhost.route(b"first", b"") == ()


@pytest.mark.parametrize("kind", [b"direct", b"topic"])
def test_further_keys_count_as_the_first_does(vhost: VirtualHost, kind: bytes) -> None:
    """RabbitMQ, Sender-selected distribution: routed to all destinations matching any of the keys."""
    vhost.declare_exchange(b"k", kind)
    for queue in (b"a", b"b", b"c"):
        vhost.bind(b"k", QUEUE, queue, queue)
    assert names(vhost.route(b"k", b"a", more=(b"c", b"a"))) == ["a", "c"]


def test_a_route_follows_every_change_of_the_topology(vhost: VirtualHost) -> None:
    """Routes are cached. A cached route must never be outdated."""

    def routed() -> list[str]:
        return names(vhost.route(b"d", b"k"))

    assert routed() == []
    vhost.bind(b"d", QUEUE, b"a", b"k")
    assert routed() == ["a"]
    vhost.bind(b"d", EXCHANGE, b"x", b"k")
    vhost.bind(b"x", QUEUE, b"b", b"")
    assert routed() == ["a", "b"]
    vhost.unbind(b"d", QUEUE, b"a", b"k")
    assert routed() == ["b"]
    vhost.delete_queue(b"b", ME)
    assert routed() == []
    vhost.bind(b"x", QUEUE, b"c", b"")
    assert routed() == ["c"]
    vhost.delete_exchange(b"x")
    assert routed() == []
    vhost.delete_exchange(b"d")
    alternate(vhost, b"d", "later")
    assert routed() == []
    vhost.declare_exchange(b"later", b"fanout")
    vhost.bind(b"later", QUEUE, b"a", b"")
    assert routed() == ["a"]


def test_a_route_by_headers_is_found_for_each_message(vhost: VirtualHost) -> None:
    """Even if the headers exchange is not the first one."""
    vhost.bind(b"x", EXCHANGE, b"amq.headers", b"")
    vhost.bind(b"amq.headers", QUEUE, b"a", b"", table({"n": 1}))
    vhost.bind(b"amq.headers", QUEUE, b"b", b"", table({"n": 2}))
    assert names(vhost.route(b"x", b"", table({"n": 1}))) == ["a"]
    assert names(vhost.route(b"x", b"", table({"n": 2}))) == ["b"]
    assert vhost.route(b"x", b"") == ()
    with pytest.raises(WireError):
        vhost.route(b"x", b"", b"\xff")


def test_only_so_many_routes_are_remembered(vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "MAX_ROUTES", 3)
    vhost.bind(b"x", QUEUE, b"a", b"")
    for number in range(10):
        assert names(vhost.route(b"x", str(number).encode())) == ["a"]
        assert len(vhost._routes) <= 3


def encoded(**values: Any) -> bytes:
    return b"".join(pika.BasicProperties(**values).encode())


def headers_of(raw: bytes) -> Any:
    decoded = pika.BasicProperties()
    decoded.decode(raw)
    return decoded.headers


@pytest.mark.parametrize(
    ("headers", "keys", "seen"),
    [
        ({"a": 1}, (), {"a": 1}),
        ({"CC": ["x", "y"]}, (b"x", b"y"), {"CC": ["x", "y"]}),
        ({"BCC": ["x"]}, (b"x",), {}),
        ({"a": 1, "BCC": ["z"], "CC": ["x"], "b": 2}, (b"x", b"z"), {"a": 1, "CC": ["x"], "b": 2}),
        ({"CC": ["x", 5, b"octets", ["y"]]}, (b"x",), {"CC": ["x", 5, b"octets", ["y"]]}),
        ({"BCC": []}, (), {}),
        ({"other": "CC"}, (), {"other": "CC"}),
    ],
)
def test_keys_in_cc_and_bcc_are_routed_and_bcc_removed(
    headers: dict[str, Any], keys: tuple[bytes, ...], seen: dict[str, Any]
) -> None:
    """RabbitMQ, Sender-selected distribution: "The BCC key and value will be removed from the message"."""
    found, raw = sender_selected(encoded(headers=headers, message_id="m"))
    assert found == keys
    assert headers_of(raw) == seen
    assert properties.read(raw).message_id == b"m"


def test_a_message_without_further_keys_stays_as_it_is() -> None:
    raw = encoded(headers={"CC": ["x"]}, app_id="a")
    assert sender_selected(raw)[1] is raw
    assert sender_selected(properties.EMPTY) == ((), properties.EMPTY)


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_cc_and_bcc_are_arrays(name: str) -> None:
    """RabbitMQ: 406, "unacceptable_type_in_header"."""
    with pytest.raises(XaError, match=f"header {name} must be an array of routing keys, not longstr") as refused:
        sender_selected(encoded(headers={name: "x"}))
    assert refused.value.code is ReplyCode.PRECONDITION_FAILED
