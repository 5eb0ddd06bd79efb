"""What one transaction does: a branch of the transaction manager's, and the deliveries whose outcome belongs to it.

For the manager it is a channel that is associated with the branch. What it retires stays with its source until the
branch has ended; its outcome is applied then, or the delivery is the client's as before.
"""

from asyncio import Future, wait
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dtx.manager.entry import Entry
from dtx.server.amqp10.errors import rolled_back
from dtx.store.work import HeldPublish
from dtx.wire.amqp10.coordination import FATES, Fate, Transaction
from dtx.wire.amqp10.coordination import Work as Kind
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import RELEASED, Accepted, Outcome
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation, State, end_operation
from dtx.xa.xid import Xid

if TYPE_CHECKING:
    from dtx.server.amqp10.connection import Connection
    from dtx.server.amqp10.outgoing import Outgoing

LOCAL_FORMAT: Final = 0x616D7170
"""Format id of the xids of local transactions ("amqp"): nobody else knows their gtrid, which is random."""


@dataclass(slots=True, eq=False)
class Retired:
    """A delivery whose outcome belongs to a transaction.

    Args:
        work: the transaction's.
        link: that sent it.
        number: what the engine calls it, see ``Link.send``.
        taken: the message, as its node calls it.
        outcome: that the client wants.
        settled: whether the client can say nothing more of it.
        kind: whether it was also sent in the transaction.
        discharged: whether the transaction was, with success: nobody but the branch has a say any more.
        later: what the client has said of it since the transaction failed, and others still worked for its branch.
    """

    work: "Work"
    link: "Outgoing"
    number: int
    taken: object
    outcome: Outcome
    settled: bool
    kind: Kind
    discharged: bool = False
    later: Outcome | None = None


class Work:
    """What one transaction does; for the manager it is a channel that is associated with the branch.

    Args:
        connection: of the client.
        xid: of the branch.
        local: whether discharge decides it.
    """

    def __init__(self, connection: "Connection", xid: Xid, *, local: bool) -> None:
        self._connection = connection
        self.xid = xid
        self.local = local
        self.entry: Entry
        """Known once it has begun."""
        self._held: dict[Retired, None] = {}
        self._late: list[Retired] = []
        """What was sent in it and is settled, without an outcome, while it is being discharged: no more than the client
        may have unsettled.
        """
        self._acquirers: dict[Outgoing, None] = {}
        """Links that send, or have sent, in it."""
        self._ending = False
        self.has_failed = False
        """It was discharged, or its control link is gone, and nothing of it will be committed."""
        self._verdicts: set[Future[Any]] = set()
        """What has to be known before it ends: whether messages have to be left out, and what dead letters are."""

    # -- begin and end

    def begin(self) -> XaFlag | None:
        """Start the branch, or join it.

        Returns:
            The answer; ``None`` while another operation runs on it.

        Raises:
            XaError: as the table of the core says.
        """
        result = self._demarcate(self.xid, Operation.START) if self.local else self._join(self.xid)
        if result is None:
            return None
        flag, self.entry = result
        return flag

    def _join(self, xid: Xid) -> tuple[XaFlag, Entry] | None:
        try:
            return self._demarcate(xid, Operation.JOIN)
        except XaError as error:
            if error.code is not ReplyCode.NOT_FOUND:
                raise
        return self._demarcate(xid, Operation.START)

    def promote(self, xid: Xid) -> bool:
        """Of a local one: work for the branch *xid* from now on, which gets all that was done so far.

        Returns:
            Whether that is done; false while another operation runs on one of the two.

        Raises:
            AmqpError, XaError: it cannot be; nothing has changed.
        """
        entry, own = self.entry, self.entry.work
        if not entry.idle:
            return False
        if own is None or not self.is_active:
            raise rolled_back(XaFlag.RBTIMEOUT if entry.branch.state is State.TIMED_OUT else XaFlag.RBROLLBACK)
        joined = self._join(xid)
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
        # It has nothing to vote about any more, and so it ends.
        self._connection.manager.ask(self._connection.who, left, Operation.PREPARE, partial(self._emptied, left))
        return True

    def _emptied(self, xid: Xid, answer: XaFlag | XaError) -> None:
        if isinstance(answer, XaError):
            self.end_for_good(xid)

    def end_for_good(self, xid: Xid) -> None:
        """Roll back the branch *xid*, of which nobody else will: the log was away when it was asked to end.

        It waits until the log is there again. A branch that has committed after all is not known any more.
        """
        self._connection.manager.ask(self._connection.who, xid, Operation.ROLLBACK, _nobody)

    def end(self, *, fail: bool) -> XaFlag | None:
        """End the association; as :meth:`begin`, ``None`` also while it is not known what belongs to it."""
        if not fail:
            if self._verdicts:
                return None
            reason = self._connection.nodes.refusal(self.entry)
            if reason is not None:
                self.doom(reason)
        result = self._demarcate(self.xid, end_operation(fail=fail, suspend=False))
        return None if result is None else result[0]

    def _demarcate(self, xid: Xid, operation: Operation) -> tuple[XaFlag, Entry] | None:
        return self._connection.manager.demarcate(self._connection.who, xid, operation, self)

    # -- work

    @property
    def is_active(self) -> bool:
        """Whether it takes work: it has neither ended nor been rolled back."""
        return self.entry.work is not None and self.entry.branch.state is State.ACTIVE

    def publish(self, message: HeldPublish) -> None:
        """Hold a message.

        Raises:
            XaError: 506, it is too much for the transaction, which is rolled back.
        """
        work = self.entry.work
        if work is None or not self.is_active:
            return  # rolled back already, as the discharge will say
        size = message.size
        if not work.fits(size):
            reason = work.excess(size)
            self.doom(reason)
            raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}; the transaction is rolled back")
        work.add_publish(message)

    def wait_for(self, verdict: Future[Any]) -> None:
        """A message is held of which nobody knows yet whether it may be, or one is about to be: nothing is decided
        before.
        """
        self._verdicts.add(verdict)
        verdict.add_done_callback(self._verdicts.discard)

    async def quiet(self) -> None:
        """Wait until the work is known, and nothing else runs on the branch.

        Raises:
            XaError: 541, that takes too long.
        """
        while self._verdicts:
            await wait(self._verdicts)
        await self._connection.manager.settle(self._connection.who, self.xid)

    def withdraw(self, message: HeldPublish) -> None:
        """Leave a message out again."""
        if self.entry.work is not None:
            self.entry.work.withdraw(message)

    def acquires(self, link: "Outgoing") -> None:
        """What *link* sends belongs to it from now on."""
        self._acquirers[link] = None

    def ending(self) -> None:
        """Its discharge has come: nothing is sent in it any more."""
        self._ending = True
        for link in self._acquirers:
            link.acquire_no_more(self)

    def retire(
        self, link: "Outgoing", number: int, taken: object, outcome: Outcome, *, settled: bool, kind: Kind
    ) -> None:
        """Hold the outcome of a delivery.

        Args:
            link: that sent it.
            number: what the engine calls it.
            taken: the message; the link keeps it no more.
            outcome: what shall become of it.
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
        """The branch is rolled back: nothing of what was retired has happened."""
        self._held.pop(retired, None)
        if retired.discharged:
            # The discharge was no rollback, so there is no default outcome (4.4.4.2): it was the branch's to consume.
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
        """Part of its work is lost, or must not be done: it can only be rolled back."""
        self._connection.manager.doom(self.entry, reason)

    # -- outcome

    def succeeded(self) -> None:
        """The discharge has succeeded: what is unsettled is settled. Outcomes are applied when the branch commits."""
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
        """It is rolled back; the manager releases what is held for the branch, when nobody works for that any more."""
        self.has_failed = True
        late = self._late[:]
        self._late.clear()
        for retired in late:
            _revert(retired)
        self._discharged(committed=False)

    def give_up(self) -> None:
        """It was rolled back when messages had left their queues: they have returned there, to be taken again."""
        left = list(self._held)
        self._held.clear()
        for retired in left:
            retired.outcome = RELEASED
        _settle(left)

    def lose(self) -> None:
        """Who declared it is gone: nothing is done for it any more. :meth:`part` comes next."""
        self.ending()
        self.failed()

    def part(self) -> None:
        """Let go of the branch, whatever it is associated with: nobody asks about it here any more."""
        connection = self._connection
        connection.manager.channel_lost(self, [self.entry])
        if self.local:
            connection.manager.ask(connection.who, self.xid, Operation.ROLLBACK, _nobody)


def spoil(transaction: Transaction, work: Work, reason: str) -> None:
    """What cannot be done was sent settled, or nobody hears of it: "it MUST NOT allow the successful discharge"
    (4.4.4.1), and what was not settled has an outcome that "the resource must inform the controller of" before (4.4.1).
    """
    transaction.doom = AmqpError(Condition.ROLLBACK, reason)
    work.doom(reason)


def _settle(done: Sequence[Retired]) -> None:
    """Tell clients what became of deliveries that they have not settled themselves."""
    told: dict[tuple[Outgoing, int], tuple[Outcome, list[int]]] = {}
    for retired in done:
        if not retired.settled:
            retired.settled = True
            retired.link.retired.pop(retired.number, None)
            # one disposition of the client has one outcome, which may hold maps and so has no hash
            told.setdefault((retired.link, id(retired.outcome)), (retired.outcome, []))[1].append(retired.number)
    for (link, _), (outcome, numbers) in told.items():
        link.settle(numbers, outcome)


def _revert(retired: Retired) -> None:
    """The outcome was not applied: the delivery is the client's as before, or its source's where it was settled, or was
    sent in the transaction.
    """
    link = retired.link
    link.retired.pop(retired.number, None)
    match FATES[retired.kind, retired.settled or not link.is_open, False]:
        case Fate.RETURN:
            link.give_back(retired.number, retired.taken, settled=retired.settled)
        case _ if retired.later is not None:
            link.apply((retired.taken,), retired.later)
            if not retired.settled:
                link.settle((retired.number,), retired.later)
        case Fate.DEFAULT:
            link.apply_default(retired.taken)
        case _:
            link.unsettled[retired.number] = retired.taken


def _nobody(answer: XaFlag | XaError) -> None:
    """Nobody waits for the answer."""
