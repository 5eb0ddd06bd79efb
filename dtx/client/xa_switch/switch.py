"""The calls of the switch, for all threads of control of a process.

A thread of control is a thread of the operating system, told from others by a number that ``entry.c`` gives it. Each
has resource managers of its own, by the id that the transaction manager has chosen; no two threads share anything.

Every method returns what the C function returns, or raises an XAException whose code that is.
"""

from typing import Final

from dtx.client.errors import XAER_INVAL, XAER_PROTO, XAER_RMERR, XAER_RMFAIL
from dtx.client.xa_switch.association import Association
from dtx.client.xa_switch.codes import (
    POSSIBLE,
    TMENDRSCAN,
    TMFAIL,
    TMJOIN,
    TMMIGRATE,
    TMNOFLAGS,
    TMNOWAIT,
    TMONEPHASE,
    TMRESUME,
    TMSTARTRSCAN,
    TMSUSPEND,
    XA_OK,
    Call,
    check_flags,
    no_such_flags,
)
from dtx.client.xa_switch.info import parse
from dtx.client.xa_switch.manager import Manager
from dtx.xa.xid import Xid

ANY: Final = -1
"""For :meth:`Switch.use`: the only resource manager that the thread is associated with."""


class Switch:
    """All threads, and what each has opened."""

    def __init__(self) -> None:
        self._threads: dict[int, dict[int, Manager]] = {}
        self._used: dict[int, int] = {}

    def _opened(self, thread: int, rmid: int, call: str) -> Manager:
        try:
            return self._threads[thread][rmid]
        except KeyError:
            raise XAER_PROTO(f"{call}: this thread has not called xa_open for resource manager {rmid}") from None

    # -- the resource manager ------------------------------------------------------------------------------------------

    def open(self, thread: int, text: str, rmid: int, flags: int) -> int:
        """``xa_open`` (R0 to R1). Doing it again connects again where that is needed, and changes nothing else.

        Raises:
            XAER_INVAL: the string cannot be read, or is another one than before.
            XAER_RMERR: a connection is not to be had (xa_open knows no XAER_RMFAIL).
        """
        check_flags("xa_open", flags, frozenset({TMNOFLAGS}))
        info = parse(text)
        known = self._threads.get(thread, {}).get(rmid)
        if known is not None and known.text != text:
            raise XAER_INVAL(f"xa_open: resource manager {rmid} of this thread was opened with another string")
        manager = known or Manager(text, info)
        try:
            manager.connect()
        except XAER_RMFAIL as error:
            manager.drop()
            raise XAER_RMERR(error.reason) from error
        except XAER_RMERR:
            manager.drop()
            raise
        self._threads.setdefault(thread, {})[rmid] = manager
        return XA_OK

    def close(self, thread: int, rmid: int, flags: int) -> int:
        """``xa_close`` (R1 to R0). Doing it again, or before xa_open, changes nothing.

        Raises:
            XAER_PROTO: the thread is associated with a branch of this resource manager.
        """
        check_flags("xa_close", flags, frozenset({TMNOFLAGS}))
        managers = self._threads.get(thread, {})
        if rmid in managers:
            managers[rmid].close()
            del managers[rmid]
        if self._used.get(thread) == rmid:
            del self._used[thread]
        return XA_OK

    def gone(self, thread: int) -> None:
        """A thread has ended: its connections end, and with them what it was associated with."""
        self._used.pop(thread, None)
        for manager in self._threads.pop(thread, {}).values():
            manager.drop()

    def abandon(self, thread: int, rmid: int) -> None:
        """Something unforeseen happened in a call: what is left of it is not to be built upon."""
        manager = self._threads.get(thread, {}).get(rmid)
        if manager is not None:
            manager.drop()

    # -- branches ------------------------------------------------------------------------------------------------------

    def branch(self, thread: int, call: Call, xid: Xid, rmid: int, flags: int) -> int:
        """``xa_start``, ``xa_end``, ``xa_rollback``, ``xa_prepare``, ``xa_commit`` and ``xa_forget``.

        Raises:
            XAER_ASYNC: TMASYNC.
            XAER_INVAL: flags that the call does not know.
            XAER_PROTO: the thread has not opened this resource manager; or is not in the state for the call.
            XAException: as the server says.
        """
        name = f"xa_{call.name.lower()}"
        check_flags(name, flags, POSSIBLE[call])
        manager = self._opened(thread, rmid, name)
        match call:
            case Call.START:
                return manager.start(xid, join=bool(flags & TMJOIN), resume=bool(flags & TMRESUME))
            case Call.END:
                fail, suspend, migrate = (bool(flags & flag) for flag in (TMFAIL, TMSUSPEND, TMMIGRATE))
                return manager.end(xid, fail=fail, suspend=suspend, migrate=migrate)
            case Call.PREPARE:
                return manager.prepare(xid)
            case Call.COMMIT:
                return manager.commit(xid, one_phase=bool(flags & TMONEPHASE))
            case Call.ROLLBACK:
                return manager.rollback(xid)
            case Call.FORGET:
                return manager.forget(xid)

    def recover(self, thread: int, count: int, rmid: int, flags: int) -> list[Xid]:
        """``xa_recover``: the next xids of a scan, *count* at most.

        Raises:
            XAER_INVAL: a count below 0, other flags, or no scan is open.
        """
        if flags & ~(TMSTARTRSCAN | TMENDRSCAN):
            no_such_flags("xa_recover", flags)
        if count < 0:
            raise XAER_INVAL(f"xa_recover: a count of {count}")
        manager = self._opened(thread, rmid, "xa_recover")
        return manager.recover(count, start=bool(flags & TMSTARTRSCAN), end=bool(flags & TMENDRSCAN))

    def complete(self, thread: int, rmid: int, flags: int) -> int:
        """``xa_complete``: there never is an asynchronous call.

        Raises:
            XAER_INVAL: flags that the call does not know.
            XAER_PROTO: always else.
        """
        if flags not in {TMNOFLAGS, TMNOWAIT}:
            no_such_flags("xa_complete", flags)
        self._opened(thread, rmid, "xa_complete")
        raise XAER_PROTO("xa_complete: nothing was begun asynchronously")

    # -- work ----------------------------------------------------------------------------------------------------------

    def use(self, thread: int, rmid: int) -> int:
        """``dtx_use``: whose branch the work of this thread is for.

        Raises:
            XAER_PROTO: the thread has not opened it.
        """
        if rmid == ANY:
            self._used.pop(thread, None)
            return XA_OK
        self._opened(thread, rmid, "dtx_use")
        self._used[thread] = rmid
        return XA_OK

    def working(self, thread: int) -> tuple[int, Association]:
        """The resource manager and the branch that the work of this thread is for.

        Raises:
            XAER_PROTO: there is none, or more than one.
        """
        managers = self._threads.get(thread, {})
        used = self._used.get(thread)
        found = [
            (rmid, manager.active)
            for rmid, manager in managers.items()
            if manager.active is not None and used in {None, rmid}
        ]
        match found:
            case [(rmid, Association() as active)]:
                return rmid, active
            case []:
                raise XAER_PROTO(
                    "this thread is not associated with a branch: work belongs between xa_start and xa_end"
                )
            case _:
                raise XAER_PROTO("this thread is associated with several branches: dtx_use says which one is meant")
