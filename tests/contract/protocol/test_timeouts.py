"""Timeouts of branches: when they apply, the answers after a timeout, and branches that never time out."""

import pytest

from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxGetTimeout,
    DtxPrepare,
    DtxRollback,
    DtxSetTimeout,
    DtxStart,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.contract.conftest import DEFAULT_TIMEOUT, MAX_TIMEOUT
from tests.support.broker import Broker
from tests.support.client import bodies, new_xid
from tests.support.processes import wait_until
from tests.support.raw import RawClient
from tests.support.service import DtxService


def await_timeout(service: DtxService, *xids: Xid) -> None:
    """Wait until the log says that these have timed out; a call would change their state."""

    def said() -> bool:
        lines = [line for line in service.log_path.read_text().splitlines() if "branch timed out" in line]
        return all(any(str(xid) in line for line in lines) for xid in xids)

    wait_until(said, what="the timeout")


def test_a_timed_out_branch_reports_the_timeout_once(service: DtxService, raw: RawClient, queue: str) -> None:
    """Xa-rbtimeout: "A transaction branch took too long"."""
    active, prepared, one_phase, rolled_back, joined = (new_xid() for _ in range(5))
    for xid in (prepared, one_phase, rolled_back, joined):
        raw.idle(1, xid, queue=queue)
        raw.ask(1, DtxSetTimeout(xid=xid, timeout=1))
    raw.ask(1, DtxStart(xid=active))
    raw.ask(2, DtxSetTimeout(xid=active, timeout=1))
    await_timeout(service, active, prepared, one_phase, rolled_back, joined)

    assert raw.ask(1, DtxEnd(xid=active)) is XaFlag.RBTIMEOUT
    assert raw.ask(2, DtxPrepare(xid=active)) is XaFlag.RBTIMEOUT
    assert raw.ask(2, DtxPrepare(xid=prepared)) is XaFlag.RBTIMEOUT
    assert raw.ask(2, DtxCommit(xid=one_phase, one_phase=True)) is XaFlag.RBTIMEOUT
    # "one further rollback answers the same code"
    for xid in (active, prepared, one_phase):
        assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.RBTIMEOUT
        assert raw.refusal(2, DtxRollback(xid=xid)).code == 404
    assert raw.refusal(3, DtxCommit(xid=rolled_back)).code == 503
    assert raw.ask(2, DtxRollback(xid=rolled_back)) is XaFlag.RBTIMEOUT
    assert raw.refusal(2, DtxRollback(xid=rolled_back)).code == 404
    assert raw.ask(1, DtxStart(xid=joined, join=True)) is XaFlag.RBROLLBACK
    assert raw.refusal(3, DtxStart(xid=joined)).code == 530
    assert raw.ask(2, DtxRollback(xid=joined)) is XaFlag.RBTIMEOUT


def test_consumed_messages_return_when_the_branch_times_out(
    service: DtxService, raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """Rollback: "any consumed messages are re-enqueued"; this needs no call."""
    raw.publish(1, queue, b"wanted elsewhere")
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, queue)
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=1))
    await_timeout(service, xid)
    wait_until(lambda: broker.count(queue) == 1, what="the message's return")
    raw.publish(1, queue, b"too late")  # the branch has timed out, so this message is dropped with it
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.RBTIMEOUT
    raw.close_channel(1)
    assert bodies(broker, queue) == [b"wanted elsewhere"]


def test_resume_reports_the_timeout_of_suspended_work(service: DtxService, raw: RawClient, xid: Xid) -> None:
    """Start-ok has only the flags xa-ok and xa-rbrollback."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxEnd(xid=xid, suspend=True))
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=1))
    await_timeout(service, xid)
    assert raw.ask(1, DtxStart(xid=xid, resume=True)) is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.RBTIMEOUT


def test_a_prepared_branch_never_times_out(
    service: DtxService, raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """Obligation2, and no "completed by a timeout", whether the timeout is set before prepare or after it."""
    before, after = new_xid(), new_xid()
    raw.idle(1, before, queue=queue)
    raw.ask(1, DtxSetTimeout(xid=before, timeout=1))
    assert raw.ask(1, DtxPrepare(xid=before)) is XaFlag.OK
    raw.prepared(1, after, queue=queue)
    raw.ask(1, DtxSetTimeout(xid=after, timeout=1))
    assert raw.ask(1, DtxGetTimeout(xid=after)) == 1
    raw.idle(1, xid)
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=2))
    await_timeout(service, xid)
    assert raw.ask(2, DtxCommit(xid=before)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=after)) is XaFlag.OK
    assert bodies(broker, queue) == [b"one", b"one"]


@pytest.mark.parametrize(
    ("seconds", "effective"), [(1, 1), (MAX_TIMEOUT, MAX_TIMEOUT), (MAX_TIMEOUT + 1, MAX_TIMEOUT), (0, DEFAULT_TIMEOUT)]
)
def test_get_timeout_returns_the_reduced_timeout(raw: RawClient, xid: Xid, seconds: int, effective: int) -> None:
    """Get-timeout: "the value used in the previous setTimeout call"; a value above the maximum becomes the maximum."""
    raw.idle(1, xid)
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=seconds))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == effective
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=0xFFFFFFFF))
    assert raw.ask(1, DtxGetTimeout(xid=xid)) == MAX_TIMEOUT
    raw.ask(1, DtxRollback(xid=xid))


def test_a_longer_timeout_saves_a_branch(service: DtxService, raw: RawClient, queue: str, xid: Xid) -> None:
    """Rule effective: "Once set, this timeout value is effective until this method is reinvoked"."""
    raw.idle(1, xid, queue=queue)
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=1))
    raw.ask(1, DtxSetTimeout(xid=xid, timeout=30))
    control = raw.idle(1, new_xid())
    raw.ask(1, DtxSetTimeout(xid=control, timeout=2))
    await_timeout(service, control)
    calls: list[DtxCall] = [DtxPrepare(xid=xid), DtxRollback(xid=xid)]
    assert [raw.ask(2, call) for call in calls] == [XaFlag.OK, XaFlag.OK]
