"""Addresses of nodes, and the filters of links from exchanges.

Addresses are ``/queues/NAME``, ``/exchanges/NAME/KEY``, ``/exchanges/NAME``, and a plain name, a queue's, as RabbitMQ 4
writes them ("Addresses", version 2): names and keys are percent-encoded UTF-8. Behind ``/exchanges/NAME`` the routing
key is the message's subject.

A filter is in place where the exchange itself does what the filter says; dtx looks into no message. "The receiving
endpoint sets its desired filter, the sending endpoint sets the filter actually in place" (AMQP 1.0, 3.5.3): what cannot
be had is not refused, but missing in the answer. Which filters there are, the registry of AMQP's filters says
(``apache.org``), as Qpid and RabbitMQ 3 know them.
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
"""Octets of a name: what AMQP 0-9 can say."""


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
        name: its name; empty for the default one.
        key: the routing key; ``None`` for the message's subject.
    """

    name: bytes
    key: bytes | None


Address = QueueAddress | ExchangeAddress


def parse(address: object) -> Address:
    """What *address*, of a source, of a target or in ``to``, is the address of.

    Raises:
        AmqpError: invalid-field, it is none that dtx knows.
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
        Condition.INVALID_FIELD, f"{shown} is no address: use /queues/NAME, /exchanges/NAME/KEY or the name of a queue"
    )


def route(address: Address, subject: str | None = None) -> tuple[bytes, bytes]:
    """Exchange and routing key of a message for *address*; its *subject* is the key where the address has none."""
    if isinstance(address, QueueAddress):
        return b"", address.name
    return address.name, (subject or "").encode() if address.key is None else address.key


def of_queue(name: bytes) -> str:
    """The address of a queue."""
    return _QUEUES + quote(name, safe="")


def reply_name(address: str) -> bytes | None:
    """The name that AMQP 0-9 has in ``reply-to`` for *address*, if it is that of a queue."""
    try:
        found = parse(address)
    except AmqpError:
        return None
    return found.name if isinstance(found, QueueAddress) else None


COPY: Final = "copy"
"""The distribution mode in which messages stay at their node for others (std-dist-mode, 3.5.7)."""
MOVE: Final = "move"
"""That in which they do not."""


class _Filter(StrEnum):
    """What of a message decides."""

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
"""By type of exchange, the key with which a queue gets all messages."""
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
    """Where the reader of a stream wants to begin, as RabbitMQ 4 has that filter.

    Returns:
        ``first``, ``last``, ``next``, an age, an offset or a time; ``None`` where it does not say. And that filter,
        which is in place then.
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
    """A binding, and what it does for the client.

    Args:
        key: routing key of the binding.
        arguments: of the binding, a table without its length.
        filters: those that are in place with it, as the client has named them.
    """

    key: bytes
    arguments: bytes
    filters: dict[str, Any]


def check_terminus(source: Source, *, exchange: bool) -> None:
    """Refuse what a source cannot be.

    Args:
        source: as the client asks for it.
        exchange: whether its messages come from one, and wait for the link in a queue that goes with it.

    Raises:
        AmqpError: not-implemented; it says what to do instead.
    """
    if not exchange:
        if source.distribution_mode == COPY:
            raise AmqpError(Condition.NOT_IMPLEMENTED, "browsing (distribution-mode copy): what a queue sends is taken")
        return
    lasting = source.expiry_policy in (ExpiryPolicy.NEVER, ExpiryPolicy.CONNECTION_CLOSE)
    if lasting or source.timeout or source.durable is not Durability.NONE:
        reason = "a link from an exchange goes with its messages: for a durable subscription declare a queue, bind it"
        raise AmqpError(Condition.NOT_IMPLEMENTED, f"{reason}, and attach to /queues/NAME")


def known_kind(exchange: bytes) -> str | None:
    """The type of an *exchange* that every virtual host has."""
    return _PREDECLARED.get(exchange)


def subscription(address: ExchangeAddress, asked: dict[str, Any] | None, kind: str | None) -> Subscription:
    """What a link takes of an exchange.

    The key of the address counts before all filters. A key that comes from a filter is used at an exchange whose type
    is not known, too; whether that does what the filter says nobody can tell, so it is not said to be in place.

    Args:
        address: of the exchange.
        asked: the filters that the client wants.
        kind: the type of the exchange; ``None`` where it is not known.

    Raises:
        AmqpError: precondition-failed, it would get no message: a direct exchange, and no key.
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
    """Those of the filters that dtx knows, and that are well-formed: "of a described type"; null is none (3.5.8)."""
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
    which, said = found
    return None if which is _Filter.HEADERS else str(said).encode()


def _does(found: _Known, kind: str | None) -> bool:
    """Whether an exchange of that *kind* does what the filter says."""
    which, said = found
    if which is _Filter.HEADERS:
        return kind == _HEADERS
    # Without wildcards a pattern matches itself alone, as a key does.
    plain = not {"*", "#"}.intersection(str(said).split("."))
    return kind == (_TOPIC if which is _Filter.TOPIC else _DIRECT) or (plain and kind in (_TOPIC, _DIRECT))


def _table(found: _Known) -> bytes | None:
    """Arguments of a binding that are what the filter says; ``None`` where AMQP 0-9 cannot say it."""
    entries = []
    for name, value in found[1].items():
        field = to_field(value)
        key = str(name).encode()
        if not isinstance(name, str) or field is None or len(key) > tables.MAX_SHORT:
            return None
        entries.append(tables.entry(key, *field))
    return b"".join(entries)
