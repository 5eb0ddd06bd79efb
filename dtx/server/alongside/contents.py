"""Contents stay whole: what dtx itself says to a client never comes between the frames of a message.

"The content body frames of one channel are not intermixed with its methods" (AMQP 0-9-1, 2.3.5.2): strict clients end
their connection over it. A broker writes each message in one piece, so it is enough to know whether what was passed on
last ended within one.
"""

from collections.abc import Callable, Sequence

from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.frames import BODY, HEADER, OVERHEAD, Frame

_CONNECTION = b"\x00\x00"


class Contents:
    """The stream of one broker's frames to one client.

    Args:
        write: sends to the client.
    """

    __slots__ = ("_late", "_left", "_write", "late", "passing")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.passing = False
        """Frames of the broker are being passed on at the moment: what is sent now is between whole ones."""
        self.late = 0
        """Octets that wait for the end of a message."""
        self._left = 0
        self._late: list[bytes] = []
        self._write = write

    def send(self, data: bytes) -> None:
        """Send whole frames of one channel, now or behind the message that is on its way."""
        if self._left and not self.passing and data[1:3] != _CONNECTION:
            self._late.append(data)
            self.late += len(data)
        else:
            self._write(data)

    def passed(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """These were passed on."""
        octets = 0
        for key, channel, start, end in reversed(frames):
            if not channel:
                continue  # a heartbeat, for example
            if key == BODY:
                octets += end - start - OVERHEAD
                continue
            if key == HEADER:
                self._left = content.header(buffer[start + 7 : end - 1]).body_size - octets
            else:
                self._left = int(key in methods.CONTENT)  # its header is still to come
            break
        else:
            self._left = max(0, self._left - octets)
        if not self._left:
            self.flush()

    def flush(self) -> None:
        """Nothing more comes of the message that is on its way, or it is whole: send what waits."""
        late, self._late = self._late, []
        self._left = self.late = 0
        for data in late:
            self._write(data)
