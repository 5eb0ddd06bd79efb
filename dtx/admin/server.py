"""Serving the API: in the event loop of dtx itself, on a socket of its own."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from fastapi.responses import RedirectResponse

from dtx.admin.desk import Desk
from dtx.admin.guard import PAGES, Guard
from dtx.admin.routes import api
from dtx.admin.web.pulse import Pulse
from dtx.admin.web.site import website

_MOST_REQUESTS: Final = 200
"""At the same time; more are told 503."""
_MOST_HEADERS: Final = 32 * 1024
"""Octets of a request's head."""
_IDLE_SECONDS: Final = 30
_GOODBYE_SECONDS: Final = 5


def application(desk: Desk, pulse: Pulse) -> FastAPI:
    """The API, and the web pages."""
    app = api(desk)
    app.mount(PAGES, website(desk, pulse))

    @app.get("/", include_in_schema=False)
    async def show_pages() -> RedirectResponse:
        """Whoever comes with a browser wants the pages."""
        return RedirectResponse(f"{PAGES}/")

    return app


class _Server(uvicorn.Server):
    """Signals are the service's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Listens, and answers once it is told what about.

    Args:
        host, port: address; port 0 lets the system choose.
        names: under which it is reached, besides that address and those of the machine.
        certificate, key: PEM files, for TLS.

    Raises:
        OSError: the address is taken, or is none of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        names: Sequence[str] = (),
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            reason = f"the operators' API cannot listen on {where} (--admin-listen names another, --no-admin none)"
            raise OSError(error.errno, f"{reason}: {error.strerror}") from None
        self._names = (host, *names)
        self._certificate = certificate
        self._key = key
        self._pulse: Pulse | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def begin(self, desk: Desk) -> None:
        """Answer from now on."""
        self._pulse = Pulse(desk)
        self._pulse.begin()
        config = uvicorn.Config(
            Guard(application(desk, self._pulse), self._names),
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_REQUESTS,
            h11_max_incomplete_event_size=_MOST_HEADERS,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_GOODBYE_SECONDS,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket]), name="dtx-admin"
        )

    async def close(self) -> None:
        """Finish what is being answered, and end."""
        if self._pulse is not None:
            await self._pulse.close()  # pages that watch would be waited for
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
