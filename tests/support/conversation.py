"""AMQP 0-9-1 conversations as text, run with a server over a socket.

A line that begins with ``<`` is sent to the server, a line with ``>`` is expected from it; ``#`` begins a comment.

    < 1 queue.declare queue=$q exclusive=1
    > 1 queue.declare-ok queue=$q message_count=0
    < 1 basic.publish routing_key=$q
    < 1 header size=2
    < 1 body ok

The number is the channel. Fields that are not named have their defaults in a sent method and may have any value in a
received one. Words with a dollar sign, like ``$q``, are names that are unique to the conversation, ``$xid`` is an xid.
``with channels 1 2`` opens these first, ``at standalone`` names the servers that it applies to. ``< raw 0102`` sends
these bytes, ``> end`` is the end of the socket. Received frames are compared for each channel: a server may answer two
channels in any order. pika, not the codec of dtx, encodes and decodes the methods.
"""

import contextlib
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from pika import spec

from dtx.client.pika_methods import DtxCoordination, DtxDemarcation
from dtx.wire.amqp09.frames import BODY, HEADER, HEARTBEAT, METHOD
from tests.support.client import new_xid
from tests.support.raw import Frame, RawClient

_CLASSES: Final[list[Any]] = [
    method
    for group in (*(value for value in vars(spec).values() if isinstance(value, type)), DtxDemarcation, DtxCoordination)
    for method in vars(group).values()
    if isinstance(method, type) and "INDEX" in vars(method)
]
_BY_INDEX: Final[dict[int, Any]] = {method.INDEX: method for method in _CLASSES}


def _wire_name(method: Any) -> str:
    """``Queue.DeclareOk`` is ``queue.declare-ok``."""
    hyphened = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in method.NAME)
    return hyphened.removeprefix("-").replace(".-", ".")


_BY_NAME: Final[dict[str, Any]] = {_wire_name(method): method for method in _CLASSES}


class Line(NamedTuple):
    """One line of a script, with its number and direction."""

    number: int
    sent: bool
    words: list[str]


class Script(NamedTuple):
    """A conversation.

    Args:
        servers: the servers that it applies to.
        channels: the channels that are open at the beginning.
        lines: the lines in order.
    """

    servers: list[str]
    channels: list[int]
    lines: list[Line]

    @property
    def is_about_xa(self) -> bool:
        """Whether it needs the classes that dtx adds."""
        return any(word.startswith("dtx-") for line in self.lines for word in line.words)


def read(text: str) -> Script:
    """Parse *text*; the defaults are ``at rabbitmq standalone alongside`` and ``with channels 1``."""
    script = Script(["rabbitmq", "standalone", "alongside"], [1], [])
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words[:2] == ["with", "channels"]:
            script.channels[:] = map(int, words[2:])
        elif words[:1] == ["at"]:
            script.servers[:] = words[1:]
        elif words:
            assert words[0] in ("<", ">"), f"line {number}: {line}"
            script.lines.append(Line(number, words[0] == "<", words[1:]))
    return script


class Names(dict[str, Any]):
    """The values of the words with a dollar sign."""

    def __missing__(self, word: str) -> Any:
        self[word] = new_xid().to_wire() if word.startswith("$xid") else f"{word[1:]}-{secrets.token_hex(4)}"
        return self[word]

    def fields(self, words: Sequence[str]) -> dict[str, Any]:
        """The fields in ``name=value …``."""
        return {name: self._value(value) for name, _, value in (word.partition("=") for word in words)}

    def _value(self, word: str) -> Any:
        if word.startswith("$"):
            return self[word]
        return int(word) if word.lstrip("-").isdigit() else word


def octets(line: Line, names: Names) -> bytes:
    """The bytes that a line sends."""
    if line.words[0] == "raw":
        return bytes.fromhex("".join(line.words[1:]))
    channel, name, *rest = line.words
    kind = {"header": HEADER, "body": BODY, "heartbeat": HEARTBEAT}.get(name, METHOD)
    if kind == METHOD:
        method = _BY_NAME[name](**names.fields(rest))
        payload = struct.pack(">I", method.INDEX) + b"".join(method.encode())
    elif kind == HEADER:
        fields = {"class": 60, "size": 0, **names.fields(rest)}
        payload = struct.pack(">HHQH", fields["class"], 0, fields["size"], 0)
    else:
        payload = " ".join(rest).encode()
    return struct.pack(">BHI", kind, int(channel), len(payload)) + payload + b"\xce"


Split = Callable[[bytes], Iterator[bytes]]


def at_once(data: bytes) -> Iterator[bytes]:
    """All data in one piece."""
    yield data


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    """Each byte in its own packet."""
    for position in range(len(data)):
        yield data[position : position + 1]


def inside_frames(data: bytes) -> Iterator[bytes]:
    """Cut in the middle of each frame's payload."""
    begin, frame = 0, 0
    while frame + 8 <= len(data):
        size = int.from_bytes(data[frame + 3 : frame + 7], "big")
        cut = min(frame + 7 + size // 2, len(data))
        yield data[begin:cut]
        begin, frame = cut, frame + 8 + size
    yield data[begin:]


class Conversation:
    """Runs conversations on one connection.

    Args:
        peer: the client, logged in if the conversation needs it.
        split: divides the sent data into packets.
    """

    def __init__(self, peer: RawClient, split: Split) -> None:
        self._peer = peer
        self._split = split
        self._names = Names()
        self._early: dict[int, deque[Frame]] = {}

    def hold(self, lines: Sequence[Line]) -> None:
        """Run all lines; fail at the first received frame that differs from its line."""
        data = b""
        for line in lines:
            if line.sent:
                data += octets(line, self._names)
                continue
            self._send(data)
            data = b""
            self._hear(line)
        self._send(data)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # the expected lines show the error
            for piece in self._split(data):
                self._peer.send_raw(piece)

    def _hear(self, line: Line) -> None:
        if line.words == ["end"]:
            assert self._peer.frame() is None, f"line {line.number}: the server goes on"
            return
        number, name, *rest = line.words
        frame = self._next(int(number), line)
        wanted = {"text": " ".join(rest)} if name == "body" else self._names.fields(rest)
        came, said = self._said(frame)
        assert (came, said) == (name, {**said, **wanted}), f"line {line.number}: {came} {said}"

    def _next(self, channel: int, line: Line) -> Frame:
        early = self._early.get(channel)
        if early:
            return early.popleft()
        while True:
            frame = self._peer.frame()
            assert frame is not None, f"line {line.number}: the server has closed the socket"
            if frame.channel == channel:
                return frame
            self._early.setdefault(frame.channel, deque()).append(frame)

    def _said(self, frame: Frame) -> tuple[str, dict[str, Any]]:
        if frame.key == HEADER:
            return "header", {"class": frame.payload[1], "size": int.from_bytes(frame.payload[4:12], "big")}
        if frame.key == BODY:
            return "body", {"text": frame.payload.decode()}
        method = _BY_INDEX[frame.key]()
        method.decode(frame.payload, 4)
        return _wire_name(method), vars(method)
