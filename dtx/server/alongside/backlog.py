"""Frames of a client that wait behind a method of their channel, until that is answered."""

from collections import deque


class Backlog:
    """A queue of frames that knows its size. Each frame is touched once, however often the channel has to wait."""

    __slots__ = ("_frames", "size")

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque()
        self.size = 0
        """Octets."""

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, key: int, frame: bytes) -> None:
        """A frame that comes last."""
        self._frames.append((key, frame))
        self.size += len(frame)

    def put_before(self, earlier: "Backlog") -> None:
        """What *earlier* has comes first; it costs what *earlier* has, not what is here."""
        self._frames.extendleft(reversed(earlier._frames))  # noqa: SLF001 - of its own class
        self.size += earlier.size

    @property
    def first(self) -> int:
        """What the first frame is; there must be one."""
        return self._frames[0][0]

    def next(self) -> tuple[int, bytes]:
        """Take the first frame: what it is (class << 16 | method, or the kind of content), and all of it."""
        key, frame = self._frames.popleft()
        self.size -= len(frame)
        return key, frame
