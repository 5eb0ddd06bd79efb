"""A branch belongs to the user that started it, and the broker's permissions apply within it."""

from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, cast

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRollback,
    DtxSelect,
    DtxSetTimeout,
    DtxStart,
)
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.contract.conftest import COORDINATOR
from tests.support.broker import Broker, Mode, only_alongside
from tests.support.client import bodies, new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, session
from tests.support.service import DtxService

CLERK = "a clerk"
"""May select, and publish to exchanges whose names begin with "ok" and to topics that begin with "ok"."""
EXCHANGES = {"ok-fanout": "fanout", "ok-topic": "topic", "secret": "fanout", "ok-internal": "fanout"}


@pytest.fixture(scope="module", autouse=True)
def users(mode: Mode, shared_broker: Broker) -> Iterator[None]:
    """Create the users and exchanges of the tests."""
    broker, names = shared_broker, [COORDINATOR, CLERK, "no lock", "no write"]
    broker.add_user(COORDINATOR)
    broker.add_user(CLERK, write=r"ok-.*|amq\.default", configure=r"dtx\.lock\..*", read=r"dtx\.lock\..*")
    broker.add_user("no lock", configure="")
    broker.add_user("no write", write="secret")
    with broker.channel() as channel:
        for name, kind in EXCHANGES.items():
            channel.exchange_declare(name, kind, internal=name == "ok-internal")
    if mode == "alongside":
        cast("RabbitNode", broker).set_topic_permissions(CLERK, "ok-topic", write="^ok")
    yield
    with broker.channel() as channel:
        for name in EXCHANGES:
            channel.exchange_delete(name)
    for user in names:
        broker.delete_user(user)


def connected(service: DtxService, user: str, **options: Any) -> RawClient:
    """A connection of *user*: channel 1 is selected, channel 2 is open."""
    client = RawClient(service.url(user, **options)).log_in()
    client.open(1, select=True)
    client.open(2)
    return client


# -- branches have owners ---------------------------------------------------------------------------------------------

CALLS: list[Callable[[Xid], DtxCall]] = [
    lambda xid: DtxStart(xid=xid, join=True),
    lambda xid: DtxStart(xid=xid, resume=True),
    lambda xid: DtxEnd(xid=xid),
    lambda xid: DtxEnd(xid=xid, fail=True),
    lambda xid: DtxPrepare(xid=xid),
    lambda xid: DtxCommit(xid=xid),
    lambda xid: DtxCommit(xid=xid, one_phase=True),
    lambda xid: DtxRollback(xid=xid),
    lambda xid: DtxForget(xid=xid),
    lambda xid: DtxGetTimeout(xid=xid),
    lambda xid: DtxSetTimeout(xid=xid, timeout=1),
]


@pytest.mark.parametrize("state", ["active", "idle", "prepared"])
def test_another_user_can_neither_see_nor_touch_a_branch(
    service: DtxService, raw: RawClient, broker: Broker, queue: str, xid: Xid, state: str
) -> None:
    """Rule security: "restricting which users are allowed to control which transactions"."""
    if state == "active":
        raw.ask(1, DtxStart(xid=xid))
        raw.publish(1, queue)
    elif state == "idle":
        raw.idle(1, xid, queue=queue)
    else:
        raw.prepared(1, xid, queue=queue)
    with connected(service, CLERK) as stranger:
        for make in CALLS:
            refusal = stranger.refusal(1, make(xid))
            assert (refusal.code, refusal.text[:16]) == (403, "ACCESS_REFUSED -"), make(xid)
        assert stranger.refusal(1, DtxStart(xid=xid)).code == 530
        assert xid not in [found for batch in stranger.recover(2) for found in batch]
    if state == "active":
        assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    outcome = DtxCommit(xid=xid, one_phase=state != "prepared")
    assert raw.ask(2, outcome) is XaFlag.OK
    assert bodies(broker, queue) == [b"one"]


def test_a_coordinator_sees_and_completes_the_branches_of_all(
    service: DtxService, raw: RawClient, broker: Broker, queue: str
) -> None:
    """Rule security; --coordinator."""
    committed, rolled_back, idle = new_xid(), new_xid(), new_xid()
    raw.prepared(1, committed, queue=queue, body=b"committed")
    raw.prepared(1, rolled_back, queue=queue, body=b"rolled back")
    raw.idle(1, idle, queue=queue, body=b"idle")
    with connected(service, COORDINATOR) as manager:
        assert {committed, rolled_back} <= {found for batch in manager.recover(2) for found in batch}
        assert manager.ask(2, DtxCommit(xid=committed)) is XaFlag.OK
        assert manager.ask(2, DtxRollback(xid=rolled_back)) is XaFlag.OK
        assert manager.ask(2, DtxPrepare(xid=idle)) is XaFlag.OK
        assert manager.ask(2, DtxCommit(xid=idle)) is XaFlag.OK
    assert sorted(bodies(broker, queue)) == [b"committed", b"idle"]


def test_a_remembered_branch_is_visible_to_its_owner_only(service: DtxService, raw: RawClient, xid: Xid) -> None:
    """The call of another user does not use up the one further rollback that is answered."""
    raw.ask(1, DtxStart(xid=xid))
    raw.ask(1, DtxEnd(xid=xid, fail=True))
    raw.ask(1, DtxPrepare(xid=xid))
    with connected(service, CLERK) as stranger:
        assert stranger.refusal(1, DtxRollback(xid=xid)).code == 404
    assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.RBROLLBACK


def test_how_a_branch_ended_is_for_its_owner_and_coordinators(
    service: DtxService, raw: RawClient, queue: str, xid: Xid
) -> None:
    """Other users get the same answer as for an xid that never existed."""
    raw.prepared(1, xid, queue=queue)
    assert raw.ask(1, DtxCommit(xid=xid)) is XaFlag.OK
    assert "completed: committed at 20" in raw.refusal(2, DtxCommit(xid=xid)).text
    with connected(service, COORDINATOR) as manager:
        assert "completed: committed at 20" in manager.refusal(2, DtxCommit(xid=xid)).text
    with connected(service, CLERK) as stranger:
        other = new_xid()
        said, never_was = (stranger.refusal(2, DtxCommit(xid=which)) for which in (xid, other))
        assert said.code == never_was.code == 404
        assert said.text == never_was.text.replace(str(other), str(xid))


# -- select -----------------------------------------------------------------------------------------------------------


@only_alongside
@pytest.mark.parametrize(("user", "words"), [("no lock", "dtx.lock"), ("no write", "amq.default")])
def test_select_needs_the_permissions_that_receipts_need(service: DtxService, user: str, words: str) -> None:
    """403 with the reason; the connection stays open and the channel number can be used again."""
    with session(service.url(user)) as client:
        client.open(1)
        for _ in range(2):
            refusal = client.refusal(1, DtxSelect())
            assert (refusal.code, refusal.class_id, refusal.method_id) == (403, 101, 10)
            assert words in refusal.text


@only_alongside
def test_a_login_by_token_passes_through_and_cannot_select(
    service: DtxService, raw: RawClient, rabbitmq: RabbitNode, queue: str, xid: Xid
) -> None:
    """Design: "where no user name is known (for example a bare OAuth token), select gets 403 with the reason".

    A client may send any user name with a token: the broker takes the name from the token.
    """
    token = ".".join(b64encode(part).decode().rstrip("=") for part in (b'{"alg":"RS256"}', b'{"sub":"anna"}', b"sign"))
    rabbitmq.add_user("bearer", token)
    try:
        with session(service.url("bearer", token)) as client:
            client.open(1)
            for _ in range(2):
                refusal = client.refusal(1, DtxSelect())
                assert (refusal.code, refusal.class_id, refusal.method_id) == (403, 101, 10)
                assert "a token" in refusal.text
            raw.prepared(1, xid, queue=queue, body=b"branch")
            assert client.refusal(1, DtxCommit(xid=xid)).code == 403
            assert [found for batch in client.recover(1) for found in batch] == []
            client.publish(1, queue, b"passes through")
            client.close_channel(1)
        assert bodies(rabbitmq, queue) == [b"passes through"]
        assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    finally:
        rabbitmq.delete_user("bearer")


@only_alongside
def test_select_is_refused_if_dtx_may_not_use_the_vhost(service: DtxService, rabbitmq: RabbitNode) -> None:
    """The service completes branches with its own credentials."""
    vhost = rabbitmq.add_vhost()
    try:
        rabbitmq.set_permissions(CLERK, vhost=vhost)
        rabbitmq.api("DELETE", f"/api/permissions/{vhost}/guest")
        with session(service.url(CLERK, vhost=vhost)) as client:
            client.open(1)
            refusal = client.refusal(1, DtxSelect())
            assert refusal.code == 541
            assert f"dtx cannot work in vhost '{vhost}'" in refusal.text
            assert "530" in refusal.text
    finally:
        rabbitmq.delete_vhost(vhost)


@only_alongside
@pytest.mark.parametrize("call", [lambda xid: DtxPrepare(xid=xid), lambda xid: DtxCommit(xid=xid, one_phase=True)])
def test_a_refused_receipt_rolls_the_branch_back_with_a_reason(
    service: DtxService, rabbitmq: RabbitNode, queue: str, xid: Xid, call: Callable[[Xid], DtxCall]
) -> None:
    """The broker refuses the receipt by closing the channel; dtx answers before it passes on the close."""
    user = f"soon without rights {xid.gtrid.hex()}"
    rabbitmq.add_user(user)
    with rabbitmq.channel() as channel:
        channel.basic_publish("", queue, b"consumed")
    try:
        with connected(service, user) as client:
            client.ask(1, DtxStart(xid=xid))
            client.consume_one(1, queue)
            client.publish(1, queue, b"published")
            client.ask(1, DtxEnd(xid=xid))
            rabbitmq.set_permissions(user, write="^$")
            assert client.ask(1, call(xid)) is XaFlag.RBROLLBACK
            refusal = client.refused(1)
            assert (refusal.code, refusal.class_id, refusal.method_id) == (403, 60, 40)
            assert client.ask(2, DtxRollback(xid=xid)) is XaFlag.RBROLLBACK
        assert bodies(rabbitmq, queue) == [b"consumed"]
    finally:
        rabbitmq.delete_user(user)


# -- publishes are checked as the broker checks them ------------------------------------------------------------------

PUBLISHES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "no permission for the exchange": (403, "secret", "", {}),
    "an internal exchange": (403, "ok-internal", "", {}),
    "no such exchange": (404, "ok-nowhere", "", {}),
    "somebody else's user-id": (406, "ok-fanout", "", {"user_id": "guest"}),
    "an expiration that is no number": (406, "ok-fanout", "", {"expiration": "soon"}),
    "an expiration that is negative": (406, "ok-fanout", "", {"expiration": "-1"}),
    "a CC that is no list": (406, "ok-fanout", "", {"headers": {"CC": "one"}}),
    "a BCC that is no list": (406, "ok-fanout", "", {"headers": {"BCC": 1}}),
    "an exchange without permission that is not there": (403, "nowhere", "", {}),
}


@pytest.mark.parametrize("case", PUBLISHES)
def test_a_publish_in_a_branch_is_refused_as_outside(service: DtxService, broker: Broker, xid: Xid, case: str) -> None:
    """The code and the text are those of the broker; the refusal comes at the end of the branch at the latest."""
    check_refusal(service, broker, xid, *PUBLISHES[case])


@only_alongside
def test_a_topic_that_the_broker_does_not_permit_is_refused(service: DtxService, broker: Broker, xid: Xid) -> None:
    """As above for topics; tests/contract/test_topic_permissions.py tests the users of standalone mode."""
    check_refusal(service, broker, xid, 403, "ok-topic", "bad.topic", {})


def check_refusal(
    service: DtxService, broker: Broker, xid: Xid, code: int, exchange: str, key: str, values: dict[str, Any]
) -> None:
    """Check that a publish is refused within a branch as outside one, and that the branch is rollback-only."""
    message = pika.BasicProperties(**values)
    with broker.channel(user=CLERK) as direct:
        direct.basic_publish(exchange, key, b"one", message)
        with pytest.raises(ChannelClosedByBroker) as raised:
            direct.basic_qos(prefetch_count=1)
    with connected(service, CLERK) as client:
        client.ask(1, DtxStart(xid=xid))
        client.publish(1, key, exchange=exchange, properties=b"".join(message.encode()))
        refusal = client.refusal(1, DtxEnd(xid=xid))
        assert refusal.code == code == raised.value.reply_code
        assert refusal.text == raised.value.reply_text
        assert (refusal.class_id, refusal.method_id) == (60, 40)
        assert client.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
        # later publishes that are allowed are accepted
        client.ask(1, DtxStart(xid=xid))
        client.publish(1, "ok.topic", exchange="ok-topic")
        assert client.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert client.ask(2, DtxRollback(xid=xid)) is XaFlag.OK


def test_one_bad_publish_dooms_only_its_own_branch(service: DtxService, broker: Broker, queue: str) -> None:
    """Checks are pipelined on one side channel: each result must reach its own publish."""
    good, bad = new_xid(), new_xid()
    with broker.channel() as channel:
        channel.queue_bind(queue, "ok-fanout")
    with connected(service, CLERK) as client:
        client.open(3, select=True)
        client.ask(1, DtxStart(xid=good))
        client.ask(3, DtxStart(xid=bad))
        for number in range(5):
            client.publish(1, f"good {number}", f"good {number}".encode(), exchange="ok-fanout")
            client.publish(3, f"bad {number}", b"bad", exchange="secret" if number == 2 else "ok-fanout")
        client.say(1, DtxEnd(xid=good).encode())
        assert client.refusal(3, DtxEnd(xid=bad)).code == 403
        assert client.answer(1, DtxEnd(xid=good)) is XaFlag.OK
        assert client.ask(2, DtxPrepare(xid=bad)) is XaFlag.RBROLLBACK
        assert client.ask(2, DtxCommit(xid=good, one_phase=True)) is XaFlag.OK
    assert bodies(broker, queue) == [f"good {number}".encode() for number in range(5)]


def test_the_own_user_id_is_kept_and_cc_is_routed(service: DtxService, broker: Broker, queue: str, xid: Xid) -> None:
    """In alongside mode dtx's own user, an impersonator, publishes at commit, so the broker accepts the user-id."""
    message = pika.BasicProperties(user_id=CLERK, headers={"CC": [queue]}, expiration="60000", message_id="7")
    with connected(service, CLERK) as client:
        client.ask(1, DtxStart(xid=xid))
        client.publish(1, "nobody", properties=b"".join(message.encode()))
        client.ask(1, DtxEnd(xid=xid))
        client.ask(1, DtxPrepare(xid=xid))
        assert client.ask(1, DtxCommit(xid=xid)) is XaFlag.OK
    ((body, found, _),) = broker.take_all(queue)
    assert (body, found.user_id, found.expiration, found.message_id) == (b"one", CLERK, "60000", "7")
    assert found.headers["CC"] == [queue]
