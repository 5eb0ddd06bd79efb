"""Setup of standalone mode: dtx itself stores the messages, in the database of the log."""

import asyncio
from contextlib import AsyncExitStack

from dtx import failpoint
from dtx.auth.accounts import Accounts
from dtx.config import Settings
from dtx.failpoint import Point
from dtx.log.postgres import PostgresTransactionLog
from dtx.manager import BranchManager, Limits
from dtx.server.amqp10.connection import Amqp10Connection as Connection10
from dtx.server.amqp10.connection import Amqp10Limits as Limits10
from dtx.server.limits import ConnectionLimits
from dtx.server.listener import AcceptedConnection, NewSession
from dtx.server.standalone.client import Parts
from dtx.server.standalone.connection import StandaloneConnection
from dtx.server.standalone.nodes import StandaloneNodes
from dtx.server.standalone.operator_requests import OperatorBroker
from dtx.store.postgres.store import PostgresStore
from dtx.telemetry import Metrics
from dtx.wire.amqp09.frames import Protocol


async def open_standalone(
    settings: Settings, url: str, log: PostgresTransactionLog, limits: Limits, metrics: Metrics, stack: AsyncExitStack
) -> tuple[BranchManager, NewSession, OperatorBroker]:
    """Open the store, the manager and the accounts.

    Args:
        settings: the settings of the service.
        url: the URL of the database that has the users.
        log: the open log.
        limits: the limits of the manager.
        metrics: the metrics of the service.
        stack: closes what was opened, in the opposite order.

    Returns:
        The manager, with its branches and messages loaded, a function that makes the connection of a client, and the
        broker for operators.

    Raises:
        LogError: the log cannot be read.
    """
    store = PostgresStore(log, cache_bytes=settings.message_cache_bytes)
    await store.open()
    failpoint.at(Point.STORE_OPENED)
    stack.push_async_callback(store.close)
    manager = BranchManager(log, store, limits, metrics)
    stack.push_async_callback(manager.close)
    await manager.start()
    store.begin()
    failpoint.at(Point.STORE_BEGUN)
    accounts = Accounts(url, settings.rm)
    await accounts.open()
    stack.push_async_callback(accounts.close)
    watching = asyncio.create_task(accounts.watch(), name="dtx-accounts")
    stack.push_async_callback(_end, watching)
    client_limits = ConnectionLimits.of(settings)
    parts = Parts(manager=manager, broker=store, accounts=accounts, metrics=metrics, limits=client_limits)
    limits_10 = Limits10.of(settings)
    connections: dict[StandaloneConnection | Connection10, None] = {}  # as they came

    def new_session(transport: AcceptedConnection, header: bytes) -> StandaloneConnection | Connection10 | None:
        connection: StandaloneConnection | Connection10
        if header in (Protocol.AMQP_0_9_1.value, Protocol.AMQP_0_9.value):
            connection = StandaloneConnection(parts, transport)
        elif header in (Protocol.AMQP_1_0_TLS.value, Protocol.DTX_MEMBER.value):
            return None
        else:
            connection = Connection10(manager, limits_10, lambda home: StandaloneNodes(parts, home), transport, header)
        connections[connection] = None
        connection.ended.add_done_callback(lambda _: connections.pop(connection, None))
        return connection

    def recheck() -> None:
        for connection in list(connections):
            connection.recheck()

    accounts.on_change(recheck)
    return manager, new_session, OperatorBroker(parts)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
