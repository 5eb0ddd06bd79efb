"""Connections of pika that nobody has read from for a while: is one still there, its end, and calls with a limit."""
# ruff: noqa: SLF001 - nothing public tells of the socket, and an end without a farewell is pika's own

import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPConnectionError, AMQPError

from dtx.client.errors import XAER_RMFAIL

# AttributeError: pika's own, where the end of a connection comes in at an unusual moment
FAILURES: Final = (AMQPError, OSError, AttributeError)
"""What pika raises for whatever happens to a connection."""
_LOGIN_REFUSED: Final = frozenset({"AuthenticationError", "ProbableAuthenticationError"})
"""Classes of pika, and of aiormq, which need not be installed."""
_MOST_TURNS: Final = 100
"""Of pika's loop; what has come in still is heard by the next call itself."""


def unreachable(where: str, error: Exception) -> XAER_RMFAIL:
    """Why there is no connection to *where*: it is out of reach, or it refused the login."""
    what = "refused the login" if type(error).__name__ in _LOGIN_REFUSED else "is out of reach"
    return XAER_RMFAIL(f"{where} {what}: {' '.join(str(error).split()) or type(error).__name__}")


def alive(connection: BlockingConnection) -> bool:
    """Whether a connection is open still; hears what the server said meanwhile.

    pika notices the end of a connection in several turns of its loop, and one turn is all that ``process_data_events``
    makes when it is not to wait: so there are as many as there is something to read. Mostly that is none.
    """
    for _ in range(_MOST_TURNS):
        if not connection.is_open or not _readable(connection):
            break
        with suppress(*FAILURES):
            connection.process_data_events(0)
    return bool(connection.is_open)


def _readable(connection: BlockingConnection) -> bool:
    """Whether the socket has anything for us, be it its end."""
    look = select.poll()  # select.select knows no descriptor from 1024 on, and programs in C have many
    look.register(connection._impl._transport._sock.fileno(), select.POLLIN)
    return bool(look.poll(0))


def drop(connection: BlockingConnection) -> None:
    """Close its socket. pika does that some turns of its loop later, and its loop with it."""
    with suppress(*FAILURES):
        connection._impl._terminate_stream(AMQPConnectionError("given up"))
        for _ in range(_MOST_TURNS):
            connection.process_data_events(0)  # until it raises that the connection is closed


@contextmanager
def limited(connection: BlockingConnection, timeout: float | None) -> Iterator[None]:
    """Within it pika's own calls wait no longer than *timeout* seconds: then the connection is given up.

    Raises:
        AMQPConnectionError: by the call within, when the time is up.
    """
    inner = connection._impl
    if timeout is None or not inner.is_open:
        yield
        return
    error = AMQPConnectionError(f"no answer within {timeout:g} s")
    timer = inner._adapter_call_later(timeout, lambda: inner._terminate_stream(error))
    try:
        yield
    finally:
        inner._adapter_remove_timeout(timer)
