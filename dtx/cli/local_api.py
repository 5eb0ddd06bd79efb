"""The operators' API in this process, on the database: reading needs no lease, orders take it.

A command has the same effects and the same lines in journal and audit log, whether a dtx runs or not.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httpx
from pydantic import TypeAdapter, ValidationError

from dtx.admin.api import api
from dtx.admin.api_context import Active, ApiContext
from dtx.admin.identity import Authenticator, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.admin.routes_read import COUNT, Positions, export_branch
from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.cli.api_client import HEADERS, Api, RequestRefused, encoded, parsed, user_name
from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings
from dtx.log.api import LeaseHeld, LogError
from dtx.telemetry import Metrics
from dtx.xa.codes import XaError

if TYPE_CHECKING:
    from fastapi import Request


class _LocalAuthenticator(Authenticator):
    """Gives every request the role coordinator: a process that can open the database may do everything."""

    def __init__(self) -> None:
        """Without users and tokens, unlike its base."""

    async def identify(self, request: "Request | None" = None) -> Identity:  # noqa: ARG002
        """The user of this process."""
        return Identity(name=user_name(), role=OperatorRole.COORDINATOR, address="command line")


class LocalApi(Api):
    """The API of a dtx, run in this process.

    Args:
        settings: those of the dtx.
        url: that of the database.
    """

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        operator_log = OperatorLog(url, settings.rm)
        self._gate = _LocalAuthenticator()
        self._context = ApiContext(
            url=url, rm=settings.rm, gate=self._gate, operator_log=operator_log, metrics=Metrics()
        )
        transport = httpx.ASGITransport(api(self._context), client=("command line", 0))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the client and its event loop."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def require_tables(self) -> None:
        """Check the version of the tables.

        Raises:
            CommandError: it is not the one that this dtx needs.
        """
        from dtx.db import migrate

        here, newest = migrate.current(self._url), migrate.known_revisions()[0]
        if here != newest:
            raise CommandError(
                Exit.DATABASE, f"the tables are at version {here or 'none'}, this dtx needs {newest}: run 'dtx migrate'"
            )

    @contextmanager
    def orders(self) -> Iterator[None]:
        """Take the lease, so that the API takes orders, and give it back at the end of the context.

        Raises:
            CommandError: another dtx has the lease, or the tables have another version than this dtx needs.
        """
        from dtx.server.offline_orders import active_offline

        self.require_tables()
        stack = AsyncExitStack()
        try:
            found = self._runner.run(stack.enter_async_context(active_offline(self._settings, self._url)))
        except LeaseHeld as error:
            raise CommandError(
                Exit.FAILED, f"{error.holder} has just taken the lease: run the command again, which then asks its API"
            ) from None
        self.away = found.away
        log = found.log
        active = Active(
            manager=found.manager,
            connections=dict,
            disconnect=lambda *_: None,
            broker=None,
            lease_valid=lambda: log.lease_valid,
            epoch=lambda: log.epoch,
            log_queue=lambda: log.queued,
        )
        self._context.activate(active)
        try:
            yield
        finally:
            self._context.active = self._context.operators = None
            self._runner.run(stack.aclose())

    def _ask(self, method: str, target: str, body: object) -> Any:
        return parsed(self._runner.run(self._client.request(method, target, content=encoded(body))))

    def export(
        self, xid: str, sink: Callable[[bytes], None], *, vhost: str, archived: bool, positions: tuple[int, ...]
    ) -> int:
        """Pass the messages of a branch to *sink*. It bypasses the transport, which keeps a whole answer in memory."""
        return self._runner.run(self._export(xid, sink, vhost, list(positions), archived=archived))

    async def _export(
        self, xid: str, sink: Callable[[bytes], None], vhost: str, positions: list[int], *, archived: bool
    ) -> int:
        try:
            TypeAdapter(Positions).validate_python(positions)
            who = await self._gate.identify()
            response = await export_branch(who, self._context, xid, vhost, archived, positions)
        except ValidationError as error:
            raise RequestRefused(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"query.position: {error.errors()[0]['msg']}"
            ) from None
        except (Problem, XaError, LogError) as error:
            problem = as_problem(error)
            raise RequestRefused(problem.status, problem.detail) from None
        async for piece in cast("AsyncIterable[bytes]", response.body_iterator):
            sink(piece)
        return int(response.headers[COUNT])
