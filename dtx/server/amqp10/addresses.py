"""Addresses of nodes: ``/queues/NAME``, ``/exchanges/NAME/KEY``, ``/exchanges/NAME``, and a plain name, a queue's.

As RabbitMQ 4 writes them ("Addresses", version 2): names and keys are percent-encoded UTF-8. Behind ``/exchanges/NAME``
the routing key is the message's subject.
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from dtx.wire.amqp10.errors import AmqpError, Condition

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
