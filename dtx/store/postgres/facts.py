"""The answers to binding.query and exchange.query of the AMQP 0-9 preview."""

from collections.abc import Callable
from dataclasses import dataclass

from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres.topology import VirtualHost
from dtx.store.postgres.values import in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingFacts:
    """The bits of binding.query-ok; none is set when what was asked for is there."""

    exchange_not_found: bool = False
    queue_not_found: bool = False
    queue_not_matched: bool = False
    key_not_matched: bool = False
    args_not_matched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The fields of exchange.query-ok; *arguments* as on the wire, without the length."""

    type: bytes = b""
    durable: bool = False
    not_found: bool = False
    arguments: bytes = b""


def exchange_facts(vhost: VirtualHost, name: bytes) -> ExchangeFacts:
    """exchange.query: "If not specified explicitly the default exchange is implied"."""
    exchange = vhost.exchanges.get(name)
    if exchange is None:
        return ExchangeFacts(not_found=True)
    return ExchangeFacts(type=exchange.kind.encode(), durable=exchange.durable, arguments=exchange.arguments)


def _bound(vhost: VirtualHost, exchange: bytes) -> list[BindingRow]:
    """What leads out of *exchange*; out of the default exchange to each queue, by its name."""
    if exchange:
        return list(vhost.exchanges[exchange].bindings)
    return [BindingRow(vhost.name, exchange, DestinationKind.QUEUE, name, name) for name in vhost.queues]


def binding_facts(
    vhost: VirtualHost, exchange: bytes, queue: bytes, routing_key: bytes, arguments: bytes
) -> BindingFacts:
    """binding.query.

    "If populated" a queue, key or arguments narrow down what is searched for. What does not match says so, and is then
    left aside; so at least one bit is set unless one binding has all that was asked for.

    Args:
        vhost: where.
        exchange: the source; empty for the default exchange.
        queue: the destination; empty for any.
        routing_key: empty for any.
        arguments: as on the wire, without the length; empty for any.

    Raises:
        WireError: 502 when *arguments* are malformed.
    """
    wanted = in_order(arguments)
    exchange_found = exchange in vhost.exchanges
    queue_found = not queue or queue in vhost.queues
    if not exchange_found or not queue_found:
        return BindingFacts(exchange_not_found=not exchange_found, queue_not_found=not queue_found)
    candidates = _bound(vhost, exchange)

    def narrow(matches: Callable[[BindingRow], bool]) -> bool:
        """Keep what *matches*; whether there was anything."""
        nonlocal candidates
        matching = [binding for binding in candidates if matches(binding)]
        candidates = matching or candidates
        return bool(matching)

    return BindingFacts(
        queue_not_matched=bool(queue)
        and not narrow(lambda each: each.destination_kind is DestinationKind.QUEUE and each.destination == queue),
        key_not_matched=bool(routing_key) and not narrow(lambda each: each.routing_key == routing_key),
        args_not_matched=bool(wanted) and not narrow(lambda each: each.arguments == wanted),
    )
