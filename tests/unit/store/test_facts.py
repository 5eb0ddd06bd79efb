"""binding.query and exchange.query."""

import pytest

from dtx.log.changes import DestinationKind
from dtx.store.facts import BindingFacts, ExchangeFacts
from dtx.store.postgres.topology import VirtualHost, binding_facts, exchange_facts
from tests.support.topology import table, virtual_host

ME = object()
ONE, TWO = table({"a": 1, "b": 2}), table({"a": 2})


@pytest.fixture
def vhost() -> VirtualHost:
    """Exchange x is bound to queue q by k with arguments a=1 b=2, and to queue p by l with a=2."""
    made = virtual_host()
    made.declare_exchange(b"x", b"topic", arguments=ONE)
    for queue, key, arguments in ((b"q", b"k", ONE), (b"p", b"l", TWO)):
        made.declare_queue(queue, ME)
        made.bind(b"x", DestinationKind.QUEUE, queue, key, arguments)
    return made


def test_an_exchange_is_described(vhost: VirtualHost) -> None:
    """exchange.query-ok: type, durable, not-found, arguments; "If not specified … the default exchange is implied"."""
    assert exchange_facts(vhost, b"x") == ExchangeFacts(type=b"topic", arguments=ONE)
    assert exchange_facts(vhost, b"amq.fanout") == ExchangeFacts(type=b"fanout", durable=True)
    assert exchange_facts(vhost, b"") == ExchangeFacts(type=b"direct", durable=True)
    assert exchange_facts(vhost, b"nope") == ExchangeFacts(not_found=True)


THERE = BindingFacts()


@pytest.mark.parametrize(
    ("exchange", "queue", "key", "arguments", "expected"),
    [
        (b"x", b"", b"", b"", THERE),
        (b"x", b"q", b"", b"", THERE),
        (b"x", b"q", b"k", b"", THERE),
        (b"x", b"q", b"k", table({"b": 2, "a": 1}), THERE),
        (b"x", b"", b"l", TWO, THERE),
        (b"nope", b"", b"", b"", BindingFacts(exchange_not_found=True)),
        (b"x", b"nope", b"", b"", BindingFacts(queue_not_found=True)),
        (b"nope", b"nope", b"k", b"", BindingFacts(exchange_not_found=True, queue_not_found=True)),
        (b"amq.direct", b"q", b"", b"", BindingFacts(queue_not_matched=True)),
        (
            b"amq.direct",
            b"q",
            b"k",
            ONE,
            BindingFacts(queue_not_matched=True, key_not_matched=True, args_not_matched=True),
        ),
        (b"x", b"q", b"z", b"", BindingFacts(key_not_matched=True)),
        (b"x", b"", b"z", b"", BindingFacts(key_not_matched=True)),
        (b"x", b"q", b"k", table({"a": 1}), BindingFacts(args_not_matched=True)),
        (b"x", b"q", b"l", b"", BindingFacts(key_not_matched=True)),
        (b"x", b"q", b"k", TWO, BindingFacts(args_not_matched=True)),
        (b"", b"q", b"", b"", THERE),
        (b"", b"q", b"q", b"", THERE),
        (b"", b"q", b"k", b"", BindingFacts(key_not_matched=True)),
        (b"", b"", b"p", b"", THERE),
    ],
)
def test_a_binding_is_searched_for(
    vhost: VirtualHost, exchange: bytes, queue: bytes, key: bytes, arguments: bytes, expected: BindingFacts
) -> None:
    """binding.query: populated fields are searched for, others are ignored; default exchange: implied."""
    assert binding_facts(vhost, exchange, queue, key, arguments) == expected
