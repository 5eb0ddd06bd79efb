"""A Python worker of Spark that answers before it has loaded anything. Run as a program; the standard library alone.

Spark starts a Python process for each stream of a data source, and gives it ten seconds, which nobody can change, until
it calls back: "Python worker failed to connect back". PySpark calls when it has imported itself, which takes half a
second of a processor; on a machine where twenty others want it, that is more than ten seconds, again and again. Here
the call comes first. What PySpark then asks for is the connection that stands already.

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
"""Octets; it is ``ok``."""
_LENGTH: Final = 4


def call(environment: Mapping[str, str]) -> tuple[BinaryIO, socket.socket]:
    """Connect to the Spark that started this process, and show its secret.

    Args:
        environment: where Spark says how, as in ``pyspark.util.local_connect_and_auth``.

    Raises:
        OSError: it is not there any more, or says something else than yes.
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
    """Call, then be the module that Spark has asked for."""
    _, flag, module, *words = sys.argv
    assert flag == "-m"
    standing: list[tuple[BinaryIO, socket.socket]] = [call(os.environ)]
    # as python -m has it: modules beside this file are nobody's business
    sys.path[0] = os.getcwd()  # noqa: PTH109 - before it calls it loads as little as it can
    from pyspark import util, worker_util

    given = os.environ.get(_PATH) or int(os.environ[_PORT])
    connect = util.local_connect_and_auth

    def local_connect_and_auth(conn_info: str | int | None, auth_secret: str | None) -> Any:
        """The connection that stands; others as they are asked for."""
        return standing.pop() if standing and conn_info == given else connect(conn_info, auth_secret)

    for each in (util, worker_util):
        each.local_connect_and_auth = local_connect_and_auth  # type: ignore[attr-defined]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
