"""One client as its channels see it, and the objects that all clients share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dtx.auth.accounts import Account, Accounts
from dtx.auth.permissions import Permission
from dtx.manager import BranchManager, Requester
from dtx.server.connection import Outbox
from dtx.server.limits import ConnectionLimits
from dtx.server.standalone.access import Access
from dtx.server.standalone.broker import StandaloneServer, close_queues, remove
from dtx.server.standalone.direct_replies import DirectReplies
from dtx.server.standalone.writes import Writes
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.topology import DeletedQueues, VirtualHost
from dtx.store.slices import Slices
from dtx.store.work import Budget
from dtx.telemetry import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects that all connections share."""

    manager: BranchManager
    broker: StandaloneServer
    accounts: Accounts
    metrics: Metrics
    limits: ConnectionLimits
    direct: DirectReplies = field(default_factory=DirectReplies)


@dataclass(slots=True, kw_only=True, eq=False)
class VirtualHostUser:
    """A user in a virtual host: a client, or an operator.

    Args:
        parts: the objects that all clients share.
        who: user and virtual host.
        vhost: the virtual host.
        access: the rights of the user there.
        wait_for_disk: called when the user publishes while the disk is nearly full.
    """

    parts: Parts
    who: Requester
    vhost: VirtualHost
    access: Access
    wait_for_disk: Callable[[], None]

    @property
    def account(self) -> Account:
        """The account of the user."""
        return self.access.account

    @property
    def manager(self) -> BranchManager:
        """The manager of the branches."""
        return self.parts.manager

    @property
    def broker(self) -> StandaloneServer:
        """The store of the messages."""
        return self.parts.broker

    def require(self, permission: Permission, kind: str, name: bytes) -> None:
        """See :meth:`Access.require`."""
        self.access.require(permission, kind, name)

    def now(self) -> float:
        """Seconds since the epoch; the clock that the queues use."""
        return time.time()

    def close_queues(self, queues: Sequence[Queue]) -> None:
        """See :func:`~dtx.server.standalone.broker.close_queues`."""
        close_queues(self.broker, queues)

    def remove(self, deleted: DeletedQueues) -> None:
        """See :func:`~dtx.server.standalone.broker.remove`."""
        remove(self.broker, self.manager, deleted)


@dataclass(slots=True, kw_only=True, eq=False)
class Client(VirtualHostUser):
    """A client that has entered a virtual host. It owns the exclusive queues that it declares.

    Args:
        connection: its number, for the log.
        writes: of this connection.
        budget: memory of the user and virtual host.
        frame_max: agreed with the client, bytes.
        hears_of_cancelled_consumers: the client understands basic.cancel when a queue is deleted.
        outbox: data that is sent to the client.
        slices: long work for the client.
        handle_waiting: called when frames that waited behind a method may be handled.
        fail: called with an exception that ends the connection, and class << 16 | method of the client's method.
    """

    connection: int
    writes: Writes
    budget: Budget
    frame_max: int
    consumer_cancel_notify: bool
    outbox: Outbox
    slices: Slices
    handle_waiting: Callable[[], None]
    fail: Callable[[Exception, int], None]
