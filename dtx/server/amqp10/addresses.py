"""Addresses of nodes, and the filters of links from exchanges.

Addresses are ``/queues/NAME``, ``/exchanges/NAME/KEY``, ``/exchanges/NAME``, and the plain name of a queue. As in
RabbitMQ 4 ("Addresses", version 2), names and keys are percent-encoded UTF-8. For ``/exchanges/NAME`` the routing key
is the subject of the message.

A filter is in place if the exchange itself can do it; dtx filters no messages. "The receiving endpoint sets its desired
filter, the sending endpoint sets the filter actually in place" (AMQP 1.0, 3.5.3): an unsupported filter is not refused,
but missing in the answer. The filters are those of the registry of AMQP filters (``apache.org``), as in Qpid and
RabbitMQ 3.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from dtx.server.amqp10.values import to_field
from dtx.wire.amqp09 import tables
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Durability, ExpiryPolicy, Source
from dtx.wire.amqp10.values import Described, Symbol, Timestamp, ULong, Value

_QUEUES: Final = "/queues/"
_EXCHANGES: Final = "/exchanges/"
_BAD_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")
_MAX_NAME: Final = 255
"""Bytes of a name: the limit of AMQP 0-9."""


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """A queue.

    Args:
        name: its name.
    """

    name: bytes


@dataclass(frozen=True, slots=True)
class ExchangeAddress:
    """An exchange.

    Args:
        name: its name; empty for the default exchange.
        key: the routing key; ``None`` if the subject of each message is the key.
    """

    name: bytes
    key: bytes | None


Address = QueueAddress | ExchangeAddress


def parse(address: object) -> Address:
    """Parse the *address* of a source or a target, or in ``to``.

    Raises:
        AmqpError: invalid-field, it is not an address that dtx knows.
    """
    if not isinstance(address, str) or not address:
        raise _invalid(address)
    if not address.startswith("/"):
        return QueueAddress(_name(address, address.encode()))
    if address.startswith(_QUEUES):
        return QueueAddress(_decoded(address, address[len(_QUEUES) :]))
    if address.startswith(_EXCHANGES):
        name, slash, key = address[len(_EXCHANGES) :].partition("/")
        return ExchangeAddress(_decoded(address, name), _decoded(address, key, empty=True) if slash else None)
    raise _invalid(address)


def _decoded(address: str, part: str, *, empty: bool = False) -> bytes:
    if "/" in part or _BAD_ESCAPE.search(part):
        raise _invalid(address)
    return _name(address, unquote_to_bytes(part), empty=empty)


def _name(address: str, name: bytes, *, empty: bool = False) -> bytes:
    if len(name) > _MAX_NAME or not (name or empty):
        raise _invalid(address)
    return name


def _invalid(address: object) -> AmqpError:
    shown = f"{address[:100]!r}" if isinstance(address, str) else f"a {type(address).__name__}"
    return AmqpError(
        Condition.INVALID_FIELD, f"{shown} is not an address: use /queues/NAME, /exchanges/NAME/KEY or a queue name"
    )


def route(address: Address, subject: str | None = None) -> tuple[bytes, bytes]:
    """Exchange and routing key of a message for *address*; *subject* is the key if the address has none."""
    if isinstance(address, QueueAddress):
        return b"", address.name
    return address.name, (subject or "").encode() if address.key is None else address.key


def of_queue(name: bytes) -> str:
    """The address of a queue."""
    return _QUEUES + quote(name, safe="")


def reply_name(address: str) -> bytes | None:
    """The ``reply-to`` of AMQP 0-9 for *address*; ``None`` unless it is the address of a queue."""
    try:
        found = parse(address)
    except AmqpError:
        return None
    return found.name if isinstance(found, QueueAddress) else None


COPY: Final = "copy"
"""The distribution mode in which messages stay at their node for other links (std-dist-mode, 3.5.7)."""
MOVE: Final = "move"
"""The distribution mode in which they do not stay."""


class _Filter(StrEnum):
    """The filters, by the part of a message that they match."""

    DIRECT = "apache.org:legacy-amqp-direct-binding:string"
    TOPIC = "apache.org:legacy-amqp-topic-binding:string"
    HEADERS = "apache.org:legacy-amqp-headers-binding:map"


_CODES: Final = {_Filter.DIRECT: 0x468C00000000, _Filter.TOPIC: 0x468C00000001, _Filter.HEADERS: 0x468C00000002}
_DESCRIPTORS: Final[dict[Value, _Filter]] = {
    **{Symbol(each.value): each for each in _Filter},
    **{ULong(code): each for each, code in _CODES.items()},
}
_DIRECT: Final = "direct"
_TOPIC: Final = "topic"
_HEADERS: Final = "headers"
_EVERYTHING: Final = {_TOPIC: b"#", "fanout": b"", _HEADERS: b""}
"""By exchange type, the key with which a queue gets all messages."""
_PREDECLARED: Final = {
    b"amq.direct": _DIRECT,
    b"amq.fanout": "fanout",
    b"amq.topic": _TOPIC,
    b"amq.headers": _HEADERS,
    b"amq.match": _HEADERS,
}


_STREAM_OFFSET: Final = Symbol("rabbitmq:stream-offset-spec")
_OFFSETS: Final = re.compile(r"first|last|next|[1-9][0-9]{0,9}[YMDhms]")
_MAX_OFFSET: Final = 2**63 - 1


def stream_offset(asked: dict[str, Any] | None) -> tuple[Value, dict[str, Any]]:
    """The start of a stream's reader, by the filter of RabbitMQ 4.

    Returns:
        ``first``, ``last``, ``next``, an age, an offset or a time, and the filter in place; ``None`` and no filter if
        *asked* has no valid one.
    """
    for name, each in (asked or {}).items():
        if isinstance(each, Described) and each.descriptor == _STREAM_OFFSET:
            value = each.value
            if isinstance(value, str) and _OFFSETS.fullmatch(value):
                return str(value), {name: each}
            if isinstance(value, Timestamp) and value >= 0:
                return value, {name: each}
            if isinstance(value, int) and not isinstance(value, bool | Timestamp) and 0 <= value <= _MAX_OFFSET:
                return int(value), {name: each}
    return None, {}


class Subscription(NamedTuple):
    """A binding, and the filters that it implements.

    Args:
        key: routing key of the binding.
        arguments: arguments of the binding, a table without its length.
        filters: the filters in place, by the names that the client gave them.
    """

    key: bytes
    arguments: bytes
    filters: dict[str, Any]


def check_terminus(source: Source, *, exchange: bool) -> None:
    """Refuse a source that dtx does not support.

    Args:
        source: the client's source.
        exchange: whether it is an exchange; then its messages wait in a queue that is deleted with the link.

    Raises:
        AmqpError: not-implemented, with a text that names an alternative.
    """
    if not exchange:
        if source.distribution_mode == COPY:
            raise AmqpError(Condition.NOT_IMPLEMENTED, "browsing (distribution-mode copy) of a queue is not supported")
        return
    lasting = source.expiry_policy in (ExpiryPolicy.NEVER, ExpiryPolicy.CONNECTION_CLOSE)
    if lasting or source.timeout or source.durable is not Durability.NONE:
        reason = "messages from an exchange end with the link: for a durable subscription declare a queue, bind it"
        raise AmqpError(Condition.NOT_IMPLEMENTED, f"{reason}, and attach to /queues/NAME")


def known_kind(exchange: bytes) -> str | None:
    """The type of *exchange* if every virtual host has it, else ``None``."""
    return _PREDECLARED.get(exchange)


def subscription(address: ExchangeAddress, asked: dict[str, Any] | None, kind: str | None) -> Subscription:
    """The binding for a link from an exchange.

    The key of the address has precedence over all filters. At an exchange of unknown type, the key of a filter is used
    too. dtx cannot know whether that exchange does what the filter says, so the filter is not in place.

    Args:
        address: the exchange.
        asked: the filters that the client requests.
        kind: the type of the exchange; ``None`` if it is not known.

    Raises:
        AmqpError: precondition-failed, the link would get no message: a direct exchange without a key.
    """
    wanted = _known(asked)
    if address.key is not None:
        same = [(name, found) for name, found in wanted if _does(found, kind) and _key(found) == address.key]
        return Subscription(address.key, b"", _named(asked, [name for name, _ in same]))
    for name, found in wanted:
        if _does(found, kind):
            table = _table(found) if found[0] is _Filter.HEADERS else b""
            return Subscription(_key(found) or b"", table or b"", _named(asked, [name]))
    if kind is None or kind not in (_DIRECT, *_EVERYTHING):
        key = next((key for _, found in wanted if (key := _key(found)) is not None), None)
        return Subscription(_EVERYTHING[_TOPIC] if key is None else key, b"", {})
    if kind == _DIRECT:
        shown = address.name.decode("utf-8", "replace")
        raise AmqpError(
            Condition.PRECONDITION_FAILED, f"exchange '{shown}' is direct: name a key, /exchanges/NAME/KEY, or a filter"
        )
    return Subscription(_EVERYTHING[kind], b"", {})


_Known = tuple[_Filter, Any]


def _known(asked: dict[str, Any] | None) -> list[tuple[str, _Known]]:
    """The filters that dtx knows and that are well-formed: "of a described type"; null is no filter (3.5.8)."""
    found: list[tuple[str, _Known]] = []
    for name, each in (asked or {}).items():
        if not isinstance(each, Described) or not isinstance(each.descriptor, Symbol | ULong):
            continue
        which = _DESCRIPTORS.get(each.descriptor)
        if which is _Filter.HEADERS:
            if isinstance(each.value, dict) and _table((which, each.value)) is not None:
                found.append((name, (which, each.value)))
        elif which is not None and isinstance(each.value, str) and len(each.value.encode()) <= tables.MAX_SHORT:
            found.append((name, (which, each.value)))
    return found


def _named(asked: dict[str, Any] | None, names: list[str]) -> dict[str, Any]:
    return {name: found for name, found in (asked or {}).items() if name in names}


def _key(found: _Known) -> bytes | None:
    which, value = found
    return None if which is _Filter.HEADERS else str(value).encode()


def _does(found: _Known, kind: str | None) -> bool:
    """Whether an exchange of type *kind* does what the filter says."""
    which, value = found
    if which is _Filter.HEADERS:
        return kind == _HEADERS
    # Without wildcards a pattern matches only itself, as a key does.
    plain = not {"*", "#"}.intersection(str(value).split("."))
    return kind == (_TOPIC if which is _Filter.TOPIC else _DIRECT) or (plain and kind in (_TOPIC, _DIRECT))


def _table(found: _Known) -> bytes | None:
    """The arguments of a binding for a headers filter; ``None`` if AMQP 0-9 cannot express one of its values."""
    entries = []
    for name, value in found[1].items():
        field = to_field(value)
        key = str(name).encode()
        if not isinstance(name, str) or field is None or len(key) > tables.MAX_SHORT:
            return None
        entries.append(tables.entry(key, *field))
    return b"".join(entries)
