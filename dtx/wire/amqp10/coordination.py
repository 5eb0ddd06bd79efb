"""Transactions of one connection, as its peers see them: what a control link asks, which work is allowed, what an end
does to unsettled deliveries (AMQP 1.0 transactions, 4.1 to 4.5).

Nothing is begun, committed or rolled back here. A :class:`CoordinationEngine` returns the request, and the answer that
the specification demands. The shell carries it out and reports the result with :meth:`CoordinationEngine.declared`,
:meth:`CoordinationEngine.promoted` or :meth:`CoordinationEngine.discharged`. A transaction lives from the first to the
last of these calls, and belongs to the control link that declared it. That control link gets the errors: as a rejected
outcome if its source allows that outcome, else by a detach.

Promotion is ours in its form: the text has the capability and no exchange ("will be provided separately in Book 6").
It is a declare whose global-id names both, as a described list, ``dtx:promote:list`` of txn-id and global-id, and its
outcome is declared with the same txn-id. A local transaction whose promotion is refused can only be rolled back: a
discharge that was sent behind it, without waiting, must not commit alone what was to be decided elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from dtx.wire.amqp10 import composite, message
from dtx.wire.amqp10.endpoint import Delivered
from dtx.wire.amqp10.errors import AmqpError, Condition, malformed
from dtx.wire.amqp10.message import Section
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Declare,
    Declared,
    DeliveryState,
    Discharge,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
    Source,
    TransactionalState,
    told,
)
from dtx.wire.amqp10.performatives import TransactionCapability as Capability
from dtx.wire.amqp10.values import Described, Symbol, Value
from dtx.xa.value import value

MAX_TXN_ID: Final = 32
"""Octets: "a transaction-id may be up to 32 octets of binary data" (4.5.4)."""
MAX_LIVE: Final = 1024
"""Transactions of one connection that are live at once: each may hold work."""
TXN_ID: Final = "txn-id"
"""The entry of a flow's properties that names the transaction of what is acquired (4.4.3)."""

PROMOTE: Final = Symbol("dtx:promote:list")
"""Descriptor of a global-id that promotes a transaction."""

_FORM: Final = f"{PROMOTE} is a list of txn-id and global-id"
_REQUESTS: Final = frozenset((Declare, Discharge))
_REJECTED: Final = Rejected.layout.symbol

Control = tuple[int, int]
"""Session and link of a control link, as events name them."""


class Rejects(Enum):
    """Which sources of control links hear of an error by a rejected outcome; of the others the link is detached."""

    STRICT = "strict"
    """Those that list it, as the text says."""
    LENIENT = "lenient"
    """Those that list no outcomes, too: many clients list none, and do not mean that they take none."""
    ALWAYS = "always"
    """All."""


class Phase(Enum):
    """Of a transaction."""

    LIVE = auto()
    PROMOTING = auto()
    """Live, and about to work for a global transaction."""
    DISCHARGING = auto()


@dataclass(slots=True, eq=False)
class Amqp10Transaction:
    """One that has been declared and not been discharged.

    Args:
        txn_id: its id, on this connection.
        control: the link that declared it.
        global_id: the global transaction that it works for, ``None`` for a local one.
        phase: live, being promoted, or being discharged.
        doom: why it can only be rolled back, if it is so.
    """

    txn_id: bytes
    control: Control
    global_id: Value
    phase: Phase = Phase.LIVE
    doom: AmqpError | None = None


@value
class DeclareAsked:
    """Begin a transaction, for a global one where *global_id* is set; then :meth:`CoordinationEngine.declared`."""

    control: Control
    delivery_id: int
    global_id: Value


@value
class PromoteAsked:
    """Let a local transaction work for a global one from now on, with all that it has done; then
    :meth:`CoordinationEngine.promoted` or :meth:`CoordinationEngine.promotion_refused`.

    Args:
        control: who asks.
        delivery_id: what is to be answered.
        transaction: which.
        global_id: the global transaction.
    """

    control: Control
    delivery_id: int
    transaction: Amqp10Transaction
    global_id: Value


@value
class DischargeAsked:
    """End a transaction; then :meth:`CoordinationEngine.discharged`.

    Args:
        control: who asks.
        delivery_id: what is to be answered.
        transaction: which.
        commit: commit it, else roll it back; for a global one, end its association, in success or failure.
        refusal: what the answer is even when it has been rolled back: a commit was asked for that cannot be.
    """

    control: Control
    delivery_id: int
    transaction: Amqp10Transaction
    commit: bool
    refusal: AmqpError | None = field(default=None)


@value
class CoordinatorAnswer:
    """Settle a delivery of the control link with this outcome."""

    control: Control
    delivery_id: int
    outcome: Outcome


@value
class Terminate:
    """Detach the control link with this error, and then handle :meth:`CoordinationEngine.control_closed`."""

    control: Control
    error: Error


Asked = DeclareAsked | PromoteAsked | DischargeAsked | CoordinatorAnswer | Terminate


class WorkRefused(Exception):
    """Transactional work is not allowed.

    Args:
        error: why.
        terminates: the control link that the text ends for it; ``None``: only the work fails, by a rejected outcome,
            or a detach of its link where it was sent settled.
    """

    def __init__(self, error: AmqpError, terminates: Control | None = None) -> None:
        super().__init__(error, terminates)
        self.error = error
        self.terminates = terminates


class CoordinationEngine:
    """The transactions of one connection.

    Args:
        capabilities: what is advertised, and no more is done.
        rejects: which control links hear of errors by a rejected outcome.
    """

    def __init__(self, capabilities: frozenset[Capability], rejects: Rejects = Rejects.LENIENT) -> None:
        self.capabilities = capabilities
        self._setting = rejects
        self._live: dict[bytes, Amqp10Transaction] = {}
        self._rejects: dict[Control, bool] = {}

    @property
    def advertised(self) -> tuple[str, ...]:
        """The capabilities of our coordinator target."""
        return tuple(capability.value for capability in Capability if capability in self.capabilities)

    def control_attached(self, control: Control, source: Source | Described | None) -> None:
        """A link to the coordinator has been attached."""
        outcomes = source.outcomes if isinstance(source, Source) else ()
        self._rejects[control] = (
            _REJECTED in outcomes
            or self._setting is Rejects.ALWAYS
            or (self._setting is Rejects.LENIENT and not outcomes)
        )

    def control_closed(self, control: Control) -> tuple[Amqp10Transaction, ...]:
        """A control link is gone: "all such transactions are immediately rolled back" (4.1).

        Returns:
            Those to roll back; no work is taken for them any more. One that is being discharged goes its way.
        """
        self._rejects.pop(control, None)
        lost = tuple(
            one for one in self._live.values() if one.control == control and one.phase is not Phase.DISCHARGING
        )
        for one in lost:
            del self._live[one.txn_id]
        return lost

    # The control link.

    def asked(self, delivered: Delivered, is_partial: Callable[[bytes], bool] = lambda _: False) -> Asked:
        """A message to the coordinator.

        Args:
            delivered: as it came.
            is_partial: whether a delivery has come in part that belongs to a transaction, of which the id is given.
        """
        control = delivered.session, delivered.link
        try:
            if delivered.settled:
                return Terminate(control=control, error=told(_not_allowed("a declare or discharge that is settled")))
            if delivered.states:
                return Terminate(control=control, error=told(_not_allowed("transactional work on the control link")))
            request = read_request(delivered.payload)
            if isinstance(request, Discharge):
                return self._discharge(control, delivered.delivery_id, request.txn_id, request.fail, is_partial)
            if isinstance(request.global_id, Described) and request.global_id.descriptor == PROMOTE:
                return self._promote(control, delivered.delivery_id, request.global_id.value)
            self._check_declare(control, request.global_id)
            return DeclareAsked(control=control, delivery_id=delivered.delivery_id, global_id=request.global_id)
        except AmqpError as error:
            return self.refused(control, delivered.delivery_id, error)

    def _check_declare(self, control: Control, global_id: Value) -> None:
        needed = Capability.LOCAL if global_id is None else Capability.DISTRIBUTED
        if needed not in self.capabilities:
            raise AmqpError(Condition.NOT_IMPLEMENTED, f"the coordinator does not have {needed.value}")
        if len(self._live) >= MAX_LIVE:
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, f"{MAX_LIVE} transactions are live on this connection")
        if Capability.MULTI_TXNS_PER_SSN not in self.capabilities and any(
            one.control[0] == control[0] for one in self._live.values()
        ):
            raise _not_allowed(f"the coordinator does not have {Capability.MULTI_TXNS_PER_SSN.value}")

    def _promote(self, control: Control, delivery_id: int, both: Value) -> Asked:
        txn_id, *rest = both if isinstance(both, list) and both else (None,)
        if not isinstance(txn_id, bytes):
            raise AmqpError(Condition.INVALID_FIELD, _FORM)
        found = self._find(txn_id)
        if found.phase is Phase.PROMOTING or found.global_id is not None:
            raise AmqpError(Condition.ILLEGAL_STATE, "the transaction works for a global one already")
        asked = PromoteAsked(
            control=control, delivery_id=delivery_id, transaction=found, global_id=rest[0] if rest else None
        )
        if len(rest) != 1:
            return self.promotion_refused(asked, AmqpError(Condition.INVALID_FIELD, _FORM))
        if not {Capability.PROMOTABLE, Capability.DISTRIBUTED} <= self.capabilities:
            reason = f"the coordinator does not have {Capability.PROMOTABLE.value}"
            return self.promotion_refused(asked, AmqpError(Condition.NOT_IMPLEMENTED, reason))
        if found.doom is not None:
            return self.refused(control, delivery_id, found.doom)
        found.phase = Phase.PROMOTING
        return asked

    def _discharge(
        self, control: Control, delivery_id: int, txn_id: bytes, fail: bool, is_partial: Callable[[bytes], bool]
    ) -> Asked:
        found = self._find(txn_id)
        if not fail and is_partial(txn_id):
            # "It is an error for the controller to attempt to discharge a transaction against which a partial delivery
            # has been posted." A discharge that fails it "MUST always" complete: the part goes with it. Another control
            # link than its own may have asked; rolled back is what that was told.
            found.doom = _rollback("a delivery of the transaction is not complete")
            return Terminate(control=control, error=told(found.doom))
        found.phase = Phase.DISCHARGING
        refusal = None if fail else found.doom
        return DischargeAsked(
            control=control,
            delivery_id=delivery_id,
            transaction=found,
            commit=not fail and refusal is None,
            refusal=refusal,
        )

    def declared(self, asked: DeclareAsked, txn_id: bytes) -> CoordinatorAnswer:
        """A transaction has been begun.

        Args:
            asked: the declare.
            txn_id: its id, 1 to 32 octets that nobody can guess.

        Returns:
            The answer; nothing is to be sent where the control link has gone meanwhile.
        """
        assert 0 < len(txn_id) <= MAX_TXN_ID
        assert txn_id not in self._live
        self._live[txn_id] = Amqp10Transaction(txn_id, asked.control, asked.global_id)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=Declared(txn_id=txn_id))

    def promoted(self, asked: PromoteAsked) -> CoordinatorAnswer:
        """A transaction works for a global one; its id is the same as before."""
        transaction = asked.transaction
        transaction.global_id = asked.global_id
        self._through(transaction)
        declared = Declared(txn_id=transaction.txn_id)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=declared)

    def promotion_refused(self, asked: PromoteAsked, error: AmqpError) -> CoordinatorAnswer | Terminate:
        """A transaction could not be promoted; it can only be rolled back."""
        self._through(asked.transaction)
        asked.transaction.doom = _rollback(f"it could not be promoted: {error.reason}")
        return self.refused(asked.control, asked.delivery_id, error)

    @staticmethod
    def _through(transaction: Amqp10Transaction) -> None:
        if transaction.phase is Phase.PROMOTING:  # a discharge may have come behind it
            transaction.phase = Phase.LIVE

    def discharged(self, asked: DischargeAsked, failure: AmqpError | None = None) -> CoordinatorAnswer | Terminate:
        """A transaction has been ended; its id is known no more.

        Args:
            asked: the discharge.
            failure: why it was rolled back though a commit was asked for, or why nobody knows.
        """
        self._live.pop(asked.transaction.txn_id, None)
        error = asked.refusal or failure
        if error is not None:
            return self.refused(asked.control, asked.delivery_id, error)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=ACCEPTED)

    def refused(self, control: Control, delivery_id: int, error: AmqpError) -> CoordinatorAnswer | Terminate:
        """The answer to a refused request: rejected where the source of the link supports that, else a detach (4.2)."""
        if self._rejects.get(control, False):
            return CoordinatorAnswer(control=control, delivery_id=delivery_id, outcome=Rejected(error=told(error)))
        return Terminate(control=control, error=told(error))

    # Work.

    def _find(self, txn_id: bytes) -> Amqp10Transaction:
        found = self._live.get(txn_id)
        if found is None or found.phase is Phase.DISCHARGING:
            raise AmqpError(Condition.UNKNOWN_ID, f"no live transaction has the id {txn_id[:MAX_TXN_ID].hex()}")
        return found

    def _work(self, txn_id: bytes, session: int) -> Amqp10Transaction:
        """The transaction that work on a session names."""
        try:
            found = self._find(txn_id)
        except AmqpError as error:
            raise WorkRefused(error) from None
        if found.control[0] != session and Capability.MULTI_SSNS_PER_TXN not in self.capabilities:
            raise WorkRefused(_not_allowed(f"the coordinator does not have {Capability.MULTI_SSNS_PER_TXN.value}"))
        return found

    def posting(self, session: int, states: tuple[DeliveryState, ...]) -> Amqp10Transaction | None:
        """The transaction to which a message that has come belongs, if any.

        Args:
            session: where it came.
            states: of its frames.

        Raises:
            WorkRefused: unknown-id; or its frames do not name the same transaction.
        """
        named = [state.txn_id for state in states if isinstance(state, TransactionalState)]
        if not named:
            return None
        found = self._work(named[0], session)
        if len(states) > 1:  # "all frames MUST be explicitly associated with the same transaction"
            raise WorkRefused(_rollback("the frames of a delivery do not name the same transaction"), found.control)
        return found

    def live(self, txn_id: bytes) -> Amqp10Transaction | None:
        """The transaction of that id, if it takes work."""
        try:
            return self._find(txn_id)
        except AmqpError:
            return None

    def retiring(
        self, session: int, state: DeliveryState | None, acquired_in: Amqp10Transaction | None
    ) -> tuple[Amqp10Transaction | None, DeliveryState | None]:
        """The transaction of a disposition, if any, and the outcome that is to be applied.

        Args:
            session: where it came.
            state: what it says.
            acquired_in: the transaction that the delivery was sent in, if any.

        Raises:
            WorkRefused: unknown-id; or delivery and outcome belong to different transactions that are live.
        """
        found = self._work(state.txn_id, session) if isinstance(state, TransactionalState) else None
        outcome = state.outcome if isinstance(state, TransactionalState) else state
        if (
            acquired_in is not None
            and self._live.get(acquired_in.txn_id) is acquired_in
            and outcome is not None
            and found is not acquired_in
        ):
            error = _rollback("delivery and outcome belong to different transactions")
            raise WorkRefused(error, (found or acquired_in).control)
        return found, outcome

    def acquiring(self, session: int, properties: Mapping[str, Any] | None) -> Amqp10Transaction | None:
        """The transaction in which a link shall acquire from now on, as the properties of a flow name it.

        Raises:
            WorkRefused: unknown-id.
        """
        named = (properties or {}).get(TXN_ID)
        if named is None:
            return None
        return self._work(named if isinstance(named, bytes) else b"", session)


def _not_allowed(reason: str) -> AmqpError:
    return AmqpError(Condition.NOT_ALLOWED, reason)


def _rollback(reason: str) -> AmqpError:
    return AmqpError(Condition.ROLLBACK, reason)


def read_request(payload: bytes | memoryview) -> Declare | Discharge:
    """What a message to a coordinator asks: "a single amqp-value section", all others are ignored (4.2).

    Raises:
        AmqpError: decode-error.
    """
    view = memoryview(payload)
    part = message.body(message.split(view))[0]
    if part.section is not Section.VALUE:
        raise malformed("a message to a coordinator whose body is no value")
    found: Declare | Discharge
    found, _ = composite.decode(view, part.value, part.end, _REQUESTS)
    return found


def provisional(transaction: Amqp10Transaction, outcome: Outcome | None = None) -> TransactionalState:
    """The state that work in a transaction has for the peer."""
    return TransactionalState(txn_id=transaction.txn_id, outcome=outcome)


class Work(Enum):
    """How a delivery that was sent to the controller belongs to a transaction."""

    RETIREMENT = auto()
    """Its outcome does."""
    ACQUISITION = auto()
    """It was sent in it."""


class TransactionFate(Enum):
    """What becomes of a delivery when the transaction of its outcome ends."""

    APPLY = auto()
    """The outcome is applied."""
    DEFAULT = auto()
    """The default outcome of the source is applied: the controller can say nothing more of it."""
    KEEP = auto()
    """It stays acquired by the controller, as it was before the disposition."""
    RETURN = auto()
    """The acquisition is rolled back, too."""


FATES: Final[dict[tuple[Work, bool, bool], TransactionFate]] = {
    (Work.RETIREMENT, True, True): TransactionFate.APPLY,
    (Work.RETIREMENT, True, False): TransactionFate.DEFAULT,
    (Work.RETIREMENT, False, True): TransactionFate.APPLY,
    (Work.RETIREMENT, False, False): TransactionFate.KEEP,
    (Work.ACQUISITION, True, True): TransactionFate.APPLY,
    (Work.ACQUISITION, True, False): TransactionFate.RETURN,
    (Work.ACQUISITION, False, True): TransactionFate.APPLY,
    (Work.ACQUISITION, False, False): TransactionFate.RETURN,
}
"""By the kind of work, whether the delivery is settled, and whether the transaction was committed (4.4.4)."""


def default_outcome(source: Source | Described | None) -> Outcome:
    """What becomes of a delivery that is settled without an outcome: what the source says, or released (3.5.3)."""
    said = source.default_outcome if isinstance(source, Source) else None
    return said if isinstance(said, Accepted | Rejected | Released | Modified) else RELEASED
