"""Answers to calls in each state of a branch: flags, refusals, and answers about completed branches."""

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxGetTimeout, DtxPrepare, DtxRollback, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker, only_alongside, only_standalone
from tests.support.client import bodies, fresh_queue, new_xid
from tests.support.raw import RawClient, session
from tests.support.service import DtxService


@contextlib.contextmanager
def exchange_to(node: Broker, queue: str) -> Iterator[str]:
    """A fanout exchange bound to *queue*."""
    name = f"x-{queue}"
    with node.channel() as channel:
        channel.exchange_declare(name, "fanout", durable=True)
        channel.queue_bind(queue, name)
    yield name
    with node.channel() as channel:
        channel.exchange_delete(name)


def doomed(raw: RawClient, xid: Xid) -> Xid:
    """A rollback-only branch without associations."""
    raw.ask(1, DtxStart(xid=xid))
    assert raw.ask(1, DtxEnd(xid=xid, fail=True)) is XaFlag.RBROLLBACK
    return xid


# -- start and end ----------------------------------------------------------------------------------------------------


def test_join_of_a_prepared_branch_is_refused(raw: RawClient, queue: str, xid: Xid) -> None:
    raw.prepared(1, xid, queue=queue)
    assert raw.refusal(3, DtxStart(xid=xid, join=True)).code == 503
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


def test_join_of_a_rollback_only_branch_returns_rbrollback(raw: RawClient, xid: Xid) -> None:
    """Start-ok: "xa-rbrollback: The broker marked the transaction branch rollback-only"."""
    doomed(raw, xid)
    assert raw.ask(3, DtxStart(xid=xid, join=True)) is XaFlag.RBROLLBACK
    assert raw.ask(3, DtxStart(xid=new_xid())) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


def test_resume_of_a_branch_that_failed_meanwhile_returns_rbrollback(raw: RawClient, xid: Xid) -> None:
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxEnd(xid=xid, suspend=True))
    raw.ask(3, DtxStart(xid=xid, join=True))
    assert raw.ask(3, DtxEnd(xid=xid, fail=True)) is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxStart(xid=xid, resume=True)) is XaFlag.RBROLLBACK
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK


def test_end_reports_that_another_channel_has_failed(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """End-ok: "xa-rbrollback: The broker marked the transaction branch rollback-only"."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(3, DtxStart(xid=xid, join=True))
    raw.publish(3, queue)
    raw.close_channel(3)
    raw.publish(1, queue)
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.RBROLLBACK
    assert raw.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == []


# -- prepare and commit -----------------------------------------------------------------------------------------------


def test_a_branch_without_work_is_read_only_and_forgotten(raw: RawClient, xid: Xid) -> None:
    """Prepare-ok: "xa-rdonly: The transaction branch was read-only and has been committed"."""
    raw.idle(1, xid)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RDONLY
    assert raw.refusal(2, DtxCommit(xid=xid)).code == 404
    assert raw.idle(1, xid) is xid


def test_a_one_phase_commit_without_work_is_ok(raw: RawClient, xid: Xid) -> None:
    raw.idle(1, xid)
    assert raw.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK


def test_a_failed_one_phase_commit_returns_the_rollback_code(raw: RawClient, xid: Xid) -> None:
    """Commit-ok: "xa-rbrollback: The broker marked the transaction branch rollback-only"."""
    doomed(raw, xid)
    assert raw.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.RBROLLBACK


def test_a_two_phase_commit_of_a_doomed_branch_is_refused(raw: RawClient, xid: Xid) -> None:
    doomed(raw, xid)
    assert raw.refusal(2, DtxCommit(xid=xid)).code == 503
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


@only_alongside
def test_branches_that_cannot_commit_are_stuck_with_distinct_reasons(
    raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """Commit, rule internalError: "If an error occurs in committing ... 541"; the decision to commit stands."""
    with exchange_to(broker, queue) as exchange:
        raw.ask(1, DtxStart(xid=xid))
        raw.publish(1, "key", b"late", exchange=exchange)
        raw.ask(1, DtxEnd(xid=xid))
        raw.ask(1, DtxPrepare(xid=xid))
    refusal = raw.refusal(2, DtxCommit(xid=xid))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (541, 105, 10)
    assert "no exchange" in refusal.text
    assert raw.refusal(2, DtxRollback(xid=xid)).code == 503
    assert raw.refusal(2, DtxPrepare(xid=xid)).code == 503
    assert raw.refusal(3, DtxStart(xid=xid, join=True)).code == 503
    assert raw.refusal(3, DtxStart(xid=xid)).code == 530
    assert xid in [found for batch in raw.recover(2) for found in batch]
    with exchange_to(broker, queue):
        assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"late"]


@only_alongside
def test_branches_that_cannot_roll_back_are_stuck_with_distinct_reasons(
    raw: RawClient, broker: Broker, xid: Xid
) -> None:
    """Rollback, rule internalError: "If an error occurs in rolling back ... 541"; the decision to roll back stands."""
    with fresh_queue(broker) as queue:
        raw.publish(1, queue, b"back")
        raw.ask(1, DtxStart(xid=xid))
        raw.consume_one(1, queue)
        raw.ask(1, DtxEnd(xid=xid))
        assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    refusal = raw.refusal(2, DtxRollback(xid=xid))
    assert (refusal.code, refusal.class_id, refusal.method_id) == (541, 105, 60)
    assert "could not be put back" in refusal.text
    assert raw.refusal(2, DtxCommit(xid=xid)).code == 503
    with broker.channel() as channel:
        channel.queue_declare(queue, durable=True)
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"back"]
    with broker.channel() as channel:
        channel.queue_delete(queue)


@only_standalone
def test_a_deleted_exchange_still_routes_messages_published_before(
    raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """In standalone mode dtx routes a message when it is published, so a prepared branch can be committed."""
    with exchange_to(broker, queue) as exchange:
        raw.ask(1, DtxStart(xid=xid))
        raw.publish(1, "key", b"routed", exchange=exchange)
        raw.ask(1, DtxEnd(xid=xid))
        raw.ask(1, DtxPrepare(xid=xid))
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"routed"]


@only_standalone
@pytest.mark.parametrize("commit", [True, False])
def test_a_deleted_queue_takes_the_messages_of_branches_along(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, commit: bool
) -> None:
    """queue.delete: "messages … are discarded"; the branch still completes, with its other work."""
    with fresh_queue(broker) as doomed:
        raw.publish(1, doomed, b"consumed")
        raw.publish(1, queue, b"consumed too")
        raw.ask(1, DtxStart(xid=xid))
        raw.consume_one(1, doomed)
        raw.consume_one(1, queue)
        raw.publish(1, doomed, b"lost with its queue")
        raw.publish(1, queue, b"published")
        raw.ask(1, DtxEnd(xid=xid))
        assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid) if commit else DtxRollback(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"published" if commit else b"consumed too"]
    with broker.channel() as channel:
        channel.queue_declare(doomed, durable=True)
    assert bodies(broker, doomed) == []
    with broker.channel() as channel:
        channel.queue_delete(doomed)


# -- completed branches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["committed", "committed at once", "rolled-back", "read-only"])
def test_a_completed_xid_is_reported_as_completed(raw: RawClient, queue: str, xid: Xid, outcome: str) -> None:
    """404 contains the outcome and its time, for a TM that has lost an answer."""
    if outcome == "read-only":
        raw.idle(1, xid)
        raw.ask(2, DtxPrepare(xid=xid))
    elif outcome == "committed at once":
        raw.idle(1, xid, queue=queue)
        raw.ask(2, DtxCommit(xid=xid, one_phase=True))
    else:
        raw.prepared(1, xid, queue=queue)
        raw.ask(2, DtxCommit(xid=xid) if outcome == "committed" else DtxRollback(xid=xid))
    for call in (DtxCommit(xid=xid), DtxRollback(xid=xid), DtxPrepare(xid=xid), DtxGetTimeout(xid=xid)):
        refusal = raw.refusal(2, call)
        assert refusal.code == 404
        ending = outcome.removesuffix(" at once")
        assert refusal.text.startswith(f"NOT_FOUND - ended={ending}; at=20")
        assert f"; unknown xid, completed: {ending} at 20" in refusal.text


def test_the_reason_precedes_an_xid_that_fills_the_text(raw: RawClient, queue: str) -> None:
    """Reply-text is a short string, which the longest xid exceeds."""
    xid = raw.prepared(1, Xid(0xFFFFFFFF, secrets.token_bytes(64), secrets.token_bytes(64)), queue=queue)
    assert "already known, in state prepared" in raw.refusal(3, DtxStart(xid=xid)).text
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert "completed: committed at 20" in raw.refusal(2, DtxCommit(xid=xid)).text


@pytest.mark.parametrize("call", [DtxPrepare, "one-phase"])
def test_a_rolled_back_branch_answers_one_further_rollback(raw: RawClient, xid: Xid, call: object) -> None:
    """Prepare-ok: xa-rbrollback; one further rollback gets the same answer instead of 404."""
    doomed(raw, xid)
    first = DtxPrepare(xid=xid) if call is DtxPrepare else DtxCommit(xid=xid, one_phase=True)
    assert raw.ask(2, first) is XaFlag.RBROLLBACK
    assert raw.refusal(2, DtxCommit(xid=xid)).code == 404
    assert raw.refusal(2, DtxPrepare(xid=xid)).code == 404
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.RBROLLBACK
    assert raw.refusal(2, DtxRollback(xid=xid)).code == 404


def test_a_remembered_branch_does_not_block_a_new_start(raw: RawClient, xid: Xid) -> None:
    """The new branch replaces the memory of the old one: a second rollback is refused."""
    doomed(raw, xid)
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    raw.idle(1, xid)
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert raw.refusal(2, DtxRollback(xid=xid)).code == 404


def test_after_a_lost_connection_only_ended_branches_can_be_prepared(
    service: DtxService, raw: RawClient, queue: str, xid: Xid
) -> None:
    """A branch whose channel ends while associated is rollback-only; the next call says so."""
    ended = new_xid()
    lost = RawClient(service.url()).log_in()
    lost.idle(lost.open(1, select=True), ended, queue=queue)
    lost.ask(1, DtxStart(xid=xid))
    lost.publish(1, queue)
    lost.close()
    assert raw.ask(2, DtxPrepare(xid=ended)) is XaFlag.OK
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert raw.ask(2, DtxRollback(xid=ended)) is XaFlag.OK


def test_the_same_xid_lives_in_two_vhosts(
    service: DtxService, raw: RawClient, broker: Broker, vhost: str, queue: str, xid: Xid
) -> None:
    """A vhost is one resource manager."""
    with broker.channel(vhost) as channel:
        channel.queue_declare(queue, durable=True)
    with session(service.url(vhost=vhost)) as other:
        other.prepared(other.open(1, select=True), xid, queue=queue, body=b"there")
        assert raw.refusal(2, DtxCommit(xid=xid)).code == 404
        raw.prepared(1, xid, queue=queue, body=b"here")
        assert [found for batch in other.recover(1) for found in batch] == [xid]
        assert other.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
        assert "completed: rolled-back" in other.refusal(1, DtxCommit(xid=xid)).text
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"here"]
    assert broker.take_all(queue, vhost) == []
