"""Receipts that prove nothing: what was sent while they were not believed is not believed when the reason has gone."""

import contextlib
import json
from collections.abc import Callable

import psycopg
import pytest

from dtx.cli.doctor import Status
from dtx.cli.doctor.broker import check_broker
from dtx.client import XAER_RMFAIL, XaFlag, Xid
from dtx.config import Settings
from tests.support.crash import Stage, ids, work
from tests.support.processes import free_port
from tests.support.rabbitmq import RabbitNode

REFUSING = {"max-length": 1, "overflow": "reject-publish"}


def leaves_receipts(stage: Stage, xid: Xid) -> list[bool]:
    """Whether the units of a branch were sent with receipts, as the log has it."""
    shown = json.loads(stage.service.run("show", str(xid), "--json").stdout)
    return [unit["receipt"] for unit in shown["in_log"]["units"]]


def forget_policy(stage: Stage, name: str, *queues: str) -> None:
    """Delete a policy, and wait until nobody can see any more that it was there."""

    def seen() -> bool:
        found = stage.node.api("GET", f"/api/queues/{stage.vhost}?columns=name,effective_policy_definition")
        return any(queue["name"] in queues and queue.get("effective_policy_definition") for queue in found)

    stage.node.delete_policy(name, vhost=stage.vhost)
    stage.wait_for(lambda: not seen(), "the end of the policy")


def test_a_refused_unit_is_not_trusted_when_the_queue_accepts(
    stage_with: Callable[..., Stage],
) -> None:
    """A receipt "proves that tx.commit was processed, not that every queue accepted": a lost message otherwise."""
    stage = stage_with(start=False)
    stage.node.set_policy("refuse", "^full$", REFUSING, vhost=stage.vhost)
    for queue in ("full", "out"):
        stage.declare(queue)
    stage.fill("full", b"in the way")
    stage.service.start()
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a"], "full": [b"b"]})
        assert xa.prepare(xid) is XaFlag.OK
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.commit(xid))
        stage.wait_for_count("out", 1)
        stage.service.kill9()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
    assert leaves_receipts(stage, xid) == [False]
    forget_policy(stage, "refuse", "full")
    stage.service.start()
    stage.wait_for_end()
    assert stage.bodies("full") == [b"in the way", b"b"]
    taken = stage.take("out")
    assert [body for body, _, _ in taken] == [b"a", b"a"]
    assert len(set(ids(taken))) == 1


def test_a_refused_receipt_does_not_prove_that_nothing_happened(stage_with: Callable[..., Stage]) -> None:
    """A policy that refuses receipts keeps the marker beside them: the consumed message would be dropped otherwise."""
    stage = stage_with(start=False)
    stage.node.set_policy("refuse", "^dtx[.]receipts", REFUSING, vhost=stage.vhost)
    stage.service.start()
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.prepare(xid))
        stage.wait_for_state(xid, "taking")
        stage.wait_for(lambda: stage.held("in") == 0, "the end of the message")
        stage.service.kill9()
        with pytest.raises(XAER_RMFAIL):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
    assert leaves_receipts(stage, xid) == [False]
    forget_policy(stage, "refuse", *stage.receipt_queues())
    stage.service.start()
    stage.wait_for_end()
    assert stage.bodies("in") == [b"one"]


def test_a_refused_receipt_prevents_the_vote_and_loses_no_message(stage: Stage) -> None:
    """The broker closes the channel behind tx.commit (406, partial tx completion): nobody knows what the acks became.

    Design: "dtx decides a row only when that row's lock is free".
    """
    stage.declare("in")
    stage.fill("in", b"one", b"two")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.node.set_policy("refuse", "^dtx[.]receipts", REFUSING, vhost=stage.vhost)
        with pytest.raises(XAER_RMFAIL):
            xa.prepare(xid)
    stage.wait_for_end()
    assert sorted(stage.bodies("in")) == [b"one", b"two"]
    assert b"receipts are not trusted" in stage.service.log_path.read_bytes()


def test_a_commit_connection_whose_lock_was_deleted_starts_anew(stage: Stage) -> None:
    """Without its lock a successor would believe that nothing of it can happen any more; and it would trust nothing."""
    stage.declare("in")
    stage.fill("in", b"one")
    number = stage.proxy.accepted + 1
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        stage.proxy.stall("down")
        answer = stage.background(lambda: xa.prepare(xid))
        try:
            stage.wait_for_state(xid, "taking")
            stage.wait_for(lambda: stage.receipts() == 1, "the receipt")
            (lock,) = commit_locks(stage)
            stage.node.delete_queue(lock, vhost=stage.vhost)
        finally:
            stage.proxy.cut_one(number)
            stage.proxy.resume()
        stage.wait_for_state(
            xid, "prepared"
        )  # by the receipt, which the next connection of the commit connection believes
        with contextlib.suppress(XAER_RMFAIL):
            answer.result(30)
    assert b"a queue of dtx's own was deleted" in stage.service.log_path.read_bytes()
    assert lock not in commit_locks(stage)
    with stage.coordinator() as coordinator:
        assert coordinator.rollback(xid) is XaFlag.OK
    assert stage.bodies("in") == [b"one"]


def commit_locks(stage: Stage) -> list[str]:
    """The locks that are no unit's."""
    with psycopg.connect(stage.database) as log:
        theirs = {lock for (lock,) in log.execute("SELECT lock FROM dtx.unit")}
    found = stage.node.api("GET", f"/api/queues/{stage.vhost}?columns=name")
    return [queue["name"] for queue in found if queue["name"].startswith("dtx.lock.") and queue["name"] not in theirs]


def test_the_management_api_of_another_broker_is_not_believed(
    stage_with: Callable[..., Stage], impatient_rabbitmq: RabbitNode
) -> None:
    """What it says of nodes, queues and policies holds elsewhere: the default address may be a neighbour's."""
    stage = stage_with(start=False, options=("--management", impatient_rabbitmq.management_url))
    impatient_rabbitmq.add_vhost(stage.vhost)
    stage.service.start()
    stage.declare("in")
    stage.fill("in", b"one")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
        assert leaves_receipts(stage, xid) == [False]
        assert xa.rollback(xid) is XaFlag.OK
    assert b"belongs to another broker" in stage.service.log_path.read_bytes()
    assert stage.receipts() == 0
    impatient_rabbitmq.delete_vhost(stage.vhost)


def test_the_start_without_a_management_api_names_the_remedy(stage_with: Callable[..., Stage]) -> None:
    """A plain package of RabbitMQ has none: the log says at the start what a crash may repeat, and not only then."""
    stage = stage_with(options=("--management", f"http://127.0.0.1:{free_port()}"))
    stage.wait_for(lambda: b"units may be repeated after a crash" in stage.service.log_path.read_bytes(), "the warning")
    assert b"rabbitmq-plugins enable rabbitmq_management" in stage.service.log_path.read_bytes()


def test_doctor_reports_a_management_api_of_another_broker(
    shared_rabbitmq: RabbitNode, impatient_rabbitmq: RabbitNode
) -> None:
    settings = {"broker": shared_rabbitmq.url(), "management": impatient_rabbitmq.management_url}
    found = {check.name: check for check in check_broker(Settings.model_validate(settings))}
    assert found["broker.management"].status is Status.WARNING
    assert "belongs to another broker" in found["broker.management"].sentence
    assert "--management" in found["broker.management"].sentence
    assert "broker.receipts" not in found
