"""Every answer of dtx has the same code in Java as in the Python adapter.

A test can produce only few of them. So a proxy changes dtx's answers: the flags of an answer, or the reply code of a
refusal. The dialogue stays valid for both ends.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Self

import pytest

from dtx.client import XAException, XARollback
from dtx.client.errors import XAER_NOTA, XAER_RMERR, raised_by_flag, raised_by_reply_code
from dtx.xa.codes import ReplyCode, XaFlag
from tests.servers.interop.java_programs import Program
from tests.servers.interop.test_java import JOIN, NO_FLAGS, SUCCESS, a_xid
from tests.support.broker import only_standalone
from tests.support.service import DtxService

DEMARCATION, COORDINATION = 101, 105
CHANNEL_CLOSE = struct.pack(">HH", 20, 40)
FRAME_METHOD = 1


class Forger:
    """A proxy between a client and dtx that changes dtx's answers. Use as a context manager.

    Args:
        port: the port of dtx.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flags: int | None = None
        self._reply_code: int | None = None
        self._words: tuple[bytes, bytes] | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def forge(self, *, flags: int | None = None, reply_code: int | None = None) -> None:
        """Put *flags* into the next answer that has flags, *reply_code* into the next refusal."""
        self._flags, self._reply_code = flags, reply_code

    def replace(self, old: bytes, new: bytes) -> None:
        """Replace *old* in the next refusal by *new*, which is as long."""
        self._words = old, new

    @property
    def done(self) -> bool:
        """Whether all changes have been made."""
        return self._flags is None and self._reply_code is None and self._words is None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            for work in (self._up, self._down):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while octets := client.recv(65536):
                server.sendall(octets)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server, server.makefile("rb") as frames:
            while len(head := frames.read(7)) == 7:
                kind, _, size = struct.unpack(">BHI", head)
                payload = frames.read(size)
                client.sendall(head + (self._forged(payload) if kind == FRAME_METHOD else payload) + frames.read(1))

    def _forged(self, payload: bytes) -> bytes:
        """The changed payload, which is as long."""
        if payload[:4] == CHANNEL_CLOSE and self._words is not None:
            old, new = self._words
            assert old in payload
            assert len(old) == len(new)
            self._words = None
            return payload.replace(old, new)
        if payload[:4] == CHANNEL_CLOSE and self._reply_code is not None:
            code, self._reply_code = self._reply_code, None
            return payload[:4] + struct.pack(">H", code) + payload[6:]
        if len(payload) == 6 and payload[1] in (DEMARCATION, COORDINATION) and self._flags is not None:
            flags, self._flags = self._flags, None
            return payload[:4] + struct.pack(">H", flags)
        return payload


@pytest.fixture
def forger(service: DtxService) -> Iterator[Forger]:
    with Forger(service.port) as forging:
        yield forging


@pytest.fixture
def forged(program: Program, forger: Forger, service: DtxService) -> Iterator[str]:
    """The name of a connection through the forger."""
    program("forged", "connect", service.url().replace(f":{service.port}/", f":{forger.port}/"))
    yield "forged"
    program("forged", "close")


def code(raised: type[XAException] | None) -> int:
    """The code of *raised*; 0: nothing is raised."""
    return 0 if raised is None else raised.code


def answer(program: Program, *words: object) -> int:
    """Make a call; returns the code that it raises, or 0."""
    said = program.say(*words)
    assert said.startswith(("ok ", "xa ")), said
    return int(said.split(" ")[1]) if said.startswith("xa ") else 0


@only_standalone
@pytest.mark.parametrize("call", ["prepare", "commit", "rollback"])
@pytest.mark.parametrize("flags", [*XaFlag, 9])
def test_every_answer_has_its_code(
    program: Program, forger: Forger, forged: str, queue: str, call: str, flags: int
) -> None:
    """A rollback succeeds if the branch has been rolled back for any reason."""
    xid = a_xid()
    program(forged, "start", xid, NO_FLAGS)
    program(forged, "publish", queue, "x")
    program(forged, "end", xid, SUCCESS)
    if call != "prepare":
        program(forged, "prepare", xid)
    expected: type[XAException] | None = raised_by_flag(XaFlag(flags)) if flags in set(XaFlag) else XAER_RMERR
    if call == "rollback" and expected is not None and issubclass(expected, XARollback):
        expected = None
    forger.forge(flags=flags)
    assert answer(program, forged, call, xid) == code(expected)
    assert forger.done
    if call == "prepare":
        program("a", "rollback", xid)


@only_standalone
@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("start", ("start", JOIN)),
        ("prepare", ("prepare",)),
        ("commit", ("commit",)),
        ("one-phase commit", ("commit", "one-phase")),
        ("rollback", ("rollback",)),
        ("forget", ("forget",)),
    ],
)
@pytest.mark.parametrize("reply_code", [*ReplyCode, 999])
def test_every_refusal_has_its_code(
    program: Program, forger: Forger, forged: str, operation: str, words: tuple[str | int, ...], reply_code: int
) -> None:
    """The branch is unknown, so every call is refused."""
    forger.forge(reply_code=reply_code)
    call, *more = words
    assert answer(program, forged, call, a_xid(), *more) == code(raised_by_reply_code(operation, reply_code))
    assert forger.done


@only_standalone
@pytest.mark.parametrize(
    ("words", "raised"),
    [
        ((b"completed: committed", b"completed: forgotten"), None),
        ((b"ended=committed", b"ended=forgotten"), XAER_NOTA),
    ],
    ids=["the sentence", "the field"],
)
def test_the_field_holds_how_a_branch_ended(
    program: Program, forger: Forger, forged: str, words: tuple[bytes, bytes], raised: type[XAException] | None
) -> None:
    """A commit succeeds if it is a repetition because the first answer was lost."""
    xid = a_xid()
    program(forged, "start", xid, NO_FLAGS)
    program(forged, "publish", "nowhere", "x")
    program(forged, "end", xid, SUCCESS)
    program(forged, "prepare", xid)
    program(forged, "commit", xid)
    forger.replace(*words)
    assert answer(program, forged, "commit", xid) == code(raised)
    assert forger.done
