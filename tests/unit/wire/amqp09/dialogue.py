"""Dialogues with the engine as text: the frames that it receives, the calls, and the events and frames expected of it.

The first line that is not a comment describes the engine, for example ``server, running, channel 1 open``. Then:

    < 1 queue.declare "q" 0 1     frames that it receives, with the fields of the method in order
    < 1 header 3                  a content header: size, and properties and class where they matter
    < 1 body "abc"
    < x'0102'                     any bytes
    ! 1 hold                      a call, of the connection where there is no number
    @ 30                          seconds pass
    = 1 MethodReceived queue.declare "q"
    > 1 queue.declare-ok "q" 0 0  a frame that it sends

A line names as many fields as needed. The others may have any value, or have the default of their row. A call between
two events is made while the engine is iterated. Each event and each frame needs a line. Passed frames have a line each,
``= FramesPassed 1 basic.publish``, even if one event holds several of them.
"""

import shlex
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast, get_args, get_type_hints

from dtx.wire.amqp09 import events, methods
from dtx.wire.amqp09.channel import ChannelEngine, Passing
from dtx.wire.amqp09.closes import close_frame
from dtx.wire.amqp09.codec import ChannelMode, Method
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import BODY, HEADER, HEARTBEAT, FrameSplitter, Protocol, header_frame
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.xid import Xid
from tests.support.conversation import at_once, byte_by_byte, inside_frames
from tests.support.raw import body_frames

__all__ = ["FOLDER", "Dialogue", "at_once", "byte_by_byte", "inside_frames"]

FOLDER: Final = Path(__file__).parent / "dialogues"
PROPERTIES: Final = b"\0\0"
ROWS: Final[list[type[Method]]] = [*methods.METHODS.values(), methods.ExchangeQuery, methods.ExchangeQueryOk]
BY_NAME: Final = {row.NAME: row for row in ROWS}
MEMORY: Final = 100
"""Bytes of incomplete bodies that all channels may hold."""


class Few:
    """A memory with a limit."""

    def __init__(self) -> None:
        self.used = 0

    def charge(self, size: int) -> None:
        self.used += size

    def has_room(self, size: int) -> bool:
        return self.used + size <= MEMORY

    def excess(self, size: int) -> str:
        return f"{self.used + size} bytes, {MEMORY} are allowed"


def _key(word: str) -> int:
    class_id, _, method_id = word.partition(".")
    return int(class_id) << 16 | int(method_id or 0)


def _value(kind: str, word: str) -> Any:
    if kind == "xid":
        return Xid(1, word.encode(), b"")
    if kind in ("short", "long"):
        return bytes.fromhex(word[2:-1]) if word.startswith("x'") else word.encode()
    if kind == "bit":
        return word == "1"
    return _key(word) if "." in word else int(word)


def method(words: list[str]) -> Method:
    """The method that *words* name, with its fields."""
    row = BY_NAME[words[0]]
    kinds = get_type_hints(row, include_extras=True)
    names = [each.name for each in fields(cast("Any", row))]
    given = {name: _value(get_args(kinds[name])[1], word) for name, word in zip(names, words[1:], strict=False)}
    return cast("Method", cast("Any", row)(**given))


def _said(value: Any) -> str:
    if isinstance(value, Xid):
        return value.gtrid.decode()
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(int(value))


def words_of(said: Method) -> list[str]:
    """All words that a line can have for *said*."""
    found = [_said(getattr(said, each.name)) for each in fields(cast("Any", said))]
    if isinstance(said, methods.ChannelClose | methods.ConnectionClose):
        found[-1] = f"{said.failed >> 16}.{said.failed & 0xFFFF}"
    return [said.NAME, *found]


def words_of_frame(key: int) -> str:
    """The name of the kind of frame *key*."""
    return {HEADER: "header", BODY: "body"}.get(key) or methods.METHODS[key].NAME


def words_of_event(event: events.EngineEvent) -> list[str]:
    """All words that a line can have for an event."""
    if isinstance(event, events.FramePassed):
        assert event.end <= len(event.buffer)
        return [str(event.channel), "FramePassed", words_of_frame(event.key)]
    channel, words = "", [type(event).__name__]
    for each in fields(event):
        name, value = each.name, getattr(event, each.name)
        if name == "channel":
            channel = str(value)
        elif isinstance(value, Method):
            words += words_of(value)
        elif isinstance(value, XaError | WireError):
            words += [str(value.code.value), value.reason]
        else:
            words.append(f"{name}={_said(value)}" if isinstance(value, int) else _said(value))
    return [channel, *words] if channel else words


def octets(words: list[str]) -> bytes:
    """The bytes of a line with ``<``."""
    if words[0].startswith("x'"):
        return bytes.fromhex("".join(words)[2:-1])
    channel, name, *rest = words
    match name:
        case "heartbeat":
            return b"\x08\0\0\0\0\0\0\xce"
        case "header":
            properties = bytes.fromhex(rest[1]) if len(rest) > 1 else PROPERTIES
            return header_frame(int(channel), int(rest[2]) if len(rest) > 2 else 60, int(rest[0]), properties)
        case "body":
            return body_frames(int(channel), rest[0].encode(), 0)[0]
        case _:
            return method([name, *rest]).frame(int(channel))


class Dialogue:
    """Plays one dialogue.

    Args:
        text: text of the file.
        split: cuts the received bytes into reads.
    """

    def __init__(self, text: str, split: Callable[[bytes], Iterator[bytes]]) -> None:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self._split = split
        self._words = [shlex.split(line, posix=True) if "x'" not in line else line.split() for line in lines[1:]]
        self._lines = lines
        self._reads: list[bytes] = []
        self._events: Iterator[events.EngineEvent] = iter(())
        self._joined: deque[list[str]] = deque()
        """The remaining frames of a joined event."""
        self._early: list[str] | None = None
        """An event before its line is reached: the engine was iterated to make it send."""
        self._sent: list[list[str]] = []
        self._now = 0.0
        self.engine = self._begin([word.strip() for word in lines[0].split(",")])

    def _begin(self, words: list[str]) -> ConnectionEngine:
        server = words[0] == "server"
        settings = EngineSettings(max_message=10_000, close_overtakes="close waits" not in words)
        engine = self.engine = ConnectionEngine(settings, PeerEnd.SERVER if server else PeerEnd.CLIENT)
        self._reader = FrameSplitter(0)
        self._client_header = not server
        if not server:
            engine.start()
        if "running" in words:
            engine.memory = Few()
            if server:
                list(engine.receive(Protocol.AMQP_0_9_1.value))
                engine.greet(methods.ConnectionStart(0, 9, b"", b"PLAIN", b"en_US"))
                list(engine.receive(methods.ConnectionStartOk(b"", b"PLAIN", b"", b"en_US").frame(0)))
                engine.tune(methods.ConnectionTune(10, 4096, 60))
                list(engine.receive(methods.ConnectionTuneOk(10, 4096, 60).frame(0)))
                list(engine.receive(methods.ConnectionOpen(b"/").frame(0)))
                engine.open_ok()
            else:
                list(engine.receive(methods.ConnectionStart(0, 9, b"", b"PLAIN", b"en_US").frame(0)))
                engine.log_in(methods.ConnectionStartOk(b"", b"PLAIN", b"", b"en_US"))
                list(engine.receive(methods.ConnectionTune(10, 4096, 60).frame(0)))
                engine.tune_ok(methods.ConnectionTuneOk(10, 4096, 60), b"/")
                list(engine.receive(methods.ConnectionOpenOk().frame(0)))
            for word in words:
                if word.startswith("channel "):
                    self._open(int(word.split()[1]), server=server)
            engine.data_to_send()
            engine.tick(self._now)
            self._client_header = False
        return engine

    def _open(self, number: int, *, server: bool) -> None:
        if server:
            list(self.engine.receive(methods.ChannelOpen().frame(number)))
            self.engine.channel(number).open_ok()
        else:
            self.engine.open_channel(number)
            list(self.engine.receive(methods.ChannelOpenOk().frame(number)))

    def hold(self) -> None:
        """Play all lines, and check the results."""
        received = b""
        for number, words in enumerate(self._words):
            sign, rest = words[0], words[1:]
            where = f"line {number + 2}: {self._lines[number + 1]}"
            if sign == "<":
                if not received:
                    self._finish(where)
                received += octets(rest)
                continue
            if received:
                self._events = self._iterate(list(self._split(received)))
                received = b""
                if sign == "!":
                    self._early = self._next_event()
            match sign:
                case "=":
                    event = self._next_event()
                    assert event is not None, f"{where}: there is no event"
                    _compare(rest, event, where)
                case ">":
                    self._expect_sent(rest, where)
                case "@":
                    self._finish(where)
                    self._now += float(rest[0])
                    _, told = self.engine.tick(self._now)
                    self._events = iter(told)
                case _:
                    assert sign == "!", where
                    self._call(rest)
        if received:
            self._events = self._iterate(list(self._split(received)))
        self._finish("the end")

    def _iterate(self, reads: list[bytes]) -> Iterator[events.EngineEvent]:
        for read in reads:
            yield from self.engine.receive(read)
            while self.engine.behind:
                yield from self.engine.receive(b"")

    def _next_event(self) -> list[str] | None:
        words, self._early = self._early, None
        if words is not None:
            return words
        if self._joined:
            return self._joined.popleft()
        event = next(self._events, None) or next(self.engine.events(), None)
        if isinstance(event, events.FramesPassed):
            frames = event.frames
            assert (event.start, event.end) == (frames[0][2], frames[-1][3])
            self._joined += [["FramesPassed", str(number), words_of_frame(key)] for key, number, _, _ in frames]
            return self._joined.popleft()
        return None if event is None else words_of_event(event)

    def _finish(self, where: str) -> None:
        left = []
        while (event := self._next_event()) is not None:
            left.append(event)
        assert not left, f"{where}: {left} are unexpected events"
        self._collect()
        assert not self._sent, f"{where}: {self._sent} was sent unexpectedly"

    def _collect(self) -> None:
        sent = b"".join(self.engine.data_to_send())
        if self._client_header and sent:
            self._client_header = False
            self._sent.append([sent[:8].decode("latin-1")])
            sent = sent[8:]
        if sent.startswith(b"AMQP"):
            self._sent.append([sent.decode("latin-1")])
            return
        buffer, frames = self._reader.feed(sent)
        for key, channel, start, end in frames:
            payload = bytes(buffer[start + 7 : end - 1])
            if key == HEARTBEAT:
                self._sent.append(["0", "heartbeat"])
            elif key == HEADER:
                self._sent.append([str(channel), "header", str(int.from_bytes(payload[4:12])), payload[12:].hex()])
            elif key == BODY:
                self._sent.append([str(channel), "body", payload.decode()])
            else:
                row = methods.METHODS[key]
                if key == methods.ExchangeBindOk.KEY and len(payload) > 4:
                    row = methods.ExchangeQueryOk
                self._sent.append([str(channel), *words_of(row.decode(payload))])
        assert not self._reader.pending, "half a frame was sent"

    def _expect_sent(self, wanted: list[str], where: str) -> None:
        self._collect()
        if not self._sent and self._early is None:
            self._early = self._next_event()
            self._collect()
        assert self._sent, f"{where}: nothing was sent"
        if wanted[0].startswith("x'"):
            wanted = [bytes.fromhex(wanted[0][2:-1]).decode("latin-1")]
        _compare(wanted, self._sent.pop(0), where)

    # -- calls

    def _call(self, words: list[str]) -> None:
        if words[0].isdigit():
            if words[1] == "open_channel":
                self.engine.open_channel(int(words[0]))
            else:
                self._call_channel(self.engine.channel(int(words[0])), words[1:])
            return
        engine, (name, *rest) = self.engine, words
        match name:
            case "greet":
                engine.greet(methods.ConnectionStart(0, 9, b"", b"PLAIN", b"en_US"))
            case "secure":
                engine.secure(rest[0].encode())
            case "secure_ok":
                engine.secure_ok(rest[0].encode())
            case "tune":
                engine.tune(methods.ConnectionTune(*map(int, rest)))
            case "refuse_login":
                engine.refuse_login(rest[0])
            case "log_in":
                engine.log_in(methods.ConnectionStartOk(b"", b"PLAIN", b"\0a\0b", b"en_US"))
            case "tune_ok":
                engine.tune_ok(methods.ConnectionTuneOk(*map(int, rest)), b"/")
            case "adopt":
                engine.adopt(methods.ConnectionTuneOk(*map(int, rest)))
            case "send_raw":
                engine.send_raw(octets(rest))
            case "fail":
                engine.close(close_frame(WireError(HardCode(int(rest[0])), rest[1]), 0))
            case "send":
                engine.send(method(rest).frame(0))
            case _:
                getattr(engine, name)()

    def _call_channel(self, channel: ChannelEngine, words: list[str]) -> None:
        name, *rest = words
        match name:
            case "become":
                channel.become(ChannelMode(rest[0]))
            case "pass_frames":
                channel.pass_frames(Passing[rest[0].upper()])
            case "confirm":
                channel.confirm(int(rest[0]), safe=rest[1] == "safe")
            case "announce":
                channel.announces = True
            case "put_back":
                key = {"header": HEADER}.get(rest[0]) or method(rest).KEY
                channel.put_back(key, octets([str(channel.number), *rest]))
            case "refuse":
                key = BY_NAME[rest[2]].KEY if len(rest) > 2 else 0
                channel.refuse(XaError(ReplyCode(int(rest[0])), rest[1]), key)
            case "send":
                channel.send(method(rest).frame(channel.number))
            case "content":
                *said, body = rest
                channel.send_content(method(said).frame(channel.number), PROPERTIES, body.encode())
            case "close":
                channel.close(methods.ChannelClose(200, b"", 0).frame(channel.number))
            case _:
                getattr(channel, name)()


def _compare(wanted: list[str], came: list[str], where: str) -> None:
    assert came[: len(wanted)] == wanted, f"{where}: {came}"
