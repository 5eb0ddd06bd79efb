"""The requests and answers of a branch, encoded once; for each branch only numbers are patched in."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from struct import Struct
from typing import Final

from benchmarks.support.amqp import BASIC, CHANNEL, PERSISTENT, message_frames
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import FRAME_END, OVERHEAD, header_frame
from dtx.wire.amqp09.methods import (
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxStart,
    DtxStartOk,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

STAMP: Final = Struct(">Q")
"""The number of a branch, unique in a run, in the xid and at the start of the body."""
_STAMP_PLACE: Final = b"\xf1stamp\xf1\xf1"
_TAG_PLACE: Final = 0xF2746167F2F2F2F2
_GET_OK_KEY: Final = methods.BasicGetOk.HEAD
_END: Final = bytes((FRAME_END,))
FORMAT_ID: Final = 0x62656E63


class Phase(Enum):
    """The answer that a step waits for; prepare and commit are measured separately."""

    WORK = auto()
    PREPARE = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The operations of each branch.

    Args:
        queue: for the published message, by the default exchange.
        source: each branch gets and acks one message of this queue; ``None``: only publish.
        size: of the published body, in bytes.
        one_phase: commit without prepare.
        pipeline: do not wait for the answers to start, end and prepare one by one.
    """

    queue: bytes
    source: bytes | None = None
    size: int = 1024
    one_phase: bool = False
    pipeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One write and the answers that must follow it.

    Args:
        start, end: of the request, in the dialogue's buffer.
        answer: the bytes that must come first: answers with xa-ok.
        delivery: size in bytes of a got message that must come after that; 0 for none.
        phase: of the answers.
    """

    start: int
    end: int
    answer: bytes
    delivery: int = 0
    phase: Phase = Phase.WORK


class Dialogue:
    """The frames of the branches of one connection.

    Args:
        cycle: the operations of each branch.
        run: 8 bytes in all xids of this run, unique to it.
    """

    def __init__(self, cycle: Cycle, run: bytes) -> None:
        xid = Xid(FORMAT_ID, run + _STAMP_PLACE, b"queue")
        self._said = bytearray()
        self.steps: list[Step] = []
        self._plan(cycle, xid)
        self._stamps = _places(self._said, _STAMP_PLACE)
        self._tags = _places(self._said, _TAG_PLACE.to_bytes(8, "big"))
        self._view = memoryview(self._said)
        self.writes = [self._view[step.start : step.end] for step in self.steps]

    def _plan(self, cycle: Cycle, xid: Xid) -> None:
        start, end, prepare = (
            call.frame(CHANNEL) for call in (DtxStart(xid=xid), DtxEnd(xid=xid), DtxPrepare(xid=xid))
        )
        commit = DtxCommit(xid=xid, one_phase=cycle.one_phase).frame(CHANNEL)
        body = _STAMP_PLACE + bytes(octet & 0x7F for octet in range(cycle.size - len(_STAMP_PLACE)))
        work = message_frames(b"", cycle.queue, body)
        start_ok, end_ok, prepare_ok, commit_ok = (
            row(XaFlag.OK).frame(CHANNEL) for row in (DtxStartOk, DtxEndOk, DtxPrepareOk, DtxCommitOk)
        )
        vote = [] if cycle.one_phase else [(prepare, prepare_ok, 0, Phase.PREPARE)]
        outcome = (commit, commit_ok, 0, Phase.COMMIT)
        if cycle.source is None:
            got: list[_Exchange] = []
        else:
            get = methods.BasicGet(cycle.source).frame(CHANNEL)
            got = [(get, b"", got_size(cycle.source, cycle.size), Phase.WORK)]
            work = methods.BasicAck(_TAG_PLACE).frame(CHANNEL) + work
        first: _Exchange = (start, start_ok, 0, Phase.WORK)
        last: _Exchange = (work + end, end_ok, 0, Phase.WORK)
        if not cycle.pipeline:
            exchanges = [first, *got, last, *vote, outcome]
        elif got:
            exchanges = [_merge([first, *got]), _merge([last, *vote]), outcome]
        else:
            exchanges = [_merge([first, last, *vote]), outcome]
        for request, answer, delivery, phase in exchanges:
            begin = len(self._said)
            self._said += request
            self.steps.append(Step(start=begin, end=len(self._said), answer=answer, delivery=delivery, phase=phase))

    def stamp(self, number: int) -> None:
        """Patch in the number of a branch."""
        for place in self._stamps:
            STAMP.pack_into(self._said, place, number)

    def acknowledge(self, delivery_tag: bytes) -> None:
        """Patch the tag of the got message into the ack."""
        for place in self._tags:
            self._said[place : place + 8] = delivery_tag


_Exchange = tuple[bytes, bytes, int, Phase]


def _merge(exchanges: Sequence[_Exchange]) -> _Exchange:
    """Join several requests into one write; only the last answer may be a delivery."""
    requested, answers, deliveries, phases = zip(*exchanges, strict=True)
    return b"".join(requested), b"".join(answers), sum(deliveries), phases[-1]


def _places(buffer: bytes | bytearray, marker: bytes) -> list[int]:
    places = []
    place = buffer.find(marker)
    while place >= 0:
        places.append(place)
        place = buffer.find(marker, place + 1)
    return places


def got_size(source: bytes, size: int) -> int:
    """Return the bytes of get-ok, header and body of a persistent message from the default exchange to *source*."""
    method = 4 + 8 + 1 + 1 + 1 + len(source) + 4
    return OVERHEAD + method + len(header_frame(CHANNEL, BASIC, size, PERSISTENT)) + OVERHEAD + size


def got_tag(answer: bytes, position: int) -> bytes | None:
    """Return the delivery tag of the get-ok that begins at *position*; ``None`` if it is another method."""
    key = answer[position + 7 : position + 11]
    return answer[position + 11 : position + 19] if key == _GET_OK_KEY else None


def is_answer(answer: bytes, step: Step) -> bool:
    """Return whether *answer* is the complete answer to *step*."""
    return (
        len(answer) == len(step.answer) + step.delivery
        and answer.startswith(step.answer)
        and answer.endswith(_END)
        and (not step.delivery or got_tag(answer, len(step.answer)) is not None)
    )
