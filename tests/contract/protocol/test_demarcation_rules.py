"""Every rule of the class dtx-demarcation (101), by name, over the wire.

Each refusal is "a channel exception": :meth:`RawClient.refusal` opens the channel number again, so it fails if the
connection was closed.
"""

import pytest

from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxGetTimeout,
    DtxPrepare,
    DtxRollback,
    DtxSelect,
    DtxStart,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker
from tests.support.client import bodies, new_xid
from tests.support.raw import RawClient, Refusal


def check(refusal: Refusal, code: int, method_id: int, words: str) -> None:
    """Check the code, the refused method and the text."""
    assert (refusal.code, refusal.class_id, refusal.method_id) == (code, 101, method_id)
    assert words in refusal.text


# -- select -----------------------------------------------------------------------------------------------------------


def test_select_may_be_repeated_and_changes_nothing(raw: RawClient, xid: Xid) -> None:
    """Select: "The client must use this method at least once on a channel"."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxSelect())
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK


def test_transactionality(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Rule transactionality: "work performed outside of transactional blocks is NOT transactional"."""
    raw.publish(1, queue, b"before")
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, b"within")
    raw.ask(1, DtxEnd(xid=xid))
    raw.publish(1, queue, b"after")
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert bodies(broker, queue) == [b"before", b"after"]


# -- start ------------------------------------------------------------------------------------------------------------


def test_start_command_invalid_without_select(raw: RawClient, xid: Xid) -> None:
    """Rule commandInvalid: "invoked in an improper context (see class grammar) ... 503"; SELECT comes first."""
    check(raw.refusal(2, DtxStart(xid=xid)), 503, 20, "without dtx-demarcation.select")


def test_start_command_invalid_in_the_midst_of_a_branch(raw: RawClient, xid: Xid) -> None:
    """Rule commandInvalid: "demarcation = C:START S:START-OK C:END S:END-OK"."""
    raw.ask(1, DtxStart(xid=xid))
    check(raw.refusal(1, DtxStart(xid=new_xid())), 503, 20, "associated")


@pytest.mark.parametrize("state", ["associated", "idle", "prepared", "rollback-only"])
def test_start_already_associated(raw: RawClient, queue: str, xid: Xid, state: str) -> None:
    """Rules alreadyAssociated and unknownXid: "has previously been seen ... reply code 530 (not allowed)"."""
    match state:
        case "associated":
            raw.ask(3, DtxStart(xid=xid))
        case "idle":
            raw.idle(3, xid)
        case "prepared":
            raw.prepared(3, xid, queue=queue)
        case _:
            raw.ask(3, DtxStart(xid=xid))
            raw.ask(3, DtxEnd(xid=xid, fail=True))
    check(raw.refusal(1, DtxStart(xid=xid)), 530, 20, "already known")
    if state == "associated":
        raw.ask(3, DtxEnd(xid=xid))
    assert raw.ask(3, DtxRollback(xid=xid)) is XaFlag.OK


def test_start_join_and_resume(raw: RawClient, xid: Xid) -> None:
    """Rule joinAndresume: "If join and resume are specified then ... 503 (command invalid)"."""
    check(raw.refusal(1, DtxStart(xid=xid, join=True, resume=True)), 503, 20, "join and resume")


def test_start_unsupported_is_not_true_of_join(raw: RawClient, xid: Xid) -> None:
    """Rule unsupported: "If the broker does not support join ... 540"; dtx supports join."""
    raw.ask(1, DtxStart(xid=xid))
    assert raw.ask(3, DtxStart(xid=xid, join=True)) is XaFlag.OK
    raw.ask(1, DtxEnd(xid=xid))
    raw.ask(3, DtxEnd(xid=xid))
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


@pytest.mark.parametrize("bits", [{"join": True}, {"resume": True}])
def test_start_of_an_unknown_branch_by_join_or_resume(raw: RawClient, xid: Xid, bits: dict[str, bool]) -> None:
    """Join: "a transaction previously seen"."""
    check(raw.refusal(1, DtxStart(xid=xid, **bits)), 404, 20, "unknown xid")


# -- end --------------------------------------------------------------------------------------------------------------


def test_end_command_invalid_without_select(raw: RawClient, xid: Xid) -> None:
    """Rule commandInvalid: "invoked in an improper context (see class grammar) ... 503"."""
    check(raw.refusal(2, DtxEnd(xid=xid)), 503, 30, "without dtx-demarcation.select")


def test_end_command_invalid_on_another_channel(raw: RawClient, xid: Xid) -> None:
    """Rule commandInvalid: the channel is not associated, though the branch is known."""
    raw.ask(1, DtxStart(xid=xid))
    check(raw.refusal(3, DtxEnd(xid=xid)), 503, 30, "not associated with this channel")
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    raw.ask(1, DtxRollback(xid=xid))


def test_end_command_invalid_twice(raw: RawClient, xid: Xid) -> None:
    """Rule commandInvalid: one END for each START."""
    raw.idle(1, xid)
    check(raw.refusal(1, DtxEnd(xid=xid)), 503, 30, "end is illegal in state idle")
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


def test_end_suspend_and_fail(raw: RawClient, xid: Xid) -> None:
    """Rule suspendAndfail: "If suspend and fail are specified then ... 503 (command invalid)"."""
    raw.ask(1, DtxStart(xid=xid))
    check(raw.refusal(1, DtxEnd(xid=xid, fail=True, suspend=True)), 503, 30, "fail and suspend")


def test_end_unknown_xid(raw: RawClient, xid: Xid) -> None:
    """Rule unknownXid: "has not been started or has already been ended ... 404 (not found)"."""
    check(raw.refusal(1, DtxEnd(xid=xid)), 404, 30, f"unknown xid {xid}")


def test_end_success(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Rule success: "If neither fail nor suspend are specified then the portion of work has completed successfully"."""
    raw.idle(1, xid, queue=queue)
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert bodies(broker, queue) == [b"one"]


def test_end_failure(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Rule failure: "If fail is specified then the transaction should be marked as rollback-only"."""
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue)
    assert raw.ask(1, DtxEnd(xid=xid, fail=True)) is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == []


def test_end_resume(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Rule resume: "in a suspended state and must be resumed via the start method with resume specified"."""
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, b"one")
    assert raw.ask(1, DtxEnd(xid=xid, suspend=True)) is XaFlag.OK
    raw.publish(1, queue, b"not transactional")
    assert raw.ask(1, DtxStart(xid=xid, resume=True)) is XaFlag.OK
    raw.publish(1, queue, b"two")
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert bodies(broker, queue) == [b"not transactional", b"one", b"two"]


def test_resume_only_by_the_channel_that_suspended(raw: RawClient, xid: Xid) -> None:
    """Rule resume, and X/Open table 6-2: the suspended association belongs to the thread, here the channel."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxEnd(xid=xid, suspend=True))
    check(raw.refusal(3, DtxStart(xid=xid, resume=True)), 503, 20, "not associated with this channel")
    assert raw.ask(1, DtxStart(xid=xid, resume=True)) is XaFlag.OK


def test_two_branches_take_turns_on_one_channel(raw: RawClient, broker: Broker, queue: str) -> None:
    """Suspend: "the transaction branch is temporarily suspended in an incomplete state"; another may run meanwhile."""
    first, second = new_xid(), new_xid()
    for xid, body in ((first, b"first"), (second, b"second")):
        raw.ask(1, DtxStart(xid=xid))
        raw.publish(1, queue, body)
        raw.ask(1, DtxEnd(xid=xid, suspend=True))
    raw.ask(1, DtxStart(xid=first, resume=True))
    raw.publish(1, queue, b"first again")
    raw.ask(1, DtxEnd(xid=first))
    raw.ask(1, DtxEnd(xid=second))  # a suspended branch may be ended without being resumed
    assert raw.ask(1, DtxCommit(xid=first, one_phase=True)) is XaFlag.OK
    assert raw.ask(1, DtxRollback(xid=second)) is XaFlag.OK
    assert bodies(broker, queue) == [b"first", b"first again"]


def test_refusals_leave_other_channels_alone(raw: RawClient, xid: Xid) -> None:
    """Each is "a channel exception": associations of other channels remain."""
    raw.ask(3, DtxStart(xid=xid))
    calls: list[DtxCall] = [DtxStart(xid=xid), DtxEnd(xid=new_xid()), DtxPrepare(xid=xid), DtxCommit(xid=new_xid())]
    for call in calls:
        raw.refusal(1, call)
    assert raw.ask(3, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxGetTimeout(xid=xid)) == 60
