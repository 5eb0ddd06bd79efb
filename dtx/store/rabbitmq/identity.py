"""Names of dtx's own queues in the broker, and the check that no other log uses them.

Each name has the resource manager, the log, and the instance (one dtx, from its start to its end). So two logs never
share a queue, and a stalled predecessor never purges a queue that its successor needs. A dtx that has taken over
derives the names of its predecessor's receipt queues from the locks in the log.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from dtx.store.rabbitmq.upstream import OwnChannel, Upstream, UpstreamChannelClosed
from dtx.wire.amqp09 import methods, tables

GENERATIONS: Final = 4
CLASSIC: Final = tables.entry(b"x-queue-type", b"S", b"classic")
_LOCK: Final = "dtx.lock."
_LOCK_UNUSED: Final = 60_000
"""Milliseconds after which the broker deletes a lock without a consumer: one never consumed, or left by a restart."""


class NameTaken(Exception):
    """Another log uses this name in the virtual host. The message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerIdentity:
    """The identity in the names of queues.

    Args:
        rm: name of the resource manager.
        log: id of its log.
        instance: id of this dtx.
    """

    rm: str
    log: UUID
    instance: UUID

    @property
    def stem(self) -> str:
        """The part that all names of this dtx have in common."""
        return f"{self.rm}.{self.log.hex}.{self.instance.hex}"

    def new_lock(self) -> str:
        """A new name for a lock."""
        return f"{_LOCK}{self.stem}.{uuid4()}"

    async def claim(self, vhost: str, channel: OwnChannel) -> None:
        """Declare the owner exchange. The broker compares alternate exchanges, so only one log can declare it.

        Raises:
            NameTaken: another log has declared it.
            UpstreamChannelClosed: the broker refuses for another reason.
            UpstreamLost.
        """
        declare = methods.ExchangeDeclare(
            owner_exchange(self.rm).encode(),
            b"fanout",
            durable=True,
            internal=True,
            arguments=tables.entry(b"alternate-exchange", b"S", owner_mark(self.log).encode()),
        )
        try:
            await channel.call(declare)
        except UpstreamChannelClosed as closed:
            if closed.close.reply_code != 406:
                raise
            raise NameTaken(name_taken(self.rm, vhost)) from None


def name_taken(rm: str, vhost: str) -> str:
    """A text for people: another log has the name, and the remedy."""
    return (
        f"resource manager {rm!r} in virtual host {vhost!r} of the broker belongs to another log: give this dtx a name "
        f"of its own with --rm; only if that other database is gone for good, delete exchange {owner_exchange(rm)!r}"
    )


def owner_exchange(rm: str) -> str:
    """The exchange that shows which log owns the name *rm*."""
    return f"dtx.owner.{rm}"


def owner_mark(log: UUID) -> str:
    """The alternate exchange of the owner exchange of *log*; there is no exchange of that name."""
    return f"dtx.log.{log}"


def stem_of(lock: str) -> str:
    """The stem of the dtx that made *lock*. An older version used the resource manager alone as stem."""
    return lock.removeprefix(_LOCK).rpartition(".")[0]


def receipt_queues(stem: str) -> tuple[bytes, ...]:
    """The receipt queues of a dtx, one for each generation."""
    return tuple(f"dtx.receipts.{stem}.{generation}".encode() for generation in range(GENERATIONS))


def declare_lock(lock: str) -> methods.QueueDeclare:
    """The method that declares a lock: a queue that the broker deletes with its last consumer.

    A queue that is exclusive to the connection is not enough. The broker deletes it with the connection, while a
    channel may still be working on a tx.commit, or have one in its mailbox.
    """
    arguments = CLASSIC + tables.entry(b"x-expires", b"I", _LOCK_UNUSED.to_bytes(4, "big"))
    return methods.QueueDeclare(lock.encode(), durable=True, auto_delete=True, arguments=arguments)


def hold_lock(channel: int, lock: str) -> bytes:
    """The frame that makes a channel hold *lock* until the channel has ended. It holds it from basic.consume-ok on."""
    name = lock.encode()
    return methods.BasicConsume(name, name, no_ack=True).frame(channel)


async def consumers_of(queue: bytes, upstream: Upstream) -> int | None:
    """The number of consumers of *queue*; ``None`` if it does not exist.

    A queue that is exclusive to a connection counts as one with a consumer: older versions had such queues as locks.

    Raises:
        UpstreamChannelClosed: the broker refuses the request.
        UpstreamLost.
        XaError: 506, the connection has no channel left.
    """
    channel = await OwnChannel(upstream).open()
    try:
        found = await channel.declare(methods.QueueDeclare(queue, passive=True))
    except UpstreamChannelClosed as closed:
        match closed.close.reply_code:
            case 404:
                return None
            case 405:
                return 1
            case _:
                raise
    await channel.close()
    return found.consumer_count
