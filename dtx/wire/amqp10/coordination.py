"""Transactions of one connection: requests on control links, transactional work, and the effect of a discharge on
unsettled deliveries (AMQP 1.0 transactions, 4.1 to 4.5).

The engine does not begin, commit or roll back anything. A :class:`CoordinationEngine` returns the request, or the
answer that the specification demands. The shell executes the request and reports the result with
:meth:`CoordinationEngine.declared`, :meth:`CoordinationEngine.promoted` or :meth:`CoordinationEngine.discharged`. A
transaction exists from the first to the last of these calls, and belongs to the control link that declared it. That
control link receives the errors: as a rejected outcome if its source allows that outcome, otherwise by a detach.

The form of a promotion is defined by dtx: the text has the capability, but no exchange for it ("will be provided
separately in Book 6"). A promotion is a declare whose global-id is the described list ``dtx:promote:list`` of txn-id
and global-id. Its outcome is declared with the same txn-id. After a refused promotion, a local transaction can only be
rolled back: a client may have sent a discharge without waiting. It must not commit alone what another transaction
manager was to decide.
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
    peer_error,
)
from dtx.wire.amqp10.performatives import TransactionCapability as Capability
from dtx.wire.amqp10.values import Described, Symbol, Value
from dtx.xa.value import value

MAX_TXN_ID: Final = 32
"""The maximum size in bytes: "a transaction-id may be up to 32 octets of binary data" (4.5.4)."""
MAX_LIVE: Final = 1024
"""The maximum number of live transactions of one connection."""
TXN_ID: Final = "txn-id"
"""The entry of the properties of a flow that names the transaction for acquired messages (4.4.3)."""

PROMOTE: Final = Symbol("dtx:promote:list")
"""The descriptor of a global-id that promotes a transaction."""

_FORM: Final = f"{PROMOTE} is a list of txn-id and global-id"
_REQUESTS: Final = frozenset((Declare, Discharge))
_REJECTED: Final = Rejected.layout.symbol

Control = tuple[int, int]
"""A control link: the channel of its session and its handle."""


class Rejects(Enum):
    """Which control links receive an error as a rejected outcome. The other control links are detached."""

    STRICT = "strict"
    """Control links whose source lists the outcome, as the text demands."""
    LENIENT = "lenient"
    """Also control links whose source lists no outcomes: many clients list none, but accept all."""
    ALWAYS = "always"
    """All control links."""


class Phase(Enum):
    """The phase of a transaction."""

    LIVE = auto()
    PROMOTING = auto()
    """Live, while the shell promotes it."""
    DISCHARGING = auto()


@dataclass(slots=True, eq=False)
class Amqp10Transaction:
    """A transaction that is declared and not discharged.

    Args:
        txn_id: its id on this connection.
        control: the control link that declared it.
        global_id: its global transaction; ``None`` for a local transaction.
        phase: its phase.
        doom: the reason why it can only be rolled back; ``None`` if it can be committed.
    """

    txn_id: bytes
    control: Control
    global_id: Value
    phase: Phase = Phase.LIVE
    doom: AmqpError | None = None


@value
class DeclareAsked:
    """Begin a transaction, for a global one if *global_id* is set. Then call :meth:`CoordinationEngine.declared`."""

    control: Control
    delivery_id: int
    global_id: Value


@value
class PromoteAsked:
    """Make a local transaction with all its work a part of a global one. Then call :meth:`CoordinationEngine.promoted`
    or :meth:`CoordinationEngine.promotion_refused`.

    Args:
        control: the control link of the request.
        delivery_id: the delivery of the request.
        transaction: the local transaction.
        global_id: the global transaction.
    """

    control: Control
    delivery_id: int
    transaction: Amqp10Transaction
    global_id: Value


@value
class DischargeAsked:
    """End a transaction. Then call :meth:`CoordinationEngine.discharged`.

    Args:
        control: the control link of the request.
        delivery_id: the delivery of the request.
        transaction: the transaction.
        commit: commit it, otherwise roll it back. For a global one, end its association with success or failure.
        refusal: the error for the client after the rollback, if it requested a commit that is impossible.
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
    """Detach the control link with this error. Then call :meth:`CoordinationEngine.control_closed`."""

    control: Control
    error: Error


Asked = DeclareAsked | PromoteAsked | DischargeAsked | CoordinatorAnswer | Terminate


class WorkRefused(Exception):
    """Transactional work is not allowed.

    Args:
        error: the reason.
        terminates: the control link that must be detached for it. ``None`` if only the work fails: by a rejected
            outcome, or by a detach of its link if it was sent settled.
    """

    def __init__(self, error: AmqpError, terminates: Control | None = None) -> None:
        super().__init__(error, terminates)
        self.error = error
        self.terminates = terminates


class CoordinationEngine:
    """The transactions of one connection.

    Args:
        capabilities: the advertised capabilities; the engine refuses requests that need others.
        rejects: which control links receive errors as a rejected outcome.
    """

    def __init__(self, capabilities: frozenset[Capability], rejects: Rejects = Rejects.LENIENT) -> None:
        self.capabilities = capabilities
        self._setting = rejects
        self._live: dict[bytes, Amqp10Transaction] = {}
        self._rejects: dict[Control, bool] = {}

    @property
    def advertised(self) -> tuple[str, ...]:
        """The capabilities for the coordinator target in attach."""
        return tuple(capability.value for capability in Capability if capability in self.capabilities)

    def control_attached(self, control: Control, source: Source | Described | None) -> None:
        """Record a control link that has been attached."""
        outcomes = source.outcomes if isinstance(source, Source) else ()
        self._rejects[control] = (
            _REJECTED in outcomes
            or self._setting is Rejects.ALWAYS
            or (self._setting is Rejects.LENIENT and not outcomes)
        )

    def control_closed(self, control: Control) -> tuple[Amqp10Transaction, ...]:
        """Forget a control link that has ended: "all such transactions are immediately rolled back" (4.1).

        Returns:
            The transactions to roll back. They accept no more work. A transaction whose discharge continues is not one.
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
        """Handle a message to the coordinator.

        Args:
            delivered: the message.
            is_partial: returns whether a delivery of the transaction with an id is incomplete.

        Returns:
            The request or the answer for the shell.
        """
        control = delivered.session, delivered.link
        try:
            if delivered.settled:
                return Terminate(
                    control=control, error=peer_error(_not_allowed("a declare or discharge that is settled"))
                )
            if delivered.states:
                return Terminate(
                    control=control, error=peer_error(_not_allowed("transactional work on the control link"))
                )
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
            # has been posted." A discharge with fail "MUST always" complete, and drops the part. The request may come
            # from another control link than the transaction's own. It is told "rolled back", so doom forbids a commit.
            found.doom = _rollback("a delivery of the transaction is not complete")
            return Terminate(control=control, error=peer_error(found.doom))
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
        """Record a transaction that the shell has begun.

        Args:
            asked: the request.
            txn_id: its id, 1 to 32 bytes. No client must be able to guess it.

        Returns:
            The answer. Do not send it if the control link has ended in the meantime.
        """
        assert 0 < len(txn_id) <= MAX_TXN_ID
        assert txn_id not in self._live
        self._live[txn_id] = Amqp10Transaction(txn_id, asked.control, asked.global_id)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=Declared(txn_id=txn_id))

    def promoted(self, asked: PromoteAsked) -> CoordinatorAnswer:
        """Record that a transaction is now part of a global one. Its id stays the same. Return the answer."""
        transaction = asked.transaction
        transaction.global_id = asked.global_id
        self._end_promotion(transaction)
        declared = Declared(txn_id=transaction.txn_id)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=declared)

    def promotion_refused(self, asked: PromoteAsked, error: AmqpError) -> CoordinatorAnswer | Terminate:
        """Record a failed promotion: the transaction can only be rolled back. Return the answer."""
        self._end_promotion(asked.transaction)
        asked.transaction.doom = _rollback(f"it could not be promoted: {error.reason}")
        return self.refused(asked.control, asked.delivery_id, error)

    @staticmethod
    def _end_promotion(transaction: Amqp10Transaction) -> None:
        if transaction.phase is Phase.PROMOTING:  # a discharge may have followed the promotion
            transaction.phase = Phase.LIVE

    def discharged(self, asked: DischargeAsked, failure: AmqpError | None = None) -> CoordinatorAnswer | Terminate:
        """Forget a transaction that the shell has ended.

        Args:
            asked: the request.
            failure: the reason why it was rolled back instead of committed, or why its outcome is unknown.

        Returns:
            The answer.
        """
        self._live.pop(asked.transaction.txn_id, None)
        error = asked.refusal or failure
        if error is not None:
            return self.refused(asked.control, asked.delivery_id, error)
        return CoordinatorAnswer(control=asked.control, delivery_id=asked.delivery_id, outcome=ACCEPTED)

    def refused(self, control: Control, delivery_id: int, error: AmqpError) -> CoordinatorAnswer | Terminate:
        """Return the answer to a refused request: rejected if the source of the link allows it, else a detach (4.2)."""
        if self._rejects.get(control, False):
            return CoordinatorAnswer(
                control=control, delivery_id=delivery_id, outcome=Rejected(error=peer_error(error))
            )
        return Terminate(control=control, error=peer_error(error))

    # Work.

    def _find(self, txn_id: bytes) -> Amqp10Transaction:
        found = self._live.get(txn_id)
        if found is None or found.phase is Phase.DISCHARGING:
            raise AmqpError(Condition.UNKNOWN_ID, f"no live transaction has the id {txn_id[:MAX_TXN_ID].hex()}")
        return found

    def _work(self, txn_id: bytes, session: int) -> Amqp10Transaction:
        try:
            found = self._find(txn_id)
        except AmqpError as error:
            raise WorkRefused(error) from None
        if found.control[0] != session and Capability.MULTI_SSNS_PER_TXN not in self.capabilities:
            raise WorkRefused(_not_allowed(f"the coordinator does not have {Capability.MULTI_SSNS_PER_TXN.value}"))
        return found

    def posting(self, session: int, states: tuple[DeliveryState, ...]) -> Amqp10Transaction | None:
        """Return the transaction of a received message, if any.

        Args:
            session: the channel of its session.
            states: the states in its frames.

        Raises:
            WorkRefused: as for :meth:`transaction_of_acquisition`; rollback if its frames do not name the same
                transaction.
        """
        named = [state.txn_id for state in states if isinstance(state, TransactionalState)]
        if not named:
            return None
        found = self._work(named[0], session)
        if len(states) > 1:  # "all frames MUST be explicitly associated with the same transaction"
            raise WorkRefused(_rollback("the frames of a delivery do not name the same transaction"), found.control)
        return found

    def live(self, txn_id: bytes) -> Amqp10Transaction | None:
        """Return the transaction with that id if it accepts work."""
        try:
            return self._find(txn_id)
        except AmqpError:
            return None

    def transaction_of_disposition(
        self, session: int, state: DeliveryState | None, acquired_in: Amqp10Transaction | None
    ) -> tuple[Amqp10Transaction | None, DeliveryState | None]:
        """Return the transaction of a disposition, if any, and the outcome to apply.

        Args:
            session: the channel of its session.
            state: its state.
            acquired_in: the transaction in which the delivery was sent, if any.

        Raises:
            WorkRefused: as for :meth:`transaction_of_acquisition`; rollback if *acquired_in* is live, and the outcome
                is not part of it.
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

    def transaction_of_acquisition(
        self, session: int, properties: Mapping[str, Any] | None
    ) -> Amqp10Transaction | None:
        """Return the transaction in which a link acquires messages from now on, if the properties of a flow name one.

        Raises:
            WorkRefused: unknown-id; not-allowed on a session that the transaction must not use.
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
    """Read the request in a message to a coordinator: "a single amqp-value section". Other sections are ignored (4.2).

    Raises:
        AmqpError: decode-error.
    """
    view = memoryview(payload)
    part = message.body(message.split(view))[0]
    if part.section is not Section.VALUE:
        raise malformed("a message to a coordinator without an amqp-value body")
    found: Declare | Discharge
    found, _ = composite.decode(view, part.value, part.end, _REQUESTS)
    return found


def provisional(transaction: Amqp10Transaction, outcome: Outcome | None = None) -> TransactionalState:
    """Return the delivery state of work in a transaction."""
    return TransactionalState(txn_id=transaction.txn_id, outcome=outcome)


class Work(Enum):
    """How a delivery to the controller is part of a transaction."""

    RETIREMENT = auto()
    """Its outcome is part of the transaction."""
    ACQUISITION = auto()
    """It was sent in the transaction."""


class DeliveryResult(Enum):
    """What happens to a delivery at the end of its transaction."""

    APPLY = auto()
    """Its outcome is applied."""
    DEFAULT = auto()
    """The default outcome of the source is applied: the controller has settled it, and can send no other outcome."""
    KEEP = auto()
    """It stays acquired by the controller, as before the disposition."""
    RETURN = auto()
    """Its acquisition is rolled back."""


FATES: Final[dict[tuple[Work, bool, bool], DeliveryResult]] = {
    (Work.RETIREMENT, True, True): DeliveryResult.APPLY,
    (Work.RETIREMENT, True, False): DeliveryResult.DEFAULT,
    (Work.RETIREMENT, False, True): DeliveryResult.APPLY,
    (Work.RETIREMENT, False, False): DeliveryResult.KEEP,
    (Work.ACQUISITION, True, True): DeliveryResult.APPLY,
    (Work.ACQUISITION, True, False): DeliveryResult.RETURN,
    (Work.ACQUISITION, False, True): DeliveryResult.APPLY,
    (Work.ACQUISITION, False, False): DeliveryResult.RETURN,
}
"""The fates by kind of work, whether the delivery is settled, and whether the transaction is committed (4.4.4)."""


def default_outcome(source: Source | Described | None) -> Outcome:
    """Return the outcome of deliveries settled without an outcome: the default of the source, or released (3.5.3)."""
    outcome = source.default_outcome if isinstance(source, Source) else None
    return outcome if isinstance(outcome, Accepted | Rejected | Released | Modified) else RELEASED
