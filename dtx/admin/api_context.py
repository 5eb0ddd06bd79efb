"""The context of all routes of API and pages, and the parameters with which a route gets it.

It has the log, the manager of the active dtx, tokens and the audit log.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from http import HTTPStatus
from typing import Annotated, Any, Final, Protocol, TypeVar

from fastapi import Depends, Path, Query, Request, Response
from fastapi.routing import APIRoute

from dtx import failpoint
from dtx.admin.branch_filter import Name
from dtx.admin.identity import Authenticator, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.auth.accounts import Accounts
from dtx.auth.operators import OperatorLog
from dtx.failpoint import Point
from dtx.log.api import LogError
from dtx.log.changes import StoredMessage
from dtx.log.reader import LogReader
from dtx.log.records import Duplicate
from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.operators import Operators
from dtx.manager.scan import Scan
from dtx.store.postgres.message_counts import BrokerCounts
from dtx.store.postgres.topology import VirtualHost
from dtx.telemetry import CommitConnectionNumbers, Metrics, RateSample, get_logger
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.methods import BasicPublish, ConnectionStartOk, ConnectionTuneOk
from dtx.xa.model import Association

_log = get_logger(part="admin")
API: Final = "/dtx/v1"
"""Path of the resources that only dtx has. The paths of RabbitMQ's management API begin with /api."""
_PATIENCE = 30.0
"""Timeout of a query in seconds, so that a query over a long period does not load the database."""
_T = TypeVar("_T")


class ChannelFacts(Protocol):
    """The part of a client's channel that operators see."""

    @property
    def mode(self) -> Enum:
        """Its mode: ``dtx``, ``tx``, ``confirm``, or ``plain``."""

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""

    @property
    def associations(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """Branches with an association to it, active or suspended."""

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open on it."""


class BrokerChannel(ChannelFacts, Protocol):
    """A channel in standalone mode."""

    @property
    def consumers(self) -> int:
        """The number of its consumers."""

    @property
    def unacked(self) -> int:
        """The number of deliveries that the client has not settled."""

    @property
    def prefetch(self) -> tuple[int, int]:
        """The limits of basic.qos for each later consumer, and for the channel; 0 for none."""


class Arrived(Protocol):
    """The socket of a client."""

    @property
    def address(self) -> str:
        """Its remote address, host:port."""

    @property
    def local(self) -> str:
        """The address of dtx, host:port."""

    @property
    def since(self) -> float:
        """Time of its start, seconds since the epoch."""

    @property
    def protocol(self) -> str:
        """``AMQP 0-9-1``, for example."""

    @property
    def tls(self) -> bool:
        """Whether the socket is encrypted."""

    @property
    def traffic(self) -> Callable[[], tuple[int, int]]:
        """Returns the bytes that the client has sent, and those that were sent to it."""

    @property
    def sample(self) -> RateSample:
        """For the rates of these bytes."""


class Connected(Protocol):
    """The part of a client's connection that operators see."""

    @property
    def id(self) -> int:
        """Its number in the logs."""

    @property
    def who(self) -> Requester:
        """User and virtual host; empty during the handshake."""

    @property
    def stage(self) -> Enum:
        """Its state."""

    @property
    def channels(self) -> Mapping[int, ChannelFacts]:
        """Its channels by number."""


class OperatedBroker(Protocol):
    """The part of the store in a broker that operators use."""

    @property
    def commit_connections(self) -> Mapping[str, CommitConnectionNumbers]:
        """The connections to the broker for phase two, by virtual host."""

    async def restore(self, duplicate: Duplicate) -> None:
        """Publish a suppressed copy to its queue."""


class BrokerClient(Connected, Protocol):
    """A client's connection in standalone mode."""

    start_ok: ConnectionStartOk | None
    agreed: ConnectionTuneOk | None


class GotMessage(Protocol):
    """A message that was taken from a queue."""

    @property
    def message(self) -> StoredMessage:
        """The message, perhaps without the end of its body."""

    @property
    def size(self) -> int:
        """Bytes of the whole body."""

    @property
    def redelivered(self) -> bool:
        """Whether it may have been delivered before."""

    @property
    def remaining(self) -> int:
        """Ready messages after it."""


class BrokerUser(Protocol):
    """The requests of one operator in one virtual host. They raise what the same request of a client gets."""

    async def request(self, method: Method) -> None:
        """Declare, delete, bind, unbind or purge; done when it is durable."""

    async def publish(self, method: BasicPublish, properties: bytes, body: bytes) -> bool:
        """Publish a message. Returns whether a queue has taken it."""

    async def get(
        self,
        name: bytes,
        count: int,
        how: str,
        most: int,
        keep: int,
        show: Callable[[Sequence[GotMessage]], Awaitable[_T]],
    ) -> _T:
        """Take messages from a queue, then settle all.

        Args:
            name: of the queue.
            count: number of messages at most.
            how: ``ack``, ``requeue`` or ``reject``.
            most: bytes of bodies and properties at most; the message that exceeds them stays, as do those after it.
            keep: bytes of each body that count and are needed.
            show: makes the answer, before the messages are settled. They are not settled if it raises.
        """


class OwnBroker(Protocol):
    """The broker of standalone mode."""

    accounts: Accounts
    """The users of clients."""
    virtual_host: Callable[[str], VirtualHost]
    """Returns the virtual host of a name, which must exist."""
    counts: BrokerCounts
    """What has happened to messages."""

    def user(self, name: str, vhost: str, *, by_role: bool) -> BrokerUser:
        """The requests of an operator in a virtual host, which must exist.

        Args:
            name: of the user or token.
            vhost: name of the virtual host.
            by_role: whether the role decides, as for a token, and not the permissions of a user.

        Raises:
            XaError: 403, the user may not enter it.
        """


ServedCertificates = Mapping[str, Mapping[str, tuple[str, Sequence[datetime]]]]
"""By protocol and kind of file (``certfile``, ``cacertfile``): the file, and the ends of the certificates in it."""


@dataclass(slots=True, kw_only=True)
class Active:
    """The parts that only the active dtx has.

    Args:
        manager: manages the branches.
        connections: returns the clients, the oldest connection first.
        disconnect: closes a client's connection; the client gets the reason.
        broker: the store in a broker; ``None`` without a broker, or if the command line has the lease.
        lease_valid: whether this dtx is still the active one.
        epoch: returns the epoch of its lease.
        log_queue: returns the number of log records that wait for the database.
        own_broker: the broker of standalone mode; ``None`` if the command line has the lease.
        addresses: for clients and operators: host, port and protocol, in RabbitMQ's words.
    """

    manager: BranchManager
    connections: Callable[[], Mapping[Any, Arrived]]
    disconnect: Callable[[Any, str], None]
    broker: OperatedBroker | None
    lease_valid: Callable[[], bool]
    epoch: Callable[[], int]
    log_queue: Callable[[], int]
    own_broker: OwnBroker | None = None
    addresses: Sequence[tuple[str, int, str]] = ()

    @property
    def commit_connections(self) -> Mapping[str, CommitConnectionNumbers]:
        """The connections to the broker for phase two, by virtual host."""
        return {} if self.broker is None else self.broker.commit_connections


@dataclass(slots=True, kw_only=True)
class ApiContext:
    """The context of the routes.

    Args:
        url: of the log's database.
        rm: name of the resource manager.
        gate: authenticates requests.
        operator_log: tokens and the audit log.
        metrics: the metrics.
        standalone: whether there is no broker.
        certificates: of the listeners.
        active: set once this dtx is the active one.
    """

    url: str
    rm: str
    gate: Authenticator
    operator_log: OperatorLog
    metrics: Metrics
    standalone: bool = False
    certificates: ServedCertificates = field(default_factory=dict)
    active: Active | None = None
    operators: Operators | None = field(default=None, init=False)

    def activate(self, active: Active) -> None:
        """Accept orders from now on: this dtx has the lease and has loaded all branches."""
        self.active = active
        self.operators = Operators(active.manager)

    def require_active(self) -> tuple[Active, Operators]:
        """The parts that only the active dtx has.

        Raises:
            Problem: 503, this dtx is not the active one.
        """
        if self.active is None or self.operators is None or not self.active.lease_valid():
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "this dtx is not the active one")
        return self.active, self.operators

    async def read(self, ask: Callable[[LogReader], _T]) -> _T:
        """Run *ask* with a reader of the log in a thread: it sees committed data and does not block the event loop."""

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
        """Do *work* and record it in the audit log, before it begins and when it has ended.

        Args:
            who: the operator.
            action: name of the action.
            subject: the branch, user or other object of the action.
            reason: the reason that the operator gave.
            detail: parameters of the request.
            work: returns the result for the audit log, and the answer.
        """
        failpoint.at(Point.AUDIT_BEFORE)
        number = await asyncio.to_thread(
            lambda: self.operator_log.begin(
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
            await asyncio.to_thread(self.operator_log.finish, number, result)
        except LogError as error:  # the action has its result, and the answer must tell it in any case
            _log.warning("the result of an action could not be recorded", line=number, result=result, reason=str(error))
        failpoint.at(Point.AUDIT_ENDED)


def context_of(request: Request) -> ApiContext:
    """The context of the application that serves *request*."""
    context: ApiContext = request.app.state.context
    return context


async def identify(request: Request) -> Identity:
    """The operator that sent *request*."""
    if not hasattr(request.state, "identity"):
        request.state.identity = await context_of(request).gate.identify(request)
    found: Identity = request.state.identity
    return found


class LoginFirstRoute(APIRoute):
    """A route with a body. FastAPI reads and parses it before the dependencies, so the sender is identified here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_identified(request: Request) -> Response:
            await identify(request)
            return await handle(request)

        return handle_identified


Asker = Annotated[Identity, Depends(identify)]
Context = Annotated[ApiContext, Depends(context_of)]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number.")]
Vhost = Annotated[Name, Query(description="Virtual host of the branch. Several may have the same xid.")]


XidPath = Annotated[str, Path(description="The xid: format:gtrid-hex:bqual-hex")]
ConnectionNumber = Annotated[int, Path(description="Number of the connection in the logs.")]


def page_of(found: list[_T], limit: int) -> tuple[list[_T], _T | None]:
    """The first *limit* of *found*, and the last one of these if there is a next page, which begins after it."""
    shown = found[:limit]
    return shown, shown[-1] if len(found) > limit else None
