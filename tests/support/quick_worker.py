"""A Python worker of Spark that connects before it loads PySpark. Run as a program; uses only the standard library.

Spark starts a Python process for each stream of a data source, which must connect back within ten seconds; the limit
is fixed: "Python worker failed to connect back". PySpark connects after its import, which takes half a
second of processor time; on a machine with twenty other processes this often takes more than ten seconds. This program
connects first; PySpark then gets the open connection.

    python quick_worker.py -m pyspark.sql.streaming.python_streaming_source_runner
"""

import os
import runpy
import socket
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

_PATH: Final = "PYTHON_WORKER_FACTORY_SOCK_PATH"
_PORT: Final = "PYTHON_WORKER_FACTORY_PORT"
_SECRET: Final = "PYTHON_WORKER_FACTORY_SECRET"
_LONGEST_REPLY: Final = 16
"""The size limit of the reply, in bytes; the reply is ``ok``."""
_LENGTH: Final = 4


def call(environment: Mapping[str, str]) -> tuple[BinaryIO, socket.socket]:
    """Connect to the Spark that started this process, and send its secret.

    Args:
        environment: has the address and the secret, as in ``pyspark.util.local_connect_and_auth``.

    Raises:
        OSError: Spark is not reachable, or does not accept the secret.
    """
    seconds = float(environment.get("SPARK_AUTH_SOCKET_TIMEOUT", "15"))
    secret = environment.get(_SECRET)
    if path := environment.get(_PATH):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        connection.connect(path)
    else:
        host = "::1" if environment.get("SPARK_PREFER_IPV6", "false").lower() == "true" else "127.0.0.1"
        connection = socket.create_connection((host, int(environment[_PORT])), seconds)
    file: Any = connection.makefile("rwb", int(environment.get("SPARK_BUFFER_SIZE", "65536")))
    if secret is not None:
        word = secret.encode()
        file.write(len(word).to_bytes(_LENGTH, "big") + word)
        file.flush()
        length = int.from_bytes(file.read(_LENGTH), "big")
        if length > _LONGEST_REPLY or file.read(length) != b"ok":
            raise ConnectionRefusedError("spark does not take this worker")
    return file, connection


def main() -> None:
    """Connect, then run the module that Spark requests."""
    _, flag, module, *words = sys.argv
    assert flag == "-m"
    standing: list[tuple[BinaryIO, socket.socket]] = [call(os.environ)]
    # as with python -m: modules beside this file must not be imported
    sys.path[0] = os.getcwd()  # noqa: PTH109 - import as little as possible before the connect
    from pyspark import util, worker_util

    given = os.environ.get(_PATH) or int(os.environ[_PORT])
    connect = util.local_connect_and_auth

    def local_connect_and_auth(conn_info: str | int | None, auth_secret: str | None) -> Any:
        """Return the open connection once; make other connections as usual."""
        return standing.pop() if standing and conn_info == given else connect(conn_info, auth_secret)

    for each in (util, worker_util):
        each.local_connect_and_auth = local_connect_and_auth  # type: ignore[attr-defined]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
