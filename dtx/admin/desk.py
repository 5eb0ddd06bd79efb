"""What the API stands on: the log as others read it, the manager where this dtx is the active one, tokens and trail."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from dtx import failpoint
from dtx.admin.identity import Gate, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.failpoint import Point
from dtx.log.api import LogError
from dtx.log.operators import OperatorLog
from dtx.log.reading import LogReader
from dtx.manager.manager import TransactionManager, Who
from dtx.manager.operators import Operators
from dtx.telemetry import Metrics, get_logger

_log = get_logger(part="admin")
_T = TypeVar("_T")


class Connected(Protocol):
    """A client's connection, as far as operators see it."""

    @property
    def id(self) -> int:
        """Its number in the logs."""

    @property
    def who(self) -> Who:
        """User and virtual host; empty during the handshake."""

    @property
    def channels(self) -> Mapping[int, object]:
        """By number."""


class LaneFacts(Protocol):
    """A lane, as far as operators see it."""

    problem: str | None
    distrust: str | None

    @property
    def blocked(self) -> bool:
        """Whether the broker takes no publishes."""


@dataclass(slots=True, kw_only=True)
class Active:
    """What only the active dtx has.

    Args:
        manager: of the branches.
        connections: asks for the clients.
        lanes: asks for the lanes, by virtual host.
        lease_valid: whether it is still the active one.
    """

    manager: TransactionManager
    connections: Callable[[], Iterable[Connected]]
    lanes: Callable[[], Mapping[str, LaneFacts]]
    lease_valid: Callable[[], bool]


@dataclass(slots=True, kw_only=True)
class Desk:
    """Everything that the routes need.

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
            with LogReader(self.url) as log:
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
