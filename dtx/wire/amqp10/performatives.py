"""The nine performatives (AMQP 1.0, 2.7) and the five frames of SASL (5.3.3)."""

from enum import Enum
from typing import Any, Final

from dtx.wire.amqp10 import composite as composites
from dtx.wire.amqp10.composite import (
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
)
from dtx.wire.amqp10.errors import malformed
from dtx.wire.amqp10.reading import Buffer
from dtx.wire.amqp10.states import ERROR, STATE, DeliveryState, Error
from dtx.wire.amqp10.terminus import SOURCE, TARGET, Coordinator, Source, Target
from dtx.wire.amqp10.values import Described


class Role(Enum):
    """Of an endpoint of a link."""

    SENDER = False
    RECEIVER = True

    @property
    def other(self) -> "Role":
        """The peer's."""
        return Role(not self.value)


class SenderSettles(Enum):
    """sender-settle-mode."""

    UNSETTLED = 0
    SETTLED = 1
    MIXED = 2


class ReceiverSettles(Enum):
    """receiver-settle-mode: at once, or when the sender has settled."""

    FIRST = 0
    SECOND = 1


_ROLE: Final = choice(BOOLEAN, Role)
_SENDER_SETTLES: Final = choice(UBYTE, SenderSettles)
_RECEIVER_SETTLES: Final = choice(UBYTE, ReceiverSettles)
NO_LIMIT: Final = 0xFFFF_FFFF


@composite(0x10, "amqp:open:list")
class Open(Composite):
    """Negotiates a connection; idle_time_out in milliseconds, sizes in octets."""

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
    """Attaches a link to a session; max_message_size in octets."""

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
    """A message, or a part of one; the payload is what follows in the frame."""

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
    """The state of deliveries first to last (null: first alone), as the endpoint in *role* has it."""

    role: Role = field(_ROLE)
    first: int = field(UINT)
    last: int | None = field(UINT, default=None)
    settled: bool = field(BOOLEAN, default=False)
    state: DeliveryState | None = field(STATE, default=None)
    batchable: bool = field(BOOLEAN, default=False)


@composite(0x16, "amqp:detach:list")
class Detach(Composite):
    """Detaches a link; closed: and ends it."""

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
    """What the server offers."""

    sasl_server_mechanisms: tuple[str, ...] = field(SYMBOLS)


@composite(0x41, "amqp:sasl-init:list")
class SaslInit(Composite):
    """What the client chooses. Holds the password: has no repr."""

    mechanism: str = field(SYMBOL)
    initial_response: bytes | None = field(BINARY, default=None)
    hostname: str | None = field(STRING, default=None)

    def __repr__(self) -> str:
        return f"SaslInit(mechanism={self.mechanism!r})"


@composite(0x42, "amqp:sasl-challenge:list")
class SaslChallenge(Composite):
    """What the server asks."""

    challenge: bytes = field(BINARY)


@composite(0x43, "amqp:sasl-response:list")
class SaslResponse(Composite):
    """What the client answers. Holds the password: has no repr."""

    response: bytes = field(BINARY)

    def __repr__(self) -> str:
        return "SaslResponse()"


@composite(0x44, "amqp:sasl-outcome:list")
class SaslOutcome(Composite):
    """Whether the client is who it says."""

    code: SaslCode = field(choice(UBYTE, SaslCode))
    additional_data: bytes | None = field(BINARY, default=None)


SaslFrame = SaslMechanisms | SaslInit | SaslChallenge | SaslResponse | SaslOutcome
_SASL: Final = frozenset((SaslMechanisms, SaslInit, SaslChallenge, SaslResponse, SaslOutcome))


def read_performative(buffer: Buffer, start: int, end: int) -> tuple[Performative, int]:
    """Read the body of an AMQP frame: the performative, and where its payload begins.

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
        raise malformed(f"octets behind {found.layout.name}")
    return found
