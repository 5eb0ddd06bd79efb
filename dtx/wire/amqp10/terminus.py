"""Sources, targets, and the coordinator (AMQP 1.0, 3.5; transactions, 4.5.1 to 4.5.3 and 4.5.7)."""

from enum import Enum
from typing import Any, Final

from dtx.wire.amqp10.composite import (
    ANY,
    BINARY,
    BOOLEAN,
    FIELDS,
    SYMBOL,
    SYMBOLS,
    UINT,
    Composite,
    choice,
    composite,
    field,
    one_of,
)
from dtx.wire.amqp10.states import OUTCOME, Outcome
from dtx.wire.amqp10.values import Described, Value


class Durability(Enum):
    """terminus-durability."""

    NONE = 0
    CONFIGURATION = 1
    UNSETTLED_STATE = 2


class ExpiryPolicy(Enum):
    """terminus-expiry-policy."""

    LINK_DETACH = "link-detach"
    SESSION_END = "session-end"
    CONNECTION_CLOSE = "connection-close"
    NEVER = "never"


class TransactionCapability(Enum):
    """txn-capability."""

    LOCAL = "amqp:local-transactions"
    DISTRIBUTED = "amqp:distributed-transactions"
    PROMOTABLE = "amqp:promotable-transactions"
    MULTI_TXNS_PER_SSN = "amqp:multi-txns-per-ssn"
    MULTI_SSNS_PER_TXN = "amqp:multi-ssns-per-txn"


_DURABILITY: Final = choice(UINT, Durability)
_EXPIRY: Final = choice(SYMBOL, ExpiryPolicy)


@composite(0x28, "amqp:source:list")
class Source(Composite):
    """Where messages of a link come from. Times in seconds; what an address means is for the node to say."""

    address: Value = field(ANY, default=None)
    durable: Durability = field(_DURABILITY, default=Durability.NONE)
    expiry_policy: ExpiryPolicy = field(_EXPIRY, default=ExpiryPolicy.SESSION_END)
    timeout: int = field(UINT, default=0)
    dynamic: bool = field(BOOLEAN, default=False)
    dynamic_node_properties: dict[str, Any] | None = field(FIELDS, default=None)
    distribution_mode: str | None = field(SYMBOL, default=None)
    filter: dict[str, Any] | None = field(FIELDS, default=None)
    default_outcome: Outcome | Described | None = field(OUTCOME, default=None)
    outcomes: tuple[str, ...] = field(SYMBOLS, default=())
    capabilities: tuple[str, ...] = field(SYMBOLS, default=())


@composite(0x29, "amqp:target:list")
class Target(Composite):
    """Where messages of a link go to."""

    address: Value = field(ANY, default=None)
    durable: Durability = field(_DURABILITY, default=Durability.NONE)
    expiry_policy: ExpiryPolicy = field(_EXPIRY, default=ExpiryPolicy.SESSION_END)
    timeout: int = field(UINT, default=0)
    dynamic: bool = field(BOOLEAN, default=False)
    dynamic_node_properties: dict[str, Any] | None = field(FIELDS, default=None)
    capabilities: tuple[str, ...] = field(SYMBOLS, default=())


@composite(0x30, "amqp:coordinator:list")
class Coordinator(Composite):
    """The target of a control link."""

    capabilities: tuple[str, ...] = field(SYMBOLS, default=())


@composite(0x31, "amqp:declare:list")
class Declare(Composite):
    """Begin a transaction; the body of a message to a coordinator."""

    global_id: Value = field(ANY, default=None)


@composite(0x32, "amqp:discharge:list")
class Discharge(Composite):
    """End a transaction; the body of a message to a coordinator."""

    txn_id: bytes = field(BINARY)
    fail: bool = field(BOOLEAN, default=False)


SOURCE: Final = one_of("source", (Source,), others=True)
TARGET: Final = one_of("target", (Target, Coordinator), others=True)
