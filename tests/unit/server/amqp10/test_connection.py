"""A connection with unforeseen errors, and with ends in an unusual order."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dtx.server.amqp10.links import Incoming
from dtx.server.amqp10.transactions import TransactionWork
from dtx.server.standalone.client import Parts
from dtx.server.standalone.nodes import StandaloneNodes
from dtx.store.slices import SLICE_SECONDS
from dtx.wire.amqp10.endpoint import Attached, Closed
from dtx.wire.amqp10.performatives import Role, Source, Target
from tests.evidence.fuzz.server import whole
from tests.unit.server.amqp10.inside import Inside


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    """The parts of a server."""
    async with whole() as (found, _):
        yield found


class Broken(StandaloneNodes):
    """Nodes with an operation that raises an unforeseen error.

    Args:
        parts: parts of the server.
        home: the connection.
        what: the operation that fails: ``enter`` or ``destination``.
    """

    def __init__(self, parts: Parts, home: Any, what: str) -> None:
        super().__init__(parts, home)
        self._what = what

    async def _fail(self) -> Any:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    def enter(self, hostname: str | None) -> Any:
        return self._fail() if self._what == "enter" else super().enter(hostname)

    def destination(self, *args: Any, **options: Any) -> Any:
        return self._fail() if self._what == "destination" else super().destination(*args, **options)


@pytest.mark.usefixtures("one_slice")
@pytest.mark.parametrize("what", ["enter", "destination"])
async def test_a_background_error_ends_the_connection_and_releases_waiters(parts: Parts, what: str) -> None:
    """The error is logged. The client is told only that it was an internal error."""
    client = Inside(parts, lambda home: Broken(parts, home, what))
    await client.open()
    if what == "destination":
        session = await client.begin()
        link = session.new_link("sender", Role.SENDER)
        link.attach(source=Source(), target=Target(address="q"))
        await client.turn()
        assert not client.among(Attached)
    (closed,) = client.among(Closed)
    assert closed.error is not None
    assert closed.error.condition == "amqp:internal-error"
    assert "division" not in str(closed.error.description).lower()
    assert client.wire.reads, "dtx reads the client's close"
    client.engine.close()
    await client.turn()
    assert not client.wire.open


@pytest.mark.usefixtures("one_slice")
async def test_a_link_that_fails_at_the_end_blocks_no_other(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends too. Otherwise messages that the other links hold would stay unavailable."""
    parts.broker.virtual_host("/").declare_queue(b"q", None, durable=True)
    client = Inside(parts)
    await client.open()
    session = await client.begin()
    links = [await client.sender(session, "q", name) for name in ("first", "second", "third")]
    gone: list[int] = []
    shut_down = Incoming.shut_down

    def break_once(shell: Incoming, **options: Any) -> None:
        gone.append(shell.place[1])
        shut_down(shell, **options)
        if len(gone) == 1:
            raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Incoming, "shut_down", break_once)
    client.server.client_disconnected()
    async with asyncio.timeout(10):
        await client.server.ended
    assert gone == [link.handle for link in links]


@pytest.mark.usefixtures("one_slice")
@pytest.mark.parametrize("by_client", [True, False])
async def test_a_connection_is_over_behind_the_transactions_of_its_links(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, by_client: bool
) -> None:
    """Even if its links are released in several turns."""
    parts.broker.virtual_host("/").declare_queue(b"q", None, durable=True)
    client = Inside(parts)
    await client.open()
    session = await client.begin()
    await client.sender(session, "q")
    await client.declare(session, await client.control(session))
    order: list[str] = []
    shut_down = Incoming.shut_down

    def slow(shell: Incoming, **options: Any) -> None:
        shut_down(shell, **options)
        time.sleep(2 * SLICE_SECONDS)

    def noted(of: Any, name: str) -> None:
        method = getattr(of, name)

        def called(*arguments: Any) -> None:
            order.append(name)
            method(*arguments)

        monkeypatch.setattr(of, name, called)

    monkeypatch.setattr(Incoming, "shut_down", slow)
    noted(TransactionWork, "part")
    noted(client.server.nodes, "leave")
    noted(client.server.nodes, "end")
    if by_client:
        client.engine.close()
        await client.turn()
    else:
        client.server.client_disconnected()
    async with asyncio.timeout(10):
        await client.server.ended
    assert order == ["part", "leave", "end"]
