"""What binding.query and exchange.query of the AMQP 0-9 preview ask a virtual host for."""

from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.facts import BindingFacts, ExchangeFacts, search
from dtx.store.postgres.topology import VirtualHost
from dtx.store.postgres.values import in_order

__all__ = ["BindingFacts", "ExchangeFacts", "binding_facts", "exchange_facts"]


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
    """binding.query; see :func:`dtx.store.facts.search`.

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
    return search(
        _bound(vhost, exchange),
        (lambda each: each.destination_kind is DestinationKind.QUEUE and each.destination == queue) if queue else None,
        (lambda each: each.routing_key == routing_key) if routing_key else None,
        (lambda each: each.arguments == wanted) if wanted else None,
    )
