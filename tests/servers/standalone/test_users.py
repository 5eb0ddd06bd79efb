"""Users of a dtx without a broker: operators create them on the command line, clients log in."""

import io
import secrets
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Final
from urllib.parse import urlsplit

import pytest
from pika.exceptions import ConnectionClosedByBroker, ProbableAccessDeniedError, ProbableAuthenticationError

from dtx.auth.users import AccountEditor
from dtx.cli import run
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRollback,
    DtxSetTimeout,
    DtxStart,
)
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.client import connected, new_xid
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import ConnectionEnded, RawClient, session
from tests.support.service import ADMIN, DtxService
from tests.support.topology import table
from tests.support.users import StandaloneUsers

COORDINATOR = "tm"
TELL_ME = table({"capabilities": {"authentication_failure_close": True}})


@pytest.fixture(scope="module")
def own_address() -> str:
    """An address of this machine other than loopback; empty if there is none."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


@pytest.fixture(scope="module")
def service(postgres: PostgresServer, own_address: str) -> Iterator[DtxService]:
    database = postgres.create_database()
    more = ("--listen", f"{own_address}:0") if own_address else ()
    with DtxService(database=database, options=("--coordinator", COORDINATOR, *ADMIN, *more)) as running:
        users = StandaloneUsers(running)
        users.add(COORDINATOR)
        users.permit(COORDINATOR, "", "", "")
        yield running
    postgres.drop_database(database)


@pytest.fixture
def users(service: DtxService) -> StandaloneUsers:
    return StandaloneUsers(service)


@pytest.fixture
def queue(service: DtxService) -> Iterator[str]:
    name = f"queue-{secrets.token_hex(4)}"
    with connected(service.url()) as connection:
        connection.channel().queue_declare(name, durable=True)
        yield name
        connection.channel().queue_delete(name)


@pytest.fixture
def clerk(users: StandaloneUsers) -> Iterator[str]:
    """A user who may publish to the default exchange and read everything."""
    name = f"clerk-{secrets.token_hex(4)}"
    users.add(name)
    users.permit(name, configure="", write=r"^amq\.default$")
    yield name
    users.remove(name)


def bodies(service: DtxService, queue: str) -> list[bytes]:
    found = []
    with session(service.url()) as client:
        client.open(1)
        while (body := client.take(1, queue)) is not None:
            found.append(body)
    return found


# -- the life of a user ------------------------------------------------------------------------------------------------


def test_a_user_from_its_making_to_its_end(service: DtxService, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All changes are made on the command line while the service runs."""

    def dtx_user(*words: str, typed: str = "") -> None:
        assert service.database is not None
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        where = ["--database", service.database, "--admin-listen", urlsplit(service.admin_url).netloc]
        assert run(["user", *words, *where]) == 0

    dtx_user("add", "alice", "--password-stdin", typed="secret\n")
    with pytest.raises(ProbableAccessDeniedError, match="530"), connected(service.url("alice", "secret")):
        pass
    dtx_user("grant", "alice", "--write", r"^amq\.default$")
    with pytest.raises(ProbableAuthenticationError, match="403"), connected(service.url("alice", "wrong")):
        pass
    with connected(service.url("alice", "secret")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"by alice")
        dtx_user("passwd", "alice", "--password-stdin", typed="renewed\n")
        channel.basic_publish("", queue, b"connected still")
        with pytest.raises(ProbableAuthenticationError), connected(service.url("alice", "secret")):
            pass
        with connected(service.url("alice", "renewed")):
            pass
        dtx_user("rm", "alice")
        with pytest.raises(ConnectionClosedByBroker) as closed:
            connection.process_data_events(time_limit=20)
        assert closed.value.reply_code == 320
    with pytest.raises(ProbableAuthenticationError), connected(service.url("alice", "renewed")):
        pass
    assert bodies(service, queue) == [b"by alice", b"connected still"]


def test_a_user_whose_access_is_revoked_is_disconnected(users: StandaloneUsers) -> None:
    """Unlike RabbitMQ, where such a client keeps its consumers until it leaves."""
    users.add("bob")
    users.permit("bob")
    with RawClient(users.url("bob")) as peer:
        peer.log_in()
        users.revoke("bob")
        end = peer.end()
    assert end is not None
    assert end.reply_code == 320
    assert b"'bob' may not be in vhost '/'" in end.reply_text
    users.remove("bob")


def test_clients_of_a_removed_vhost_are_disconnected(service: DtxService, users: StandaloneUsers) -> None:
    """A client in the virtual host is disconnected and cannot connect to it again."""
    assert service.database is not None
    editor = AccountEditor(service.database, "dtx")
    editor.add_vhost("shop")
    editor.grant("guest", "shop", read="")
    with session(users.url(vhost="shop")) as client:
        client.open(1)
        editor.remove_vhost("shop")
        with pytest.raises(ConnectionEnded, match=r"^320"):
            client.read()
    with pytest.raises(ConnectionEnded, match=r"^530 .*not found"):
        RawClient(users.url(vhost="shop")).log_in()


def test_changed_tags_apply_to_connected_users(users: StandaloneUsers, clerk: str) -> None:
    raw = properties.build({Property.USER_ID: b"somebody"})

    def may_pretend() -> bool:
        client.open(1)
        client.publish(1, "nowhere", properties=raw)
        client.say(1, methods.BasicQos(0, 0).encode())
        refused = client.next_method(1).startswith(methods.ChannelClose.HEAD)
        client.say(1, methods.ChannelCloseOk().encode()) if refused else client.close_channel(1)
        return not refused

    with session(users.url(clerk)) as client:
        assert not may_pretend()
        users.tag(clerk, "impersonator")
        wait_until(may_pretend, what="the tag")
        users.tag(clerk)
        wait_until(lambda: not may_pretend(), what="its loss")


def test_guest_comes_in_from_this_machine_only(
    service: DtxService, users: StandaloneUsers, clerk: str, own_address: str, left_out: Callable[[str], None]
) -> None:
    """RabbitMQ: "guest … can only connect from localhost"; other users connect from any address."""
    if not own_address:
        left_out("guest from another address: this machine has none")
        return
    elsewhere = service.ready_line.partition(",")[2].split()[0]
    for user in ("guest", clerk):
        with RawClient(users.url(user).replace(f"127.0.0.1:{service.port}", elsewhere)) as peer:
            peer.begin()
            peer.say(0, peer.start_ok(properties=TELL_ME))
            if user == clerk:
                peer.wait(methods.ConnectionTune.KEY)
                continue
            end = peer.end()
            assert end is not None
            assert end.reply_code == 403
            assert b"can only connect from" in end.reply_text
    RawClient(users.url()).log_in().close()


# -- many attempts -----------------------------------------------------------------------------------------------------


def test_wrong_passwords_of_one_name_delay_no_other(users: StandaloneUsers, clerk: str, queue: str) -> None:
    users.add("victim")
    users.permit("victim")
    with session(users.url()) as client, ExitStack() as stack:
        client.open(1)
        flood = []
        for number in range(50):
            peer = stack.enter_context(RawClient(users.url("victim", f"wrong {number}")))
            peer.begin()
            peer.say(0, peer.start_ok(properties=TELL_ME))
            flood.append(peer)
        flood[0].wait(methods.ConnectionClose.KEY)
        client.publish(1, queue)
        client.consume_one(1, queue)
        RawClient(users.url(clerk)).log_in().close()
        answered, _, _ = select.select([peer.socket for peer in flood[1:]], [], [], 0)
        assert len(answered) < 25
    # The clients of the flood have left; their unverified passwords are dropped.
    RawClient(users.url("victim")).log_in().close()
    users.remove("victim")


def test_a_client_that_repeats_its_old_password_is_not_delayed(users: StandaloneUsers, clerk: str) -> None:
    """Each wrong password is verified once, so a login with the right password of the same user does not wait."""
    users.renew(clerk, "new")
    for _ in range(40):
        with RawClient(users.url(clerk, clerk)) as peer:
            peer.begin()
            peer.say(0, peer.start_ok(properties=TELL_ME))
            peer.wait(methods.ConnectionClose.KEY)
    RawClient(users.url(clerk, "new")).log_in().close()


# -- branches and users ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "code"), [("exchange", 403), ("topic", 403), ("user-id", 406)])
def test_a_forbidden_publish_dooms_the_branch(
    service: DtxService, users: StandaloneUsers, clerk: str, queue: str, what: str, code: int
) -> None:
    """The exception ends the channel and its association: the branch can only be rolled back."""
    xid = new_xid()
    exchange = {"exchange": "amq.direct", "topic": "amq.topic", "user-id": ""}[what]
    raw = properties.build({Property.USER_ID: b"guest"}) if what == "user-id" else b"\x00\x00"
    if what == "topic":
        users.permit(clerk, configure="", write=r"^amq\.(default|topic)$")
        users.permit_topic(clerk, "amq.topic", write=r"^permitted\.")
    with session(users.url(clerk)) as client:
        client.open(1, select=True)
        client.open(2)
        client.ask(1, DtxStart(xid=xid))
        client.publish(1, queue, b"permitted")
        client.publish(1, queue, exchange=exchange, properties=raw)
        refusal = client.refused(1)
        assert (refusal.code, refusal.class_id, refusal.method_id) == (code, 60, 40)
        assert client.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
        assert client.ask(1, DtxStart(xid=xid)) is XaFlag.OK
        client.publish(1, queue, b"again")
        if what == "topic":
            client.publish(1, "permitted.topic", exchange=exchange)
        assert client.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert client.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert bodies(service, queue) == [b"again"]


STRANGERS_CALLS: Final[list[Callable[[Xid], DtxCall]]] = [
    lambda xid: DtxStart(xid=xid, join=True),
    lambda xid: DtxEnd(xid=xid),
    lambda xid: DtxPrepare(xid=xid),
    lambda xid: DtxCommit(xid=xid),
    lambda xid: DtxCommit(xid=xid, one_phase=True),
    lambda xid: DtxRollback(xid=xid),
    lambda xid: DtxForget(xid=xid),
    lambda xid: DtxGetTimeout(xid=xid),
    lambda xid: DtxSetTimeout(xid=xid, timeout=1),
]


def recovered(client: RawClient) -> set[Xid]:
    return {xid for batch in client.recover(2) for xid in batch}


def test_a_branch_is_its_users_and_the_coordinators(
    service: DtxService, users: StandaloneUsers, clerk: str, queue: str
) -> None:
    """Rule security: "restricting which users are allowed to control which transactions"."""
    idle, first, second = new_xid(), new_xid(), new_xid()
    with session(users.url(clerk)) as owner, session(users.url()) as stranger, session(users.url("tm")) as tm:
        owner.open(1, select=True)
        for client in (owner, stranger, tm):
            client.open(2)
        stranger.open(1, select=True)
        owner.idle(1, idle, queue=queue, body=b"idle")
        owner.prepared(1, first, queue=queue, body=b"first")
        owner.prepared(1, second, queue=queue, body=b"second")
        for xid in (idle, first):
            for make in STRANGERS_CALLS:
                assert stranger.refusal(1, make(xid)).code == 403, make(xid)
        assert not recovered(stranger) & {idle, first, second}
        assert {first, second} <= recovered(owner)
        assert {first, second} <= recovered(tm)
        assert tm.ask(2, DtxCommit(xid=first)) is XaFlag.OK
        assert tm.ask(2, DtxRollback(xid=second)) is XaFlag.OK
        assert owner.ask(2, DtxCommit(xid=idle, one_phase=True)) is XaFlag.OK
    assert bodies(service, queue) == [b"first", b"idle"]


def test_a_branch_survives_its_user(service: DtxService, users: StandaloneUsers, queue: str) -> None:
    users.add("leaver")
    users.permit("leaver")
    prepared, idle = new_xid(), new_xid()
    with session(users.url("leaver")) as client:
        client.open(1, select=True)
        client.prepared(1, prepared, queue=queue)
        client.idle(1, idle, queue=queue)
        said = service.run("user", "rm", "leaver")
        assert "branches in doubt that it has started: 1; only users named by --coordinator" in said.stderr
        with pytest.raises(ConnectionEnded, match=r"^320"):
            client.read()
    with session(users.url("tm")) as tm:
        tm.open(2)
        assert prepared in recovered(tm)
        assert tm.ask(2, DtxCommit(xid=prepared)) is XaFlag.OK
        assert tm.ask(2, DtxRollback(xid=idle)) is XaFlag.OK
    assert bodies(service, queue) == [b"one"]


def may_get(client: RawClient, queue: str) -> bool:
    """Whether channel 2, which is open afterwards, may get from an empty queue."""
    client.say(2, methods.BasicGet(queue.encode()).encode())
    if client.next_method(2).startswith(methods.BasicGetEmpty.HEAD):
        return True
    client.say(2, methods.ChannelCloseOk().encode())
    client.open(2)
    return False


def test_a_consumer_keeps_its_permission_until_it_ends(users: StandaloneUsers, clerk: str, queue: str) -> None:
    """As in RabbitMQ, permissions are checked at basic.consume; later deliveries can be acknowledged in a branch."""
    xid = new_xid()
    with session(users.url(clerk)) as client, session(users.url()) as guest:
        client.open(1, select=True)
        client.open(2)
        guest.open(1)
        client.say(1, methods.BasicConsume(queue.encode(), b"tag").encode())
        client.read_method(1, methods.BasicConsumeOk.KEY)
        users.permit(clerk, configure="", write="", read="")
        wait_until(lambda: not may_get(client, queue), what="the refusal")
        guest.publish(1, queue)
        tag = methods.BasicDeliver.decode(client.read_method(1, methods.BasicDeliver.KEY)).delivery_tag
        client.ask(1, DtxStart(xid=xid))
        client.say(1, methods.BasicAck(tag).encode())
        assert client.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert client.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
        assert client.ask(1, DtxCommit(xid=xid)) is XaFlag.OK
        assert guest.get(1, queue) is None
