"""Transactions as specified. Each test quotes or names the clause that it proves (AMQP 1.0 transactions)."""

from typing import Any

import pytest

from dtx.wire.amqp10 import coordination
from dtx.wire.amqp10.coordination import (
    FATES,
    MAX_LIVE,
    PROMOTE,
    Amqp10Transaction,
    CoordinationEngine,
    CoordinatorAnswer,
    DeclareAsked,
    DeliveryResult,
    DischargeAsked,
    Phase,
    PromoteAsked,
    Rejects,
    Terminate,
    Work,
    WorkRefused,
    default_outcome,
    provisional,
    read_request,
)
from dtx.wire.amqp10.endpoint import Delivered
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.message import Header, data, head, value
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
    Rejected,
    Source,
    TransactionalState,
)
from dtx.wire.amqp10.performatives import TransactionCapability as Capability
from dtx.wire.amqp10.values import Described, ULong, Value

ALL = frozenset(Capability)
CONTROL = (0, 5)
REJECTING = Source(outcomes=("amqp:accepted:list", "amqp:rejected:list"))


def coordination_of(capabilities: frozenset[Capability] = ALL, source: Source | None = REJECTING) -> CoordinationEngine:
    found = CoordinationEngine(capabilities, Rejects.STRICT)
    found.control_attached(CONTROL, source)
    return found


def message(payload: bytes, delivery_id: int = 7, control: tuple[int, int] = CONTROL, **changes: Any) -> Delivered:
    given: dict[str, Any] = {"settled": False, "states": ()} | changes
    return Delivered(
        session=control[0],
        link=control[1],
        delivery_id=delivery_id,
        tag=b"t",
        message_format=0,
        payload=memoryview(payload),
        **given,
    )


def declare(
    found: CoordinationEngine, txn_id: bytes = b"txn", control: tuple[int, int] = CONTROL, **fields: Any
) -> Amqp10Transaction:
    asked = found.asked(message(value(Declare(**fields)), control=control))
    assert isinstance(asked, DeclareAsked)
    assert found.declared(asked, txn_id) == CoordinatorAnswer(
        control=control, delivery_id=7, outcome=Declared(txn_id=txn_id)
    )
    transaction = found.posting(control[0], (TransactionalState(txn_id=txn_id),))
    assert transaction is not None
    return transaction


def discharge(found: CoordinationEngine, *, fail: bool = False, txn_id: bytes = b"txn", **more: Any) -> Any:
    return found.asked(message(value(Discharge(txn_id=txn_id, fail=fail))), **more)


def condition(answer: Any) -> str:
    """The condition of a rejected outcome or of a detach."""
    error = answer.error if isinstance(answer, Terminate) else answer.outcome.error
    assert isinstance(error, Error)
    return error.condition


def test_a_declare_is_answered_with_declared() -> None:
    found = coordination_of()
    assert declare(found).global_id is None
    assert declare(found, b"other", global_id=b"xid").global_id == b"xid"


def test_other_sections_are_ignored() -> None:
    """4.2: "other standard message sections such as the header section SHOULD be ignored"."""
    found = coordination_of()
    payload = head(Header(durable=True), {}, {"a": 1}) + value(Declare())
    assert isinstance(found.asked(message(payload)), DeclareAsked)


def test_a_settled_request_ends_the_control_link() -> None:
    """4.2: "This message MUST NOT be sent settled … it should detach with an appropriate error"; so has 4.3."""
    found = coordination_of()
    declare(found)
    for body in (Declare(), Discharge(txn_id=b"txn")):
        answer = found.asked(message(value(body), settled=True))
        assert isinstance(answer, Terminate)
        assert condition(answer) == Condition.NOT_ALLOWED


def test_no_transactional_work_is_allowed_on_the_control_link() -> None:
    found = coordination_of()
    answer = found.asked(message(value(Declare()), states=(TransactionalState(txn_id=b"txn"),)))
    assert isinstance(answer, Terminate)


def test_an_error_is_rejected_if_supported_and_otherwise_detaches() -> None:
    """4.2, 4.3: MUST be rejected, MUST detach."""
    for source, expected in ((REJECTING, CoordinatorAnswer), (Source(), Terminate), (None, Terminate)):
        answer = discharge(coordination_of(source=source), txn_id=b"none")
        assert isinstance(answer, expected)
        assert condition(answer) == Condition.UNKNOWN_ID


@pytest.mark.parametrize(
    ("rejects", "expected"),
    [
        (Rejects.STRICT, (Terminate, Terminate, Terminate, CoordinatorAnswer)),
        (Rejects.LENIENT, (CoordinatorAnswer, CoordinatorAnswer, Terminate, CoordinatorAnswer)),
        (Rejects.ALWAYS, (CoordinatorAnswer, CoordinatorAnswer, CoordinatorAnswer, CoordinatorAnswer)),
    ],
)
def test_the_support_of_rejected_is_a_setting(rejects: Rejects, expected: tuple[type, ...]) -> None:
    found = CoordinationEngine(ALL, rejects)
    accepting = Source(outcomes=("amqp:accepted:list",))
    sources: tuple[Source | Described, ...] = (Source(), Described(ULong(1), None), accepting, REJECTING)
    for source, kind in zip(sources, expected, strict=True):
        found.control_attached(CONTROL, source)
        answer = discharge(found, txn_id=b"none")
        assert isinstance(answer, kind)
        assert condition(answer) == Condition.UNKNOWN_ID


@pytest.mark.parametrize(
    "payload", [data(b"x"), value("declare"), value(Accepted()), b"", value(Described(ULong(0x31), 1))]
)
def test_an_invalid_request_is_rejected(payload: bytes) -> None:
    assert condition(coordination_of().asked(message(payload))) == Condition.DECODE_ERROR


def test_requests_are_read() -> None:
    assert read_request(value(Discharge(txn_id=b"t"))) == Discharge(txn_id=b"t")


@pytest.mark.parametrize("fail", [False, True])
def test_a_discharge_commits_or_rolls_back_and_ends_the_id(fail: bool) -> None:
    found = coordination_of()
    transaction = declare(found)
    asked = discharge(found, fail=fail)
    assert asked == DischargeAsked(control=CONTROL, delivery_id=7, transaction=transaction, commit=not fail)
    assert transaction.phase is Phase.DISCHARGING
    assert condition(discharge(found)) == Condition.UNKNOWN_ID
    with pytest.raises(WorkRefused):
        found.posting(0, (TransactionalState(txn_id=b"txn"),))
    assert found.discharged(asked) == CoordinatorAnswer(control=CONTROL, delivery_id=7, outcome=ACCEPTED)
    assert condition(discharge(found)) == Condition.UNKNOWN_ID
    declare(found)


@pytest.mark.parametrize("cause", [Condition.ROLLBACK, Condition.TIMEOUT])
def test_a_failed_commit_is_reported(cause: Condition) -> None:
    found = coordination_of()
    declare(found)
    answer = found.discharged(discharge(found), AmqpError(cause, "it failed"))
    assert condition(answer) == cause


def test_a_doomed_transaction_can_only_be_rolled_back() -> None:
    """4.4.4: a delivery that cannot be processed "MUST NOT allow the successful discharge"; 4.3: with fail set the
    coordinator "MUST always be able to complete".
    """
    found = coordination_of()
    for fail, txn_id in ((False, b"a"), (True, b"b")):
        declare(found, txn_id).doom = AmqpError(Condition.NOT_FOUND, "no queue 'q'")
        asked = discharge(found, fail=fail, txn_id=txn_id)
        assert not asked.commit
        answer = found.discharged(asked)
        assert isinstance(answer, CoordinatorAnswer)
        assert isinstance(answer.outcome, Accepted if fail else Rejected)


def test_a_discharge_against_a_partial_delivery_ends_the_control_link() -> None:
    """4.4.1: "the control link MUST be terminated with the transaction-rollback error"."""
    found = coordination_of()
    transaction = declare(found)
    answer = discharge(found, is_partial=lambda _: True)
    assert isinstance(answer, Terminate)
    assert condition(answer) == Condition.ROLLBACK
    assert found.control_closed(CONTROL) == (transaction,)


def test_a_foreign_discharge_against_a_partial_delivery_rolls_back() -> None:
    """The client was told of a rollback, so a later discharge of the complete delivery cannot commit."""
    found = coordination_of()
    transaction = declare(found)
    other = (0, 6)
    found.control_attached(other, REJECTING)
    answer = found.asked(message(value(Discharge(txn_id=b"txn")), control=other), lambda _: True)
    assert isinstance(answer, Terminate)
    assert (answer.control, condition(answer)) == (other, Condition.ROLLBACK)
    assert found.control_closed(other) == ()
    assert transaction.doom is not None
    asked = discharge(found)
    assert isinstance(asked, DischargeAsked)
    assert not asked.commit
    assert condition(found.discharged(asked)) == Condition.ROLLBACK


def test_a_failing_discharge_against_a_partial_delivery_completes() -> None:
    found = coordination_of()
    declare(found)
    assert isinstance(discharge(found, fail=True, is_partial=lambda _: True), DischargeAsked)


def test_a_closed_control_link_rolls_back_only_its_transactions() -> None:
    """4.1: "all such transactions are immediately rolled back, and attempts to perform further transactional work on
    them will lead to failure".
    """
    found = coordination_of()
    found.control_attached((0, 6), REJECTING)
    mine, ending, others = declare(found, b"a"), declare(found, b"b"), declare(found, b"c", (0, 6))
    asked = discharge(found, txn_id=b"b")
    assert found.control_closed(CONTROL) == (mine,)
    assert found.control_closed(CONTROL) == ()
    with pytest.raises(WorkRefused) as caught:
        found.posting(0, (TransactionalState(txn_id=b"a"),))
    assert (caught.value.error.condition, caught.value.terminates) == (Condition.UNKNOWN_ID, None)
    assert found.posting(0, (provisional(others),)) is others
    assert ending.phase is Phase.DISCHARGING
    assert isinstance(found.discharged(asked), CoordinatorAnswer)


def test_capabilities_match_the_implementation() -> None:
    """4.5.2: global-id MUST NOT be set without distributed-transactions."""
    local = coordination_of(frozenset({Capability.LOCAL}))
    assert local.advertised == ("amqp:local-transactions",)
    assert condition(local.asked(message(value(Declare(global_id=b"xid"))))) == Condition.NOT_IMPLEMENTED
    declare(local)
    assert condition(local.asked(message(value(Declare())))) == Condition.NOT_ALLOWED  # multi-txns-per-ssn
    with pytest.raises(WorkRefused, match="multi-ssns-per-txn"):
        local.posting(1, (TransactionalState(txn_id=b"txn"),))
    other = coordination_of(frozenset({Capability.DISTRIBUTED}))
    assert condition(other.asked(message(value(Declare())))) == Condition.NOT_IMPLEMENTED
    assert len(coordination_of().advertised) == 5


def promote(found: CoordinationEngine, *parts: Value) -> Any:
    return found.asked(message(value(Declare(global_id=Described(PROMOTE, list(parts)))), delivery_id=8))


def test_a_promoted_transaction_keeps_its_id() -> None:
    found = coordination_of()
    transaction = declare(found)
    asked = promote(found, b"txn", b"xid")
    assert asked == PromoteAsked(control=CONTROL, delivery_id=8, transaction=transaction, global_id=b"xid")
    assert found.posting(0, (provisional(transaction),)) is transaction  # work can continue in the meantime
    assert condition(promote(found, b"txn", b"other")) == Condition.ILLEGAL_STATE
    assert found.promoted(asked) == CoordinatorAnswer(control=CONTROL, delivery_id=8, outcome=Declared(txn_id=b"txn"))
    assert (transaction.global_id, transaction.phase, transaction.doom) == (b"xid", Phase.LIVE, None)
    assert condition(promote(found, b"txn", b"other")) == Condition.ILLEGAL_STATE
    assert isinstance(found.discharged(discharge(found)), CoordinatorAnswer)
    assert condition(promote(found, b"txn", b"xid")) == Condition.UNKNOWN_ID


def test_an_unpromotable_transaction_can_only_be_rolled_back() -> None:
    found = coordination_of()
    transaction = declare(found)
    answer = found.promotion_refused(promote(found, b"txn", b"xid"), AmqpError(Condition.UNAUTHORIZED_ACCESS, "no"))
    assert condition(answer) == Condition.UNAUTHORIZED_ACCESS
    assert transaction.phase is Phase.LIVE
    assert condition(promote(found, b"txn", b"xid")) == Condition.ROLLBACK
    asked = discharge(found)
    assert not asked.commit
    assert condition(found.discharged(asked)) == Condition.ROLLBACK


def test_a_discharge_behind_a_pending_promotion_is_part_of_it() -> None:
    for refused in (False, True):
        found = coordination_of()
        transaction = declare(found)
        promotion = promote(found, b"txn", b"xid")
        asked = discharge(found)
        assert isinstance(asked, DischargeAsked)
        assert found.control_closed(CONTROL) == ()  # its discharge continues
        if refused:
            found.promotion_refused(promotion, AmqpError(Condition.NOT_FOUND, "no"))
        else:
            found.promoted(promotion)
        assert transaction.phase is Phase.DISCHARGING


def test_a_lost_control_link_takes_its_pending_promotion_along() -> None:
    found = coordination_of()
    transaction = declare(found)
    promote(found, b"txn", b"xid")
    assert found.control_closed(CONTROL) == (transaction,)


@pytest.mark.parametrize(
    ("parts", "doomed"), [((), False), (("txn",), False), ((b"txn",), True), ((b"txn", b"xid", 1), True)]
)
def test_a_promotion_names_a_transaction_and_a_branch(parts: tuple[Value, ...], doomed: bool) -> None:
    found = coordination_of()
    transaction = declare(found)
    assert condition(promote(found, *parts)) == Condition.INVALID_FIELD
    assert (transaction.doom is not None) is doomed


def test_nothing_is_promoted_without_that_capability() -> None:
    found = coordination_of(ALL - {Capability.PROMOTABLE})
    transaction = declare(found)
    assert condition(promote(found, b"txn", b"xid")) == Condition.NOT_IMPLEMENTED
    assert transaction.doom is not None


def test_live_transactions_are_bounded() -> None:
    found = coordination_of()
    for number in range(MAX_LIVE):
        declare(found, b"%d" % number)
    assert condition(found.asked(message(value(Declare())))) == Condition.RESOURCE_LIMIT_EXCEEDED


def test_a_delivery_without_a_transaction_belongs_to_none() -> None:
    found = coordination_of()
    assert found.posting(0, ()) is None
    assert found.posting(0, (ACCEPTED,)) is None
    assert found.transaction_of_disposition(0, ACCEPTED, None) == (None, ACCEPTED)
    assert found.transaction_of_acquisition(0, None) is None
    assert found.transaction_of_acquisition(0, {"other": 1}) is None


def test_a_transaction_is_live_until_its_discharge_comes() -> None:
    found = coordination_of()
    declare(found, b"a")
    assert found.live(b"a") is not None
    assert found.live(b"b") is None
    found.asked(message(value(Discharge(txn_id=b"a"))))
    assert found.live(b"a") is None


@pytest.mark.parametrize("second", [TransactionalState(txn_id=b"b"), ACCEPTED])
def test_all_frames_must_name_the_same_transaction(second: DeliveryState) -> None:
    found = coordination_of()
    first = declare(found, b"a")
    declare(found, b"b")
    with pytest.raises(WorkRefused) as caught:
        found.posting(0, (provisional(first), second))
    assert (caught.value.error.condition, caught.value.terminates) == (Condition.ROLLBACK, CONTROL)


def test_an_outcome_has_a_transaction_although_its_delivery_has_none() -> None:
    """4.4.2: "The delivery itself need not be associated with the same transaction as the outcome"."""
    found = coordination_of()
    transaction = declare(found)
    state = provisional(transaction, RELEASED)
    assert found.transaction_of_disposition(3, state, None) == (transaction, RELEASED)
    assert found.transaction_of_disposition(3, state, transaction) == (transaction, RELEASED)
    assert found.transaction_of_disposition(0, None, transaction) == (None, None)


@pytest.mark.parametrize("state", [TransactionalState(txn_id=b"b", outcome=ACCEPTED), ACCEPTED])
def test_delivery_and_outcome_must_not_belong_to_different_live_transactions(state: DeliveryState) -> None:
    """4.4.2: "If this happens then the control link MUST be terminated with a transaction-rollback error"."""
    found = coordination_of()
    first = declare(found, b"a")
    found.control_attached((0, 6), REJECTING)
    second = declare(found, b"b", (0, 6))
    with pytest.raises(WorkRefused) as caught:
        found.transaction_of_disposition(0, state, first)
    assert caught.value.error.condition == Condition.ROLLBACK
    assert caught.value.terminates == (CONTROL if state is ACCEPTED else second.control)
    found.discharged(discharge(found, txn_id=b"a", fail=True))
    found.transaction_of_disposition(0, state, first)  # the first one is discharged


def test_a_flow_names_the_transaction_of_acquired_messages() -> None:
    """4.4.3."""
    found = coordination_of()
    transaction = declare(found)
    assert found.transaction_of_acquisition(1, {"txn-id": b"txn"}) is transaction
    for unknown in (b"x", "txn", 5):
        with pytest.raises(WorkRefused) as caught:
            found.transaction_of_acquisition(1, {"txn-id": unknown})
        assert caught.value.error.condition == Condition.UNKNOWN_ID


def test_effects_on_deliveries_are_defined_for_every_end() -> None:
    """4.4.4, the table of settlement: rolled back, an unsettled retirement stays acquired, a settled one gets the
    default outcome, an acquisition is undone.
    """
    flags = (False, True)
    assert set(FATES) == {(work, settled, done) for work in Work for settled in flags for done in flags}
    assert {fate for (_, _, done), fate in FATES.items() if done} == {DeliveryResult.APPLY}
    assert FATES[Work.RETIREMENT, True, False] is DeliveryResult.DEFAULT
    assert FATES[Work.RETIREMENT, False, False] is DeliveryResult.KEEP
    assert FATES[Work.ACQUISITION, True, False] is FATES[Work.ACQUISITION, False, False] is DeliveryResult.RETURN


def test_the_default_outcome_is_the_sources_or_released() -> None:
    assert default_outcome(Source(default_outcome=Modified(delivery_failed=True))) == Modified(delivery_failed=True)
    assert default_outcome(Source(default_outcome=Declared(txn_id=b"?"))) == RELEASED
    assert default_outcome(Source()) == default_outcome(None) == RELEASED


def test_ids_have_at_most_32_bytes() -> None:
    assert coordination.MAX_TXN_ID == 32
    found = coordination_of()
    declare(found, bytes(32))
    asked = found.asked(message(value(Declare())))
    assert isinstance(asked, DeclareAsked)
    for bad in (b"", bytes(33), bytes(32)):
        with pytest.raises(AssertionError):
            found.declared(asked, bad)
