"""A process that relays bytes without parsing them: the least cost of a proxy on this machine.

There are two kinds. One reads and writes, as a proxy that parses bytes must. The other leaves all bytes in the kernel
(splice(2), only on Linux): this is the least that any process in between can cost.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Final, Self

from tests.support.raw import Address

COPY: Final = "copy"
SPLICE: Final = "splice"
_READ_SIZE: Final = 1 << 20
_MOVE: Final = 1
"""SPLICE_F_MOVE: the kernel moves pages if it can, instead of copying them."""


class Relay:
    """A relay in its own process. Use as a context manager.

    Args:
        target: the server to connect to.
        in_kernel: use splice(2).
    """

    def __init__(self, target: Address, *, in_kernel: bool = False) -> None:
        self._target = target
        self._kind = SPLICE if in_kernel else COPY

    def __enter__(self) -> Self:
        target = self._target
        words = [sys.executable, "-m", "benchmarks.support.relay", target.host, str(target.port), self._kind]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = replace(self._target, host="127.0.0.1", port=int(self._process.stdout.readline()))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Process id of the relay."""
        return self._process.pid


def _pump(source: socket.socket, sink: socket.socket) -> None:
    buffer = bytearray(_READ_SIZE)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            sink.sendall(view[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _splice(source: socket.socket, sink: socket.socket) -> None:
    outlet, inlet = os.pipe()
    fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, _READ_SIZE)
    with contextlib.suppress(OSError):
        while count := os.splice(source.fileno(), inlet, _READ_SIZE, flags=_MOVE):
            while count:
                count -= os.splice(outlet, sink.fileno(), count, flags=_MOVE)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    os.close(outlet)
    os.close(inlet)


def main() -> None:
    host, port, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pump = _splice if kind == SPLICE else _pump
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            broker = socket.create_connection((host, port))
            for one, other in ((client, broker), (broker, client)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=pump, args=(one, other), daemon=True).start()


if __name__ == "__main__":
    main()
