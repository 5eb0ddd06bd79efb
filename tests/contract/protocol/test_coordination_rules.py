"""Every rule of the class dtx-coordination (105), by name, over the wire (internalError: test_internal_error)."""

from collections.abc import Callable

import pytest

from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxSetTimeout,
    DtxStart,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.contract.conftest import DEFAULT_TIMEOUT
from tests.support.broker import Broker
from tests.support.client import bodies, new_xid
from tests.support.raw import RawClient, Refusal, session
from tests.support.service import DtxService

METHODS = {DtxCommit: 10, DtxForget: 20, DtxGetTimeout: 30, DtxPrepare: 40, DtxRollback: 60, DtxSetTimeout: 70}
OUTCOMES: list[Callable[[Xid], DtxCall]] = [
    lambda xid: DtxCommit(xid=xid),
    lambda xid: DtxCommit(xid=xid, one_phase=True),
    lambda xid: DtxForget(xid=xid),
    lambda xid: DtxPrepare(xid=xid),
    lambda xid: DtxRollback(xid=xid),
]
TIMEOUTS: list[Callable[[Xid], DtxCall]] = [
    lambda xid: DtxGetTimeout(xid=xid),
    lambda xid: DtxSetTimeout(xid=xid, timeout=9),
]
names = ["commit", "commit one-phase", "forget", "prepare", "rollback", "get-timeout", "set-timeout"]


def check(refusal: Refusal, code: int, call: DtxCall, words: str) -> None:
    """Check the code, the refused method and the text."""
    assert (refusal.code, refusal.class_id, refusal.method_id) == (code, 105, METHODS[type(call)])
    assert words in refusal.text


@pytest.mark.parametrize("make", [*OUTCOMES, *TIMEOUTS], ids=names)
def test_unknown_xid(raw: RawClient, xid: Xid, make: Callable[[Xid], DtxCall]) -> None:
    """Rule unknownXid: "has not been started or has already been ended ... 404 (not found)"."""
    check(raw.refusal(2, make(xid)), 404, make(xid), f"unknown xid {xid}")


@pytest.mark.parametrize("how", ["associated", "suspended", "elsewhere"])
@pytest.mark.parametrize("make", OUTCOMES, ids=names[:5])
def test_notdisassociated(raw: RawClient, xid: Xid, make: Callable[[Xid], DtxCall], how: str) -> None:
    """Rule notdisassociated: "called when Xid is still associated with a channel ... 503 (command invalid)"."""
    raw.ask(3, DtxStart(xid=xid))
    if how == "suspended":
        raw.ask(3, DtxEnd(xid=xid, suspend=True))
    elif how == "elsewhere":
        raw.ask(1, DtxStart(xid=xid, join=True))
        raw.ask(1, DtxEnd(xid=xid))
    check(raw.refusal(2, make(xid)), 503, make(xid), "associated or suspended")
    assert raw.ask(3, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


def test_completing_on_the_very_channel_that_is_associated(raw: RawClient, xid: Xid) -> None:
    """Rule notdisassociated; the exception ends the channel, so the branch can only be rolled back."""
    raw.ask(1, DtxStart(xid=xid))
    check(raw.refusal(1, DtxPrepare(xid=xid)), 503, DtxPrepare(xid=xid), "associated")
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK


def test_command_invalid_of_commit_before_prepare(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule commandInvalid: "two-phase-commit = C:PREPARE S:PREPARE-OK C:COMMIT S:COMMIT-OK"."""
    raw.idle(1, xid, queue=queue)
    check(raw.refusal(2, DtxCommit(xid=xid)), 503, DtxCommit(xid=xid), "state=idle; commit is illegal in state idle")
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK


def test_command_invalid_of_one_phase_commit_after_prepare(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule commandInvalid: "one-phase-commit = C:COMMIT S:COMMIT-OK"."""
    raw.prepared(1, xid, queue=queue)
    call = DtxCommit(xid=xid, one_phase=True)
    check(raw.refusal(2, call), 503, call, "illegal in state prepared")
    assert raw.ask(1, DtxCommit(xid=xid)) is XaFlag.OK


def test_command_invalid_of_a_second_prepare(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule commandInvalid: one PREPARE for a branch."""
    raw.prepared(1, xid, queue=queue)
    check(raw.refusal(2, DtxPrepare(xid=xid)), 503, DtxPrepare(xid=xid), "illegal in state prepared")
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK


@pytest.mark.parametrize("state", ["idle", "prepared", "rollback-only"])
def test_command_invalid_of_forget(raw: RawClient, queue: str, xid: Xid, state: str) -> None:
    """Rule commandInvalid: forget is for "a heuristically completed transaction branch"."""
    if state == "prepared":
        raw.prepared(1, xid, queue=queue)
    else:
        raw.ask(1, DtxStart(xid=xid))
        raw.ask(1, DtxEnd(xid=xid, fail=state != "idle"))
    check(raw.refusal(2, DtxForget(xid=xid)), 503, DtxForget(xid=xid), f"illegal in state {state}")
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK


def test_commit_makes_available_and_discards(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Commit: "Any produced messages are made available and any consumed messages are discarded"."""
    raw.publish(1, queue, b"consumed")
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, queue)
    raw.publish(1, queue, b"produced")
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert broker.count(queue) == 0
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert bodies(broker, queue) == [b"produced"]


@pytest.mark.parametrize("vote", [False, True])
def test_rollback_discards_and_re_enqueues(raw: RawClient, broker: Broker, queue: str, xid: Xid, vote: bool) -> None:
    """Rollback: "Any produced messages are discarded and any consumed messages are re-enqueued"."""
    raw.publish(1, queue, b"consumed")
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, queue)
    raw.publish(1, queue, b"produced")
    raw.ask(1, DtxEnd(xid=xid))
    if vote:
        assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert bodies(broker, queue) == [b"consumed"]


def test_obligation_1(service: DtxService, broker: Broker, queue: str) -> None:
    """Rule obligation1: "may be either committed or rolled back regardless of failures", here of the connection."""
    committed, rolled_back = new_xid(), new_xid()
    for xid in (committed, rolled_back):
        client = RawClient(service.url()).log_in()
        client.prepared(client.open(1, select=True), xid, queue=queue)
        client.abort()  # no channel.close, no connection.close
    with session(service.url()) as client:
        client.open(1)
        assert client.ask(1, DtxCommit(xid=committed)) is XaFlag.OK
        assert client.ask(1, DtxRollback(xid=rolled_back)) is XaFlag.OK
    assert bodies(broker, queue) == [b"one"]


def test_obligation_2(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule obligation2: "The knowledge of xid cannot be erased before commit or rollback complete the branch"."""
    raw.prepared(1, xid, queue=queue)
    raw.refusal(2, DtxForget(xid=xid))
    raw.refusal(2, DtxStart(xid=xid))
    raw.close_channel(1)
    assert xid in [found for batch in raw.recover(2) for found in batch]
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert raw.refusal(2, DtxCommit(xid=xid)).code == 404


# -- recover ----------------------------------------------------------------------------------------------------------


def test_recover_start_end(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule startEnd: "a single call starts and then ends a scan"."""
    raw.prepared(1, xid, queue=queue)
    found = raw.ask(2, DtxRecover(startscan=True, endscan=True))
    assert isinstance(found, list)
    assert xid in found
    refusal = raw.refusal(2, DtxRecover(startscan=False, endscan=False))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (503, 105, 50)
    raw.ask(2, DtxRollback(xid=xid))


def test_recover_must_be_started(raw: RawClient) -> None:
    """Rule mustBeStarted: "a recovery scan must already be started otherwise ... 503 (command invalid)"."""
    refusal = raw.refusal(2, DtxRecover(startscan=False, endscan=False))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (503, 105, 50)
    assert "no recovery scan is open" in refusal.text


def test_recover_recovery_already_open(raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule recoveryAlreadyOpen: "as if the recovery scan were ended and then restarted"."""
    raw.ask(2, DtxRecover(startscan=True, endscan=False))
    raw.prepared(1, xid, queue=queue)
    after = raw.ask(2, DtxRecover(startscan=True, endscan=False))
    assert isinstance(after, list)
    assert xid in after
    raw.ask(1, DtxRollback(xid=xid))


def test_recover_lists_exactly_the_branches_in_doubt(raw: RawClient, queue: str) -> None:
    """Recover: "transaction branches that are in a prepared or heuristically completed state"."""
    prepared, idle, failed, gone = new_xid(), new_xid(), new_xid(), new_xid()
    raw.prepared(1, prepared, queue=queue)
    raw.idle(1, idle, queue=queue)
    raw.ask(1, DtxStart(xid=failed))
    raw.ask(1, DtxEnd(xid=failed, fail=True))
    raw.idle(1, gone, queue=queue)
    raw.ask(1, DtxCommit(xid=gone, one_phase=True))
    found = [xid for batch in raw.recover(2) for xid in batch]
    assert {prepared, idle, failed, gone} & set(found) == {prepared}
    for xid in (prepared, idle, failed):
        raw.ask(2, DtxRollback(xid=xid))


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_get_timeout_is_the_default_or_the_value_set(raw: RawClient, xid: Xid) -> None:
    """Get-timeout: "If setTimeout was not used ... the default timeout; otherwise, the value used in the previous"."""
    raw.idle(1, xid)
    assert raw.ask(2, DtxGetTimeout(xid=xid)) == DEFAULT_TIMEOUT
    raw.ask(2, DtxSetTimeout(xid=xid, timeout=17))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == 17
    raw.ask(1, DtxRollback(xid=xid))


def test_set_timeout_effective(raw: RawClient, xid: Xid) -> None:
    """Rule effective: "until this method is reinvoked with a different value", over end, suspend and resume."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=17))
    raw.ask(1, DtxEnd(xid=xid, suspend=True))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == 17
    raw.ask(1, DtxStart(xid=xid, resume=True))
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == 17
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=18))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == 18
    raw.ask(1, DtxRollback(xid=xid))


def test_set_timeout_reset(raw: RawClient, xid: Xid) -> None:
    """Rule reset: "A value of zero resets the timeout value to the default value"."""
    raw.idle(1, xid)
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=17))
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=0))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == DEFAULT_TIMEOUT
    raw.ask(1, DtxRollback(xid=xid))
