"""Lists of clients do not block the event loop, however many branches or scans the clients have."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dtx.admin import routes_read
from dtx.admin.identity import Identity
from dtx.auth.roles import OperatorRole
from dtx.manager import Requester
from dtx.store import slices
from dtx.xa.model import Association

VIEWER = Identity(name="somebody", role=OperatorRole.VIEWER, address="127.0.0.1")
CLIENTS = 20


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice ends after one step."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)


class Client(SimpleNamespace):
    """A client with one channel, which has *branches* associations and an open recovery scan.

    Args:
        number: number of the connection.
        branches: number of branches.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, number: int, branches: int) -> None:
        channel = SimpleNamespace(
            associations=[(None, Association.SUSPENDED)] * branches,
            mode=SimpleNamespace(value="dtx"),
            scan=SimpleNamespace(left=number),
        )
        super().__init__(
            id=number, who=Requester("guest", "/"), channels={1: channel}, stage=SimpleNamespace(value="running")
        )


def a_desk(branches: int) -> Any:
    """An object with clients in the reverse order of their numbers."""
    arrival = SimpleNamespace(protocol="AMQP 0-9-1", address="127.0.0.1:1", tls=False, since=0.0)
    found = [Client(number, branches) for number in reversed(range(1, CLIENTS + 1))]
    active = SimpleNamespace(connections=lambda: dict.fromkeys(found, arrival))
    return SimpleNamespace(require_active=lambda: (active, None))


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Callable[[], int]]:
    """Count the turns of the event loop that another task gets."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(others())
    yield lambda: turns
    counting.cancel()


async def test_counting_branches_of_clients_yields_to_others() -> None:
    async with counted_turns() as turns:
        page = await routes_read.list_connections(VIEWER, a_desk(50), limit=CLIENTS)
        assert turns() >= CLIENTS * 50
    assert [shown.id for shown in page.connections] == list(range(1, CLIENTS + 1))
    assert {shown.suspended for shown in page.connections} == {50}


async def test_others_get_their_turn_after_each_connection_of_a_list() -> None:
    async with counted_turns() as turns:
        page = await routes_read.list_connections(VIEWER, a_desk(0), limit=CLIENTS)
        assert turns() >= CLIENTS - 1
    assert len(page.connections) == CLIENTS


async def test_listing_scans_of_clients_yields_to_others() -> None:
    async with counted_turns() as turns:
        page = await routes_read.list_scans(VIEWER, a_desk(0), cursor="3-1", limit=5)
        assert turns() >= CLIENTS - 1
    assert [shown.left for shown in page.scans] == [4, 5, 6, 7, 8]
    assert page.cursor == "8-1"
