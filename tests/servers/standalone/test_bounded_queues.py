"""Branches that publish to full queues."""

from collections.abc import Iterator
from typing import Any

import pytest

from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.dialogue import Dialogue, connected
from tests.support.raw import RawClient, session
from tests.support.service import DtxService


@pytest.fixture
def talk(standalone: DtxService) -> Iterator[Dialogue]:
    yield from connected(standalone.url())


@pytest.fixture
def raw(standalone: DtxService) -> Iterator[RawClient]:
    with session(standalone.url()) as client:
        client.open(1, select=True)
        yield client


def work(raw: RawClient, queue: str, *bodies: bytes) -> tuple[Xid, object]:
    """A branch that publishes; returns its xid and the answer to end."""
    xid = new_xid()
    raw.ask(1, DtxStart(xid=xid))
    for body in bodies:
        raw.publish(1, queue, body)
    return xid, raw.ask(1, DtxEnd(xid=xid))


@pytest.mark.parametrize("arguments", [{"max_length": 2}, {"max_length_bytes": 2}])
def test_a_branch_that_a_full_queue_refuses_is_rolled_back(
    talk: Dialogue, raw: RawClient, arguments: dict[str, Any]
) -> None:
    """The messages that it published to other queues are rolled back too."""
    queue, other = talk.queue(overflow="reject-publish", **arguments), talk.queue()
    xid, ended = work(raw, queue, b"1", b"2")
    assert ended is XaFlag.OK
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=False)) is XaFlag.OK
    xid = new_xid()
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, other, b"elsewhere")
    raw.publish(1, queue, b"3")
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert (talk.drain(queue), talk.count(other)) == (["1", "2"], 0)
    xid, ended = work(raw, queue, b"4", b"5", b"6")
    assert ended is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    assert talk.count(queue) == 0


def test_messages_of_a_prepared_branch_enter_a_full_queue(talk: Dialogue, raw: RawClient) -> None:
    queue = talk.queue(overflow="reject-publish", max_length=1)
    xid, ended = work(raw, queue, b"promised")
    assert ended is XaFlag.OK
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert talk.publish(queue, "first", "second") == [True, False]
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=False)) is XaFlag.OK
    assert set(talk.drain(queue)) == {"first", "promised"}


def test_a_branch_that_is_suspended_is_judged_when_it_ends(talk: Dialogue, raw: RawClient) -> None:
    queue = talk.queue(overflow="reject-publish", max_length=1)
    talk.publish(queue, "first")
    xid = new_xid()
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue)
    assert raw.ask(1, DtxEnd(xid=xid, suspend=True)) is XaFlag.OK
    talk.drain(queue)
    raw.ask(1, DtxStart(xid=xid, resume=True))
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert talk.count(queue) == 1


def test_a_branch_that_ends_while_suspended_is_checked_too(talk: Dialogue, raw: RawClient) -> None:
    """X/Open, table 6-2: xa_end is permitted in T2, suspended."""
    queue = talk.queue(overflow="reject-publish", max_length=1)
    xid = new_xid()
    raw.ask(1, DtxStart(xid=xid))
    raw.publish(1, queue, b"1")
    raw.publish(1, queue, b"2")
    assert raw.ask(1, DtxEnd(xid=xid, suspend=True)) is XaFlag.OK
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.RBROLLBACK
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    assert talk.count(queue) == 0


def test_a_full_queue_that_drops_its_head_takes_a_branch(talk: Dialogue, raw: RawClient) -> None:
    grave = talk.grave()
    queue = talk.queue(max_length=1, dead_letter_exchange=grave)
    talk.publish(queue, "first")
    xid, ended = work(raw, queue, b"second", b"third")
    assert ended is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert [got.body for got in talk.receive(grave, 2)] == ["first", "second"]
    assert talk.drain(queue) == ["third"]
