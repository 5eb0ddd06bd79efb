"""What clients are refused in the topology, in RabbitMQ's words."""

from typing import Final

from dtx.store.postgres.exchanges import Owner, Queue
from dtx.store.postgres.values import text
from dtx.xa.codes import ReplyCode, XaError

RESERVED: Final = b"amq."
"""Names that start so are the server's own."""


def refused(reason: str) -> XaError:
    """403."""
    return XaError(ReplyCode.ACCESS_REFUSED, reason)


def failed(reason: str) -> XaError:
    """406."""
    return XaError(ReplyCode.PRECONDITION_FAILED, reason)


def check_not_default(name: bytes) -> None:
    """Refuse (403) the default exchange."""
    if not name:
        raise refused("operation not permitted on the default exchange")


def check_name(kind: str, name: bytes) -> None:
    """Refuse (403) a new name in ``amq.*``."""
    if name.startswith(RESERVED):
        raise refused(f"{kind} name '{text(name)}' contains reserved prefix 'amq.*'")


def check_owner(queue: Queue, owner: Owner | None, *, strict: bool = False) -> None:
    """Refuse (405) the exclusive queue of another; with *strict* also one's own claim to what is not exclusive."""
    if queue.owner is owner or (queue.owner is None and not strict):
        return
    raise XaError(
        ReplyCode.RESOURCE_LOCKED,
        f"cannot obtain exclusive access to locked {queue.spec.where}. It could be originally declared on another "
        "connection or the exclusive property value does not match that of the original declaration.",
    )
