"""Where a message goes: from exchange to exchange until there are only queues, each once."""

from collections.abc import Mapping, Sequence

from dtx.store.postgres.exchanges import Exchange, Queue
from dtx.store.postgres.matching import ExchangeType


def walk(
    start: Exchange, keys: Sequence[bytes], headers: bytes, exchanges: Mapping[bytes, Exchange]
) -> tuple[tuple[Queue, ...], bool]:
    """Follow the bindings from *start*. Each exchange is passed once, so bindings may form cycles.

    Args:
        start: where the message was published to.
        keys: its routing keys.
        headers: its headers table, without the length.
        exchanges: by name, for the alternate exchange of one that matches nothing.

    Returns:
        The queues, each once, and whether the keys alone decided: no exchange on the way looks at headers.

    Raises:
        WireError: 502 when an exchange looks at headers, and they are malformed.
    """
    found: dict[Queue, None] = {}
    seen = {start}
    waiting = [start]
    by_keys = True
    while waiting:
        exchange = waiting.pop()
        by_keys = by_keys and exchange.kind is not ExchangeType.HEADERS
        matched = False
        for destination in exchange.matcher.match(keys, headers):
            matched = True
            if isinstance(destination, Queue):
                found[destination] = None
            elif destination not in seen:
                seen.add(destination)
                waiting.append(destination)
        if not matched and exchange.alternate is not None:
            alternate = exchanges.get(exchange.alternate)
            if alternate is not None and alternate not in seen:
                seen.add(alternate)
                waiting.append(alternate)
    return tuple(found), by_keys
