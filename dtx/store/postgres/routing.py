"""Where a message goes: from exchange to exchange until there are only queues, each once."""

from collections.abc import Mapping, Sequence
from typing import Final

from dtx.store.postgres.exchanges import Exchange, Queue
from dtx.store.postgres.matching import ExchangeType
from dtx.store.postgres.values import kind_name
from dtx.wire.amqp09 import properties, tables
from dtx.xa.codes import ReplyCode, XaError

CC: Final = b"CC"
BCC: Final = b"BCC"


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


def sender_selected(raw: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """The further routing keys of a message, in its headers CC and BCC, and what consumers get to see.

    Both are arrays of strings; what else is in the array is passed over. Consumers see CC, and never BCC ("the BCC key
    and value will be removed from the message prior to delivery", RabbitMQ, Sender-selected Distribution).

    Args:
        raw: properties as received.

    Returns:
        The keys, in order, and the properties to store.

    Raises:
        XaError: 406 when one of them is no array.
        WireError: 502 when the properties are malformed.
    """
    if CC not in raw:  # as in nearly every message: no need to look any closer; BCC has it too
        return (), raw
    view = properties.read(raw)
    keys: list[bytes] = []
    hidden = False
    for name in (CC, BCC):
        entry = view.header(name)
        if entry is None:
            continue
        if entry.kind != b"A":
            reason = f"header {name.decode()} must be an array of routing keys, not {kind_name(entry)}"
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"invalid message: {reason}")
        hidden = hidden or name == BCC
        keys += (item.value for item in tables.items(entry.value) if item.kind == b"S")
    return tuple(keys), properties.remove_headers(raw, (BCC,)) if hidden else raw
