"""The same API in this process, on the database: what it looks up needs no dtx, what it is ordered takes the lease.

So a command does the same things, and they are written down the same way, whether a dtx runs or not.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from dtx.admin.api import api
from dtx.admin.api_context import Active, ApiContext
from dtx.admin.identity import Gate, Identity
from dtx.cli.console.person import user_name
from dtx.cli.console.remote import COUNT, Refused, address, said
from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings
from dtx.log.api import LeaseHeld, LogError
from dtx.log.operator_tables import Role
from dtx.log.operators import OperatorLog
from dtx.telemetry import Metrics

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Message


class _AtTheTerminal(Gate):
    """Whoever can open the database may do everything."""

    def __init__(self) -> None:
        """It keeps no users."""

    async def identify(self, request: "Request") -> Identity:  # noqa: ARG002
        """Whoever sits there."""
        return Identity(name=user_name(), role=Role.COORDINATOR, address="command line")


class Local:
    """Answers as the API of a dtx does. Use as a context manager.

    Args:
        settings: of the dtx.
        url: of the database.
    """

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        trail = OperatorLog(url, settings.rm)
        self._context = ApiContext(url=url, rm=settings.rm, gate=_AtTheTerminal(), trail=trail, metrics=Metrics())
        self._app = api(self._context)
        self._runner = asyncio.Runner()
        self.away: str | None = None
        """Why the broker cannot be used, within :meth:`orders`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def get(self, path: str, **query: object) -> Any:
        """What the API answers, parsed.

        Raises:
            Refused: it says no.
        """
        return self._parsed("GET", path, query, None)

    def post(self, path: str, body: object, **query: object) -> Any:
        """The same for an order."""
        return self._parsed("POST", path, query, body)

    def delete(self, path: str, **query: object) -> None:
        """Have something removed."""
        self._runner.run(self._ask("DELETE", address(path, query), b"", lambda _: None))

    def download(self, path: str, sink: Callable[[bytes], None], **query: object) -> int:
        """Give *sink* the answer piece by piece; returns how many messages it was said to have."""
        headers = self._runner.run(self._ask("GET", address(path, query), b"", sink))
        return int(headers.get(COUNT.encode(), b"0"))

    def require_tables(self) -> None:
        """Nothing is written to tables of another version.

        Raises:
            CommandError: they are not those of this dtx.
        """
        from dtx.cli.revisions import known_revisions
        from dtx.log import migrate

        here, newest = migrate.current(self._url), known_revisions()[0]
        if here != newest:
            raise CommandError(
                Exit.DATABASE, f"the tables are at version {here or 'none'}, this dtx wants {newest}: run 'dtx migrate'"
            )

    @contextmanager
    def orders(self) -> Iterator["Local"]:
        """Take orders: under the lease, which others wait for until the end of this.

        Raises:
            CommandError: another dtx has the lease, or the tables are not those of this dtx.
        """
        from dtx.server.alone import alone

        self.require_tables()
        stack = AsyncExitStack()
        try:
            found = self._runner.run(stack.enter_async_context(alone(self._settings, self._url)))
        except LeaseHeld as error:
            raise CommandError(
                Exit.FAILED, f"{error.holder} has just taken the lease: ask again, and its API will be asked"
            ) from None
        self.away = found.away
        log = found.log
        active = Active(
            manager=found.manager,
            connections=dict,
            disconnect=lambda *_: None,
            lanes=dict,
            lease_valid=lambda: log.lease_valid,
            epoch=lambda: log.epoch,
            log_queue=lambda: log.queued,
        )
        self._context.activate(active)
        try:
            yield self
        finally:
            self._context.active = self._context.operators = None
            self._runner.run(stack.aclose())

    def _parsed(self, method: str, path: str, query: dict[str, object], body: object) -> Any:
        pieces: list[bytes] = []
        data = b"" if body is None else json.dumps(body).encode()
        self._runner.run(self._ask(method, address(path, query), data, pieces.append))
        return json.loads(b"".join(pieces))

    async def _ask(self, method: str, target: str, body: bytes, sink: Callable[[bytes], None]) -> dict[bytes, bytes]:
        parts = urlsplit(target)
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": unquote(parts.path), "raw_path": parts.path.encode(), "root_path": "",
            "query_string": parts.query.encode(), "headers": [(b"content-type", b"application/json")],
            "client": ("command line", 0), "server": ("command line", 0), "state": {},
        }  # fmt: skip
        status = 0
        headers: dict[bytes, bytes] = {}
        refusal: list[bytes] = []
        asked = asyncio.Event()

        async def receive() -> "Message":
            if asked.is_set():
                await asyncio.Event().wait()  # nobody hangs up
            asked.set()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: "Message") -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update(message.get("headers", ()))
            elif piece := message.get("body", b""):
                (sink if status < HTTPStatus.BAD_REQUEST else refusal.append)(piece)

        try:
            await self._app(scope, receive, send)
        except RuntimeError as error:  # what goes wrong behind the beginning of an answer cannot be answered
            if isinstance(error.__cause__, LogError):
                raise error.__cause__ from None
            raise
        if status >= HTTPStatus.BAD_REQUEST:
            raise Refused(status, said(status, HTTPStatus(status).phrase, b"".join(refusal)))
        return headers
