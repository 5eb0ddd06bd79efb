"""A recovery scan: a snapshot that is returned in batches.

AMQP 0-9 dtx preview, dtx-coordination.recover. A scan belongs to a channel. It costs the memory of its snapshot until
the last batch is returned: some transaction managers never end their scans.
"""

from collections.abc import Callable, Sequence

from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import Xid


class Scan:
    """The recovery scan of one channel."""

    __slots__ = ("_open", "_position", "_snapshot", "after")

    def __init__(self) -> None:
        self._open = False
        self._snapshot: Sequence[Xid] = ()
        self._position = 0
        self.after: Xid | None = None
        """Last xid of a batch that one call started and ended. The next such call continues after it, so that a client
        that makes only such calls sees all xids, also when they do not fit one frame."""

    @property
    def is_open(self) -> bool:
        """Whether it was started and not ended."""
        return self._open

    @property
    def left(self) -> int:
        """The number of xids that are not returned yet."""
        return len(self._snapshot) - self._position

    def begin(self, snapshot: Sequence[Xid]) -> None:
        """startscan: "If a recovery scan is already open, the effect is as if [it] were ended and then restarted"."""
        self._open = True
        self._snapshot = snapshot
        self._position = 0

    def next(self, fits: Callable[[Sequence[Xid], int], int], *, end: bool) -> Sequence[Xid]:
        """The next batch.

        Args:
            fits: the number of xids of the snapshot, from a position on, that fit one frame.
            end: endscan.

        Raises:
            XaError: 503, no scan is open.
        """
        if not self._open and not end:
            raise XaError(ReplyCode.COMMAND_INVALID, "recover without startscan, and no recovery scan is open")
        stop = self._position + fits(self._snapshot, self._position)
        batch = self._snapshot[self._position : stop]
        self._position = stop
        if stop >= len(self._snapshot):
            self._snapshot, self._position = (), 0
        if end:
            self.after = batch[-1] if batch and self._snapshot else None
            self._open, self._snapshot, self._position = False, (), 0
        return batch
