"""The methods that calls send, and the results of the answers."""

from collections.abc import Callable
from typing import Any

import pytest

from dtx.client import calls
from dtx.client.calls import Call
from dtx.client.errors import XAER_RMERR, XAException, XAHeuristic, raised_by_flag
from dtx.client.pika_methods import DtxCoordination, DtxDemarcation
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

XID = Xid(0xFFFFFFFE, b"g\x00", b"b")
ROLLED_BACK = (XaFlag.RBROLLBACK, XaFlag.RBTIMEOUT)
DONE = (XaFlag.OK, XaFlag.RDONLY)

Make = Callable[[], Call[Any]]
FLAGGED: dict[str, tuple[Make, tuple[XaFlag, ...]]] = {
    "start": (lambda: calls.start(XID, join=False, resume=False), DONE),
    "end": (lambda: calls.end(XID, fail=False, suspend=False), DONE),
    "end, fail": (lambda: calls.end(XID, fail=True, suspend=False), DONE + ROLLED_BACK),
    "prepare": (lambda: calls.prepare(XID), DONE),
    "commit": (lambda: calls.commit(XID, one_phase=False), DONE),
    "commit, one phase": (lambda: calls.commit(XID, one_phase=True), DONE),
    "rollback": (lambda: calls.rollback(XID), DONE + ROLLED_BACK),
}


@pytest.mark.parametrize("flag", XaFlag)
@pytest.mark.parametrize("name", FLAGGED)
def test_only_the_matching_answer_is_a_result(name: str, flag: XaFlag) -> None:
    make, results = FLAGGED[name]
    call = make()
    answer = call.reply(flag.value)
    if flag in results:
        assert call.read(answer) is flag
        return
    with pytest.raises(XAException) as raised:
        call.read(answer)
    assert type(raised.value) is raised_by_flag(flag)
    assert raised.value.reason == f"the server answered {flag.wire_name}"


@pytest.mark.parametrize("name", FLAGGED)
def test_a_heuristic_outcome_is_never_a_result(name: str) -> None:
    call = FLAGGED[name][0]()
    for flag in (XaFlag.HEURCOM, XaFlag.HEURHAZ, XaFlag.HEURMIX, XaFlag.HEURRB):
        with pytest.raises(XAHeuristic):
            call.read(call.reply(flag.value))


def test_unknown_flags_are_an_error_of_the_resource_manager() -> None:
    call = calls.prepare(XID)
    with pytest.raises(XAER_RMERR, match="unknown flags 99"):
        call.read(DtxCoordination.PrepareOk(99))


def test_a_malformed_xid_in_recover_ok_is_rmerr() -> None:
    call = calls.recover(startscan=True, endscan=False)
    assert call.read(DtxCoordination.RecoverOk([XID.to_wire()])) == [XID]
    with pytest.raises(XAER_RMERR, match="truncated"):
        call.read(DtxCoordination.RecoverOk([b"\x00"]))


def test_calls_send_the_methods_of_the_xml() -> None:
    wire = XID.to_wire()
    sent = [
        (calls.select().request, DtxDemarcation.Select()),
        (calls.start(XID, join=True, resume=False).request, DtxDemarcation.Start(xid=wire, join=True)),
        (calls.start(XID, join=False, resume=True).request, DtxDemarcation.Start(xid=wire, resume=True)),
        (calls.end(XID, fail=True, suspend=False).request, DtxDemarcation.End(xid=wire, fail=True)),
        (calls.end(XID, fail=False, suspend=True).request, DtxDemarcation.End(xid=wire, suspend=True)),
        (calls.prepare(XID).request, DtxCoordination.Prepare(xid=wire)),
        (calls.commit(XID, one_phase=True).request, DtxCoordination.Commit(xid=wire, one_phase=True)),
        (calls.rollback(XID).request, DtxCoordination.Rollback(xid=wire)),
        (calls.forget(XID).request, DtxCoordination.Forget(xid=wire)),
        (calls.recover(startscan=True, endscan=True).request, DtxCoordination.Recover(startscan=True, endscan=True)),
        (calls.get_timeout(XID).request, DtxCoordination.GetTimeout(xid=wire)),
        (calls.set_timeout(XID, 7).request, DtxCoordination.SetTimeout(xid=wire, timeout=7)),
    ]
    for request, expected in sent:
        assert type(request) is type(expected)
        assert b"".join(request.encode()) == b"".join(expected.encode())


def test_answers_without_flags_are_read() -> None:
    assert calls.get_timeout(XID).read(DtxCoordination.GetTimeoutOk(60)) == 60
    calls.forget(XID).read(DtxCoordination.ForgetOk())
    calls.set_timeout(XID, 0).read(DtxCoordination.SetTimeoutOk())


@pytest.mark.parametrize("seconds", [-1, 2**32])
def test_a_timeout_that_is_not_a_long_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="unsigned 32 bit"):
        calls.set_timeout(XID, seconds)


def test_a_call_names_its_operation_and_branch() -> None:
    assert str(calls.prepare(Xid(1, b"g", b"b"))) == "prepare of 1:67:62"
    assert str(calls.recover(startscan=True, endscan=False)) == "recover"
