"""A client of the broker itself, which does only the broker's part of phase two."""

import socket

from benchmarks.support.amqp import CHANNEL, TRANSIENT, RawConnection, message_frames
from benchmarks.support.dialogue import STAMP, Phase
from benchmarks.support.load import LoadError
from dtx.wire.amqp09 import methods
from tests.support.raw import Address

_PLACE = b"\xf1stamp\xf1\xf1"
_COMMITTED = methods.TxCommitOk().frame(CHANNEL)


class BrokerPlayer:
    """A connection that does one AMQP transaction after another; a :class:`~benchmarks.support.load.Player`.

    Each publishes one persistent message, and a transient one of 40 bytes like dtx's receipts, and commits.

    Args:
        queue: for the messages.
        receipts: queue for the transient messages.
        size: of the message, in bytes.
        address: of the broker.
        number: of the connection.
        run: not used, since there are no xids.
    """

    __slots__ = ("_place", "_raw", "_said", "count", "number", "socket")

    def __init__(self, queue: bytes, receipts: bytes, size: int, address: Address, number: int, run: bytes) -> None:
        del run
        self._raw = RawConnection(address)
        self._raw.call(methods.TxSelect(), methods.TxSelectOk)
        self.socket: socket.socket = self._raw.socket
        self.number = number
        self.count = 0
        body = _PLACE + bytes(size - len(_PLACE))
        self._said = bytearray(
            message_frames(b"", queue, body)
            + message_frames(b"", receipts, bytes(40), TRANSIENT)
            + methods.TxCommit().frame(CHANNEL)
        )
        self._place = self._said.index(_PLACE)

    def begin(self) -> None:
        """Publish and commit."""
        STAMP.pack_into(self._said, self._place, (self.number << 32) + self.count)
        self.socket.sendall(self._said)

    def hear(self, data: bytes) -> Phase | None:
        """Take received bytes.

        Raises:
            LoadError: they are not commit-ok.
        """
        if data != _COMMITTED:
            raise LoadError(f"connection {self.number}: the broker answered {data[:80].hex(' ')}")
        return Phase.COMMIT

    def go_on(self) -> bool:
        """Count the transaction; there is no next step."""
        self.count += 1
        return False

    def close(self) -> None:
        """Close the connection in order."""
        self._raw.close()
