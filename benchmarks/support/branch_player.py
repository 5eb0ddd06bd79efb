"""A client of AMQP 0-9 in its row of branches."""

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
    """One connection in its endless row of branches; a :class:`~benchmarks.support.load.Player`.

    Args:
        cycle: what is done in each branch.
        address: of dtx.
        number: of the connection.
        run: distinguishes this run's xids from those of any other.
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
        """Start the next branch."""
        self._dialogue.stamp((self.number << 32) + self.count)
        self._step = 0
        self.socket.sendall(self._dialogue.writes[0])

    def hear(self, data: bytes) -> Phase | None:
        """Take what was read."""
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
        """Whether an answer that came in pieces or holds a delivery is whole.

        Raises:
            LoadError: it cannot become the answer.
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
        """What *data*, which is no answer, says."""
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
