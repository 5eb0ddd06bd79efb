"""Selection of inputs: few and small ones that together reach all code that any input reaches."""

import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import dtx
from dtx.wire.amqp09.errors import FrameError
from dtx.wire.amqp09.frames import FrameSplitter
from tests.evidence.fuzz.targets import TARGETS, Target

DIRECTORY: Final = Path(__file__).parent / "corpus"
MOST: Final = 60
"""Limit of inputs of one target: replaying all of them takes seconds."""
_SOURCE: Final = str(Path(dtx.__file__).parent)

Arc = tuple[str, int, int]
"""File, line, next line of the same function."""


def stored(name: str) -> list[Path]:
    """Return the stored inputs of a target, in a fixed order."""
    return sorted((DIRECTORY / name).glob("*"))


def reached(run: Callable[[bytes], None], data: bytes) -> set[Arc]:
    """Return the steps from line to line in dtx's code that *data* causes."""
    arcs: set[Arc] = set()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_SOURCE):
            return None
        before = -code.co_firstlineno

        def step(inner: FrameType, event: str, _argument: object) -> Any:
            nonlocal before
            if event == "line":
                arcs.add((code.co_filename, before, inner.f_lineno))
                before = inner.f_lineno
            return step

        return step

    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return arcs


def distil(target: Target, inputs: Iterable[bytes], pieces: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Return the smallest of *inputs* that together reach the same code, without their unnecessary parts.

    Args:
        target: of the inputs.
        inputs: all known inputs.
        pieces: cuts an input into parts that may be removed.
    """
    target.run(b"")  # exclude code that runs once in a process
    by_size = sorted(set(inputs), key=lambda data: (len(data), data))
    reach = {data: reached(target.run, data) for data in by_size}
    chosen: list[bytes] = []
    known: set[Arc] = set()
    for data in by_size:
        if not reach[data] <= known:
            chosen.append(data)
            known |= reach[data]
    kept: list[bytes] = []
    others = dict(reach)
    for data in reversed(chosen):
        rest = set().union(*(others[other] for other in chosen if other != data and other in others))
        alone = others.pop(data) - rest
        if alone:
            smaller = _shrink(target, data, alone, pieces)
            kept.append(smaller)
            others[smaller] = reached(target.run, smaller)
            chosen.append(smaller)
    return kept[:MOST]


def _shrink(target: Target, data: bytes, needed: set[Arc], pieces: Callable[[bytes], list[bytes]]) -> bytes:
    """Return *data* without parts that the *needed* steps do not need; the first part stays."""
    parts = pieces(data)
    size = max(1, (len(parts) - 1) // 2)
    while size:
        start = 1
        while start < len(parts):
            fewer = parts[:start] + parts[start + size :]
            if needed <= reached(target.run, b"".join(fewer)):
                parts = fewer
            else:
                start += size
        size //= 2
    return b"".join(parts)


def store(name: str, inputs: Iterable[bytes]) -> int:
    """Store these inputs, remove all others, and return the number of bytes."""
    directory = DIRECTORY / name
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {hashlib.sha256(data).hexdigest()[:16]: data for data in inputs}
    for path in directory.iterdir():
        if path.name not in by_name:
            path.unlink()
    for digest, data in by_name.items():
        (directory / digest).write_bytes(data)
    return sum(map(len, by_name.values()))


def frames_of(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the frames of a stream, and the bytes after the last one."""
    splitter = FrameSplitter(0)
    try:
        buffer, frames = splitter.feed(data)
    except FrameError as error:
        buffer, frames = error.buffer, error.frames
    end = frames[-1][3] if frames else 0
    return [buffer[start:stop] for *_, start, stop in frames], data[end:]


def pieces(name: str, data: bytes) -> list[bytes]:
    """Return the parts of an input that may be removed, after the first part, which must stay."""
    if not TARGETS[name].frames:
        return [b"", *(data[position : position + 1] for position in range(len(data)))]
    frames, rest = frames_of(data[1:])
    return [data[:1], *frames, rest]
