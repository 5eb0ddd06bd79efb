"""One connection to dtx that one thread uses, and that is made again when it was lost.

Between two calls nobody reads from it, so before a call it is looked at: a connection that died meanwhile is noticed
before anything is sent on it, and nothing is lost by taking a new one. One that dies under a call is another matter:
then the outcome is not known, the call ends in XAER_RMFAIL, and the next one connects again.
"""

from typing import Any

from pika.adapters.blocking_connection import BlockingConnection

from dtx.client.blocking import Coordinator
from dtx.client.channels import require_dtx
from dtx.client.connections import FAILURES, alive, drop, limited, unreachable
from dtx.client.errors import XAER_RMERR


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
            raise unreachable(where, error) from error
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
