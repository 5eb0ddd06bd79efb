"""Exchanges and bindings by RabbitMQ's rules. The texts are RabbitMQ's; test_topology.py compares the codes with it."""

from itertools import pairwise

import pytest

from dtx.log.changes import BindingRow, Define, DestinationKind, ExchangeKey, ExchangeRow
from dtx.store.postgres.topology import VirtualHost
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.xa.codes import ReplyCode, XaError
from tests.support.topology import VHOST, names, refused, table, virtual_host

QUEUE, EXCHANGE = DestinationKind.QUEUE, DestinationKind.EXCHANGE
ME = object()


@pytest.fixture
def vhost() -> VirtualHost:
    return virtual_host()


def test_the_exchanges_of_the_standard_are_there(vhost: VirtualHost) -> None:
    """3.1.3: "the server MUST implement" direct and fanout, "amq." names each; topic, headers and match likewise."""
    assert {name: exchange.kind.value for name, exchange in vhost.exchanges.items()} == {
        b"": "direct",
        b"amq.direct": "direct",
        b"amq.fanout": "fanout",
        b"amq.topic": "topic",
        b"amq.headers": "headers",
        b"amq.match": "headers",
    }
    assert all(exchange.durable for exchange in vhost.exchanges.values())


def test_only_a_durable_exchange_is_written_to_the_log(vhost: VirtualHost) -> None:
    arguments = table({"alternate-exchange": "other"})
    assert vhost.declare_exchange(
        b"x", b"topic", durable=True, auto_delete=True, internal=True, arguments=arguments
    ) == Define(
        exchanges=(
            ExchangeRow(vhost=VHOST, name=b"x", type="topic", auto_delete=True, internal=True, arguments=arguments),
        )
    )
    assert vhost.exchanges[b"x"].alternate == b"other"
    assert vhost.declare_exchange(b"y", b"fanout") is None


def test_declaring_the_same_again_changes_nothing(vhost: VirtualHost) -> None:
    """exchange.declare: "if it already exists, verifies that it is of the correct and expected class"."""
    vhost.declare_exchange(b"x", b"topic", durable=True)
    there = vhost.exchanges[b"x"]
    assert vhost.declare_exchange(b"x", b"topic", durable=True, arguments=table({"mine": 1})) is None
    assert vhost.exchanges[b"x"] is there
    assert vhost.declare_exchange(b"amq.direct", b"direct", durable=True) is None


def test_a_declaration_that_differs_is_refused_by_name(vhost: VirtualHost) -> None:
    vhost.declare_exchange(b"x", b"topic")
    where = "for exchange 'x' in vhost 'v'"
    failed = ReplyCode.PRECONDITION_FAILED
    with refused(failed, f"inequivalent arg 'type' {where}: received 'direct' but current is 'topic'"):
        vhost.declare_exchange(b"x", b"direct")
    with refused(failed, f"inequivalent arg 'durable' {where}: received 'true' but current is 'false'"):
        vhost.declare_exchange(b"x", b"topic", durable=True)
    with refused(failed, f"inequivalent arg 'auto_delete' {where}: received 'true' but current is 'false'"):
        vhost.declare_exchange(b"x", b"topic", auto_delete=True)
    with refused(failed, f"inequivalent arg 'internal' {where}: received 'true' but current is 'false'"):
        vhost.declare_exchange(b"x", b"topic", internal=True)
    reason = (
        f"inequivalent arg 'alternate-exchange' {where}: received the value 'o' of type 'longstr' but current is none"
    )
    with refused(failed, reason):
        vhost.declare_exchange(b"x", b"topic", arguments=table({"alternate-exchange": "o"}))


def test_an_alternate_exchange_is_a_string(vhost: VirtualHost) -> None:
    reason = "invalid type 'signedint' for arg 'alternate-exchange' in exchange 'x' in vhost 'v'"
    with refused(ReplyCode.PRECONDITION_FAILED, reason):
        vhost.declare_exchange(b"x", b"direct", arguments=table({"alternate-exchange": 5}))
    assert b"x" not in vhost.exchanges


def test_an_unknown_type_closes_the_connection(vhost: VirtualHost) -> None:
    """exchange.declare: "If the type is not supported … connection exception with reply code 503"."""
    with pytest.raises(WireError, match="unknown exchange type 'nope'") as raised:
        vhost.declare_exchange(b"x", b"nope")
    assert raised.value.code is HardCode.COMMAND_INVALID


def test_names_of_the_server_cannot_be_taken(vhost: VirtualHost) -> None:
    """exchange.declare: "Exchange names starting with "amq." are reserved … access-refused"."""
    with refused(ReplyCode.ACCESS_REFUSED, "exchange name 'amq.mine' contains reserved prefix 'amq.*'"):
        vhost.declare_exchange(b"amq.mine", b"direct")


def test_the_default_exchange_is_not_to_be_touched(vhost: VirtualHost) -> None:
    vhost.declare_queue(b"q", ME)
    for operation in (
        lambda: vhost.declare_exchange(b"", b"direct", durable=True),
        lambda: vhost.find_exchange(b""),
        lambda: vhost.delete_exchange(b""),
        lambda: vhost.bind(b"", QUEUE, b"q", b"k"),
        lambda: vhost.unbind(b"", QUEUE, b"q", b"q"),
        lambda: vhost.bind(b"", EXCHANGE, b"amq.direct", b"k"),
        lambda: vhost.bind(b"amq.direct", EXCHANGE, b"", b"k"),
        lambda: vhost.unbind(b"amq.direct", EXCHANGE, b"", b"k"),
    ):
        with refused(ReplyCode.ACCESS_REFUSED, "operation not permitted on the default exchange"):
            operation()


def test_a_passive_declaration_finds_an_existing_exchange(vhost: VirtualHost) -> None:
    assert vhost.find_exchange(b"amq.topic") is vhost.exchanges[b"amq.topic"]
    with refused(ReplyCode.NOT_FOUND, "no exchange 'x' in vhost 'v'"):
        vhost.find_exchange(b"x")


def test_a_publish_to_a_missing_or_internal_exchange_is_refused(vhost: VirtualHost) -> None:
    """exchange.declare, internal: "may not be used directly by publishers"."""
    vhost.declare_exchange(b"inner", b"fanout", internal=True)
    assert vhost.publishable(b"") is vhost.exchanges[b""]
    with refused(ReplyCode.NOT_FOUND, "no exchange 'x' in vhost 'v'"):
        vhost.publishable(b"x")
    with refused(ReplyCode.ACCESS_REFUSED, "cannot publish to internal exchange 'inner' in vhost 'v'"):
        vhost.publishable(b"inner")


def test_deleting_an_exchange_takes_its_bindings_along(vhost: VirtualHost) -> None:
    """exchange.delete: "all queue bindings on the exchange are cancelled"."""
    vhost.declare_exchange(b"x", b"direct", durable=True)
    vhost.declare_queue(b"q", ME, durable=True)
    vhost.declare_queue(b"t", ME)
    vhost.bind(b"x", QUEUE, b"q", b"k")
    vhost.bind(b"x", QUEUE, b"t", b"k")
    vhost.bind(b"amq.fanout", EXCHANGE, b"x", b"")
    assert vhost.delete_exchange(b"x") == Define(
        removed_exchanges=(ExchangeKey(VHOST, b"x"),),
        removed_bindings=(
            BindingRow(VHOST, b"x", QUEUE, b"q", b"k"),
            BindingRow(VHOST, b"amq.fanout", EXCHANGE, b"x", b""),
        ),
    )
    assert not vhost.exchanges[b"amq.fanout"].bindings
    assert not vhost.queues[b"q"].into
    assert vhost.route(b"x", b"k") == ()


def test_deleting_a_missing_exchange_is_no_error(vhost: VirtualHost) -> None:
    assert vhost.delete_exchange(b"x") is None
    vhost.declare_exchange(b"transient", b"direct")
    assert vhost.delete_exchange(b"transient") is None


def test_exchanges_of_the_broker_cannot_be_deleted(vhost: VirtualHost) -> None:
    for name in (b"amq.direct", b"amq.not-there"):
        reason = f"deletion of system exchange '{name.decode()}' in vhost 'v' not allowed"
        with refused(ReplyCode.ACCESS_REFUSED, reason):
            vhost.delete_exchange(name)


def test_an_exchange_in_use_stays_if_asked_to(vhost: VirtualHost) -> None:
    """exchange.delete, if-unused: "only … if it has no queue bindings"; being a destination is no use."""
    vhost.declare_exchange(b"x", b"fanout")
    vhost.declare_exchange(b"y", b"fanout")
    vhost.bind(b"x", EXCHANGE, b"y", b"")
    with refused(ReplyCode.PRECONDITION_FAILED, "exchange 'x' in vhost 'v' in use"):
        vhost.delete_exchange(b"x", if_unused=True)
    vhost.delete_exchange(b"y", if_unused=True)
    vhost.delete_exchange(b"x", if_unused=True)


def test_a_binding_between_durable_things_is_for_the_log(vhost: VirtualHost) -> None:
    """queue.bind: "Bindings of durable queues to durable exchanges are automatically durable"."""
    vhost.declare_queue(b"q", ME, durable=True)
    vhost.declare_queue(b"t", ME)
    vhost.declare_exchange(b"x", b"direct")
    row = BindingRow(VHOST, b"amq.direct", QUEUE, b"q", b"k")
    assert vhost.bind(b"amq.direct", QUEUE, b"q", b"k") == Define(bindings=(row,))
    assert vhost.bind(b"amq.direct", QUEUE, b"t", b"k") is None
    assert vhost.bind(b"x", QUEUE, b"q", b"k") is None
    assert vhost.unbind(b"amq.direct", QUEUE, b"q", b"k") == Define(removed_bindings=(row,))
    assert vhost.unbind(b"amq.direct", QUEUE, b"t", b"k") is None


def test_a_binding_between_exchanges_is_made_and_removed(vhost: VirtualHost) -> None:
    row = BindingRow(VHOST, b"amq.direct", EXCHANGE, b"amq.fanout", b"k")
    assert vhost.bind(b"amq.direct", EXCHANGE, b"amq.fanout", b"k") == Define(bindings=(row,))
    assert vhost.unbind(b"amq.direct", EXCHANGE, b"amq.fanout", b"k") == Define(removed_bindings=(row,))


def test_binding_again_changes_nothing(vhost: VirtualHost) -> None:
    """queue.bind: "A server MUST allow ignore duplicate bindings"; the order of arguments makes no difference."""
    vhost.declare_queue(b"q", ME, durable=True)
    assert vhost.bind(b"amq.headers", QUEUE, b"q", b"", table({"a": 1, "b": 2})) is not None
    assert vhost.bind(b"amq.headers", QUEUE, b"q", b"", table({"b": 2, "a": 1})) is None
    assert vhost.unbind(b"amq.headers", QUEUE, b"q", b"", table({"b": 2, "a": 1})) is not None
    assert vhost.route(b"amq.headers", b"", table({"a": 1, "b": 2})) == ()


def test_both_ends_of_a_binding_are_there(vhost: VirtualHost) -> None:
    """queue.bind: not-found for an unknown exchange or queue; the exchange is looked up first."""
    with refused(ReplyCode.NOT_FOUND, "no exchange 'x' in vhost 'v'"):
        vhost.bind(b"x", QUEUE, b"q", b"")
    with refused(ReplyCode.NOT_FOUND, "no queue 'q' in vhost 'v'"):
        vhost.bind(b"amq.direct", QUEUE, b"q", b"")
    with refused(ReplyCode.NOT_FOUND, "no exchange 'y' in vhost 'v'"):
        vhost.bind(b"amq.direct", EXCHANGE, b"y", b"")


def test_unbinding_a_missing_binding_is_no_error(vhost: VirtualHost) -> None:
    vhost.declare_queue(b"q", ME)
    assert vhost.unbind(b"x", QUEUE, b"q", b"") is None
    assert vhost.unbind(b"amq.direct", QUEUE, b"z", b"") is None
    assert vhost.unbind(b"amq.direct", QUEUE, b"q", b"") is None


def test_a_refused_binding_leaves_nothing_behind(vhost: VirtualHost) -> None:
    vhost.declare_queue(b"q", ME)
    with pytest.raises(XaError, match="x-match"):
        vhost.bind(b"amq.headers", QUEUE, b"q", b"", table({"x-match": "some"}))
    assert not vhost.exchanges[b"amq.headers"].bindings
    assert not vhost.queues[b"q"].into


def test_an_exchange_is_deleted_with_its_last_outgoing_binding(vhost: VirtualHost) -> None:
    """exchange.declare, auto-delete: "deleted when all queues have finished using it"; but not before the first."""
    vhost.declare_exchange(b"x", b"fanout", durable=True, auto_delete=True)
    vhost.declare_queue(b"q", ME, durable=True)
    vhost.bind(b"x", QUEUE, b"q", b"1")
    vhost.bind(b"x", QUEUE, b"q", b"2")
    vhost.unbind(b"x", QUEUE, b"q", b"1")
    assert b"x" in vhost.exchanges
    assert vhost.unbind(b"x", QUEUE, b"q", b"2") == Define(
        removed_exchanges=(ExchangeKey(VHOST, b"x"),), removed_bindings=(BindingRow(VHOST, b"x", QUEUE, b"q", b"2"),)
    )


def test_a_chain_of_exchanges_goes_link_by_link(vhost: VirtualHost) -> None:
    """Deleting thousands of links must not depend on the recursion limit."""
    chain = [f"x{number}".encode() for number in range(5000)]
    for name in chain:
        vhost.declare_exchange(name, b"fanout", auto_delete=True)
    for source, destination in pairwise(chain):
        vhost.bind(source, EXCHANGE, destination, b"")
    vhost.declare_queue(b"q", ME)
    vhost.bind(chain[-1], QUEUE, b"q", b"")
    assert names(vhost.route(chain[0], b"any")) == ["q"]
    vhost.delete_queue(b"q", ME)
    assert len(vhost.exchanges) == 6


def test_an_exchange_bound_to_itself_can_go(vhost: VirtualHost) -> None:
    vhost.declare_exchange(b"x", b"fanout", durable=True, auto_delete=True)
    vhost.bind(b"x", EXCHANGE, b"x", b"")
    assert vhost.delete_exchange(b"x") == Define(
        removed_exchanges=(ExchangeKey(VHOST, b"x"),), removed_bindings=(BindingRow(VHOST, b"x", EXCHANGE, b"x", b""),)
    )
