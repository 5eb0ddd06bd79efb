"""An AMQP 0-9 client that does one branch after another."""

import contextlib
import socket

from benchmarks.support.amqp import RawConnection
from benchmarks.support.dialogue import Cycle, Dialogue, Phase, got_tag, is_answer
from benchmarks.support.load import LoadError
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.errors import FrameError, WireError
from dtx.wire.amqp09.frames import FrameSplitter
from tests.support.raw import Address


class BranchPlayer:
    """A connection that does one branch after another; a :class:`~benchmarks.support.load.Player`.

    Args:
        cycle: the operations of each branch.
        address: of dtx.
        number: of the connection.
        run: 8 bytes in all xids of this run, unique to it.
    """

    __slots__ = ("_buffer", "_dialogue", "_raw", "_step", "count", "number", "socket")

    def __init__(self, cycle: Cycle, address: Address, number: int, run: bytes) -> None:
        self._raw = RawConnection(address)
        self._raw.select_dtx()
        self.socket: socket.socket = self._raw.socket
        self._dialogue = Dialogue(cycle, run)
        self.number = number
        self.count = 0
        self._step = 0
        self._buffer = b""

    def begin(self) -> None:
        """Begin the next branch."""
        self._dialogue.stamp((self.number << 32) + self.count)
        self._step = 0
        self.socket.sendall(self._dialogue.writes[0])

    def hear(self, data: bytes) -> Phase | None:
        """Take received bytes."""
        step = self._dialogue.steps[self._step]
        if (step.delivery or data != step.answer) and not self._rest(data):
            return None
        return step.phase

    def go_on(self) -> bool:
        """Write the next step."""
        self._step += 1
        if self._step < len(self._dialogue.steps):
            self.socket.sendall(self._dialogue.writes[self._step])
            return True
        self.count += 1
        return False

    def close(self) -> None:
        """Close the connection in order."""
        self._raw.close()

    def _rest(self, data: bytes) -> bool:
        """Return whether an answer that came in pieces or has a delivery is complete.

        Raises:
            LoadError: the bytes are not the start of the answer.
        """
        step = self._dialogue.steps[self._step]
        if not data:
            raise self._failure(data)
        data = self._buffer + data
        if is_answer(data, step):
            self._buffer = b""
            if step.delivery:
                tag = got_tag(data, len(step.answer))
                assert tag is not None
                self._dialogue.acknowledge(tag)
            return True
        known = min(len(data), len(step.answer))
        is_other = data[:known] != step.answer[:known]
        is_other |= bool(step.delivery) and len(data) >= known + 11 and got_tag(data, known) is None
        if is_other or len(data) >= len(step.answer) + step.delivery:
            raise self._failure(data[known:] if data[:known] == step.answer[:known] else data)
        self._buffer = data
        return False

    def _failure(self, data: bytes) -> LoadError:
        """Return the error for *data*, which is not the answer."""
        waited = self._dialogue.steps[self._step].phase.name.lower()
        where = f"connection {self.number}, branch {self.count}, step {self._step} ({waited})"
        if not data:
            return LoadError(f"{where}: the connection was closed without a word")
        with contextlib.suppress(WireError, FrameError):
            buffer, frames = FrameSplitter(0).feed(data)
            for key, _, start, end in frames:
                if key in {methods.ChannelClose.KEY, methods.ConnectionClose.KEY}:
                    closed = methods.ChannelClose.decode(buffer[start + 7 : end - 1])
                    return LoadError(f"{where}: {closed.reply_code} {closed.reply_text.decode(errors='replace')}")
                if key == methods.BasicGetEmpty.KEY:
                    return LoadError(f"{where}: the queue ran dry, give a larger --prefill")
        return LoadError(f"{where}: answered {data[:80].hex(' ')}")
