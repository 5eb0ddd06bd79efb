"""The work of a branch as frames of one unit.

Every message has the header ``x-dtx-id``. If a message is ever repeated, both copies have the same value.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Final
from uuid import UUID

from dtx.log.records import Replay, Unit, WorkKind, WorkRow
from dtx.wire.amqp09 import content, methods, properties, tables
from dtx.wire.amqp09.codec import packer
from dtx.wire.amqp09.errors import WireError, syntax_error
from dtx.wire.amqp09.methods import MANDATORY
from dtx.wire.amqp09.properties import BasicProperties
from dtx.wire.amqp09.tables import Entry

_OURS: Final = b"x-dtx-"
ID: Final = b"x-dtx-id"
PUT_BACK: Final = b"x-dtx-put-back"
ATTEMPT: Final = b"x-dtx-attempt"
"""The attempt of the unit that sent the message, from 2 on."""
_EXCHANGE: Final = b"x-dtx-original-exchange"
_KEY: Final = b"x-dtx-original-routing-key"
_STREAM_OFFSET: Final = b"x-stream-offset"
_REDELIVERED: Final = b"x-dtx-redelivered"
_X_DEATH: Final = b"x-death"
_RETURNS: Final = b"x-delivery-count"
MAX_MARKS: Final = 1024
"""Bytes of headers that dtx adds to a message at most, ``x-dtx-death`` aside, which is left out if it does not fit."""
_REMOVED: Final = (_RETURNS, b"x-acquired-count", ATTEMPT)
"""Headers that a message loses when it is put back: quorum queues count it anew, and its key is new."""
_MOST_DIGITS: Final = 9
"""Digits of a number that fits an integer column."""
_SLICE: Final = 1 << 20
"""Bytes of a body that are digested at once: a millisecond."""
_DEATHS: Final = b"x-dtx-death"
_COPIES: Final = {b"CC": b"x-dtx-cc", b"BCC": b"x-dtx-bcc"}
_publish: Final = packer(methods.BasicPublish)
_MAX_COUNT: Final = (1 << 63) - 1
_TRANSIENT: Final = properties.build({properties.Property.DELIVERY_MODE: b"\x01"})


def from_stream(raw: bytes) -> bool:
    """Whether these are properties of a message that a stream delivered.

    A search through thousands of headers takes milliseconds. So headers are read only if the bytes contain the name.
    """
    try:
        return _STREAM_OFFSET in raw and properties.has_header(raw, _STREAM_OFFSET)
    except WireError:  # brokers forward properties that they do not read; where they add a header, they have read them
        return False


def returns(raw: bytes) -> int:
    """How often the message with these properties was returned to its quorum queue."""
    if _RETURNS not in raw:
        return 0
    try:
        entry = properties.read(raw).header(_RETURNS)
    except WireError:  # a broker that has added the header has read the properties
        return 0
    return int.from_bytes(entry.value, "big") if entry is not None and entry.kind == b"l" else 0


def message_id(branch_id: UUID, position: int) -> bytes:
    """The value of ``x-dtx-id``."""
    return f"{branch_id}/{position}".encode()


def attempt_of(raw: bytes) -> int:
    """The attempt of the unit that sent a message with these properties."""
    if ATTEMPT not in raw:
        return 1
    try:
        entry = properties.read(raw).header(ATTEMPT)
    except WireError:  # a broker has read the properties, and dtx has written the header
        return 1
    if entry is None or not entry.value.isdigit() or len(entry.value) > _MOST_DIGITS:
        return 1  # written by a client
    return max(int(entry.value), 1)


class Digest:
    """Identifies destination and body of a message: brokers and applications add headers."""

    __slots__ = ("_hash",)

    def __init__(self, exchange: bytes, routing_key: bytes) -> None:
        self._hash = sha256(bytes((len(exchange),)) + exchange + bytes((len(routing_key),)) + routing_key)

    def update(self, part: bytes | memoryview) -> None:
        """Add a part of the body."""
        self._hash.update(part)

    @property
    def value(self) -> bytes:
        """The digest of all parts."""
        return self._hash.digest()


def digest_of(exchange: bytes, routing_key: bytes, body: bytes) -> bytes:
    """The digest of a whole message."""
    digest = Digest(exchange, routing_key)
    digest.update(body)
    return digest.value


def position_of(value: bytes) -> int:
    """The position in a value of ``x-dtx-id``."""
    return int(value.rpartition(b"/")[2])


def receipt_body(branch_id: UUID, unit: Unit) -> bytes:
    """The body of the receipt of a unit: the id of the branch, and a nonce that only dtx and the broker know."""
    return branch_id.bytes + unit.nonce.bytes


def nonce_of(body: bytes) -> UUID | None:
    """The nonce in a receipt; ``None`` for any other message."""
    return UUID(bytes=bytes(body[16:32])) if len(body) == 32 else None


def receipt(channel: int, queue: bytes, body: bytes) -> bytes:
    """The frames that publish a receipt: transient, to a queue of dtx by the default exchange."""
    return content.message(_publish(channel, b"", queue), channel, _TRANSIENT, body, 0)


def probe(channel: int, exchange: bytes, routing_key: bytes, flags: int, raw: bytes) -> bytes:
    """A publish with an empty body, and tx.rollback.

    RabbitMQ checks permissions, exchange and properties when it gets the message. It routes at tx.commit.
    """
    publish = _publish(channel, exchange, routing_key, flags)
    return content.message(publish, channel, raw, b"", 0) + methods.TxRollback().frame(channel)


def commit_frames(
    channel: int, frame_max: int, branch_id: UUID, work: Iterable[WorkRow], attempt: int = 1
) -> Iterator[bytes]:
    """The publishes of a branch: for each message its frames.

    Those to a queue by the default exchange are mandatory: RabbitMQ 3.10 confirms and drops messages for a queue whose
    node is down. It returns them if they are mandatory.
    """
    for item in work:
        if item.kind is not WorkKind.PUBLISH:
            continue
        raw = properties.set_header(_unmarked(item.properties), ID, message_id(branch_id, item.position))
        if attempt > 1:
            raw = properties.set_header(raw, ATTEMPT, b"%d" % attempt)
        flags = (item.flags or 0) & MANDATORY if item.exchange else MANDATORY
        publish = _publish(channel, item.exchange, item.routing_key, flags)
        yield _message(publish, channel, raw, item.body, frame_max)


def _message(publish: bytes, channel: int, raw: bytes, body: bytes, frame_max: int) -> bytes:
    """The frames of a message. Its header frame would end the connection if it were larger than *frame_max*.

    Raises:
        WireError: 502, its properties are too large: the broker has reduced frame-max since the message was accepted.
    """
    if frame_max and len(raw) + content.HEADER_OVERHEAD > frame_max:
        raise syntax_error(f"its headers of {len(raw)} bytes are too large for the broker's frame-max of {frame_max}")
    return content.message(publish, channel, raw, body, frame_max)


def _unmarked(raw: bytes) -> bytes:
    """*raw* without headers of dtx: the application has copied them from a message that it consumed."""
    if _OURS not in raw:
        return raw
    return properties.remove_headers(
        raw, [entry.key for entry in properties.read(raw).headers if entry.key.startswith(_OURS)]
    )


def put_back_frames(
    channel: int, frame_max: int, branch_id: UUID, work: Iterable[WorkRow], attempt: int = 1
) -> Iterator[bytes]:
    """The consumed messages of a branch, each published to its queue by the default exchange."""
    for item in work:
        if item.kind is not WorkKind.CONSUME:
            continue
        publish = _publish(channel, b"", item.queue or b"", MANDATORY)
        marked = _marked(branch_id, attempt, item, frame_max)
        yield _message(publish, channel, marked, item.body, frame_max)


def find_replays(work: Iterable[WorkRow], kind: WorkKind, found: list[Replay]) -> Iterator[None]:
    """Add the messages of one *kind* in *work* to *found*, as a unit sends them; in slices."""
    for item in work:
        if item.kind is kind:
            published = kind is WorkKind.PUBLISH
            exchange, routing_key = (item.exchange, item.routing_key) if published else (b"", item.queue or b"")
            digest = Digest(exchange, routing_key)
            for start in range(0, len(item.body), _SLICE):
                digest.update(item.body[start : start + _SLICE])
                yield
            found.append(
                Replay(position=item.position, exchange=exchange, routing_key=routing_key, digest=digest.value)
            )


def _marked(branch_id: UUID, attempt: int, item: WorkRow, frame_max: int) -> bytes:
    raw = properties.rename_headers(item.properties, _COPIES)
    if any(name in raw for name in _REMOVED):
        raw = properties.remove_headers(raw, _REMOVED)
    view = properties.read(raw)
    here = message_id(branch_id, item.position)
    values = {PUT_BACK: (b"S", here)}
    # A message that was put back before keeps its first exchange and routing key. One that dtx published keeps its id.
    if view.header(_EXCHANGE) is None:
        values[_EXCHANGE] = (b"S", item.exchange)
        values[_KEY] = (b"S", item.routing_key)
    if view.header(ID) is None:
        values[ID] = (b"S", here)
    if attempt > 1:
        values[ATTEMPT] = (b"S", b"%d" % attempt)
    values[_REDELIVERED] = (b"t", bytes(((item.flags or 0) & 1,)))
    if _X_DEATH in raw and (deaths := _deaths(view)) and len(raw) + len(deaths) + MAX_MARKS <= frame_max:
        values[_DEATHS] = (b"A", deaths)
    return properties.set_headers(raw, values)


def _deaths(view: BasicProperties) -> bytes:
    """The array ``x-dtx-death``: all that ``x-death`` has counted since the message was published first.

    RabbitMQ 4 begins ``x-death`` anew when a message is put back, older versions continue it. The time of the first
    death tells which: if it is the same, the greater count includes the other.
    """
    found: dict[tuple[bytes, ...], tuple[int, dict[bytes, Entry]]] = {}
    for name in (_DEATHS, _X_DEATH):
        header = view.header(name)
        for item in tables.items(header.value) if header is not None and header.kind == b"A" else ():
            fields = {entry.key: entry for entry in tables.entries(item.value)} if item.kind == b"F" else {}
            if not {b"queue", b"reason", b"time", b"count"} <= fields.keys() or fields[b"count"].kind != b"l":
                continue  # written by a client
            kind = fields[b"queue"].value, fields[b"reason"].value
            count = max(int.from_bytes(fields[b"count"].value, "big", signed=True), 0)
            before, known = found.pop(kind, (0, fields))
            is_same = known[b"time"].value == fields[b"time"].value
            found[kind] = max(before, count) if is_same else min(before + count, _MAX_COUNT), fields
    parts = []
    for count, fields in found.values():
        raw = tables.entry(b"count", b"l", count.to_bytes(8, "big", signed=True))
        table = raw + b"".join(entry.raw for key, entry in fields.items() if key != b"count")
        parts.append(b"F" + tables.put_long(table))
    return b"".join(parts)


def returned_position(raw: bytes, header: bytes) -> int | None:
    """The position of a message that the broker returned; *header* is :data:`ID` or :data:`PUT_BACK`."""
    entry = properties.read(raw).header(header)
    return None if entry is None else position_of(entry.value)
