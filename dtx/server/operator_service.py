"""The operators' part of the service: API, console and policies. Its imports take a quarter of the start-up time."""

import asyncio
from contextlib import AsyncExitStack

from dtx.admin.api_context import Active, ApiContext, OperatedBroker, OwnBroker, ServedCertificates
from dtx.admin.identity import Authenticator
from dtx.admin.routes_orders import start_policies
from dtx.admin.server import AdminServer
from dtx.auth.accounts import Accounts
from dtx.auth.operators import OperatorLog
from dtx.config import Settings
from dtx.log.postgres import PostgresTransactionLog
from dtx.manager import BranchManager
from dtx.server.client_session import ClientSession
from dtx.server.listener import Listener
from dtx.telemetry import Metrics
from dtx.tls import expirations
from dtx.wire.amqp09 import closes
from dtx.wire.amqp09.errors import HardCode


class OperatorService:
    """Binds the API at the start, answers when the tables exist, and takes orders while this dtx is the active one.

    Args:
        settings: of the service.
        metrics: of the service.
        stack: closes the opened parts in reverse order.

    Raises:
        OSError: the API cannot listen.
    """

    def __init__(self, settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._metrics = metrics
        self._stack = stack
        self._context: ApiContext | None = None
        self._server: AdminServer | None = None
        self._certificates = _served_certificates(settings)
        if not settings.no_admin:
            (address,) = settings.admin_listen
            self._server = AdminServer(
                address.host,
                address.port,
                names=settings.admin_host,
                certificate=settings.admin_tls_cert,
                key=settings.admin_tls_key,
                proxies=settings.admin_proxy,
            )
            stack.push_async_callback(self._server.close)

    @property
    def url(self) -> str | None:
        """The URL of the API; ``None`` if it is switched off."""
        return None if self._server is None else self._server.url

    def begin(self, database: str) -> None:
        """Answer API requests from now on, on a standby as well.

        Args:
            database: URL of the database, which has the tables.
        """
        rm = self._settings.rm
        accounts = Accounts(database, rm)
        self._stack.push_async_callback(accounts.close)
        operator_log = OperatorLog(database, rm)
        self._context = ApiContext(
            url=database,
            rm=rm,
            gate=Authenticator(accounts, operator_log),
            operator_log=operator_log,
            metrics=self._metrics,
            standalone=self._settings.broker is None,
            certificates=self._certificates,
        )
        if self._server is not None:
            self._server.begin(self._context)

    def activate(
        self,
        manager: BranchManager,
        listener: Listener,
        broker: OperatedBroker | None,
        own_broker: OwnBroker | None,
        log: PostgresTransactionLog,
    ) -> None:
        """Take orders and start the policies, because this dtx is the active one.

        Args:
            manager: the transaction manager, with its branches loaded.
            listener: has the sessions.
            broker: the broker; ``None`` without one.
            own_broker: the broker of standalone mode.
            log: holds the lease.
        """
        assert self._context is not None, "begin comes first"
        addresses = [(host, port, "amqp/ssl" if tls else "amqp") for host, port, tls in listener.addresses]
        if self._server is not None:
            addresses.append(self._server.address)
        self._context.activate(
            Active(
                manager=manager,
                connections=lambda: listener.sessions,
                disconnect=_disconnect,
                broker=broker,
                own_broker=own_broker,
                addresses=addresses,
                lease_valid=lambda: log.lease_valid,
                epoch=lambda: log.epoch,
                log_queue=lambda: log.queued,
            )
        )
        settings = self._settings
        if settings.policy or settings.alert_after:
            watching = start_policies(self._context, settings.policy, settings.alert_after)
            self._stack.push_async_callback(_end, watching)


def _served_certificates(settings: Settings) -> ServedCertificates:
    """Read the files now, when dtx loads them: it does not read them again when they are renewed."""
    files = {
        "amqp/ssl": {"certfile": settings.tls_cert, "cacertfile": settings.tls_ca},
        "https": {"certfile": settings.admin_tls_cert},
    }
    return {
        protocol: {
            kind: (str(path), expirations(path.read_text("utf-8", "replace"))) for kind, path in found.items() if path
        }
        for protocol, found in files.items()
    }


def _disconnect(session: ClientSession, reason: str) -> None:
    text = closes.describe(HardCode.CONNECTION_FORCED, f"closed by an operator: {reason}")
    session.stop(closes.connection_close(HardCode.CONNECTION_FORCED, text))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
