"""A branch that a thread of control works for, or has suspended, and the channel that it works with.

A branch has a channel of its own while it is associated: the server closes a channel over a refused call, and with it
go all associations of that channel. So a start that is refused costs no other branch anything.
"""

from collections.abc import Mapping
from typing import Any

from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from dtx.client.coordination import XAResource
from dtx.client.errors import XA_RBROLLBACK, XAER_RMFAIL, XAException
from dtx.xa.xid import Xid


class Association:
    """One branch of one thread.

    Args:
        xid: the branch.
        resource: its channel, associated with it.
        timeout: seconds to wait for answers of the channel, ``None``: no limit.
    """

    def __init__(self, xid: Xid, resource: XAResource, timeout: float | None) -> None:
        self.xid = xid
        self.resource = resource
        self.timeout = timeout
        self.suspended = False
        self.unsettled: dict[int, Mapping[str, Any]] = {}
        """Headers of the messages that were taken, and neither acknowledged nor given back, by delivery tag."""
        self.waiting: dict[str, Any] = {}
        """Messages that were taken and did not fit into the caller's buffer, by queue."""

    @property
    def channel(self) -> BlockingChannel:
        """The channel."""
        return self.resource.channel

    @property
    def connection(self) -> BlockingConnection:
        """Its connection."""
        return self.channel.connection

    def lost(self, error: Exception) -> XAException:
        """What a call gets whose channel has ended under it.

        Where the server closed the channel alone it is there still, and has marked the branch rollback-only. Where the
        connection is gone nobody knows what the server has heard.
        """
        code = getattr(error, "reply_code", None)
        words = getattr(error, "reply_text", None) or getattr(error, "reason", None) or str(error)
        if code is not None and self.connection.is_open:
            return XA_RBROLLBACK(f"the server refused work of {self.xid}: {code} {words}", code)
        return XAER_RMFAIL(f"{words or type(error).__name__} (branch {self.xid})", code)
