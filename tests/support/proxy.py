"""A TCP proxy that a test can cut, stall and slow down, to simulate a bad network."""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from typing import Literal, Self

Direction = Literal["up", "down"]  # up: from the client to the target


class Proxy:
    """Forwards connections from a free port to a target. Use as a context manager.

    Args:
        host: the host of the target; a directory (with a slash first) of PostgreSQL's Unix socket, as for libpq.
        port: the port of the target.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._changed = threading.Condition()
        self._stalled: set[Direction] = set()
        self._cut_after: dict[Direction, int] = {}
        self._delay = 0.0
        self._refusing = False
        self._pairs: set[_Pair] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the listener and all connections. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake accept
        self._listener.close()
        self._reset_all()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with *refuse*, new ones too, until ``resume``."""
        with self._changed:
            self._refusing = refuse
        self._reset_all()

    def cut_one(self, number: int) -> None:
        """Reset the connection that was accepted as the *number*-th, counted from 1."""
        with self._changed:
            (pair,) = (pair for pair in self._pairs if pair.number == number)
            self._pairs.discard(pair)
        pair.reset()

    def stall(self, *directions: Direction) -> None:
        """Hold bytes back in the given directions (both when none is given) until ``resume``."""
        with self._changed:
            self._stalled |= set(directions or ("up", "down"))

    def delay(self, seconds: float) -> None:
        """Delay each piece of data by *seconds*."""
        with self._changed:
            self._delay = seconds

    def cut_after(self, direction: Direction, count: int) -> None:
        """Reset every connection after exactly *count* more bytes in *direction*."""
        with self._changed:
            self._cut_after[direction] = count

    def resume(self) -> None:
        """Forward without delay again; data that was held back comes first."""
        with self._changed:
            self._stalled.clear()
            self._cut_after.clear()
            self._delay = 0.0
            self._refusing = False
            self._changed.notify_all()

    def wait_for_bytes(self, direction: Direction, count: int, *, seconds: float = 30.0) -> None:
        """Wait until *count* bytes in total were forwarded in *direction*."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.bytes[direction] >= count, seconds):
                raise TimeoutError(f"{self.bytes[direction]} of {count} bytes went {direction} within {seconds:g} s")

    def wait_for_connections(self, count: int, *, seconds: float = 30.0) -> None:
        """Wait until *count* connections in total were accepted."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.accepted >= count, seconds):
                raise TimeoutError(f"{self.accepted} of {count} connections came within {seconds:g} s")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                refusing = self._refusing
            if refusing:
                _reset(client)
                continue
            try:
                server = self._connect()
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self.accepted += 1
                pair = _Pair(client, server, self.accepted)
                self._pairs.add(pair)
                self._changed.notify_all()
            threading.Thread(target=self._pump, args=(pair, client, server, "up"), daemon=True).start()
            threading.Thread(target=self._pump, args=(pair, server, client, "down"), daemon=True).start()

    def _connect(self) -> socket.socket:
        host, port = self._target
        if host.startswith("/"):
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(10)
            try:
                end.connect(f"{host}/.s.PGSQL.{port}")
            except BaseException:
                end.close()
                raise
            return end
        end = socket.create_connection(self._target, timeout=10)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def _pump(self, pair: "_Pair", source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        try:
            while piece := source.recv(65536):
                last = self._pass(piece, direction)
                if last is None:
                    sink.sendall(piece)
                else:
                    sink.sendall(piece[:last])
                    _flush(sink)
                    self.cut()
                    return
            sink.shutdown(socket.SHUT_WR)
        except (OSError, ValueError):
            pair.reset()
        with self._changed:
            if pair.half_done():
                self._pairs.discard(pair)
                pair.close()

    def _pass(self, piece: bytes, direction: Direction) -> int | None:
        """Wait while the direction is stalled; returns how many bytes may pass before the cut, ``None`` for all."""
        with self._changed:
            delay = self._delay
        if delay:
            time.sleep(delay)
        with self._changed:
            self._changed.wait_for(lambda: direction not in self._stalled or self._closed)
            if self._closed:
                raise OSError("the proxy is closed")
            left = self._cut_after.get(direction)
            passed = len(piece) if left is None else min(left, len(piece))
            self.bytes[direction] += passed
            self._changed.notify_all()
            if left is None:
                return None
            self._cut_after[direction] = left - passed
            if left > len(piece):
                return None
            del self._cut_after[direction]
            return passed

    def _reset_all(self) -> None:
        with self._changed:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            pair.reset()


class Balancer(Proxy):
    """A TCP balancer: forwards each connection to a random one of several servers, and skips those that refuse it.

    Args:
        ports: of the servers, on the loopback interface.
    """

    def __init__(self, *ports: int) -> None:
        super().__init__("127.0.0.1", ports[0])
        self._ports = ports

    def _connect(self) -> socket.socket:
        for port in random.sample(self._ports, len(self._ports)):
            self._target = ("127.0.0.1", port)
            with contextlib.suppress(OSError):
                return super()._connect()
        raise ConnectionRefusedError("all servers refuse connections")


class _Pair:
    """Both ends of one forwarded connection."""

    def __init__(self, client: socket.socket, server: socket.socket, number: int) -> None:
        self.number = number
        self._ends = (client, server)
        self._done = 0

    def half_done(self) -> bool:
        """Count one direction as done; return whether both are done."""
        self._done += 1
        return self._done == 2

    def reset(self) -> None:
        for end in self._ends:
            _reset(end)

    def close(self) -> None:
        for end in self._ends:
            end.close()


def _reset(end: socket.socket) -> None:
    """Close with RST, as a broken network does."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)  # wakes a thread that is in recv, which would hold the socket open
    end.close()


def _flush(end: socket.socket) -> None:
    """Wait until the peer has acknowledged the sent data: a reset drops data that is still in the kernel."""
    import fcntl
    import termios

    for _ in range(200):
        unsent = struct.unpack("i", fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        if unsent == 0:
            return
        select.select([], [], [], 0.005)
