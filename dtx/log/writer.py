"""Group commit: one task writes all records, one transaction after the other.

Theory of operation. Records queue up while a group is under way. The writer takes them, up to limits, and sends them as
one transaction in one round trip. Each caller is answered after the commit of its record. When PostgreSQL refuses a
group, its records are written one by one, so that only the bad one fails.

A group is sent while PostgreSQL writes the one before it, so that PostgreSQL does not wait between them. It proves its
*sequence*: it fails unless the group before it has committed. So groups commit in their order or not at all, as if each
had waited for the answer to the one before. When a group fails, the group sent behind it fails too. It is sent again
after the good records of the first.

A group whose connection was lost is *carried*: whether it committed is not known. The writer connects again and raises
its own epoch in the lease. From then on the old session has either committed or never will: its proof of the lease
fails, or the update has waited for its lock. Then the writer looks for traces of the carried groups, from the last to
the first. A trace shows that this group and all before it committed. A group without one is written again. When the
database stays away for the retry window, callers get LogUnavailable, and the carried groups are settled later. Until
then no answer about any xid is given (:meth:`Writer.settled`).

Traces. Either all of a group was committed or nothing, so one trace of the most certain kind decides:

1. A journal entry: its id is random, no other writer uses it, and it stays for days.
2. A branch that entered or advanced: only this record could give it its state and version.
3. A message that was put and not dropped by the same group. A slot is used once, and until the group is settled only
   the group behind it may drop it. (The removal of a deleted queue's messages may do so too. To put those again does no
   harm.)
4. Without any of these the group has only dropped messages, changed their expiry or properties, marked what was
   delivered, added settlements or duplicates, or defined topology. All of that may be written twice: it counts as not
   applied. No record outside the group can have come between.

Of two groups under way the second is looked for first: it was written only if the first was. If it left no trace, or
dropped the only trace of the first, both are written again, in their order, with the same result. So no write serves
as a trace only, and a group of acknowledgements costs no more than its deletions.
"""

import asyncio
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from os import urandom
from typing import Final
from uuid import UUID

import psycopg
from psycopg.pq.abc import PGresult

from dtx import failpoint
from dtx.db.columns import int4s, int8s, raw_uuids, texts, times, uuids
from dtx.db.connections import Dsn, application_name, session_settings
from dtx.db.pipeline import CONFLICT, Bound, PipelineSession, SessionLost, Statement, StatementRefused
from dtx.failpoint import Point
from dtx.log.api import DuplicateXid, LeaseLost, LogConflict, LogError, LogUnavailable, OnWritten
from dtx.log.changes import Change, Slot
from dtx.log.lease import Lease
from dtx.log.records import Advance, Insert, JournalEntry, Line, LogWrite
from dtx.log.statements import DUPLICATE_XID, LEASE_LOST, PREPARED, WriteSequence, bind_group
from dtx.log.tables import BRANCH_XID_KEY
from dtx.log.write_queue import Pending, WriteQueue, points_around
from dtx.telemetry import get_logger

_COMPANY: Final = 4
"""Turns of the event loop for which a group waits for more records, when the last group had more than one. In about as
many, callers of that group are answered and new input is read. An idle turn takes some microseconds."""
_ENOUGH: Final = 4
"""Records that do not wait for others: a larger group would cost each of them hardly less. So many are sent behind a
group under way."""
_MOST_UNDER_WAY: Final = 2
"""Groups that PostgreSQL has at a time: one that it writes, and the next, so that it does not wait for the writer."""
_LEADS: Final = 2
"""Records of a group that another one may be sent behind. A single record proves the lease in its own statement."""
_DISK_FULL: Final = "53100"
"""SQLSTATE of a write for which PostgreSQL has no space."""
_FULL_SECONDS: Final = 3.0
"""How long a disk counts as full after such a write: only another write shows whether it still is."""
_PAUSE_MIN: Final = 0.05
_PAUSE_MAX: Final = 1.0
WRITER_SETTINGS: Final = {
    # The tables are empty when plans are made and have 100,000 rows a minute later. Every hot statement finds its
    # rows by primary key: only that plan is ever right, and planning again for each group would cost more than
    # running it. Only bitmap scans are left, since they always have a condition on the index. An index scan can read
    # a whole table, and does so for each group once autovacuum has found the table empty.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_indexscan": "off",
    "enable_indexonlyscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""Settings of the session that writes."""

_END_PREDECESSOR: Final = Statement(
    b"end_predecessor",
    # A session that is cut off in a transaction holds its lock on the lease until the server notices. dtx's own role
    # may end it.
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE application_name = $1::text AND usename = current_user AND pid <> pg_backend_pid()",
)
_RAISE_EPOCH: Final = Statement(
    b"raise_epoch",
    # Waits for the lock of an old session's transaction that has proved the old epoch; a later proof of it fails.
    "UPDATE dtx.lease SET epoch = epoch + 1 WHERE rm = $1::text AND instance = $2::uuid RETURNING epoch",
)
_RAISE_EPOCH_OF_MEMBER: Final = Statement(
    b"raise_epoch_of_member",
    "UPDATE dtx.member SET epoch = nextval('dtx.member_epoch') WHERE rm = $1::text AND instance = $2::uuid "
    "RETURNING epoch",
)
_LINE: Final = Statement(
    b"find_line", "SELECT count(*) FROM dtx.journal WHERE at = ($1::timestamptz[])[1] AND id = ($2::uuid[])[1]"
)
_BRANCH: Final = Statement(
    b"find_branch",
    "SELECT count(*) FROM dtx.branch WHERE rm = $1::text AND id = ($2::uuid[])[1] "
    "AND state = ($3::text[])[1] AND version = ($4::integer[])[1]",
)
_MESSAGE: Final = Statement(
    b"find_message",
    "SELECT count(*) FROM (SELECT 1 FROM unnest($2::bigint[], $3::bigint[]) AS u(queue, position) "
    "JOIN dtx.message m ON m.queue = u.queue AND m.position = u.position AND m.rm = $1::text LIMIT 1) AS found",
)
UNKNOWN_COMMIT: Final = (_END_PREDECESSOR, _RAISE_EPOCH, _RAISE_EPOCH_OF_MEMBER, _LINE, _BRANCH, _MESSAGE)
"""The statements of a session that replaces a lost one."""

log = get_logger()


@dataclass(slots=True)
class _Sent:
    """A group under way.

    Args:
        group: the records.
        answer: PostgreSQL's answer.
        number: its number, where another group may be sent behind it; else 0.
        began: the time when its statements were made.
    """

    group: list[Pending]
    answer: "asyncio.Future[list[PGresult]]"
    number: int
    began: float


class Writer:
    """The only task that changes branches.

    Args:
        dsn: the database.
        rm: name of the resource manager.
        lease: the lease, already taken.
        durable: see :meth:`dtx.db.pipeline.PipelineSession.connect`.
        retry_window: seconds for which a write waits for a database that is away.
        answer_timeout: seconds after which a database that does not answer counts as away.
        observe: called after each commit with the number of records and the seconds it took.
        on_lines: called with the journal entries that each commit has made durable.
        on_failed: called once when the writer has ended with an unexpected error: no write is possible any more.
    """

    def __init__(
        self,
        dsn: Dsn,
        rm: str,
        lease: Lease,
        *,
        durable: bool,
        retry_window: float,
        answer_timeout: float,
        observe: Callable[[int, float], None] | None = None,
        on_lines: Callable[[Sequence[JournalEntry | Line]], None] | None = None,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        self._on_failed = on_failed
        self._dsn = dsn
        self._rm = rm.encode()
        self._lease = lease
        # PostgreSQL gives up first if possible: then it is certain that nothing was written.
        self._settings = session_settings("writer", lease.instance, statement_timeout=answer_timeout * 0.8)
        self._settings |= WRITER_SETTINGS
        if lease.is_member:
            self._settings["dtx.member"] = str(lease.instance)
        self._durable = durable
        self._retry_window = retry_window
        self._answer_timeout = answer_timeout
        self._observe = observe
        self._on_lines = on_lines
        self._loop = asyncio.get_running_loop()
        self._line_ids = map((urandom(8)).__add__, map(_eight_octets, count()))
        self._waiting = WriteQueue(self._loop, self._wake)
        self._under_way: deque[_Sent] = deque()  # oldest first
        self._in_hand: list[Pending] = []  # taken, not answered: ``_stop`` answers them
        self._carried: list[list[Pending]] = []  # oldest first
        self._committed: list[Pending] = []  # committed, not answered
        self._last_size = 0
        self._numbers = count(1)
        self._known = asyncio.Event()
        self._idle: asyncio.Future[None] | None = None
        self._pause = _PAUSE_MIN
        self._closing = asyncio.Event()
        self._session: PipelineSession | None = None
        self._epoch = 0
        self._full_until = float("-inf")
        self._end: LogError | None = None
        self._task: asyncio.Task[None] | None = None

    async def settled(self) -> None:
        """Return when the outcome of all records sent so far is known: at once, unless a connection was lost.

        Raises:
            LogUnavailable: it is not known within the retry window.
        """
        if self._carried:
            try:
                async with asyncio.timeout(self._retry_window):
                    await self._known.wait()
            except TimeoutError:
                raise LogUnavailable("the database is away, the outcome of an earlier write is not known") from None

    async def start(self) -> None:
        """Connect, and start the task that writes.

        Raises:
            LogUnavailable, LeaseLost.
        """
        try:
            await self._connect(self._answer_timeout)
        except (psycopg.Error, OSError, StatementRefused, SessionLost) as error:
            raise LogUnavailable(f"cannot write to {self._dsn.shown}: {self._dsn.explain(error)}") from None
        self._task = asyncio.create_task(self._run(), name="log writer")

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        """Make *record* durable. Cancellation of the caller does not stop the write.

        Args:
            record: what to write.
            urgent: ``False``: it may wait for others, see :meth:`WriteQueue.add`.

        Raises:
            LogConflict, LogUnavailable, LeaseLost, LogError.
        """
        while self._waiting.full and self._end is None:
            await self._waiting.room()
        future: asyncio.Future[None] = self._loop.create_future()

        def written(error: LogError | None) -> None:
            if future.done():
                return  # the caller was cancelled
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.post(record, written, urgent=urgent)
        await future

    @property
    def epoch(self) -> int:
        """The epoch that writes prove."""
        return self._epoch

    @property
    def disk_full(self) -> bool:
        """Whether the database has refused a write for lack of space within the last seconds."""
        return time.monotonic() < self._full_until

    @property
    def queued(self) -> int:
        """The number of records that wait."""
        return self._waiting.count

    @property
    def congested(self) -> bool:
        """Whether so many records wait that callers of :meth:`post` should pause."""
        return self._waiting.full

    def post(self, record: LogWrite, written: OnWritten, *, urgent: bool = True) -> None:
        """Queue *record*, regardless of :attr:`congested`; *written* is called with the error, if any."""
        if self._end is not None:
            self._loop.call_soon(written, type(self._end)(str(self._end)))
            return
        pending = Pending(record, next(self._line_ids), written, time.monotonic() + self._retry_window)
        self._waiting.add(pending, urgent=urgent)

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    async def close(self) -> None:
        """Write what is queued, within the retry window, and disconnect."""
        self._closing.set()
        self._waiting.flush_low_priority()
        self._wake()
        if self._task is not None:
            await self._task
        self._stop(LogUnavailable("the log is closed"))
        if self._session is not None:
            await self._session.close()

    def _stop(self, error: LogError) -> None:
        """End the writer: *error* answers all records, and all later ones."""
        self._end = self._end or error
        self._answer_committed()
        sent = [*[sent.group for sent in self._under_way], *self._carried]
        waiting = (*self._in_hand, *self._waiting.take_all())
        for pending in [pending for group in sent for pending in group]:
            pending.answer(type(error)(f"{error}, the outcome of the write is not known"))
        for pending in waiting:
            pending.answer(type(error)(str(error)))

    async def _run(self) -> None:
        try:
            while self._end is None:
                if self._under_way and self._under_way[0].answer.done():
                    await self._receive_answer()
                elif self._may_send():
                    await self._send()
                elif self._committed:
                    self._answer_committed()
                elif self._under_way:
                    await self._wait()
                elif self._carried or self._waiting:
                    await self._recover()
                elif self._closing.is_set():
                    return
                else:
                    await self._wait()
        except Exception as error:
            log.exception("the log's writer failed")
            self._stop(LogError(f"the log's writer failed: {type(error).__name__}"))
            if self._on_failed is not None:
                self._on_failed()

    async def _wait(self) -> None:
        """Wait until the oldest group is answered, or until there are enough records for another group."""
        self._idle = self._loop.create_future()
        if not self._under_way:
            self._waiting.enough = 1
        else:
            self._waiting.enough = _ENOUGH if self._may_follow() else sys.maxsize
            self._under_way[0].answer.add_done_callback(self._answered)
        await self._idle

    def _answered(self, _: object) -> None:
        self._wake()

    async def _recover(self) -> None:
        """Make a session, or settle the groups that the last one carried; until then nothing can be sent."""
        if self._session is None or not self._session.alive:
            await self._reconnect()
        else:
            await self._settle()

    def _may_send(self) -> bool:
        if not self._waiting or self._carried or self._session is None or not self._session.alive:
            return False
        if not self._under_way:
            return True
        return len(self._waiting) >= _ENOUGH and not self._waiting.alone and self._may_follow()

    def _may_follow(self) -> bool:
        """Whether another group may be sent behind those that are under way."""
        return len(self._under_way) < _MOST_UNDER_WAY and self._under_way[-1].number > 0

    async def _send(self) -> None:
        """Send the next group, then answer for the committed one while PostgreSQL writes."""
        if not self._under_way and self._last_size > 1 and len(self._waiting) < _ENOUGH:
            await self._wait_for_more()
            if not self._may_send():
                return
        assert self._session is not None
        began = time.perf_counter()
        group = self._in_hand = self._waiting.take()
        self._last_size = len(group)
        sequence = None
        if self._under_way:
            sequence = WriteSequence(next(self._numbers), self._under_way[-1].number)
        elif len(group) >= _LEADS:
            sequence = WriteSequence(next(self._numbers), 0)
        try:
            bound = bind_group(
                self._rm, self._epoch, [(pending.record, pending.line_id) for pending in group], sequence
            )
        except (UnicodeError, struct.error, OverflowError) as error:
            if len(group) == 1:
                group[0].answer(LogError(f"the log cannot keep the record: {error}"))
            else:
                self._queue_singly(group)
            return
        if failpoint.armed:
            for pending in group:
                failpoint.at(points_around(pending.record)[0])
        self._under_way.append(
            _Sent(group, self._session.send(bound), 0 if sequence is None else sequence.number, began)
        )
        self._in_hand = []
        if failpoint.armed:
            failpoint.at(Point.LOG_SENT)
        self._answer_committed()

    async def _wait_for_more(self) -> None:
        """Answer for the committed group, and give its callers some turns to send more records."""
        self._answer_committed()
        for _ in range(_COMPANY):
            await asyncio.sleep(0)
            if len(self._waiting) >= _ENOUGH:
                break

    async def _receive_answer(self) -> None:
        """Handle the answer to the oldest group."""
        sent = self._under_way.popleft()
        group = self._in_hand = sent.group
        try:
            sent.answer.result()
        except SessionLost as error:
            log.warning("the connection to the database was lost", error=str(error), records=len(group))
            self._carried.append(group)
            self._known.clear()
            failpoint.at(Point.LOG_CARRIED)
        except StatementRefused as error:
            if error.sqlstate == _DISK_FULL:
                self._full_until = time.monotonic() + _FULL_SECONDS
            await self._requeue_sent()
            if error.sqlstate == LEASE_LOST:
                self._waiting.put_back(group)
                self._in_hand = []
                await self._prove_again()
            elif len(group) == 1:
                await self._refused(group[0], error)
            else:
                self._queue_singly(group)
        else:
            if failpoint.armed:
                for pending in group:
                    failpoint.at(points_around(pending.record)[1])
            self._committed += group
            self._count_lines(group)
            if self._observe is not None:
                self._observe(len(group), time.perf_counter() - sent.began)
        self._in_hand = []

    async def _requeue_sent(self) -> None:
        """Queue again all groups sent behind a refused one: their turn never came."""
        while self._under_way:
            sent = self._under_way[-1]
            try:
                await sent.answer
            except (StatementRefused, SessionLost):
                pass  # the group before it was refused before the session was lost
            else:
                raise AssertionError("a group was written though the one before it was not")
            self._under_way.pop()
            self._waiting.put_back(sent.group)

    def _queue_singly(self, group: list[Pending]) -> None:
        """Queue *group*, of which nothing was written, to be written record by record: only the bad one fails."""
        now = time.monotonic()
        again = []
        for pending in group:
            if now > pending.deadline:
                pending.answer(LogUnavailable("the database was away or too slow, nothing was written"))
            else:
                pending.alone = True
                again.append(pending)
        self._waiting.put_back(again)

    async def _prove_again(self) -> None:
        """Raise the epoch again: another dtx has the lease, or an abandoned session of this one has raised it late."""
        assert self._session is not None
        try:
            self._epoch = await raise_epoch(self._session, self._rm, self._lease)
        except LeaseLost as error:
            self._lease.lose()
            self._stop(error)
        except (StatementRefused, SessionLost):
            await self._session.close()

    def _count_lines(self, group: list[Pending]) -> None:
        if self._on_lines is not None:
            self._on_lines([line for pending in group if (line := pending.record.journal) is not None])

    def _answer_committed(self) -> None:
        """Answer for the group that has committed.

        When the next group is ready, it is sent first: PostgreSQL writes it while these answers go out.
        """
        group, self._committed = self._committed, []
        for pending in group:
            pending.answer()

    async def _refused(self, pending: Pending, error: StatementRefused) -> None:
        """Answer for a record that was refused alone, or try it again."""
        if error.sqlstate == DUPLICATE_XID:
            pending.answer(DuplicateXid(error.message))
        elif error.constraint == BRANCH_XID_KEY:
            pending.answer(DuplicateXid("another branch has this xid"))
        elif error.sqlstate == CONFLICT or error.sqlstate.startswith(("21", "23")):
            pending.answer(LogConflict(error.message))
        elif error.sqlstate in {"40001", "40P01", "55P03"} and time.monotonic() < pending.deadline:
            # serialization failure, deadlock, lock timeout: another session's lock
            await asyncio.sleep(_PAUSE_MIN)
            pending.alone = True
            self._waiting.put_back([pending])
        elif error.sqlstate.startswith(("22", "54")):
            pending.answer(LogError(f"the log cannot keep the record: {error.message}"))
        else:
            pending.answer(LogUnavailable(f"the database refused the record: {error.message}"))

    async def _connect(self, seconds: float) -> None:
        """Make a session under a new epoch within *seconds*: no earlier session of this dtx can write any more."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        session = await PipelineSession.connect(
            self._dsn,
            (*PREPARED, *UNKNOWN_COMMIT),
            settings=self._settings,
            timeout=seconds,
            answer_timeout=self._answer_timeout,
            durable=self._durable,
        )
        try:
            self._epoch = await raise_epoch(session, self._rm, self._lease)
        except BaseException:
            await session.close()
            raise
        self._session = session

    async def _reconnect(self) -> None:
        try:
            async with asyncio.timeout(self._retry_window):
                await self._connect(self._retry_window)
        except LeaseLost as error:
            self._lease.lose()
            self._stop(error)
        except (psycopg.Error, OSError, StatementRefused, SessionLost, TimeoutError) as error:
            self._expire(self._dsn.explain(error))
            if not self._waiting and self._closing.is_set():
                self._stop(LogUnavailable("the log is closed"))
                return
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _PAUSE_MAX)
        else:
            self._pause = _PAUSE_MIN
            log.info("connected to the database", database=self._dsn.shown, epoch=self._epoch)

    def _expire(self, why: str) -> None:
        """Answer the records that have waited for the retry window."""
        now = time.monotonic()
        late = self._waiting.take_late(now)
        for group in self._carried:
            for pending in group:
                if pending.deadline <= now:
                    pending.answer(
                        LogUnavailable(f"the database is away, the outcome of the write is not known: {why}")
                    )
        for pending in late:
            pending.answer(LogUnavailable(f"the database is away, nothing was written: {why}"))

    async def _settle(self) -> None:
        """Find out which carried groups were committed: each as a whole, and none unless the one before it was."""
        assert self._session is not None
        groups = self._carried
        try:
            applied = await self._count_applied(self._session, groups)
        except (StatementRefused, SessionLost) as error:
            log.warning("a write of unknown outcome could not be settled yet", error=str(error))
            await self._session.close()
            return
        failpoint.at(Point.LOG_SETTLED)
        self._carried = []
        self._known.set()
        log.info("a write of unknown outcome is settled", committed=applied, of=len(groups))
        for group in groups[:applied]:
            self._count_lines(group)
            for pending in group:
                pending.answer()
        for group in reversed(groups[applied:]):
            # A caller that got "not known" reads the row again and decides anew. The other records come one by one:
            # if one of them breaks the connection, it does so alone.
            self._queue_singly([pending for pending in group if not pending.answered])

    async def _count_applied(self, session: PipelineSession, groups: list[list[Pending]]) -> int:
        """How many of *groups* were committed.

        Raises:
            StatementRefused, SessionLost: not known yet.
        """
        for number in range(len(groups), 0, -1):
            group = [(pending.record, pending.line_id) for pending in groups[number - 1]]
            if await was_applied(session, self._rm, group):
                return number
        return 0


def _eight_octets(number: int) -> bytes:
    return number.to_bytes(8)


async def raise_epoch(session: PipelineSession, rm: bytes, lease: Lease) -> int:
    """Fence off every earlier session of the holder of *lease*.

    Returns:
        The epoch to write with.

    Raises:
        LeaseLost: another dtx has the lease.
        StatementRefused, SessionLost: not done.
    """
    failpoint.at(Point.EPOCH_BEFORE)
    await session.send([(_END_PREDECESSOR, [application_name("writer", lease.instance).encode()])])
    raising = _RAISE_EPOCH_OF_MEMBER if lease.is_member else _RAISE_EPOCH
    answer = session.send([(raising, [rm, lease.instance.bytes])])
    failpoint.at(Point.EPOCH_SENT)
    epoch = _number(await answer)
    if epoch is None:
        raise LeaseLost("another dtx has taken the lease")
    failpoint.at(Point.EPOCH_AFTER)
    return epoch


async def was_applied(session: PipelineSession, rm: bytes, group: Iterable[tuple[LogWrite, bytes]]) -> bool:
    """Whether *group* was committed by a session that is fenced off; ``False`` also if it may be written twice.

    Args:
        session: under a new epoch.
        rm: name of the resource manager.
        group: each record with the id of its journal entry.

    Raises:
        StatementRefused, SessionLost: not known yet.
    """
    trace = _trace(rm, group)
    return trace is not None and _number(await session.send([trace])) == 1


def _trace(rm: bytes, group: Iterable[tuple[LogWrite, bytes]]) -> Bound | None:
    """The query whose result is 1 if the group was committed; ``None`` where none is needed."""
    of_branch: Bound | None = None
    changes: list[Change] = []
    for record, line_id in group:
        journal = record.journal
        if journal is not None:
            return _LINE, [times.array([journal.at]), raw_uuids.array([line_id])]
        if isinstance(record, Insert):
            of_branch = _branch_trace(rm, record.branch.id, record.branch.state, record.branch.version)
        elif isinstance(record, Advance):
            of_branch = _branch_trace(rm, record.id, record.to, record.version + 1)
        if record.change is not None:
            changes.append(record.change)
    if of_branch is not None:
        return of_branch
    dropped = {slot for change in changes for slot in change.drops}
    put = [put.slot for change in changes for put in change.puts if put.slot not in dropped]
    return _message_trace(rm, put) if put else None


def _branch_trace(rm: bytes, branch_id: UUID, state: str, version: int) -> Bound:
    return _BRANCH, [rm, uuids.array([branch_id]), texts.array([state]), int4s.array([version])]


def _message_trace(rm: bytes, slots: Sequence[Slot]) -> Bound:
    queues, positions = zip(*slots, strict=True)
    return _MESSAGE, [rm, int8s.array(queues), int8s.array(positions)]


def _number(results: list[PGresult]) -> int | None:
    """The one integer of the last result; ``None`` where it has no row."""
    result = results[-1]
    if result.ntuples == 0:
        return None
    value = result.get_value(0, 0)
    assert value is not None
    return int.from_bytes(value, signed=True)
