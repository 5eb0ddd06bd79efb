"""Transactions of one connection: each works for a branch.

A local transaction has an xid that dtx makes; discharge ends its branch and commits it in one phase. A distributed
transaction works for the branch that ``global-id`` names, an xid in its wire form. Declare joins or starts that branch,
and discharge ends the association. Prepare, commit, rollback and recover stay with the transaction manager. Promotion
moves the work of a local transaction to such a branch, and makes it a distributed one.

The manager treats a transaction as a channel that is associated with the branch. A retired delivery stays with its
source until the branch has ended. Then its outcome is applied, or the delivery is the client's as before.
"""

from asyncio import Future, wait
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from typing import Any, Final, NamedTuple, Protocol

from dtx.manager.branch_runtime import BranchRuntime
from dtx.server.amqp10.nodes import Home, Nodes, Origin, amqp_error, failure_of, rolled_back
from dtx.server.failpoints import around_answer
from dtx.store.work import HeldPublish
from dtx.wire.amqp09.methods import DtxCommitOk, DtxEndOk, DtxRollbackOk, DtxStartOk
from dtx.wire.amqp10.coordination import (
    FATES,
    Amqp10Transaction,
    CoordinationEngine,
    CoordinatorAnswer,
    DeclareAsked,
    DeliveryResult,
    DischargeAsked,
    PromoteAsked,
    Terminate,
)
from dtx.wire.amqp10.coordination import Work as Kind
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import RELEASED, Accepted, Outcome
from dtx.wire.amqp10.values import Value
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Association, Operation, State, end_operation
from dtx.xa.xid import Xid

LOCAL_FORMAT: Final = 0x616D7170
"""The format id of the xids of local transactions ("amqp"). Their gtrid is random, and no client knows it."""


class TransactionHome(Home, Protocol):
    """The connection, as its transactions see it."""

    nodes: Nodes

    def shell(self, place: tuple[int, int]) -> object | None:
        """The link that is attached at *place* now. Places are reused."""

    def reply(self, answer: CoordinatorAnswer | Terminate) -> None:
        """Answer a control link."""

    def after_work(self, act: Callable[[], None]) -> None:
        """Call *act* when all long work so far is done."""


class RetiringLink(Protocol):
    """A link to a client, as transactions see it that outcomes of its deliveries belong to."""

    node: Origin
    unsettled: dict[int, object]
    retired: "dict[int, Retired]"

    @property
    def is_open(self) -> bool:
        """Whether the link is attached."""

    def apply(self, taken: Sequence[object], outcome: Outcome) -> None:
        """Apply *outcome* to *taken* messages."""

    def apply_default(self, taken: object) -> None:
        """Apply the default outcome to a message that the client has settled."""

    def settle(self, deliveries: Sequence[int], outcome: Outcome) -> None:
        """Send *outcome* for *deliveries* that the client has not settled."""

    def give_back(self, number: int, taken: object, *, settled: bool) -> None:
        """Return a message that was sent in a transaction that is rolled back."""

    def acquire_no_more(self, work: "TransactionWork") -> None:
        """Send no more in a transaction that is being discharged (4.4.3)."""

    def discharged(self, work: "TransactionWork", *, committed: bool) -> None:
        """A transaction has ended: deliveries of it without an outcome stay the client's, or return to the queue."""


@dataclass(slots=True, eq=False)
class Retired:
    """A delivery whose outcome belongs to a transaction.

    Args:
        work: the transaction.
        link: the link that sent the delivery.
        number: its number in the engine, see ``Link.send``.
        taken: the node's object for the message.
        outcome: the outcome that the client sent.
        settled: whether the client can send no other outcome for it.
        kind: whether it was also sent in the transaction.
        discharged: whether the transaction was discharged with success; from then on only the branch decides.
        later: an outcome that the client sent after the transaction failed, while its branch still held the delivery.
    """

    work: "TransactionWork"
    link: RetiringLink
    number: int
    taken: object
    outcome: Outcome
    settled: bool
    kind: Kind
    discharged: bool = False
    later: Outcome | None = None


class TransactionWork:
    """The work of one transaction. The manager treats it as a channel that is associated with the branch.

    Args:
        connection: the connection of the client.
        xid: the branch.
        local: whether discharge decides it.
    """

    def __init__(self, connection: TransactionHome, xid: Xid, *, local: bool) -> None:
        self._connection = connection
        self.xid = xid
        self.local = local
        self.entry: BranchRuntime
        """Set when it has begun."""
        self._held: dict[Retired, None] = {}
        self._late: list[Retired] = []
        """Deliveries of it that the client settles without an outcome during the discharge. The limit of unsettled
        deliveries bounds them.
        """
        self._acquirers: dict[RetiringLink, None] = {}
        """Links that send, or have sent, in it."""
        self._ending = False
        self.has_failed = False
        """Whether it was discharged, or has lost its control link, without a commit."""
        self._validations: set[Future[Any]] = set()
        """Results that the end waits for: refusals of messages, and dead letters."""

    # -- begin and end

    def begin(self, *, is_new: bool = False) -> XaFlag | None:
        """Start the branch, or join it.

        Args:
            is_new: whether no member has the branch.

        Returns:
            The answer; ``None`` while another operation runs on it.

        Raises:
            XaError: as :meth:`BranchManager.demarcate`.
        """
        if self.local:
            result = self._demarcate(self.xid, Operation.START, is_new=True)  # its xid is random
        else:
            result = self._join(self.xid, is_new=is_new)
        if result is None:
            return None
        flag, self.entry = result
        return flag

    async def wait_to_join(self, xid: Xid) -> bool:
        """Wait until :meth:`begin` and :meth:`promote` can join or start the branch *xid*.

        Returns:
            Whether no member has the branch.

        Raises:
            XaError: 503, another member has it; 541.
        """
        try:
            return await self._connection.manager.settle(self._connection.who, xid, Operation.JOIN)
        except XaError as error:
            if error.code is not ReplyCode.NOT_FOUND:
                raise
        return True

    def _join(self, xid: Xid, *, is_new: bool) -> tuple[XaFlag, BranchRuntime] | None:
        manager, who = self._connection.manager, self._connection.who
        if not is_new or manager.known(who.vhost, xid) is not None:
            try:
                return self._demarcate(xid, Operation.JOIN)
            except XaError as error:
                if error.code is not ReplyCode.NOT_FOUND:
                    raise
        return self._demarcate(xid, Operation.START, is_new=is_new)

    def promote(self, xid: Xid, *, is_new: bool = False) -> bool:
        """Move the work of a local transaction to the branch *xid*, and work for that from now on.

        Args:
            xid: of the branch.
            is_new: whether no member has it.

        Returns:
            Whether that is done; false while another operation runs on one of the two branches.

        Raises:
            AmqpError, XaError: it is not possible; no work has moved.
        """
        entry, own = self.entry, self.entry.work
        if not entry.idle:
            return False
        if own is None or not self.is_active:
            raise rolled_back(XaFlag.RBTIMEOUT if entry.branch.state is State.TIMED_OUT else XaFlag.RBROLLBACK)
        joined = self._join(xid, is_new=is_new)
        if joined is None:
            return False
        flag, branch = joined
        if flag is not XaFlag.OK:
            raise rolled_back(flag)
        held = branch.work
        assert held is not None, "it is associated, so it has not voted"
        if not held.fits(own.bytes, own.count, charged=True):
            self._demarcate(xid, Operation.END)
            raise XaError(ReplyCode.RESOURCE_ERROR, held.excess(own.bytes, own.count))
        own.hand_over(held)
        left = self.xid
        self._demarcate(left, Operation.END)
        self.xid, self.entry, self.local = xid, branch, False
        # The branch has no work left, so prepare ends it.
        self._connection.manager.ask(self._connection.who, left, Operation.PREPARE, partial(self._emptied, left))
        return True

    def _emptied(self, xid: Xid, answer: XaFlag | XaError) -> None:
        if isinstance(answer, XaError):
            self.end_for_good(xid)

    def end_for_good(self, xid: Xid) -> None:
        """Roll back the branch *xid*, which no client can end: the log failed when its end was requested.

        The manager waits for the log. A branch that has committed nevertheless is not known any more.
        """
        self._connection.manager.ask(self._connection.who, xid, Operation.ROLLBACK, _ignore_answer)

    def end(self, *, fail: bool) -> XaFlag | None:
        """End the association.

        Returns:
            As :meth:`begin`; ``None`` also while its work is not complete.

        Raises:
            XaError: as :meth:`BranchManager.demarcate`; 404, its control link is gone.
        """
        if self.has_failed:  # its messages have returned, so it must not commit before :meth:`part`
            raise XaError(ReplyCode.NOT_FOUND, "the control link of the transaction is gone")
        if not fail:
            if self._validations:
                return None
            reason = self._connection.nodes.refusal(self.entry)
            if reason is not None:
                self.doom(reason)
        result = self._demarcate(self.xid, end_operation(fail=fail, suspend=False))
        return None if result is None else result[0]

    def _demarcate(
        self, xid: Xid, operation: Operation, *, is_new: bool = False
    ) -> tuple[XaFlag, BranchRuntime] | None:
        return self._connection.manager.demarcate(self._connection.who, xid, operation, self, is_new=is_new)

    # -- work

    @property
    def is_active(self) -> bool:
        """Whether it takes work: it has neither ended nor been rolled back."""
        return self.entry.work is not None and self.entry.branch.state is State.ACTIVE

    def publish(self, message: HeldPublish) -> None:
        """Hold a message.

        Raises:
            XaError: 506, the transaction exceeds its limits and is rolled back.
        """
        work = self.entry.work
        if work is None or not self.is_active:
            return  # rolled back already; the discharge will report it
        size = message.size
        if not work.fits(size):
            reason = work.excess(size)
            self.doom(reason)
            raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}; the transaction is rolled back")
        work.add_publish(message)

    def wait_for(self, validation: Future[Any]) -> None:
        """Do not end the transaction before *verdict* is done: a message may be added, or left out."""
        self._validations.add(validation)
        validation.add_done_callback(self._validations.discard)

    async def wait_until_idle(self) -> None:
        """Wait until the work is complete, and no other operation runs on the branch.

        Raises:
            XaError: 541, another operation took too long.
        """
        while self._validations:
            await wait(self._validations)
        await self._connection.manager.settle(self._connection.who, self.xid, Operation.END)

    def withdraw(self, message: HeldPublish) -> None:
        """Remove a held message."""
        if self.entry.work is not None:
            self.entry.work.withdraw(message)

    def acquires(self, link: RetiringLink) -> None:
        """Note that *link* sends in the transaction."""
        self._acquirers[link] = None

    def ending(self) -> None:
        """Let links send no more in the transaction, because its discharge has begun."""
        self._ending = True
        for link in self._acquirers:
            link.acquire_no_more(self)

    def retire(
        self, link: RetiringLink, number: int, taken: object, outcome: Outcome, *, settled: bool, kind: Kind
    ) -> None:
        """Hold the outcome of a delivery.

        Args:
            link: the link that sent it.
            number: its number in the engine.
            taken: the message; the link does not keep it any more.
            outcome: the outcome that the client sent.
            settled: whether the client has settled it.
            kind: whether it was also sent in the transaction.
        """
        retired = Retired(self, link, number, taken, outcome, settled, kind)
        held = self.entry.work
        if not settled:
            link.retired[number] = retired
        if self._ending and kind is Kind.ACQUISITION:
            self._late.append(retired)
        elif held is None or not self.is_active:
            _revert(retired)
        else:
            try:
                if isinstance(outcome, Accepted):
                    link.node.keep(taken, self, held, partial(self._released, retired))
                else:
                    decided = partial(self._decided, retired)
                    link.node.postpone(taken, self, held, decided, outcome)
            except XaError as error:
                _revert(retired)
                self.doom(error.reason)
            else:
                self._held[retired] = None

    def _released(self, retired: Retired) -> None:
        """Undo a retirement, because the branch is rolled back."""
        self._held.pop(retired, None)
        if retired.discharged:
            # The discharge was no rollback, so no default outcome applies (4.4.4.2): the branch had the message.
            retired.link.node.requeue((retired.taken,))
        else:
            _revert(retired)

    def _decided(self, retired: Retired, committed: bool) -> None:
        """The branch has ended: "the outcome specified by the controller is applied at the source", or is not."""
        if not committed:
            self._released(retired)
            return
        self._held.pop(retired, None)
        retired.link.apply((retired.taken,), retired.outcome)
        _settle((retired,))

    def doom(self, reason: str) -> None:
        """Mark it rollback-only, because a part of its work is lost or must not be done."""
        self._connection.manager.doom(self.entry, reason)

    # -- outcome

    def succeeded(self) -> None:
        """Settle all deliveries after a successful discharge. Held outcomes are applied when the branch commits."""
        done = [*self._held, *self._late]
        for retired in self._late:
            retired.link.apply((retired.taken,), retired.outcome)
        self._late.clear()
        for retired in self._held:
            retired.discharged = True
        self._held.clear()
        _settle(done)
        self._discharged(committed=True)

    def _discharged(self, *, committed: bool) -> None:
        for link in self._acquirers:
            link.discharged(self, committed=committed)
        self._acquirers.clear()

    def failed(self) -> None:
        """Undo the transaction. The manager releases held deliveries when no association with the branch is left."""
        self.has_failed = True
        late = self._late[:]
        self._late.clear()
        for retired in late:
            _revert(retired)
        self._discharged(committed=False)

    def give_up(self) -> None:
        """Release the remaining deliveries after a rollback: their messages had left the queues, and have returned."""
        left = list(self._held)
        self._held.clear()
        for retired in left:
            retired.outcome = RELEASED
        _settle(left)

    def lose(self) -> None:
        """Undo the transaction, because its control link is gone. :meth:`part` must follow."""
        self.ending()
        self.failed()

    def part(self) -> None:
        """End the association as for a closed channel. Roll back the branch of a local transaction."""
        connection = self._connection
        connection.manager.channel_lost(self, [self.entry])
        if self.local:
            connection.manager.ask(connection.who, self.xid, Operation.ROLLBACK, _ignore_answer)


def doom_unreported(transaction: Amqp10Transaction, work: TransactionWork, reason: str) -> None:
    """Doom a transaction whose client does not get the outcome of a message.

    For a message that was sent settled: "it MUST NOT allow the successful discharge" (4.4.4.1). Otherwise, "the
    resource must inform the controller of" the outcome before the discharge (4.4.1).
    """
    transaction.doom = AmqpError(Condition.ROLLBACK, reason)
    work.doom(reason)


def _settle(done: Sequence[Retired]) -> None:
    """Send the outcomes of deliveries that clients have not settled."""
    settlements: dict[tuple[RetiringLink, int], tuple[Outcome, list[int]]] = {}
    for retired in done:
        if not retired.settled:
            retired.settled = True
            retired.link.retired.pop(retired.number, None)
            # by id: an outcome may hold maps, so it has no hash; one disposition of the client has one outcome
            settlements.setdefault((retired.link, id(retired.outcome)), (retired.outcome, []))[1].append(retired.number)
    for (link, _), (outcome, numbers) in settlements.items():
        link.settle(numbers, outcome)


def _revert(retired: Retired) -> None:
    """Undo a delivery whose outcome was not applied.

    It is the client's as before. It returns to its source if it was settled, or was sent in the transaction.
    """
    link = retired.link
    link.retired.pop(retired.number, None)
    match FATES[retired.kind, retired.settled or not link.is_open, False]:
        case DeliveryResult.RETURN:
            link.give_back(retired.number, retired.taken, settled=retired.settled)
        case _ if retired.later is not None:
            link.apply((retired.taken,), retired.later)
            if not retired.settled:
                link.settle((retired.number,), retired.later)
        case DeliveryResult.DEFAULT:
            link.apply_default(retired.taken)
        case _:
            link.unsettled[retired.number] = retired.taken


def _ignore_answer(answer: XaFlag | XaError) -> None:
    """Ignore the answer."""


_ROLLED_BACK: Final = (Condition.ROLLBACK, Condition.TIMEOUT)
_ID: Final = 16
"""Bytes of a txn-id, and of the gtrid of a local transaction."""


class _Ending(NamedTuple):
    """A discharge that is not answered yet.

    Args:
        asked: the request.
        work: the transaction that ends.
        control: the link of the request; another link may have its place when there is an answer.
    """

    asked: DischargeAsked
    work: TransactionWork
    control: object | None


class Transactions:
    """The transactions of a connection.

    Args:
        connection: the connection of the client.
        coordination: the engine of its control links.
    """

    def __init__(self, connection: TransactionHome, coordination: CoordinationEngine) -> None:
        self._connection = connection
        self._coordination = coordination
        self._works: dict[bytes, TransactionWork] = {}
        self._promoting: dict[bytes, _Ending | None] = {}
        """Transactions whose promotion waits, with the discharge that waits for it."""

    def work(self, transaction: Amqp10Transaction) -> TransactionWork:
        """The work of a live transaction."""
        return self._works[transaction.txn_id]

    def report_missed(self, txn_id: bytes) -> None:
        """Doom a transaction that lost a message whose sender gets no outcome."""
        transaction = self._coordination.live(txn_id)
        if transaction is not None:
            doom_unreported(transaction, self._works[txn_id], "a message came to a link that had ended")

    @property
    def associations(self) -> Sequence[tuple[BranchRuntime, Association]]:
        """The branches that they work for."""
        found = ((work.entry, work.entry.branch.association(work)) for work in self._works.values())
        return [(entry, how) for entry, how in found if how is not Association.NONE]

    # -- declare

    def declare(self, asked: DeclareAsked) -> None:
        """Begin a transaction, and answer."""
        try:
            work = TransactionWork(self._connection, _xid(asked.global_id), local=asked.global_id is None)
            flag = work.begin()
        except (AmqpError, XaError) as error:
            self._refuse(asked, error)
            return
        if flag is None:
            control = self._connection.shell(asked.control)
            self._connection.manager.spawn(self._declare_later(asked, work, control))
        else:
            self._declared(asked, work, flag)

    async def _declare_later(self, asked: DeclareAsked, work: TransactionWork, control: object | None) -> None:
        try:
            flag = None
            while flag is None:
                is_new = await work.wait_to_join(work.xid)
                if self._connection.shell(asked.control) is not control:
                    return  # no client would end it
                flag = work.begin(is_new=is_new)
        except XaError as error:
            if self._connection.shell(asked.control) is control:
                self._refuse(asked, error)
        else:
            self._declared(asked, work, flag)

    def _declared(self, asked: DeclareAsked, work: TransactionWork, flag: XaFlag) -> None:
        if flag is not XaFlag.OK:
            self._refuse(asked, rolled_back(flag))
            return
        txn_id = token_bytes(_ID)
        self._works[txn_id] = work
        around_answer(DtxStartOk.KEY)
        self._connection.reply(self._coordination.declared(asked, txn_id))

    def _refuse(self, asked: DeclareAsked, error: AmqpError | XaError) -> None:
        self._connection.reply(self._coordination.refused(asked.control, asked.delivery_id, amqp_error(error)))

    # -- promotion

    def promote(self, asked: PromoteAsked) -> None:
        """Promote a local transaction to a branch of the client's transaction manager, and answer."""
        work = self._works[asked.transaction.txn_id]
        try:
            xid = _named(asked.global_id)
            if not work.promote(xid):
                self._promoting[asked.transaction.txn_id] = None
                control = self._connection.shell(asked.control)
                self._connection.manager.spawn(self._promote_later(asked, work, xid, control))
                return
        except (AmqpError, XaError) as error:
            self._connection.reply(self._promotion_refused(asked, work, error))
        else:
            self._connection.reply(self._promoted(asked))

    async def _promote_later(
        self, asked: PromoteAsked, work: TransactionWork, xid: Xid, control: object | None
    ) -> None:
        manager, who, txn_id = self._connection.manager, self._connection.who, asked.transaction.txn_id
        try:
            done = False
            while not done:
                await manager.settle(who, work.xid, Operation.END)
                is_new = await work.wait_to_join(xid)
                if self._works.get(txn_id) is not work:  # its control link is gone
                    raise rolled_back(XaFlag.RBROLLBACK)
                done = work.promote(xid, is_new=is_new)
        except (AmqpError, XaError) as error:
            answer = self._promotion_refused(asked, work, error)
        else:
            answer = self._promoted(asked)
        self._reply_late(answer, control)
        discharge = self._promoting.pop(txn_id)
        if discharge is not None:
            self._discharge(discharge)

    def _promoted(self, asked: PromoteAsked) -> CoordinatorAnswer:
        around_answer(DtxStartOk.KEY)
        return self._coordination.promoted(asked)

    def _promotion_refused(
        self, asked: PromoteAsked, work: TransactionWork, error: AmqpError | XaError
    ) -> CoordinatorAnswer | Terminate:
        refusal = amqp_error(error)
        work.doom(str(refusal))
        return self._coordination.promotion_refused(asked, refusal)

    def _reply_late(self, answer: CoordinatorAnswer | Terminate, control: object | None) -> None:
        """Answer *control*, unless it is gone: another link at its place must not get the answer."""
        if self._connection.shell(answer.control) is control:
            self._connection.reply(answer)

    # -- discharge

    def discharge(self, asked: DischargeAsked) -> None:
        """End a transaction, and answer."""
        txn_id = asked.transaction.txn_id
        ending = _Ending(asked, self._works[txn_id], self._connection.shell(asked.control))
        ending.work.ending()
        if txn_id in self._promoting:
            self._promoting[txn_id] = ending
        else:
            self._discharge(ending)

    def _discharge(self, ending: _Ending) -> None:
        try:
            flag = ending.work.end(fail=not ending.asked.commit)
        except XaError as error:
            self._not_ended(ending, error)
            return
        if flag is None:
            self._connection.manager.spawn(self._discharge_later(ending))
        else:
            self._ended(ending, flag)

    async def _discharge_later(self, ending: _Ending) -> None:
        try:
            flag = None
            while flag is None:
                await ending.work.wait_until_idle()
                flag = ending.work.end(fail=not ending.asked.commit)
        except XaError as error:
            self._not_ended(ending, error)
        else:
            self._ended(ending, flag)

    def _not_ended(self, ending: _Ending, error: XaError) -> None:
        """The transaction is discharged nevertheless, so no client can end the association later. It ends as that of a
        lost channel, and the branch can only be rolled back.
        """
        ending.work.part()
        self._done(ending, _end_error(error))

    def _ended(self, ending: _Ending, flag: XaFlag) -> None:
        manager, who, work = self._connection.manager, self._connection.who, ending.work
        failure = None if flag is XaFlag.OK else ending.asked.transaction.doom or rolled_back(flag)
        if not work.local:
            self._done(ending, failure)
        elif failure is None:
            manager.ask(who, work.xid, Operation.ONE_PHASE, partial(self._decided, ending))
        else:
            manager.ask(who, work.xid, Operation.ROLLBACK, lambda _: self._done(ending, failure))

    def _decided(self, ending: _Ending, answer: XaFlag | XaError) -> None:
        """The answer to the commit in one phase."""
        if isinstance(answer, XaError):
            self._done(ending, amqp_error(answer))
            ending.work.end_for_good(ending.work.xid)  # if it still exists: no client knows its xid
        else:
            self._done(ending, failure_of(answer))

    def _done(self, ending: _Ending, failure: AmqpError | None) -> None:
        asked, work, control = ending
        if self._works.pop(asked.transaction.txn_id, None) is None:
            return  # answered already
        if asked.commit and failure is None:
            work.succeeded()
        else:
            work.failed()
            if work.local and (failure is None or failure.condition in _ROLLED_BACK):
                work.give_up()
        if not work.local:
            around_answer(DtxEndOk.KEY)
        else:
            around_answer(DtxCommitOk.KEY if asked.commit and failure is None else DtxRollbackOk.KEY)
        # A discharge with fail=true always succeeds (4.3).
        answer = self._coordination.discharged(asked, failure if asked.commit else None)
        # After the returns: links return messages to their queue when these wait for no session window any more.
        self._connection.after_work(lambda: self._reply_late(answer, control))

    # -- the end

    def lose(self, transactions: Sequence[Amqp10Transaction]) -> None:
        """Roll back transactions of a lost control link: "all such transactions are immediately rolled back" (4.1)."""
        lost = [work for one in transactions if (work := self._works.pop(one.txn_id, None)) is not None]
        for work in lost:
            work.lose()
        self._connection.slices.run(_part(lost))


def _part(works: Sequence[TransactionWork]) -> Iterator[None]:
    for work in works:
        work.part()
        yield


def _end_error(error: XaError) -> AmqpError:
    """The error of a failed end of an association. A branch that is not known any more was rolled back."""
    return rolled_back(XaFlag.RBROLLBACK) if error.code is ReplyCode.NOT_FOUND else amqp_error(error)


def _xid(global_id: Value) -> Xid:
    """The xid in *global_id*, or a new local one.

    Raises:
        AmqpError: invalid-field, it is not binary.
        XaError: it is not the wire form of an xid.
    """
    return Xid(LOCAL_FORMAT, token_bytes(_ID)) if global_id is None else _named(global_id)


def _named(global_id: Value) -> Xid:
    if not isinstance(global_id, bytes):
        raise AmqpError(Condition.INVALID_FIELD, "global-id must be binary: the wire form of an xid")
    return Xid.from_wire(global_id)
