"""One connection to dtx that one thread uses, and that is made again when it was lost.

Between two calls nobody reads from it, so before a call it is looked at: a connection that died meanwhile is noticed
before anything is sent on it, and nothing is lost by taking a new one. One that dies under a call is another matter:
then the outcome is not known, the call ends in XAER_RMFAIL, and the next one connects again.
"""
# ruff: noqa: SLF001 - timers that run while pika waits for an answer, and an end without a farewell, are pika's own

import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPConnectionError, AMQPError

from dtx.client.blocking import Coordinator
from dtx.client.channels import require_dtx
from dtx.client.errors import XAER_RMERR, XAER_RMFAIL

# AttributeError: pika's own, where the end of a connection comes in at an unusual moment
FAILURES: Final = (AMQPError, OSError, AttributeError)
"""What pika raises for whatever happens to a connection."""
_MOST_TURNS: Final = 100
"""Of pika's loop before a call; what has come in still is heard by the call itself."""


class Link:
    """A connection that is there when it is needed.

    Args:
        parameters: pika's.
        timeout: seconds to wait for each answer, ``None``: no limit.
    """

    def __init__(self, parameters: Any, timeout: float | None) -> None:
        self.timeout = timeout
        self._parameters = parameters
        self._connection: BlockingConnection | None = None
        self._coordinator: Coordinator | None = None

    def connection(self) -> BlockingConnection:
        """The connection, a new one where it was lost.

        Raises:
            XAER_RMFAIL: there is none to be had.
            PeerIsNotDtx: the server is something else.
        """
        if self._connection is not None and not alive(self._connection):
            self.drop()
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> BlockingConnection:
        where = f"{self._parameters.host}:{self._parameters.port}"
        try:
            connection = BlockingConnection(self._parameters)
        except FAILURES as error:
            raise XAER_RMFAIL(f"{where} is out of reach: {error or type(error).__name__}") from error
        try:
            require_dtx(connection)
        except XAER_RMERR:
            drop(connection)
            raise
        return connection

    def coordinator(self) -> Coordinator:
        """What completes branches on this connection.

        Raises:
            XAER_RMFAIL: there is no connection to be had.
        """
        connection = self.connection()
        if self._coordinator is None:
            self._coordinator = Coordinator(connection, timeout=self.timeout)
        return self._coordinator

    def close(self) -> None:
        """Say farewell; raises nothing."""
        connection, self._connection = self._connection, None
        self._coordinator = None
        if connection is not None and connection.is_open:
            try:
                with limited(connection, self.timeout):
                    connection.close()
            except FAILURES:
                drop(connection)

    def drop(self) -> None:
        """Be gone, at once and without a farewell; raises nothing. What was associated there is rolled back."""
        connection, self._connection = self._connection, None
        self._coordinator = None
        if connection is not None:
            drop(connection)


def alive(connection: BlockingConnection) -> bool:
    """Whether a connection is open still; hears what the server said meanwhile.

    pika notices the end of a connection in several turns of its loop, and one turn is all that ``process_data_events``
    makes when it is not to wait: so there are as many as there is something to read. Mostly that is none.
    """
    for _ in range(_MOST_TURNS):
        if not connection.is_open or not _readable(connection):
            break
        with suppress(*FAILURES):
            connection.process_data_events(0)
    return bool(connection.is_open)


def _readable(connection: BlockingConnection) -> bool:
    """Whether the socket has anything for us, be it its end."""
    look = select.poll()  # select.select knows no descriptor from 1024 on, and programs in C have many
    look.register(connection._impl._transport._sock.fileno(), select.POLLIN)
    return bool(look.poll(0))


def drop(connection: BlockingConnection) -> None:
    """Close its socket. pika does that some turns of its loop later, and its loop with it."""
    with suppress(*FAILURES):
        connection._impl._terminate_stream(AMQPConnectionError("given up"))
        for _ in range(_MOST_TURNS):
            connection.process_data_events(0)  # until it raises that the connection is closed


@contextmanager
def limited(connection: BlockingConnection, timeout: float | None) -> Iterator[None]:
    """Within it pika's own calls wait no longer than *timeout* seconds: then the connection is given up.

    Raises:
        AMQPConnectionError: by the call within, when the time is up.
    """
    inner = connection._impl
    if timeout is None or not inner.is_open:
        yield
        return
    error = AMQPConnectionError(f"no answer within {timeout:g} s")
    timer = inner._adapter_call_later(timeout, lambda: inner._terminate_stream(error))
    try:
        yield
    finally:
        inner._adapter_remove_timeout(timer)
