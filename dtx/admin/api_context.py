"""What the routes of API and pages stand on: the log as others read it, the manager where this dtx is the active one,
tokens and trail; and how a route asks for it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Query, Request

from dtx import failpoint
from dtx.admin.branch_filter import Name
from dtx.admin.identity import Gate, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.auth.operators import OperatorLog
from dtx.failpoint import Point
from dtx.log.api import LogError
from dtx.log.reader import LogReader
from dtx.manager import TransactionManager, Who
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.operators import Operators
from dtx.manager.scan import Scan
from dtx.telemetry import LaneNumbers, Metrics, get_logger
from dtx.xa.model import Association

_log = get_logger(part="admin")
_PATIENCE = 30.0
"""Seconds that a question to the log may take: what somebody asks about a long past must not keep the database busy."""
_T = TypeVar("_T")


class ChannelFacts(Protocol):
    """A client's channel, as far as operators see it."""

    @property
    def mode(self) -> Enum:
        """What it was selected for: ``dtx``, ``tx``, ``confirm``, or ``plain``."""

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""

    @property
    def ties(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """Branches that it is associated or suspended with."""

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open on it."""


class Arrived(Protocol):
    """How a client has come."""

    @property
    def address(self) -> str:
        """Of its socket, host:port."""

    @property
    def since(self) -> float:
        """Seconds since the epoch."""

    @property
    def protocol(self) -> str:
        """``AMQP 0-9-1``, for example."""

    @property
    def tls(self) -> bool:
        """Whether the socket is encrypted."""


class Connected(Protocol):
    """A client's connection, as far as operators see it."""

    @property
    def id(self) -> int:
        """Its number in the logs."""

    @property
    def who(self) -> Who:
        """User and virtual host; empty during the handshake."""

    @property
    def stage(self) -> Enum:
        """Where it is in its life."""

    @property
    def channels(self) -> Mapping[int, ChannelFacts]:
        """By number."""


@dataclass(slots=True, kw_only=True)
class Active:
    """What only the active dtx has.

    Args:
        manager: of the branches.
        connections: asks for the clients, those that came first before others.
        disconnect: ends a client's connection, for a reason that it is told.
        lanes: asks for the lanes, by virtual host.
        lease_valid: whether it is still the active one.
        epoch: of its lease.
        log_queue: how many log records wait for the database.
    """

    manager: TransactionManager
    connections: Callable[[], Mapping[Any, Arrived]]
    disconnect: Callable[[Any, str], None]
    lanes: Callable[[], Mapping[str, LaneNumbers]]
    lease_valid: Callable[[], bool]
    epoch: Callable[[], int]
    log_queue: Callable[[], int]


@dataclass(slots=True, kw_only=True)
class ApiContext:
    """What the routes stand on.

    Args:
        url: of the log's database.
        rm: name of the resource manager.
        gate: lets people in.
        trail: tokens, and what was done.
        metrics: numbers.
        active: once this dtx is the active one.
    """

    url: str
    rm: str
    gate: Gate
    trail: OperatorLog
    metrics: Metrics
    active: Active | None = None
    operators: Operators | None = field(default=None, init=False)

    def activate(self, active: Active) -> None:
        """This dtx has the lease, and knows all branches."""
        self.active = active
        self.operators = Operators(active.manager)

    def require_active(self) -> tuple[Active, Operators]:
        """What only the active dtx has.

        Raises:
            Problem: 503, another one is the active one.
        """
        if self.active is None or self.operators is None or not self.active.lease_valid():
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "this dtx is not the active one")
        return self.active, self.operators

    async def read(self, ask: Callable[[LogReader], _T]) -> _T:
        """What the log says, as it is committed; the event loop goes on meanwhile."""

        def run() -> _T:
            with LogReader(self.url, patience=_PATIENCE) as log:
                return ask(log)

        return await asyncio.to_thread(run)

    async def audited(
        self,
        who: Identity,
        action: str,
        subject: str,
        reason: str,
        detail: dict[str, Any],
        work: Callable[[], Awaitable[tuple[str, _T]]],
    ) -> _T:
        """Do *work*, written down before it begins and when it has ended.

        Args:
            who: does it.
            action: what it is.
            subject: about what.
            reason: why.
            detail: what was asked for in particular.
            work: returns how it ended, for the trail, and the answer.
        """
        failpoint.at(Point.AUDIT_BEFORE)
        number = await asyncio.to_thread(
            lambda: self.trail.begin(
                actor=who.name,
                role=who.role,
                address=who.address,
                action=action,
                subject=subject,
                reason=reason,
                detail=json.dumps(detail, ensure_ascii=False),
            )
        )
        failpoint.at(Point.AUDIT_BEGUN)
        try:
            result, answer = await work()
        except Exception as error:
            problem = as_problem(error)
            await self._finish(number, f"{problem.status.value}: {problem.detail}")
            raise
        await self._finish(number, result)
        return answer

    async def _finish(self, number: int, result: str) -> None:
        failpoint.at(Point.AUDIT_END_BEFORE)
        try:
            await asyncio.to_thread(self.trail.finish, number, result)
        except LogError as error:  # it has happened, or not: whoever asked must hear that first of all
            _log.warning(
                "the end of an action could not be written down", line=number, result=result, reason=str(error)
            )
        failpoint.at(Point.AUDIT_ENDED)


def context_of(request: Request) -> ApiContext:
    """What the application stands on."""
    context: ApiContext = request.app.state.context
    return context


async def identify(request: Request) -> Identity:
    """Who asks."""
    return await context_of(request).gate.identify(request)


Asker = Annotated[Identity, Depends(identify)]
Context = Annotated[ApiContext, Depends(context_of)]
Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
Vhost = Annotated[Name, Query(description="The virtual host: the same xid may be in two.")]


def page_of(found: list[_T], limit: int) -> tuple[list[_T], _T | None]:
    """The first *limit* of *found*, and the last one of these where more follow: the next page begins behind it."""
    shown = found[:limit]
    return shown, shown[-1] if len(found) > limit else None
