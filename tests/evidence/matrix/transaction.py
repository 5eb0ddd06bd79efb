"""One branch, with its application and its transaction manager, whose state survives every death.

Theory of operation. The manager uses presumed abort: it decides to commit only after it has received every vote, so a
branch whose vote was lost is rolled back. After a death it calls ``recover``, and completes branches in doubt as
decided. It repeats requests until it has an answer, and compares every answer with its state: a difference is a fault.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final

import psycopg
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError

from dtx.client import (
    XA_HEURCOM,
    XA_HEURRB,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    Coordinator,
    XaFlag,
    XAHeuristic,
    XAResource,
    XARollback,
    Xid,
)
from dtx.client.coordination import Coordination
from dtx.failpoint import DIED
from dtx.server.amqp10.transactions import LOCAL_FORMAT
from dtx.wire.amqp10.performatives import ACCEPTED
from tests.evidence.matrix.cases import Case, Condition, Decision, Kind
from tests.evidence.matrix.links import committed, is_rolled_back, links, stuck
from tests.evidence.matrix.operator import decide, redirect, retry
from tests.evidence.matrix.stages import FULL, GONE, IDLE, SOURCES, SPARE, TARGETS, MatrixStage
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT
from tests.support.database_faults import Lock, refusing
from tests.support.processes import wait_until
from tests.support.standby_pair import FENCED

UNANSWERED: Final = (XAER_RMFAIL, XAER_RMERR, AMQPError, OSError, psycopg.OperationalError)
"""dtx is gone, or the outcome is not known (541); or PostgreSQL died during a query of the log."""
PATIENCE: Final = 30.0
"""Limit of seconds for one call."""
INSISTING: Final = 60.0
"""Seconds for which a call is repeated while the branch is busy or the outcome is not known."""
_PAUSE: Final = 0.05
_POSITION: Final = """
SELECT w.position FROM dtx.work w JOIN dtx.branch b ON b.id = w.branch_id
WHERE b.gtrid = %s AND b.bqual = %s AND b.format_id = %s AND w.exchange = %s
"""
_END_WRITER: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'dtx writer%'
"""


class Step(IntEnum):
    """The progress of the branch, as its transaction manager knows it."""

    NEW = 0
    BEGUN = 1
    ASKED = 2
    """Prepare, or commit in one phase, was sent."""
    VOTED = 3
    ENDED = 4


class Transaction:
    """Plays one case.

    Args:
        case: the case.
        stage: the servers; the queues are empty.
        number: unique on this stage; part of the bodies.
    """

    def __init__(self, case: Case, stage: MatrixStage, number: int) -> None:
        self.case = case
        self.kind = case.kind
        self.xid: Xid = new_xid()
        self.step = Step.NEW
        self.decision = case.decision
        self.outcome: Decision | None = None
        """The outcome, as far as it is known."""
        self.voted = False
        """The branch is in doubt: the manager has received the vote, or recover listed the branch."""
        self.heard = False
        """The manager has received the vote."""
        self.told = False
        """The manager has sent the outcome; its answer may be lost."""
        self.operated = False
        self.asked_to_forget = False
        self._repeats = False
        """A request to another member had no answer, and was repeated."""
        self._stopping = 0
        """The id of the process that has received SIGTERM."""
        self.relieved: list[bytes] = []
        """Bodies that were taken from the full queue."""
        self.faults: list[str] = []
        self._stage = stage
        self._number = number
        self._before: set[Xid] = set()
        """Local transactions of AMQP 1.0 clients that were committed before."""
        self._answer: Decision | None = None
        """The answer to the discharge of a local transaction, if it was received."""
        joined = self.kind.joined
        refusing = stage.condition is Condition.REFUSING and self.kind.publishes
        self.sources = SOURCES[: 2 if joined else 1] if self.kind.consumes else ()
        self.targets = (*TARGETS[: 2 if joined else 1], *([FULL] if refusing else [])) if self.kind.publishes else ()

    # -- what goes where

    def body(self, queue: str, position: int) -> bytes:
        """Return the body of a message."""
        return b"%d %s %d" % (self._number, queue.encode(), position)

    def is_of_an_earlier_one(self, body: bytes) -> bool:
        """Whether *body* belongs to an earlier cell: the broker lost its acknowledgement when it died in this one."""
        number = body.split(b" ")[0]
        return number.isdigit() and int(number) < self._number

    def filled(self, queue: str) -> list[bytes]:
        """Return the initial messages of a source."""
        return [self.body(queue, position) for position in range(3)]

    def published(self, queue: str) -> list[bytes]:
        """Return the messages to publish to a target."""
        return [self.body(queue, position) for position in range(1 if queue == FULL else 2)]

    def expected(self, outcome: Decision) -> dict[str, list[bytes]]:
        """Return the expected messages of each queue at the end."""
        committed = outcome is Decision.COMMIT
        left = {queue: self.filled(queue)[2:] if committed else self.filled(queue) for queue in self.sources}
        return left | {queue: self.published(queue) if committed else [] for queue in self.targets}

    def fill(self) -> None:
        """Publish the initial messages."""
        for queue in self.sources:
            self._stage.fill(queue, *self.filled(queue))
        if FULL in self.targets:
            self._stage.fill(FULL, b"full")

    # -- the way

    def proceed(self) -> None:
        """Continue from the current step up to the end.

        Raises:
            UNANSWERED: dtx died meanwhile; call this again.
        """
        if self._stopping == self._stage.dtx.pid:
            self._stage.dtx.wait_end(INSISTING)
        if not self._stage.dtx.running:
            raise XAER_RMFAIL("dtx is not there")
        if self.step is Step.NEW:
            self._work()
        elif self.step is not Step.ENDED:
            self._recover()

    def _work(self) -> None:
        if self.kind is Kind.LOCAL:
            self._work_locally()
            return
        if self.kind is Kind.MENDED:
            self._stage.open_exchange(exists=True)
        with self._stage.connected(self._stage.other if self.kind.begins_elsewhere else None) as first:
            channel = first.channel()
            xa = XAResource(channel, timeout=PATIENCE)
            try:
                if self.kind is Kind.NOTHING:
                    self._work_beside(xa)
                xa.start(self.xid)
                self.step = Step.BEGUN
                if self.kind is Kind.NOTHING:
                    xa.set_timeout(self.xid, 2 * xa.get_timeout(self.xid))
                self._do(channel, 0)
                if self.kind is Kind.JOINED:
                    self._join()
                if self.kind.linked:
                    self._link()
                xa.end(self.xid)
                if self.kind is Kind.ABANDONED:
                    xa.rollback(self.xid)
                    self._ended(Decision.ROLLBACK)
                    return
                if self.kind.needs_members:
                    self._complete_at_members(xa)
                    return
                self._vote(xa)
            except XARollback as error:
                self._rolled_back(error)
                return
            if self.voted:
                with Coordinator(first, timeout=PATIENCE) as manager:
                    self._finish(first, manager)

    def _complete_at_members(self, xa: XAResource) -> None:
        """Vote and complete through another member than the one where the branch began, or after that one's end."""
        stage = self._stage
        assert stage.other is not None
        if self.kind is Kind.INHERITED:
            self._vote(xa)
            stage.other.kill9()
        if self.kind is Kind.HANDED_OVER:
            self._vote(xa)
            stage.dtx.signal(signal.SIGTERM)
        asked = stage.dtx if self.kind.begins_elsewhere else stage.other
        with stage.connected(asked) as connection, Coordinator(connection, timeout=PATIENCE) as manager:
            if self.step is Step.BEGUN:
                try:
                    self._vote(manager)
                except XAER_NOTA as error:
                    self._has_died_with_it(error)
            if self.voted:
                self._finish(connection, manager)
        if self.kind is Kind.HANDED_OVER:
            stage.dtx.wait_end(INSISTING)

    def _has_died_with_it(self, error: XAER_NOTA) -> None:
        """No member has the branch any more: the member that had it has died before the vote, or has completed it."""
        stage = self._stage
        owner = stage.other if self.kind.begins_elsewhere else stage.dtx
        if owner is not None and owner.running:
            self.faults.append(f"{self.xid} is unknown, and its member lives: {error}")
        committed = error.facts.get("ended") == "committed"
        if committed and not self.kind.one_phase:
            self.faults.append(f"nobody has asked to commit {self.xid}: {error}")
        self._ended(Decision.COMMIT if committed else Decision.ROLLBACK)

    def _vote(self, xa: XAResource | Coordinator) -> None:
        self.step = Step.ASKED
        if self.kind.one_phase:
            xa.commit(self.xid, one_phase=True)
            self._ended(Decision.COMMIT)
            return
        match self.kind:
            case Kind.CARRIED:
                assert isinstance(xa, XAResource)
                flag = self._prepare_over_a_broken_connection(xa)
            case Kind.DOUBTED:
                with refusing(self._stage.database, "journal"):
                    flag = xa.prepare(self.xid)
            case _:
                flag = xa.prepare(self.xid)
        if flag is XaFlag.RDONLY:
            if self.kind is not Kind.NOTHING:
                self.faults.append(f"{self.xid} has work and is read-only")
            self._ended(Decision.ROLLBACK)
            return
        self.step, self.voted, self.heard = Step.VOTED, True, True
        if self.kind is Kind.STOPPED:
            self._stopping = self._stage.dtx.pid
            self._stage.dtx.signal(signal.SIGTERM)
            raise XAER_RMFAIL("dtx is told to stop")
        if self.kind is Kind.TAKEN_OVER:
            self._take_over()

    def _take_over(self) -> None:
        """Let another dtx serve while this one is stopped, as in a migration; then continue this one: it must end."""
        stage = self._stage
        stage.dtx.pause()
        try:
            with stage.another_service():
                stage.dtx.resume()
                if not stage.dtx.wait_end(INSISTING):
                    self.faults.append("dtx goes on though another one has taken over")
        finally:
            stage.dtx.resume()
        if stage.dtx.wait() not in (FENCED, DIED):
            self.faults.append(f"dtx, which was taken over, has ended with status {stage.dtx.wait()}")
        raise XAER_RMFAIL("another dtx had taken over")

    def _prepare_over_a_broken_connection(self, xa: XAResource) -> XaFlag:
        """End the log's session in PostgreSQL during the write of the vote, so that its outcome is not known."""
        with Lock(self._stage.database, "journal") as lock:
            answer = self._stage.background(lambda: xa.prepare(self.xid))
            wait_until(lambda: lock.felt or answer.done(), seconds=PATIENCE, what="the write of a vote")
            with psycopg.connect(self._stage.database, autocommit=True) as connection:
                connection.execute(_END_WRITER)
        flag = answer.result(PATIENCE)
        assert isinstance(flag, XaFlag)
        return flag

    def _work_beside(self, xa: XAResource) -> None:
        """Use a selected channel outside of branches."""
        xa.select()
        xa.channel.queue_declare(SPARE, durable=True)
        method, _, _ = xa.channel.basic_get(IDLE)
        if method is not None:
            xa.channel.basic_nack(method.delivery_tag)
        xa.channel.queue_delete(SPARE)

    def _join(self) -> None:
        with self._stage.connected() as second:
            channel = second.channel()
            xa = XAResource(channel, timeout=PATIENCE)
            xa.start(self.xid, join=True)
            self._do(channel, 1)
            xa.end(self.xid)

    def _link(self) -> None:
        """Do the second part as an AMQP 1.0 client."""
        promotes = self.kind is Kind.PROMOTED
        with links(self._stage, None if promotes else self.xid.to_wire()) as second:
            published = {TARGETS[1]: self.published(TARGETS[1])}
            second.work(self.sources[1:], published, acquires=self.kind is Kind.ACQUIRED)
            if promotes:
                second.promote(self.xid.to_wire())
            if second.discharge() != ACCEPTED:
                raise ConnectionError("the association was not ended")

    def _work_locally(self) -> None:
        """Do everything as an AMQP 1.0 client."""
        self._before = committed(self._stage.database)
        with links(self._stage) as client:
            self.step = Step.BEGUN
            client.work(self.sources, {queue: self.published(queue) for queue in self.targets})
            self.step = Step.ASKED
            outcome = client.discharge()
            if outcome != ACCEPTED and not is_rolled_back(outcome):
                raise ConnectionError(f"the discharge was answered {outcome}")
            self._answer = Decision.COMMIT if outcome == ACCEPTED else Decision.ROLLBACK
        self._look_up()

    def _look_up(self) -> None:
        """Find the outcome of a local transaction in the journal, since dtx has no request for it."""
        stage = self._stage
        wait_until(
            lambda: not stage.dtx.running or not self._is_left(),
            seconds=INSISTING,
            what="the end of a local transaction",
        )
        if not stage.dtx.running:
            raise XAER_RMFAIL("dtx is not there")
        found = committed(stage.database) - self._before
        if found and self.step is not Step.ASKED:
            self.faults.append("a local transaction was committed, and nobody asked for that")
        if found:
            (self.xid,) = found
        self._ended(Decision.COMMIT if found else Decision.ROLLBACK)
        if self._answer not in (None, self.outcome):
            self.faults.append(f"the discharge was answered with {self._answer}, and the journal tells {self.outcome}")

    def _is_left(self) -> bool:
        """Whether the log has a local transaction. If it is stuck, make room and retry it as an operator."""
        left = any(xid.format_id == LOCAL_FORMAT for xid in self._stage.states())
        if left and FULL in self.targets:
            for xid in stuck(self._stage.database):
                self._relieve()
                retry(self._stage, xid)
        return left

    def _do(self, channel: BlockingChannel, part: int) -> None:
        for queue in self.sources[part : part + 1]:
            for _ in range(2):
                method, _, _ = channel.basic_get(queue)
                if method is None:
                    raise AMQPError(f"{queue} is empty")  # its messages have not returned from a dead connection yet
                channel.basic_ack(method.delivery_tag)
        if self.kind is Kind.NOTHING:
            return
        for queue in (TARGETS[part], *([FULL] if part == 0 else [])):
            bodies = self.published(queue) if queue in self.targets else []
            strayed = bodies[-1:] if self.kind is Kind.MENDED else []
            for body in bodies:
                exchange, key = (GONE, "") if body in strayed else ("", queue)
                channel.basic_publish(exchange, key, body, PERSISTENT)

    def _recover(self) -> None:
        self._await_quiet()
        with self._stage.connected() as connection, Coordinator(connection, timeout=PATIENCE) as manager:
            listed = self._scan(manager)
            if self.kind is Kind.LOCAL:
                self._look_up()
                return
            if not self.voted and listed and not self.kind.one_phase:
                # The vote was lost, so there is no decision to commit.
                self.step, self.voted, self.decision = Step.VOTED, True, Decision.ROLLBACK
            if self.voted:
                self._finish(connection, manager)
            else:
                self._give_up(connection, manager)

    def _await_quiet(self) -> None:
        """Wait until a restarted dtx has resolved a branch in state taking."""
        stage = self._stage
        wait_until(
            lambda: not stage.dtx.running or stage.states().get(self.xid) != "taking",
            seconds=INSISTING,
            what=f"the end of the taking of {self.xid}",
        )

    def _scan(self, manager: Coordinator) -> bool:
        """Return whether a recovery scan lists the branch; check that it lists exactly the branches in doubt."""
        before = self._stage.rows()
        listed = set(manager.recover())
        after = self._stage.rows()
        for xid, (state, *_) in before.items():
            if state in ("prepared", "heuristic") and after.get(xid, ("",))[0] == state and xid not in listed:
                self.faults.append(f"{xid} is {state} and not listed by recover")
        for xid in listed:
            if {before.get(xid, ("",))[0], after.get(xid, ("",))[0]} <= {"", "taking"}:
                self.faults.append(f"recover lists {xid}, which is not in doubt")
        if self.voted and not self.told and not self.operated and self.xid not in listed:
            self.faults.append(f"{self.xid} has voted and is not listed by recover")
        if self.step is Step.BEGUN and self.xid in listed:
            self.faults.append(f"{self.xid} was never asked to vote and is listed by recover")
        return self.xid in listed

    # -- the end

    def _finish(self, connection: BlockingConnection, manager: Coordination) -> None:
        if self.kind.operator is not None and self.decision is Decision.COMMIT and not self.told:
            self.operated = True
            decide(self._stage, self.xid, self.kind.operator)
        if self.kind is Kind.MENDED:
            self._stage.open_exchange(exists=False)
        asked, self.told = self.told, True
        if self.kind is Kind.SEVERED and self.decision is Decision.COMMIT and not asked:
            self._commit_over_a_severed_connection(manager)
        try:
            self._insist(connection, manager.commit if self.decision is Decision.COMMIT else manager.rollback)
        except XAHeuristic as error:
            self._heuristic(connection, manager, error)
        except XARollback as error:
            self.faults.append(f"{self.xid} has voted: {error}")
            self._ended(Decision.ROLLBACK)
        except XAER_NOTA as error:
            if not asked and not self._repeats:
                self.faults.append(f"{self.xid} has voted, was not decided, and is not known: {error}")
            self._heard(error)
        else:
            if self.operated:
                self.faults.append(f"{self.xid} was decided by an operator, and its manager was not told")
            self._ended(self.decision)

    def _commit_over_a_severed_connection(self, manager: Coordination) -> None:
        """The broker ends all connections when it has a complete unit, but one of its queues is suspended."""
        stage = self._stage
        assert stage.node is not None
        with stage.node.suspended(TARGETS[0], vhost=stage.vhost):
            answer = stage.background(lambda: manager.commit(self.xid))
            wait_until(
                lambda: stage.states().get(self.xid) != "prepared" or answer.done(), seconds=PATIENCE, what="phase two"
            )
            stage.end_connections()
        answer.result(PATIENCE)

    def _heuristic(self, connection: BlockingConnection, manager: Coordination, error: XAHeuristic) -> None:
        wanted = XA_HEURCOM if self.kind.operator is Decision.COMMIT else XA_HEURRB
        if not self.operated or not isinstance(error, wanted):
            self.faults.append(f"{self.xid}, operator: {self.kind.operator}: {error}")
        asked, self.asked_to_forget = self.asked_to_forget, True
        try:
            self._insist(connection, manager.forget)
        except XAER_NOTA as unknown:
            if not asked:
                self.faults.append(f"{self.xid} is forgotten and nobody asked for that: {unknown}")
        self._ended(self.kind.operator)

    def see_to_the_end(self) -> None:
        """Repeat a completion that was answered if the branch is in doubt again: dtx died before the log had the end.

        If receipts are not trusted, messages are repeated then, and may find the queue full again.

        Raises:
            UNANSWERED: dtx died meanwhile.
        """
        if FULL not in self.targets or self.outcome is None or self.xid not in self._stage.states():
            return
        committed = self.outcome is Decision.COMMIT
        with (
            self._stage.connected() as connection,
            Coordinator(connection, timeout=PATIENCE) as manager,
            contextlib.suppress(XAER_NOTA),
        ):
            self._insist(connection, manager.commit if committed else manager.rollback)

    def _give_up(self, connection: BlockingConnection, manager: Coordination) -> None:
        """Complete a branch that has not voted, as far as known: find its outcome, or roll it back."""
        one_phase = self.kind.one_phase and self.step is Step.ASKED
        try:
            self._insist(connection, partial(manager.commit, one_phase=True) if one_phase else manager.rollback)
        except XARollback as error:
            self._rolled_back(error)
        except XAER_NOTA as error:
            committed = error.facts.get("ended") == "committed"
            if committed and not one_phase:
                self.faults.append(f"nobody has asked to commit {self.xid}: {error}")
            self._ended(Decision.COMMIT if committed else Decision.ROLLBACK)
        else:
            self._ended(Decision.COMMIT if one_phase else Decision.ROLLBACK)

    def _insist(self, connection: BlockingConnection, call: Callable[[Xid], object]) -> None:
        """Repeat a request until there is an answer, as long as the connection is open."""
        deadline = time.monotonic() + INSISTING
        while True:
            try:
                call(self.xid)
            except XAER_RMFAIL:
                if not connection.is_open or time.monotonic() > deadline:
                    raise
                self._repeats = self.kind.needs_members  # the branch's member may have carried the request out
                self._relieve()
            except XAER_PROTO:  # an earlier request is in progress, or dtx has not noticed the death of a channel
                if time.monotonic() > deadline:
                    raise
            else:
                return
            time.sleep(_PAUSE)

    def _relieve(self) -> None:
        """Make room in the queue that refuses, or redirect the message whose exchange is missing."""
        if FULL in self.targets:
            self.relieved += self._stage.bodies(FULL)
        if self.kind is Kind.MENDED:
            with psycopg.connect(self._stage.database) as connection:
                names = self.xid.gtrid, self.xid.bqual, self.xid.format_id, GONE.encode()
                row = connection.execute(_POSITION, names).fetchone()
            if row is not None:
                redirect(self._stage, self.xid, int(row[0]), TARGETS[0])

    def _heard(self, error: XAER_NOTA) -> None:
        """Check the outcome in the answer that the branch has ended before."""
        outcomes = {
            "committed": Decision.COMMIT,
            "rolled-back": Decision.ROLLBACK,
            "forgotten": self.kind.operator,
        }
        outcome = outcomes.get(error.facts.get("ended", ""))
        wanted = self.kind.operator if self.operated else self.decision
        if outcome is not wanted:
            self.faults.append(f"{self.xid} was to be {wanted}: {error}")
        self._ended(outcome or wanted)

    def _rolled_back(self, error: XARollback) -> None:
        if self.told:
            self.faults.append(f"{self.xid} has voted: {error}")
        self._ended(Decision.ROLLBACK)

    def _ended(self, outcome: Decision | None) -> None:
        self.step, self.outcome = Step.ENDED, outcome
