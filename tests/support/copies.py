"""Copies of a message, and a channel that delivers them through a filter."""

from uuid import UUID

from dtx.log.records import Replay
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.consumed_queues import ConsumedQueue
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.rabbitmq.copy_filter import CopyFilter
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.frames import FrameSplitter
from dtx.wire.amqp09.properties import build
from tests.support.branches import a_publish

BRANCH = UUID("0190a5b0-0000-7000-8000-000000000001")
BODY = b"x" * 5000
REPLAY = Replay(position=0, exchange=b"e", routing_key=b"key", digest=messages.digest_of(b"e", b"key", BODY))
"""Message 0 of the branch is sent again."""


class Source:
    """A channel with one consumer on each queue; its tag is the name of the queue."""

    def __init__(self, register: CopyRegister, *, no_ack: bool = False) -> None:
        self.no_ack = no_ack
        self.passed: list[int] = []
        """Keys of the frames that have passed."""
        self.settled: list[tuple[int, bool]] = []
        """What dtx has settled: tag, requeue."""
        self.got: list[str] = []
        self.abandoned = ""
        self.may_settle = True
        self.gets = 1
        self.filter = CopyFilter(register, "/", self)
        self._splitter = FrameSplitter(0)

    def subscription(self, delivery: methods.BasicDeliver | methods.BasicGetOk) -> ConsumedQueue | None:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        name = delivery.consumer_tag if isinstance(delivery, methods.BasicDeliver) else b"q"
        return ConsumedQueue(name, self.no_ack) if name != b"unknown" else None

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        assert buffer[start:end]
        self.passed.append(key)

    def settle_copy(self, tag: int, *, requeue: bool) -> None:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        self.settled.append((tag, requeue))

    def get_again(self, tag: int, queue: bytes, *, no_ack: bool) -> None:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        self.got.append(f"again {queue.decode()} {no_ack}")

    def may_replace(self, *, is_got: bool) -> bool:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        return self.may_settle and not (is_got and self.gets > 1)

    def abandon(self, reason: str) -> None:
        """See :class:`~dtx.store.rabbitmq.copy_filter.FilteredChannel`."""
        self.abandoned = reason

    def deliver(
        self,
        tag: int,
        raw: bytes,
        body: bytes = BODY,
        *,
        queue: bytes = b"q",
        get: bool = False,
        again: bool = False,
        skipped: int = 0,
        frames: int | None = None,
    ) -> int:
        """Deliver a message, or some of its frames, of 1,000 bytes; returns the number of frames that have passed."""
        before = len(self.passed)
        method: methods.BasicDeliver | methods.BasicGetOk = methods.BasicDeliver(queue, tag, again, b"e", b"key")
        if get:
            method = methods.BasicGetOk(tag, again, b"e", b"key", 0)
        buffer, found = self._splitter.feed(content.message(method.frame(1), 1, raw, body, 1000))
        for key, _, start, end in found[skipped:frames]:
            self.filter.frame(key, buffer, start, end)
        return len(self.passed) - before

    @property
    def whole(self) -> int:
        """The number of frames of a message."""
        return 2 + -(-len(BODY) // 992)


def marked(attempt: int = 1, **more: bytes) -> bytes:
    """The properties of a copy of message 0 of the branch."""
    raw = build({}, {name.encode(): value for name, value in more.items()})
    (frames,) = messages.commit_frames(1, 0, BRANCH, [a_publish(properties=raw)], attempt)
    buffer, found = FrameSplitter(0).feed(frames)
    _, _, start, end = found[1]
    return content.header(buffer[start + 7 : end - 1]).properties
