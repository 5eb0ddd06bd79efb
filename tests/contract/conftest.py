"""The contract of both kinds of log and both modes. All tests of this tier share one dtx of each mode."""

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, cast

import pytest

from dtx.log.api import MessageLog
from dtx.log.postgres import PostgresTransactionLog
from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.dialogue import Dialogue, connected
from tests.support.memory_log import MemoryDatabase, MemoryLog
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService
from tests.support.standalone import Client, OpenClient
from tests.support.users import RabbitUsers, StandaloneUsers, Users

DEFAULT_TIMEOUT = 60
MAX_TIMEOUT = 3600
COORDINATOR = "the tm"
SHARED_OPTIONS: tuple[str, ...] = (
    *ADMIN,
    *("--coordinator", COORDINATOR, "--default-timeout", str(DEFAULT_TIMEOUT), "--max-timeout", str(MAX_TIMEOUT)),
    *("--max-branch-messages", "20", "--max-branch-bytes", "1MiB", "--max-message-bytes", "512KiB"),
)
OpenLog = Callable[..., Coroutine[Any, Any, MessageLog]]


@pytest.fixture(params=["postgres", "memory"])
async def open_log(request: pytest.FixtureRequest) -> AsyncIterator[OpenLog]:
    """Opens logs on one database; they are closed with the test."""
    opened: list[MessageLog] = []
    database = MemoryDatabase()
    url = request.getfixturevalue("migrated_postgres_url") if request.param == "postgres" else None

    async def make(rm: str = "rm") -> MessageLog:
        log: MessageLog = MemoryLog(rm, database) if url is None else PostgresTransactionLog(url, rm, lease_ttl=5)
        opened.append(log)
        await log.open()
        return log

    yield make
    for log in opened:
        await log.close()


@pytest.fixture
async def log(open_log: OpenLog) -> MessageLog:
    return await open_log()


@pytest.fixture
async def open_client(open_log: OpenLog) -> AsyncIterator[OpenClient]:
    """Opens stores one after the other on one database: each call is a restart."""
    opened: list[Client] = []

    async def make(**options: Any) -> Client:
        if opened:
            await opened[-1].close()
            await opened[-1].log.close()
        client = await Client(await open_log(), **options).open()
        opened.append(client)
        return client

    yield make
    await opened[-1].close()


@pytest.fixture
async def client(open_client: OpenClient) -> Client:
    return await open_client()


@pytest.fixture(scope="session")
def services(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Callable[[Mode], DtxService]]:
    """The dtx of each mode, started by the first test that needs it. No test may end it or change its settings."""
    with ExitStack() as stack:

        @cache
        def service(mode: Mode) -> DtxService:
            options: tuple[str, ...] = SHARED_OPTIONS
            broker = None
            if mode == "alongside":
                node: RabbitNode = request.getfixturevalue("shared_rabbitmq")
                broker = node.url()
                options += ("--management", node.management_url, "--max-kept-bytes", "256KiB")
            database = postgres.create_database()
            stack.callback(postgres.drop_database, database)
            return stack.enter_context(DtxService(broker=broker, database=database, options=options))

        yield service


@pytest.fixture(scope="session")
def standalone_service(services: Callable[[Mode], DtxService]) -> DtxService:
    """The dtx without a broker."""
    return services("standalone")


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode of dtx; the rules are the same in both."""
    return cast("Mode", request.param)


@pytest.fixture(scope="module")
def service(mode: Mode, services: Callable[[Mode], DtxService]) -> DtxService:
    """The shared dtx of ``mode``."""
    return services(mode)


@pytest.fixture(scope="module")
def shared_broker(mode: Mode, service: DtxService, request: pytest.FixtureRequest) -> Broker:
    """The broker, or the standalone dtx, that has the messages of ``service``."""
    if mode == "alongside":
        return cast("RabbitNode", request.getfixturevalue("shared_rabbitmq"))
    return StandaloneBroker(service)


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    """``shared_broker``, repaired after the test before."""
    shared_broker.mend()
    return shared_broker


@pytest.fixture(params=["RabbitMQ", "standalone"])
def either_url(request: pytest.FixtureRequest) -> str:
    """The URL of RabbitMQ or of a dtx without a broker: both must behave the same."""
    if request.param == "RabbitMQ":
        return cast("RabbitNode", request.getfixturevalue("rabbitmq")).url()
    return cast("DtxService", request.getfixturevalue("standalone_service")).url()


@pytest.fixture(params=["RabbitMQ", "standalone"])
def users(request: pytest.FixtureRequest) -> Users:
    """The users of RabbitMQ or of a dtx without a broker."""
    if request.param == "RabbitMQ":
        return RabbitUsers(request.getfixturevalue("rabbitmq"))
    return StandaloneUsers(request.getfixturevalue("standalone_service"))


@pytest.fixture
def alice(users: Users) -> Iterator[str]:
    """A user with all permissions in ``/``."""
    name = f"alice-{secrets.token_hex(4)}"
    users.add(name)
    users.permit(name)
    yield name
    users.remove(name)


@pytest.fixture
def talk(either_url: str) -> Iterator[Dialogue]:
    """A connection to ``either_url``."""
    yield from connected(either_url)
