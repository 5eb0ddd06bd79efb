"""The cuttable proxy does what tests rely on."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.processes import short_directory
from tests.support.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            while piece := end.recv(65536):
                end.sendall(piece)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.fixture
def through(echo: int) -> Iterator[Proxy]:
    """A proxy in front of it."""
    with Proxy("127.0.0.1", echo) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def read(end: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (piece := end.recv(count - len(got))):
        got += piece
    return got


def test_bytes_go_both_ways_and_are_counted(through: Proxy) -> None:
    with connect(through) as end:
        end.sendall(b"x" * 100_000)
        assert read(end, 100_000) == b"x" * 100_000
    assert through.bytes == {"up": 100_000, "down": 100_000}
    assert through.accepted == 1


def test_the_end_of_one_side_reaches_the_other(through: Proxy) -> None:
    with connect(through) as end:
        end.sendall(b"x")
        end.shutdown(socket.SHUT_WR)
        assert read(end, 2) == b"x"


def test_a_cut_resets_connections_and_can_refuse_new_ones(through: Proxy) -> None:
    with connect(through) as end:
        end.sendall(b"x")
        assert read(end, 1) == b"x"
        through.cut(refuse=True)
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with pytest.raises(ConnectionResetError), connect(through) as end:  # it may come while connecting
        end.recv(1)
    through.resume()
    with connect(through) as end:
        end.sendall(b"y")
        assert read(end, 1) == b"y"


def test_a_stalled_direction_holds_bytes_back_until_resumed(through: Proxy) -> None:
    with connect(through) as end:
        through.stall("down")
        end.sendall(b"x")
        through.wait_for_bytes("up", 1)
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(1)
        through.resume()
        end.settimeout(10)
        assert read(end, 1) == b"x"


def test_a_cut_after_some_bytes_lets_exactly_these_through(through: Proxy) -> None:
    with connect(through) as end:
        through.cut_after("down", 3)
        end.sendall(b"abcdef")
        assert read(end, 3) == b"abc"
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert through.bytes["down"] == 3


def test_the_target_can_be_the_socket_of_a_postgresql() -> None:
    """So that a server without TCP has a network in front of it that can be cut."""
    with (
        short_directory("socket") as place,
        socket.socket(socket.AF_UNIX) as listener,
        Proxy(str(place), 5432) as proxy,
    ):
        with connect(proxy) as refused, contextlib.suppress(ConnectionResetError):
            assert read(refused, 1) == b""  # nobody listens yet
        listener.bind(str(place / ".s.PGSQL.5432"))
        listener.listen()
        with connect(proxy) as end:
            server, _ = listener.accept()
            with server:
                end.sendall(b"question")
                assert read(server, 8) == b"question"
                server.sendall(b"answer")
                assert read(end, 6) == b"answer"
