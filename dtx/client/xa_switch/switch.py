"""The calls of the switch, for all threads of control of a process.

A thread of control is a thread of the operating system; ``entry.c`` gives each a number. Each has its own resource
managers, by the ids that the transaction manager has chosen. Threads share nothing. :class:`Manager` is one resource
manager of a thread: the states R1, T0, T1 and T2 of X/Open, chapter 6.

Theory of operation. This module decides only what the thread alone knows: its association and its suspended branches.
The server decides everything about the branch (S0 to S5), because other threads and processes work for it too.
:mod:`dtx.client.errors` maps its answers to codes. A call that the state of the thread forbids is refused before
anything is sent.

Only one thread uses a connection. A lost connection is replaced. Between two calls no code reads from it, so each call
first checks it. If it died in the meantime, the call uses a new one, and nothing is lost. If it dies during a call, the
outcome is not known: the call ends in XAER_RMFAIL, and the next call connects again.

Every method of :class:`Switch` returns the result of the C function, or raises an XAException with its code.
"""

from contextlib import suppress
from typing import Any, Final

from pika.adapters.blocking_connection import BlockingConnection

from dtx.client.calls import FAILURES, alive, drop, limited, open_channel, require_dtx, unreachable
from dtx.client.coordination import Coordinator, XAResource
from dtx.client.errors import (
    XA_RBROLLBACK,
    XAER_INVAL,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    XAException,
    XARollback,
)
from dtx.client.xa_switch.interface import (
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
    XA_NOMIGRATE,
    XA_OK,
    XA_RDONLY,
    Info,
    SwitchCall,
    check_flags,
    no_such_flags,
    parse,
)
from dtx.client.xa_switch.messages import SwitchAssociation, give_back
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

ANY: Final = -1
"""For :meth:`Switch.use`: the only resource manager that the thread is associated with."""


class SwitchLink:
    """A connection that is opened when a call needs it.

    Args:
        parameters: the connection parameters of pika.
        timeout: seconds to wait for each answer; ``None`` sets no limit.
    """

    def __init__(self, parameters: Any, timeout: float | None) -> None:
        self.timeout = timeout
        self._parameters = parameters
        self._connection: BlockingConnection | None = None
        self._coordinator: Coordinator | None = None

    def connection(self) -> BlockingConnection:
        """Return the connection. Open a new one if the old one was lost.

        Raises:
            XAER_RMFAIL: no connection could be opened.
            PeerIsNotDtx: the server is not dtx.
        """
        if self._connection is not None and not alive(self._connection):
            self.drop()
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> BlockingConnection:
        where = f"{self._parameters.host}:{self._parameters.port}"
        try:
            connection = BlockingConnection(self._parameters)
        except FAILURES as error:
            raise unreachable(where, error) from error
        try:
            require_dtx(connection)
        except XAER_RMERR:
            drop(connection)
            raise
        return connection

    def coordinator(self) -> Coordinator:
        """Return the coordinator that completes branches on this connection.

        Raises:
            XAER_RMFAIL: no connection could be opened.
        """
        connection = self.connection()
        if self._coordinator is None:
            self._coordinator = Coordinator(connection, timeout=self.timeout)
        return self._coordinator

    def close(self) -> None:
        """Close the connection with an AMQP close. Raise nothing."""
        connection, self._connection = self._connection, None
        self._coordinator = None
        if connection is not None and connection.is_open:
            try:
                with limited(connection, self.timeout):
                    connection.close()
            except FAILURES:
                drop(connection)

    def drop(self) -> None:
        """Close the socket at once, without an AMQP close. Raise nothing. The server rolls associated work back."""
        connection, self._connection = self._connection, None
        self._coordinator = None
        if connection is not None:
            drop(connection)


class Manager:
    """The state of a resource manager in a thread after ``xa_open``.

    Args:
        text: the open string.
        info: the parsed open string.
    """

    def __init__(self, text: str, info: Info) -> None:
        self.text = text
        self._info = info
        self._work = SwitchLink(info.work, info.answer_timeout)
        self._outcomes = self._work if info.coordination is None else SwitchLink(info.coordination, info.answer_timeout)
        self._free: list[XAResource] = []
        self._associations: dict[Xid, SwitchAssociation] = {}
        self._scan: list[Xid] | None = None

    def connect(self) -> None:
        """Open both connections.

        Raises:
            XAER_RMFAIL: a connection could not be opened.
            PeerIsNotDtx: the server is not dtx.
        """
        self._work.connection()
        self._outcomes.connection()

    @property
    def active(self) -> SwitchAssociation | None:
        """The branch that the thread is associated with (T1)."""
        return next((found for found in self._associations.values() if not found.suspended), None)

    def close(self) -> None:
        """Close both connections.

        X/Open forbids it while the thread is associated with a branch. A suspended association counts here, as in
        Berkeley DB's switch: otherwise its work would be lost with the connection, without an error.

        Raises:
            XAER_PROTO: the thread has an association, active or suspended: call xa_end before. An association whose
                connection is lost does not count.
        """
        held = [found.xid for found in self._associations.values() if alive(found.connection)]
        if held:
            raise XAER_PROTO(f"xa_close while this thread is associated with {held[0]}")
        self._associations.clear()
        for link in {self._work, self._outcomes}:
            link.close()

    def drop(self) -> None:
        """Drop both connections at once, because the thread has ended or the state of this object is unknown."""
        self._associations.clear()
        self._scan = None
        for link in {self._work, self._outcomes}:
            link.drop()

    # -- association ---------------------------------------------------------------------------------------------------

    def start(self, xid: Xid, *, join: bool, resume: bool) -> int:
        """Associate the thread (T0 to T1, or T2 to T1).

        Raises:
            XAER_PROTO: the thread is associated with a branch, or would join a branch that it has suspended.
            XARollback: the branch is rollback-only; the thread is not associated with it.
            XAException: the server's error.
        """
        busy = self.active
        if busy is not None:
            raise XAER_PROTO(f"xa_start of {xid} while this thread is associated with {busy.xid}")
        mine = self._associations.get(xid)
        if mine is not None and join:
            raise XAER_PROTO(f"{xid} is suspended by this thread: use TMRESUME instead of TMJOIN")
        if mine is not None and resume:
            return self._resume(mine)
        resource = self._take()
        try:
            resource.start(xid, join=join, resume=resume)
        finally:
            self._give_back(resource)
        self._free.remove(resource)
        self._associations[xid] = SwitchAssociation(xid, resource, self._work.timeout)
        if not (join or resume) and self._info.transaction_timeout:
            self._limit(xid)
        return XA_OK

    def _resume(self, mine: SwitchAssociation) -> int:
        try:
            self._on(mine, resume=True)
        except XAException:
            self._associations.pop(mine.xid)
            self._give_back(mine.resource)
            raise
        mine.suspended = False
        return XA_OK

    def _limit(self, xid: Xid) -> None:
        """Set the timeout of the open string. If that fails, undo the start: a failed xa_start must have no effect."""
        try:
            self._outcomes.coordinator().set_timeout(xid, self._info.transaction_timeout)
        except XAException:
            with suppress(XAException):
                self.end(xid, fail=True, suspend=False, migrate=False)
            with suppress(XAException):
                self._outcomes.coordinator().rollback(xid)
            raise

    def end(self, xid: Xid, *, fail: bool, suspend: bool, migrate: bool) -> int:
        """Dissociate the thread (T1 or T2 to T0), or suspend its association (T1 to T2).

        Returns:
            XA_OK; XA_NOMIGRATE if TMMIGRATE was given: ``xa.h`` says "resumption must occur where suspension
            occurred". Transaction managers that respect TMNOMIGRATE do not give it.

        Raises:
            XARollback: the branch is rollback-only; the thread is dissociated.
            XAER_PROTO: the thread is not associated with it, or has suspended it already.
            XAER_RMFAIL: the connection is lost; the thread is dissociated.
        """
        mine = self._associations.get(xid)
        if mine is None:
            return self._end_unknown(xid)
        if suspend and mine.suspended:
            raise XAER_PROTO(f"{xid} is suspended already")
        if suspend:
            self._end(mine, fail=False, suspend=True)
            mine.suspended = True
            return XA_NOMIGRATE if migrate else XA_OK
        self._end(mine, fail=fail, suspend=False)
        return XA_OK

    def _end(self, mine: SwitchAssociation, *, fail: bool, suspend: bool) -> None:
        try:
            self._on(mine, fail=fail, suspend=suspend)
        except XAException:
            self._leave(mine)
            raise
        if not suspend:
            self._leave(mine)

    def _leave(self, mine: SwitchAssociation) -> None:
        give_back(mine)  # after the end: within the branch, messages would return only after its decision
        self._associations.pop(mine.xid)
        self._give_back(mine.resource)

    def _end_unknown(self, xid: Xid) -> int:
        """End without an association: the server's answer distinguishes unknown xids from branches of other threads."""
        resource = self._take()
        try:
            resource.end(xid)
        finally:
            self._give_back(resource)
        raise XAER_PROTO(f"this thread is not associated with {xid}")  # not reached: a free channel has no association

    def _on(self, mine: SwitchAssociation, *, resume: bool = False, fail: bool = False, suspend: bool = False) -> None:
        """Resume or end on the channel of the association."""
        alive(mine.connection)
        try:
            if resume:
                mine.resource.start(mine.xid, resume=True)
            else:
                mine.resource.end(mine.xid, fail=fail, suspend=suspend)
        except XAER_RMFAIL as error:
            raise mine.lost(error) from error

    def _take(self) -> XAResource:
        """Return a channel that works for no branch."""
        connection = self._work.connection()
        while self._free:
            resource = self._free.pop()
            if resource.channel.is_open and resource.channel.connection is connection:
                return resource
        resource = XAResource(open_channel(connection, self._work.timeout), timeout=self._work.timeout)
        resource.select()  # also needed for end: on other channels the server refuses end before it reads the xid
        return resource

    def _give_back(self, resource: XAResource) -> None:
        if resource.channel.is_open:
            self._free.append(resource)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def prepare(self, xid: Xid) -> int:
        """Prepare the branch. Return XA_OK, or XA_RDONLY if the branch had nothing to commit and no longer exists."""
        return XA_RDONLY if self._outcomes.coordinator().prepare(xid) is XaFlag.RDONLY else XA_OK

    def commit(self, xid: Xid, *, one_phase: bool) -> int:
        """Commit the branch: the second phase, or the only one. A repetition after a lost answer succeeds again.

        Raises:
            XAException: the server's error.
        """
        try:
            self._outcomes.coordinator().commit(xid, one_phase=one_phase)
        except XAER_NOTA as error:
            ended = error.facts.get("ended")
            if ended == "committed":
                return XA_OK
            if one_phase and ended == "rolled-back":
                raise XA_RBROLLBACK(error.reason) from error
            raise
        return XA_OK

    def rollback(self, xid: Xid) -> int:
        """Roll the branch back. A repetition after a lost answer succeeds again.

        Raises:
            XAException: the server's error.
        """
        try:
            self._outcomes.coordinator().rollback(xid)
        except XARollback:
            return XA_OK
        except XAER_NOTA as error:
            if error.facts.get("ended") != "rolled-back":
                raise
        return XA_OK

    def forget(self, xid: Xid) -> int:
        """Discard the record of a heuristic outcome."""
        self._outcomes.coordinator().forget(xid)
        return XA_OK

    def recover(self, count: int, *, start: bool, end: bool) -> list[Xid]:
        """Return the next branches of a scan: branches in doubt or heuristically completed.

        The first call fetches the whole scan, so a transaction manager that never ends it leaves no scan open at the
        server.

        Args:
            count: maximum number of branches.
            start: begin a scan, again if one is open.
            end: end the scan after this call.

        Raises:
            XAER_INVAL: no scan is open.
        """
        if start:
            self._scan = None
            self._scan = list(self._outcomes.coordinator().recover())
        if self._scan is None:
            raise XAER_INVAL("xa_recover without TMSTARTRSCAN, and no scan is open")
        found, rest = self._scan[:count], self._scan[count:]
        self._scan = None if end else rest
        return found


class Switch:
    """The resource managers that each thread has opened."""

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
        """``xa_open`` (R0 to R1). A repetition only replaces lost connections.

        Raises:
            XAER_INVAL: the open string is malformed, or differs from the previous one.
            XAER_RMERR: a connection could not be opened (xa_open may not return XAER_RMFAIL).
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
        """``xa_close`` (R1 to R0). It has no effect if the resource manager is not open.

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

    def thread_ended(self, thread: int) -> None:
        """Drop the connections of a thread that has ended. This also ends its associations."""
        self._used.pop(thread, None)
        for manager in self._threads.pop(thread, {}).values():
            manager.drop()

    def abandon(self, thread: int, rmid: int) -> None:
        """Drop the connections after an unexpected error in a call: the remaining state is not reliable."""
        manager = self._threads.get(thread, {}).get(rmid)
        if manager is not None:
            manager.drop()

    # -- branches ------------------------------------------------------------------------------------------------------

    def branch(self, thread: int, call: SwitchCall, xid: Xid, rmid: int, flags: int) -> int:
        """``xa_start``, ``xa_end``, ``xa_rollback``, ``xa_prepare``, ``xa_commit`` and ``xa_forget``.

        Raises:
            XAER_ASYNC: TMASYNC is set.
            XAER_INVAL: the call does not permit these flags.
            XAER_PROTO: the thread has not opened this resource manager, or its state forbids the call.
            XAException: the server's error.
        """
        name = f"xa_{call.name.lower()}"
        check_flags(name, flags, POSSIBLE[call])
        manager = self._opened(thread, rmid, name)
        match call:
            case SwitchCall.START:
                return manager.start(xid, join=bool(flags & TMJOIN), resume=bool(flags & TMRESUME))
            case SwitchCall.END:
                fail, suspend, migrate = (bool(flags & flag) for flag in (TMFAIL, TMSUSPEND, TMMIGRATE))
                return manager.end(xid, fail=fail, suspend=suspend, migrate=migrate)
            case SwitchCall.PREPARE:
                return manager.prepare(xid)
            case SwitchCall.COMMIT:
                return manager.commit(xid, one_phase=bool(flags & TMONEPHASE))
            case SwitchCall.ROLLBACK:
                return manager.rollback(xid)
            case SwitchCall.FORGET:
                return manager.forget(xid)

    def recover(self, thread: int, count: int, rmid: int, flags: int) -> list[Xid]:
        """``xa_recover``: the next xids of a scan, at most *count*.

        Raises:
            XAER_INVAL: *count* is negative, the call does not permit these flags, or no scan is open.
            XAER_PROTO: the thread has not opened this resource manager.
        """
        if flags & ~(TMSTARTRSCAN | TMENDRSCAN):
            no_such_flags("xa_recover", flags)
        if count < 0:
            raise XAER_INVAL(f"xa_recover: a count of {count}")
        manager = self._opened(thread, rmid, "xa_recover")
        return manager.recover(count, start=bool(flags & TMSTARTRSCAN), end=bool(flags & TMENDRSCAN))

    def complete(self, thread: int, rmid: int, flags: int) -> int:
        """``xa_complete``: always an error, because the switch has no asynchronous calls.

        Raises:
            XAER_INVAL: the call does not permit these flags.
            XAER_PROTO: in all other cases.
        """
        if flags not in {TMNOFLAGS, TMNOWAIT}:
            no_such_flags("xa_complete", flags)
        self._opened(thread, rmid, "xa_complete")
        raise XAER_PROTO("xa_complete: there is no asynchronous call")

    # -- work ----------------------------------------------------------------------------------------------------------

    def use(self, thread: int, rmid: int) -> int:
        """``dtx_use``: choose the resource manager for the work of this thread.

        Raises:
            XAER_PROTO: the thread has not opened this resource manager.
        """
        if rmid == ANY:
            self._used.pop(thread, None)
            return XA_OK
        self._opened(thread, rmid, "dtx_use")
        self._used[thread] = rmid
        return XA_OK

    def working(self, thread: int) -> tuple[int, SwitchAssociation]:
        """Return the resource manager and the branch for the work of this thread.

        Raises:
            XAER_PROTO: the thread is associated with no branch, or with several and :meth:`use` was not called.
        """
        managers = self._threads.get(thread, {})
        used = self._used.get(thread)
        found = [
            (rmid, manager.active)
            for rmid, manager in managers.items()
            if manager.active is not None and used in {None, rmid}
        ]
        match found:
            case [(rmid, SwitchAssociation() as active)]:
                return rmid, active
            case []:
                raise XAER_PROTO("this thread is not associated with a branch: call xa_start before the work")
            case _:
                raise XAER_PROTO("this thread is associated with several branches: choose one with dtx_use")
