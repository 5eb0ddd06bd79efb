"""A process in between that looks at nothing: what any proxy costs on this machine, before it has done any work."""

import contextlib
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Final, Self

from benchmarks.support.amqp import Address

_READ_SIZE: Final = 1 << 20


class Relay:
    """A relay in a process of its own. Use as a context manager.

    Args:
        target: where it leads.
    """

    def __init__(self, target: Address) -> None:
        self._target = target

    def __enter__(self) -> Self:
        words = [sys.executable, "-m", "benchmarks.support.relay", self._target.host, str(self._target.port)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = replace(self._target, host="127.0.0.1", port=int(self._process.stdout.readline()))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid


def _pump(source: socket.socket, sink: socket.socket) -> None:
    buffer = bytearray(_READ_SIZE)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            sink.sendall(view[:count])
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            broker = socket.create_connection((host, port))
            for one, other in ((client, broker), (broker, client)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


if __name__ == "__main__":
    main()
