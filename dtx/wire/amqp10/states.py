"""Errors, and the states of a delivery (AMQP 1.0, 2.8.14, 3.4; transactions, 4.5.5 and 4.5.6)."""

from dataclasses import replace
from typing import Any, Final

from dtx.wire.amqp10.composite import (
    BINARY,
    BOOLEAN,
    FIELDS,
    STRING,
    SYMBOL,
    UINT,
    ULONG,
    Composite,
    composite,
    field,
    one_of,
)
from dtx.wire.amqp10.errors import MAX_DESCRIPTION, AmqpError, Condition
from dtx.wire.amqp10.values import Described


@composite(0x1D, "amqp:error:list")
class Error(Composite):
    """What went wrong, as a peer is told; a condition may be one of the peer's own."""

    condition: str = field(SYMBOL)
    description: str | None = field(STRING, default=None)
    info: dict[str, Any] | None = field(FIELDS, default=None)


ERROR: Final = one_of("error", (Error,))


def told(error: AmqpError) -> Error:
    """*error* as the peer is told it."""
    words = error.reason.encode("utf-8", "replace")[:MAX_DESCRIPTION].decode("utf-8", "ignore")
    return Error(condition=error.condition, description=words)


INTERNAL: Final = Error(condition=Condition.INTERNAL_ERROR, description="internal error")
"""What a peer is told of our own mistakes."""


@composite(0x23, "amqp:received:list")
class Received(Composite):
    """So much of the delivery has been received; no outcome yet."""

    section_number: int = field(UINT)
    section_offset: int = field(ULONG)


@composite(0x24, "amqp:accepted:list")
class Accepted(Composite):
    """The message was processed."""


@composite(0x25, "amqp:rejected:list")
class Rejected(Composite):
    """The message is invalid and cannot be processed."""

    error: Error | None = field(ERROR, default=None)


@composite(0x26, "amqp:released:list")
class Released(Composite):
    """The message was not and will not be processed."""


@composite(0x27, "amqp:modified:list")
class Modified(Composite):
    """As released, with changes to the message at the source."""

    delivery_failed: bool = field(BOOLEAN, default=False)
    undeliverable_here: bool = field(BOOLEAN, default=False)
    message_annotations: dict[str, Any] | None = field(FIELDS, default=None)


@composite(0x33, "amqp:declared:list")
class Declared(Composite):
    """A transaction was declared; the outcome of declare."""

    txn_id: bytes = field(BINARY)


Outcome = Accepted | Rejected | Released | Modified | Declared
OUTCOME: Final = one_of("outcome", (Accepted, Rejected, Released, Modified, Declared), others=True)


@composite(0x34, "amqp:transactional-state:list")
class TransactionalState(Composite):
    """The delivery, or the outcome, belongs to a transaction."""

    txn_id: bytes = field(BINARY)
    outcome: Outcome | Described | None = field(OUTCOME, default=None)


DeliveryState = Received | Outcome | TransactionalState | Described
"""``Described``: one that only the peer knows."""
STATE: Final = one_of(
    "delivery-state",
    (Received, Accepted, Rejected, Released, Modified, Declared, TransactionalState),
    others=True,
)


def bare(state: DeliveryState | None) -> DeliveryState | None:
    """*state* without what a peer may have made as long as it liked: no frame is too small for it."""
    match state:
        case Rejected():
            return Rejected()
        case Modified():
            return replace(state, message_annotations=None)
        case TransactionalState(outcome=Rejected()):
            return replace(state, outcome=Rejected())
        case TransactionalState(outcome=Modified() as outcome):
            return replace(state, outcome=replace(outcome, message_annotations=None))
        case _:
            return state


ACCEPTED: Final = Accepted()
RELEASED: Final = Released()
