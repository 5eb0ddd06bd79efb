"""Resources of transaction managers for threads; the one for dtx is here.

A session is one connection that one transaction at a time works with. A resource keeps those that are free, so that
a transaction need not connect; recovery gets its own in the same way. Whatever the kind, a session raises
:class:`~dtx.client.errors.XAException`, and means by each what X/Open means.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError

from dtx.client.blocking import Coordinator, XAResource
from dtx.client.connections import alive, unreachable
from dtx.client.errors import XAER_RMFAIL
from dtx.client.tm.pool import ANSWER_SECONDS, Pool
from dtx.client.tm.sessions import DrivenSession, DtxCore, Handle, Session
from dtx.client.tm.steps import drive
from dtx.xa.xid import Xid


class Resource(Pool, Generic[Handle]):
    """Where sessions come from; any thread may use it.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    @abstractmethod
    def open(self) -> Session[Handle]:
        """A new session.

        Raises:
            XAER_RMFAIL: the resource manager is out of reach.
        """

    @abstractmethod
    def around(self, handle: Handle) -> Session[Handle]:
        """A session on a connection or channel of the application's own, which stays open when it is done."""

    def acquire(self) -> Session[Handle]:
        """A free session that is usable, or a new one."""
        return drive(self.acquiring())

    def started(self, xid: Xid) -> Session[Handle]:
        """A session that works for the branch *xid*; see :meth:`~dtx.client.tm.pool.Pool.starting`."""
        return drive(self.starting(xid))

    def release(self, session: Session[Handle]) -> None:
        """The transaction is over."""
        drive(self.releasing(session))

    def close(self) -> None:
        """Close the free sessions."""
        drive(self.closing())


class DtxResource(Resource[BlockingChannel]):
    """A virtual host of a dtx, with pika's BlockingConnection. What applications work with is a channel.

    Args:
        name: see :class:`Resource`.
        connect: a URL, or what makes a connection; several addresses of a service and its standby go there.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.
    """

    def __init__(
        self,
        name: str,
        connect: str | pika.connection.Parameters | Callable[[], BlockingConnection],
        *,
        timeout: float | None = ANSWER_SECONDS,
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._timeout = timeout

    def open(self) -> "DtxSession":
        """A new connection and a channel."""
        connect: Any = pika.URLParameters(self._connect) if isinstance(self._connect, str) else self._connect
        try:
            connection = connect() if callable(connect) else BlockingConnection(connect)
        except (AMQPError, OSError) as error:
            raise unreachable(self.name, error) from error
        try:
            return DtxSession(connection.channel(), self._timeout, own=True)
        except BaseException as error:
            _close(connection)
            if isinstance(error, AMQPError):
                raise XAER_RMFAIL(f"{self.name}: {error or type(error).__name__}") from error
            raise

    def around(self, handle: BlockingChannel) -> "DtxSession":
        """A session on a channel of the application's."""
        return DtxSession(handle, self._timeout, own=False)


class DtxSession(DrivenSession[BlockingChannel]):
    """A channel for work, and one beside it for outcomes.

    Args:
        channel: open.
        timeout: seconds.
        own: whether the connection is to be closed with the session.
    """

    one_phase_repeatable = True

    def __init__(self, channel: BlockingChannel, timeout: float | None, *, own: bool) -> None:
        self._connection: BlockingConnection = channel.connection
        self._channel = channel
        outcomes = Coordinator(self._connection, timeout=timeout)
        core = DtxCore(
            XAResource(channel, timeout=timeout),
            outcomes,
            scan=lambda: list(outcomes.recover()),
            alive=self._alive,
            leave=(lambda: _close(self._connection)) if own else outcomes.close,
        )
        super().__init__(core, own=own)

    def _alive(self) -> bool:
        """Whether channel and connection are open; looks for what the server said meanwhile."""
        return alive(self._connection) and bool(self._channel.is_open)


def _close(connection: BlockingConnection) -> None:
    # AttributeError: pika's own, where the server's close comes in while pika closes the channels one by one
    with suppress(AMQPError, OSError, AttributeError):
        connection.close()
