"""The performatives (AMQP 1.0, 2.7), the types of their fields, and the frames and responses of SASL.

The types are errors (2.8.14), delivery states (3.4), sources and targets (3.5), and the coordinator (4.5). The
responses are those of PLAIN (RFC 4616), ANONYMOUS (RFC 4505) and EXTERNAL (RFC 4422, appendix A).
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from dtx.wire.amqp09 import handshake
from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp10 import composite as composites
from dtx.wire.amqp10.codec import Buffer
from dtx.wire.amqp10.composite import (
    ANY,
    BINARY,
    BOOLEAN,
    FIELDS,
    MAP,
    STRING,
    SYMBOL,
    SYMBOLS,
    UBYTE,
    UINT,
    ULONG,
    USHORT,
    Composite,
    choice,
    composite,
    field,
    one_of,
)
from dtx.wire.amqp10.errors import MAX_DESCRIPTION, AmqpError, Condition, malformed
from dtx.wire.amqp10.values import Described, Value


@composite(0x1D, "amqp:error:list")
class Error(Composite):
    """An error for or from a peer. A peer may use conditions of its own."""

    condition: str = field(SYMBOL)
    description: str | None = field(STRING, default=None)
    info: dict[str, Any] | None = field(FIELDS, default=None)


ERROR: Final = one_of("error", (Error,))


def peer_error(error: AmqpError) -> Error:
    """Make the :class:`Error` for the peer, with a description of at most :data:`MAX_DESCRIPTION` bytes."""
    words = error.reason.encode("utf-8", "replace")[:MAX_DESCRIPTION].decode("utf-8", "ignore")
    return Error(condition=error.condition, description=words)


INTERNAL: Final = Error(condition=Condition.INTERNAL_ERROR, description="internal error")
"""The error for a peer after an unexpected exception in dtx."""


@composite(0x23, "amqp:received:list")
class Received(Composite):
    """The part of the delivery that has been received; no outcome yet."""

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
"""``Described`` is a state that only the peer knows."""
STATE: Final = one_of(
    "delivery-state",
    (Received, Accepted, Rejected, Released, Modified, Declared, TransactionalState),
    others=True,
)


def bare(state: DeliveryState | None) -> DeliveryState | None:
    """Return *state* without its parts of unlimited size, so that it fits the smallest frame."""
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
    """The source of the messages of a link; timeout in seconds. The node defines the meaning of an address."""

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
    """The target of the messages of a link; timeout in seconds."""

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


class Role(Enum):
    """The role of an endpoint of a link."""

    SENDER = False
    RECEIVER = True

    @property
    def other(self) -> "Role":
        """The role of the peer."""
        return Role(not self.value)


class SenderSettles(Enum):
    """sender-settle-mode."""

    UNSETTLED = 0
    SETTLED = 1
    MIXED = 2


class ReceiverSettles(Enum):
    """receiver-settle-mode. FIRST: the receiver settles at once. SECOND: it settles after the sender."""

    FIRST = 0
    SECOND = 1


_ROLE: Final = choice(BOOLEAN, Role)
_SENDER_SETTLES: Final = choice(UBYTE, SenderSettles)
_RECEIVER_SETTLES: Final = choice(UBYTE, ReceiverSettles)
NO_LIMIT: Final = 0xFFFF_FFFF


@composite(0x10, "amqp:open:list")
class Open(Composite):
    """Negotiates a connection; idle_time_out in milliseconds, sizes in bytes."""

    container_id: str = field(STRING)
    hostname: str | None = field(STRING, default=None)
    max_frame_size: int = field(UINT, default=NO_LIMIT)
    channel_max: int = field(USHORT, default=0xFFFF)
    idle_time_out: int | None = field(UINT, default=None)
    outgoing_locales: tuple[str, ...] = field(SYMBOLS, default=())
    incoming_locales: tuple[str, ...] = field(SYMBOLS, default=())
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    properties: dict[str, Any] | None = field(FIELDS, default=None)


@composite(0x11, "amqp:begin:list")
class Begin(Composite):
    """Begins a session on a channel; windows in transfers."""

    remote_channel: int | None = field(USHORT, nullable=True)
    next_outgoing_id: int = field(UINT)
    incoming_window: int = field(UINT)
    outgoing_window: int = field(UINT)
    handle_max: int = field(UINT, default=NO_LIMIT)
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    properties: dict[str, Any] | None = field(FIELDS, default=None)


@composite(0x12, "amqp:attach:list")
class Attach(Composite):
    """Attaches a link to a session; max_message_size in bytes."""

    name: str = field(STRING)
    handle: int = field(UINT)
    role: Role = field(_ROLE)
    snd_settle_mode: SenderSettles = field(_SENDER_SETTLES, default=SenderSettles.MIXED)
    rcv_settle_mode: ReceiverSettles = field(_RECEIVER_SETTLES, default=ReceiverSettles.FIRST)
    source: Source | Described | None = field(SOURCE, default=None)
    target: Target | Coordinator | Described | None = field(TARGET, default=None)
    unsettled: dict[Any, Any] | None = field(MAP, default=None)
    incomplete_unsettled: bool = field(BOOLEAN, default=False)
    initial_delivery_count: int | None = field(UINT, default=None)
    max_message_size: int | None = field(ULONG, default=None)
    offered_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    desired_capabilities: tuple[str, ...] = field(SYMBOLS, default=())
    properties: dict[str, Any] | None = field(FIELDS, default=None)


@composite(0x13, "amqp:flow:list")
class Flow(Composite):
    """State of a session's windows and, with a handle, of a link's credit."""

    next_incoming_id: int | None = field(UINT, nullable=True)
    incoming_window: int = field(UINT)
    next_outgoing_id: int = field(UINT)
    outgoing_window: int = field(UINT)
    handle: int | None = field(UINT, default=None)
    delivery_count: int | None = field(UINT, default=None)
    link_credit: int | None = field(UINT, default=None)
    available: int | None = field(UINT, default=None)
    drain: bool = field(BOOLEAN, default=False)
    echo: bool = field(BOOLEAN, default=False)
    properties: dict[str, Any] | None = field(FIELDS, default=None)


@composite(0x14, "amqp:transfer:list")
class Transfer(Composite):
    """A message or a part of it. The payload follows in the frame."""

    handle: int = field(UINT)
    delivery_id: int | None = field(UINT, default=None)
    delivery_tag: bytes | None = field(BINARY, default=None)
    message_format: int | None = field(UINT, default=None)
    settled: bool | None = field(BOOLEAN, default=None)
    more: bool = field(BOOLEAN, default=False)
    rcv_settle_mode: ReceiverSettles | None = field(_RECEIVER_SETTLES, default=None)
    state: DeliveryState | None = field(STATE, default=None)
    resume: bool = field(BOOLEAN, default=False)
    aborted: bool = field(BOOLEAN, default=False)
    batchable: bool = field(BOOLEAN, default=False)


@composite(0x15, "amqp:disposition:list")
class Disposition(Composite):
    """The state of the deliveries first to last (null: first alone) at the endpoint with *role*."""

    role: Role = field(_ROLE)
    first: int = field(UINT)
    last: int | None = field(UINT, default=None)
    settled: bool = field(BOOLEAN, default=False)
    state: DeliveryState | None = field(STATE, default=None)
    batchable: bool = field(BOOLEAN, default=False)


@composite(0x16, "amqp:detach:list")
class Detach(Composite):
    """Detaches a link; with closed, also ends it."""

    handle: int = field(UINT)
    closed: bool = field(BOOLEAN, default=False)
    error: Error | None = field(ERROR, default=None)


@composite(0x17, "amqp:end:list")
class End(Composite):
    """Ends a session."""

    error: Error | None = field(ERROR, default=None)


@composite(0x18, "amqp:close:list")
class Close(Composite):
    """Closes the connection."""

    error: Error | None = field(ERROR, default=None)


Performative = Open | Begin | Attach | Flow | Transfer | Disposition | Detach | End | Close
_PERFORMATIVES: Final = frozenset((Open, Begin, Attach, Flow, Transfer, Disposition, Detach, End, Close))


class SaslCode(Enum):
    """sasl-code."""

    OK = 0
    AUTH = 1
    SYS = 2
    SYS_PERM = 3
    SYS_TEMP = 4


@composite(0x40, "amqp:sasl-mechanisms:list")
class SaslMechanisms(Composite):
    """The mechanisms that the server offers."""

    sasl_server_mechanisms: tuple[str, ...] = field(SYMBOLS)


@composite(0x41, "amqp:sasl-init:list")
class SaslInit(Composite):
    """The mechanism that the client chooses. The repr hides the response, which contains the password."""

    mechanism: str = field(SYMBOL)
    initial_response: bytes | None = field(BINARY, default=None)
    hostname: str | None = field(STRING, default=None)

    def __repr__(self) -> str:
        return f"SaslInit(mechanism={self.mechanism!r})"


@composite(0x42, "amqp:sasl-challenge:list")
class SaslChallenge(Composite):
    """The challenge of the server."""

    challenge: bytes = field(BINARY)


@composite(0x43, "amqp:sasl-response:list")
class SaslResponse(Composite):
    """The answer of the client. The repr hides it, because it contains the password."""

    response: bytes = field(BINARY)

    def __repr__(self) -> str:
        return "SaslResponse()"


@composite(0x44, "amqp:sasl-outcome:list")
class SaslOutcome(Composite):
    """The result of the login."""

    code: SaslCode = field(choice(UBYTE, SaslCode))
    additional_data: bytes | None = field(BINARY, default=None)


SaslFrame = SaslMechanisms | SaslInit | SaslChallenge | SaslResponse | SaslOutcome
_SASL: Final = frozenset((SaslMechanisms, SaslInit, SaslChallenge, SaslResponse, SaslOutcome))


def read_performative(buffer: Buffer, start: int, end: int) -> tuple[Performative, int]:
    """Read the body of an AMQP frame. Return the performative, and the position of its payload.

    Raises:
        AmqpError: decode-error, invalid-field.
    """
    return composites.decode(buffer, start, end, _PERFORMATIVES)


def read_sasl(buffer: Buffer, start: int, end: int) -> SaslFrame:
    """Read the body of a SASL frame.

    Raises:
        AmqpError: decode-error, invalid-field.
    """
    found: SaslFrame
    found, position = composites.decode(buffer, start, end, _SASL)
    if position != end:
        raise malformed(f"bytes after {found.layout.name}")
    return found


PLAIN: Final = "PLAIN"
ANONYMOUS: Final = "ANONYMOUS"
EXTERNAL: Final = "EXTERNAL"


@dataclass(frozen=True, slots=True)
class Anonymous:
    """A login without a user name."""


@dataclass(frozen=True, slots=True)
class External:
    """A login as the user in the certificate of the client.

    Args:
        user: the user that the client asks to act as; ``None`` for the user in the certificate.
    """

    user: bytes | None


Login = Credentials | Anonymous | External


def read_login(mechanism: str, response: bytes) -> Login | None:
    """Read the login in a SASL response.

    Args:
        mechanism: :data:`PLAIN`, :data:`ANONYMOUS` or :data:`EXTERNAL`.
        response: the response of the client.

    Returns:
        ``None`` for another mechanism, or if the response is malformed or has no user name. The login is then refused.
    """
    match mechanism:
        case "PLAIN":
            return handshake.credentials(handshake.PLAIN, response)
        case "ANONYMOUS":
            return Anonymous()
        case "EXTERNAL":
            return External(response or None)
        case _:
            return None
