"""Further routing keys that a message brings along: its headers CC and BCC."""

from typing import Final

from dtx.log.changes import MessageFlag, StoredMessage
from dtx.store.postgres.values import kind_name
from dtx.wire.amqp09 import properties, tables
from dtx.xa.codes import ReplyCode, XaError

CC: Final = b"CC"
BCC: Final = b"BCC"
_BLIND: Final = int(MessageFlag.BLIND)


def sender_selected(raw: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """The further routing keys of a message, in its headers CC and BCC, and what consumers get to see.

    Both are arrays of strings; what else is in the array is passed over. Consumers see CC, and never BCC ("the BCC key
    and value will be removed from the message prior to delivery", RabbitMQ, Sender-selected Distribution).

    Args:
        raw: properties as received.

    Returns:
        The keys, in order, and the properties without BCC: *raw* itself where it has none.

    Raises:
        XaError: 406 when one of them is no array.
        WireError: 502 when the properties are malformed.
    """
    if CC not in raw:  # as in nearly every message: no need to look any closer; BCC has it too
        return (), raw
    found = {entry.key: entry for entry in reversed(properties.read(raw).headers) if entry.key in (CC, BCC)}
    keys: list[bytes] = []
    hidden = False
    for name in (CC, BCC):
        entry = found.get(name)  # of a repeated name the first counts
        if entry is None:
            continue
        if entry.kind != b"A":
            reason = f"header {name.decode()} must be an array of routing keys, not {kind_name(entry)}"
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"invalid message: {reason}")
        hidden = hidden or name == BCC
        keys += (item.value for item in tables.items(entry.value) if item.kind == b"S")
    return tuple(keys), without_blind(raw) if hidden else raw


def without_blind(raw: bytes) -> bytes:
    """Properties without BCC."""
    return properties.remove_headers(raw, (BCC,))


def visible(message: StoredMessage) -> StoredMessage:
    """*message* as consumers see it."""
    if message.flags & _BLIND:
        return message._replace(properties=without_blind(message.properties))
    return message
