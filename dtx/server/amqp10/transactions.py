"""Transactions of one connection: each is a branch of the transaction manager.

A local one has an xid of dtx's own making, and discharge ends and commits it in one phase. A distributed one works for
the branch that ``global-id`` names, an xid in its wire form: declare joins that branch, or starts it, and discharge
ends the association; prepare, commit, rollback and recover stay with the transaction manager, as ever. A local one that
is promoted hands its work over to such a branch, and is a distributed one from then on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from secrets import token_bytes
from typing import TYPE_CHECKING, Final, NamedTuple

from dtx.manager.entry import Entry
from dtx.server.amqp10.errors import amqp_error, rolled_back
from dtx.server.amqp10.work import LOCAL_FORMAT, Work, spoil
from dtx.server.failpoints import saying
from dtx.wire.amqp09.methods import DtxCommitOk, DtxEndOk, DtxRollbackOk, DtxStartOk
from dtx.wire.amqp10.coordination import (
    Answer,
    Coordination,
    DeclareAsked,
    DischargeAsked,
    PromoteAsked,
    Terminate,
    Transaction,
)
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.values import Value
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Association, Operation
from dtx.xa.xid import Xid

if TYPE_CHECKING:
    from dtx.server.amqp10.attaching import Shell
    from dtx.server.amqp10.connection import Connection

_ROLLED_BACK: Final = (Condition.ROLLBACK, Condition.TIMEOUT)
_ID: Final = 16
"""Octets of a txn-id, and of the gtrid of a local transaction."""


class _Ending(NamedTuple):
    """A discharge on its way.

    Args:
        asked: by the client.
        work: what ends.
        control: the link that it came on: another one may have its place when there is an answer.
    """

    asked: DischargeAsked
    work: Work
    control: "Shell | None"


class Transactions:
    """The transactions of a connection.

    Args:
        connection: of the client.
        coordination: what its control links have asked for.
    """

    def __init__(self, connection: "Connection", coordination: Coordination) -> None:
        self._connection = connection
        self._coordination = coordination
        self._works: dict[bytes, Work] = {}
        self._promoting: dict[bytes, _Ending | None] = {}
        """Those that wait for the branch they are to work for, with the discharge that waits for that."""

    def work(self, transaction: Transaction) -> Work:
        """What *transaction*, a live one, does."""
        return self._works[transaction.txn_id]

    def miss(self, txn_id: bytes) -> None:
        """Something that was posted in a transaction has come to nothing, and its sender does not hear of it."""
        transaction = self._coordination.live(txn_id)
        if transaction is not None:
            spoil(transaction, self._works[txn_id], "a message came to a link that had ended")

    @property
    def ties(self) -> Sequence[tuple[Entry, Association]]:
        """Branches that they work for."""
        found = ((work.entry, work.entry.branch.association(work)) for work in self._works.values())
        return [(entry, how) for entry, how in found if how is not Association.NONE]

    # -- declare

    def declare(self, asked: DeclareAsked) -> None:
        """Begin a transaction, and answer."""
        try:
            work = Work(self._connection, _xid(asked.global_id), local=asked.global_id is None)
            flag = work.begin()
        except (AmqpError, XaError) as error:
            self._refuse(asked, error)
            return
        if flag is None:
            control = self._connection.shell(asked.control)
            self._connection.manager.spawn(self._declare_later(asked, work, control))
        else:
            self._declared(asked, work, flag)

    async def _declare_later(self, asked: DeclareAsked, work: Work, control: "Shell | None") -> None:
        try:
            flag = None
            while flag is None:
                await self._connection.manager.settle(self._connection.who, work.xid)
                if self._connection.shell(asked.control) is not control:
                    return  # nobody would end it
                flag = work.begin()
        except XaError as error:
            if self._connection.shell(asked.control) is control:
                self._refuse(asked, error)
        else:
            self._declared(asked, work, flag)

    def _declared(self, asked: DeclareAsked, work: Work, flag: XaFlag) -> None:
        if flag is not XaFlag.OK:
            self._refuse(asked, rolled_back(flag))
            return
        txn_id = token_bytes(_ID)
        self._works[txn_id] = work
        saying(DtxStartOk.KEY)
        self._connection.say(self._coordination.declared(asked, txn_id))

    def _refuse(self, asked: DeclareAsked, error: AmqpError | XaError) -> None:
        self._connection.say(self._coordination.refused(asked.control, asked.delivery_id, amqp_error(error)))

    # -- promotion

    def promote(self, asked: PromoteAsked) -> None:
        """Let a local transaction work for a branch of the client's transaction manager, and answer."""
        work = self._works[asked.transaction.txn_id]
        try:
            xid = _named(asked.global_id)
            if not work.promote(xid):
                self._promoting[asked.transaction.txn_id] = None
                control = self._connection.shell(asked.control)
                self._connection.manager.spawn(self._promote_later(asked, work, xid, control))
                return
        except (AmqpError, XaError) as error:
            self._connection.say(self._promotion_refused(asked, work, error))
        else:
            self._connection.say(self._promoted(asked))

    async def _promote_later(self, asked: PromoteAsked, work: Work, xid: Xid, control: "Shell | None") -> None:
        manager, who, txn_id = self._connection.manager, self._connection.who, asked.transaction.txn_id
        try:
            done = False
            while not done:
                await manager.settle(who, work.xid)
                await manager.settle(who, xid)
                if self._works.get(txn_id) is not work:  # its control link is gone
                    raise rolled_back(XaFlag.RBROLLBACK)
                done = work.promote(xid)
        except (AmqpError, XaError) as error:
            answer = self._promotion_refused(asked, work, error)
        else:
            answer = self._promoted(asked)
        self._say_late(answer, control)
        discharge = self._promoting.pop(txn_id)
        if discharge is not None:
            self._discharge(discharge)

    def _promoted(self, asked: PromoteAsked) -> Answer:
        saying(DtxStartOk.KEY)
        return self._coordination.promoted(asked)

    def _promotion_refused(self, asked: PromoteAsked, work: Work, error: AmqpError | XaError) -> Answer | Terminate:
        refusal = amqp_error(error)
        work.doom(str(refusal))
        return self._coordination.promotion_refused(asked, refusal)

    def _say_late(self, answer: Answer | Terminate, control: "Shell | None") -> None:
        """Answer *control*, unless it is gone: to whatever has its place it would mean something else."""
        if self._connection.shell(answer.control) is control:
            self._connection.say(answer)

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
                await ending.work.quiet()
                flag = ending.work.end(fail=not ending.asked.commit)
        except XaError as error:
            self._not_ended(ending, error)
        else:
            self._ended(ending, flag)

    def _not_ended(self, ending: _Ending, error: XaError) -> None:
        """It is discharged all the same, and so nobody can end the association later: it goes as that of a channel that
        is lost, and the branch can only be rolled back.
        """
        ending.work.part()
        self._done(ending, _gone(error))

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
            ending.work.end_for_good(ending.work.xid)  # where that is still possible: nobody else knows its name
        else:
            self._done(ending, None if answer in (XaFlag.OK, XaFlag.RDONLY) else rolled_back(answer))

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
            saying(DtxEndOk.KEY)
        else:
            saying(DtxCommitOk.KEY if asked.commit and failure is None else DtxRollbackOk.KEY)
        # A discharge with fail=true always succeeds (4.3).
        answer = self._coordination.discharged(asked, failure if asked.commit else None)
        # Behind what returns: links give messages back to their queue when those wait for no window any more.
        self._connection.behind_all(lambda: self._say_late(answer, control))

    # -- the end

    def lose(self, transactions: Sequence[Transaction]) -> None:
        """Their control link is gone: "all such transactions are immediately rolled back" (4.1)."""
        lost = [work for one in transactions if (work := self._works.pop(one.txn_id, None)) is not None]
        for work in lost:
            work.lose()
        self._connection.slices.run(_part(lost))


def _part(works: Sequence[Work]) -> Iterator[None]:
    for work in works:
        work.part()
        yield


def _gone(error: XaError) -> AmqpError:
    """Why an association could not be ended: a branch that is not known any more was rolled back."""
    return rolled_back(XaFlag.RBROLLBACK) if error.code is ReplyCode.NOT_FOUND else amqp_error(error)


def _xid(global_id: Value) -> Xid:
    """The branch that is meant.

    Raises:
        AmqpError: invalid-field, it is no xid.
    """
    return Xid(LOCAL_FORMAT, token_bytes(_ID)) if global_id is None else _named(global_id)


def _named(global_id: Value) -> Xid:
    if not isinstance(global_id, bytes):
        raise AmqpError(Condition.INVALID_FIELD, "global-id must be binary: the wire form of an xid")
    return Xid.from_wire(global_id)
