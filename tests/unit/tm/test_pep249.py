"""Drivers that report less than psycopg: the meaning of their errors, with threads and with asyncio."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dtx.client import XA_RBROLLBACK, XAER_NOTA, XAER_PROTO, XAER_RMERR, XAER_RMFAIL, XAException, XaFlag, Xid
from dtx.client.tm.asynchronous import AsyncPep249Session
from dtx.client.tm.resources import Pep249Session
from dtx.client.tm.steps import Work, drive, drive_async

XID = Xid(7, b"n.0123456789ab.a.1", b"db")
OTHER = Xid(7, b"n.0123456789ab.a.2", b"db")


class DriverError(Exception):
    """This driver's errors have only a text."""


class Driver:
    """A connection of a driver with PEP 249 only: no SQLSTATE, and no status of a transaction.

    Args:
        fails: names of methods that raise.
        in_doubt: the transactions that the database lists.
    """

    def __init__(self, *fails: str, in_doubt: tuple[Any, ...] = ()) -> None:
        self.fails = set(fails)
        self.in_doubt = in_doubt
        self.asked: list[str] = []
        self.closed = False

    def xid(self, format_id: int, gtrid: str, bqual: str) -> tuple[int, str, str]:
        return format_id, gtrid, bqual

    def _do(self, name: str) -> None:
        self.asked.append(name)
        if name in self.fails:
            raise DriverError("no, and  why\nis my own affair")

    def tpc_begin(self, _xid: Any) -> None:
        self._do("tpc_begin")

    def tpc_prepare(self) -> None:
        self._do("tpc_prepare")

    def tpc_commit(self, xid: Any = None) -> None:
        self._do("tpc_commit" if xid is None else "tpc_commit xid")

    def tpc_rollback(self, xid: Any = None) -> None:
        self._do("tpc_rollback" if xid is None else "tpc_rollback xid")

    def tpc_recover(self) -> tuple[Any, ...]:
        self._do("tpc_recover")
        return self.in_doubt

    def rollback(self) -> None:
        self._do("rollback")

    def close(self) -> None:
        self._do("close")


def listed(xid: Xid) -> tuple[int, str, str]:
    """The xid as a driver lists it."""
    return xid.format_id, xid.gtrid.decode(), xid.bqual.decode()


def test_a_two_phase_transaction_makes_the_calls_of_pep_249() -> None:
    driver = Driver()
    session = Pep249Session(driver, own=True)
    session.start(XID)
    assert session.handle is driver
    assert not session.usable()
    session.end(XID)
    assert session.prepare(XID) is XaFlag.OK
    session.commit(XID)
    assert session.usable()
    session.close()
    assert driver.asked == ["tpc_begin", "tpc_prepare", "tpc_commit", "close"]


@pytest.mark.parametrize(("returned", "vote"), [(None, XaFlag.OK), (True, XaFlag.OK), (False, XaFlag.RDONLY)])
def test_a_driver_with_nothing_to_commit_is_not_called(returned: bool | None, vote: XaFlag) -> None:
    """Oracle's drivers do so, and a commit would be an error then."""

    class Voting(Driver):
        def tpc_prepare(self) -> bool | None:  # type: ignore[override]
            super().tpc_prepare()
            return returned

    session = Pep249Session(Voting(), own=True)
    session.start(XID)
    assert session.prepare(XID) is vote
    assert session.usable() is (vote is XaFlag.RDONLY)


def test_another_connections_prepared_branch_is_completed_by_xid() -> None:
    driver = Driver()
    session = Pep249Session(driver, own=False)
    session.rollback(XID)
    session.commit(OTHER)
    session.forget(OTHER)
    session.close()  # the application's connection stays open
    assert driver.asked == ["tpc_rollback xid", "tpc_commit xid"]


@pytest.mark.parametrize(
    ("fails", "call", "error"),
    [
        ("tpc_begin", lambda session: session.start(XID), XAER_RMERR),
        ("tpc_prepare", lambda session: session.prepare(XID), XA_RBROLLBACK),
        ("tpc_commit", lambda session: session.commit_one_phase(XID), XA_RBROLLBACK),
    ],
)
def test_a_refusal_in_the_first_phase(
    fails: str, call: Callable[[Pep249Session], object], error: type[XAException]
) -> None:
    """While the connection is open. If it is lost, the outcome is unknown: XAER_RMFAIL."""
    for closed, expected in ((False, error), (True, XAER_RMFAIL)):
        driver = Driver(fails)
        session = Pep249Session(driver, own=True)
        if fails != "tpc_begin":
            session.start(XID)
        driver.closed = closed
        with pytest.raises(expected) as raised:
            call(session)
        assert type(raised.value) is expected
        assert "no, and why is my own affair" in str(raised.value)


@pytest.mark.parametrize("decision", ["commit", "rollback"])
@pytest.mark.parametrize(
    ("in_doubt", "also_fails", "error"),
    [((), (), XAER_NOTA), ((listed(XID),), (), XAER_RMFAIL), ((), ("tpc_recover",), XAER_RMFAIL)],
    ids=["not listed", "listed", "cannot list"],
)
def test_an_error_without_sqlstate_follows_the_list_of_branches(
    decision: str, in_doubt: tuple[Any, ...], also_fails: tuple[str, ...], error: type[XAException]
) -> None:
    """A branch that is not listed was completed. If it is listed or may be, the outcome is open."""
    session = Pep249Session(Driver(f"tpc_{decision} xid", *also_fails, in_doubt=in_doubt), own=True)
    with pytest.raises(error):
        getattr(session, decision)(XID)


def test_a_connection_in_one_branch_does_nothing_about_another() -> None:
    session = Pep249Session(Driver(), own=True)
    session.start(XID)
    for call in (session.prepare, session.commit, session.rollback, session.commit_one_phase):
        with pytest.raises(XAER_PROTO):
            call(OTHER)


def test_a_foreign_xid_is_omitted_from_the_list() -> None:
    strange = [(None, "a", None), ("7", "a", "b"), (7, "", "b"), (7, "x" * 65, "b"), (7, b"a", "b"), (-1, "a", "b")]
    session = Pep249Session(Driver(in_doubt=(*strange, listed(XID))), own=True)
    assert session.recover() == [XID]


async def test_coroutines_do_the_same() -> None:
    class AsyncDriver(Driver):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if not name.startswith("tpc_") and name not in ("rollback", "close"):
                return found

            async def later(*arguments: Any) -> Any:
                await asyncio.sleep(0)
                return found(*arguments)

            return later

    driver = AsyncDriver("tpc_commit xid", in_doubt=(listed(OTHER),))
    session = AsyncPep249Session(driver, own=True)
    await session.start(XID)
    assert await session.prepare(XID) is XaFlag.OK
    await session.rollback(XID)
    with pytest.raises(XAER_NOTA):
        await session.commit(XID)
    with pytest.raises(XAER_RMFAIL):
        await session.commit(OTHER)
    assert await session.recover() == [OTHER]
    assert await session.usable()
    await session.close()
    assert driver.asked[-1] == "close"


def test_an_interrupt_is_raised_at_the_interrupted_call() -> None:
    """``finally`` blocks of an algorithm run, including the calls in them, with each driver of it."""
    done: list[str] = []

    def work() -> Work[None]:
        try:
            yield interrupted
        finally:
            yield lambda: done.append("tidied")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(work())
    assert done == ["tidied"]


async def test_a_cancelled_task_tidies_up_as_well() -> None:
    done: list[str] = []
    reached = asyncio.Event()

    async def tidy() -> None:
        await asyncio.sleep(0)
        done.append("tidied")

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    def work() -> Work[None]:
        try:
            yield wait
        finally:
            yield tidy

    task = asyncio.create_task(drive_async(work()))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["tidied"]
