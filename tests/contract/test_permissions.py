"""Permissions of standalone mode and RabbitMQ: the same users and operations get the same refusals."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from dtx.auth.permissions import Permission
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import put_long, put_short
from tests.support.processes import wait_until
from tests.support.raw import ConnectionEnded, RawClient, message, session
from tests.support.topology import table
from tests.support.users import Users, outcome, refusal

CONFIGURE, WRITE, READ = Permission.CONFIGURE, Permission.WRITE, Permission.READ

SOURCE, DESTINATION, QUEUE, LETTERS, ALTERNATE = b"p-source", b"p-destination", b"p-queue", b"p-letters", b"p-alternate"
NEW_QUEUE, NEW_EXCHANGE, MISSING = b"p-new-queue", b"p-new-exchange", b"p-missing"
QUEUE_WITH_LETTERS, EXCHANGE_WITH_ALTERNATE = b"p-with-letters", b"p-with-alternate"
INTERNAL: Final = b"p-internal"
DEFAULT, SERVER_NAMED = b"amq.default", b"amq.gen-"
DEAD = table({"x-dead-letter-exchange": LETTERS.decode()})
DEAD_TO_DEFAULT = table({"x-dead-letter-exchange": ""})
OTHERWISE = table({"alternate-exchange": ALTERNATE.decode()})

Pair = tuple[Permission, bytes]


# -- permissions of each operation -------------------------------------------------------------------------------------


def exchange_declare(name: bytes, arguments: bytes = b"", *, passive: bool = False, internal: bool = False) -> bytes:
    head = methods.ExchangeDeclare.HEAD + b"\x00\x00" + put_short(name) + put_short(b"fanout")
    return head + bytes((passive | internal << 3,)) + put_long(arguments)


def exchange_delete(name: bytes) -> bytes:
    return methods.ExchangeDelete.HEAD + b"\x00\x00" + put_short(name) + b"\x00"


def exchange_bind(key: int, destination: bytes, source: bytes) -> bytes:
    names = put_short(destination) + put_short(source) + put_short(b"key")
    return key.to_bytes(4, "big") + b"\x00\x00" + names + b"\x00" + put_long(b"")


def queue_unbind(queue: bytes, exchange: bytes) -> bytes:
    names = put_short(queue) + put_short(exchange) + put_short(b"key")
    return methods.QueueUnbind.HEAD + b"\x00\x00" + names + put_long(b"")


@dataclass(frozen=True)
class Operation:
    """An operation of a client and the permissions that it needs.

    Args:
        frames: the frames that the client sends on channel 1.
        needs: the permissions; RabbitMQ, "Access Control", the table of operations.
        code: the code of the channel.close although all is permitted; 0 if the channel stays open.
    """

    frames: bytes
    needs: frozenset[Pair]
    code: int = 0


def operation(payload: bytes, *needs: Pair, code: int = 0) -> Operation:
    return Operation(method_frame(1, payload), frozenset(needs), code)


BINDING: Final[tuple[Pair, ...]] = ((WRITE, QUEUE), (READ, SOURCE))
LINKING: Final[tuple[Pair, ...]] = ((WRITE, DESTINATION), (READ, SOURCE))
OPERATIONS: Final = {
    "queue.declare": operation(methods.QueueDeclare(NEW_QUEUE).encode(), (CONFIGURE, NEW_QUEUE)),
    "queue.declare again": operation(methods.QueueDeclare(QUEUE).encode(), (CONFIGURE, QUEUE)),
    "queue.declare passive": operation(methods.QueueDeclare(QUEUE, passive=True).encode()),
    "queue.declare named by the server": operation(
        methods.QueueDeclare(b"", exclusive=True).encode(), (CONFIGURE, SERVER_NAMED)
    ),
    "queue.declare with dead letters": operation(
        methods.QueueDeclare(NEW_QUEUE, arguments=DEAD).encode(),
        (CONFIGURE, NEW_QUEUE),
        (READ, NEW_QUEUE),
        (WRITE, LETTERS),
    ),
    "queue.declare with dead letters to the default exchange": operation(
        methods.QueueDeclare(NEW_QUEUE, arguments=DEAD_TO_DEFAULT).encode(),
        (CONFIGURE, NEW_QUEUE),
        (READ, NEW_QUEUE),
        (WRITE, DEFAULT),
    ),
    "queue.declare with dead letters, named by the server": operation(
        methods.QueueDeclare(b"", exclusive=True, arguments=DEAD).encode(),
        (CONFIGURE, SERVER_NAMED),
        (READ, SERVER_NAMED),
        (WRITE, LETTERS),
    ),
    "queue.declare with dead letters again": operation(
        methods.QueueDeclare(QUEUE_WITH_LETTERS, arguments=DEAD).encode(), (CONFIGURE, QUEUE_WITH_LETTERS)
    ),
    "queue.bind": operation(methods.QueueBind(QUEUE, SOURCE, b"key").encode(), *BINDING),
    "queue.bind a queue that is not there": operation(
        methods.QueueBind(MISSING, SOURCE, b"key").encode(), (WRITE, MISSING), (READ, SOURCE), code=404
    ),
    "queue.unbind": operation(queue_unbind(QUEUE, SOURCE), *BINDING),
    "queue.purge": operation(methods.QueuePurge(QUEUE).encode(), (READ, QUEUE)),
    "queue.delete": operation(methods.QueueDelete(NEW_QUEUE).encode(), (CONFIGURE, NEW_QUEUE)),
    "queue.delete of one that is there": operation(methods.QueueDelete(QUEUE).encode(), (CONFIGURE, QUEUE)),
    "exchange.declare": operation(exchange_declare(NEW_EXCHANGE), (CONFIGURE, NEW_EXCHANGE)),
    "exchange.declare again": operation(exchange_declare(SOURCE), (CONFIGURE, SOURCE)),
    "exchange.declare passive": operation(exchange_declare(SOURCE, passive=True)),
    "exchange.declare with an alternate": operation(
        exchange_declare(NEW_EXCHANGE, OTHERWISE), (CONFIGURE, NEW_EXCHANGE), (READ, NEW_EXCHANGE), (WRITE, ALTERNATE)
    ),
    "exchange.declare with an alternate again": operation(
        exchange_declare(EXCHANGE_WITH_ALTERNATE, OTHERWISE), (CONFIGURE, EXCHANGE_WITH_ALTERNATE)
    ),
    "exchange.bind": operation(exchange_bind(methods.ExchangeBind.KEY, DESTINATION, SOURCE), *LINKING),
    "exchange.unbind": operation(exchange_bind(methods.ExchangeUnbind.KEY, DESTINATION, SOURCE), *LINKING),
    "exchange.delete": operation(exchange_delete(SOURCE), (CONFIGURE, SOURCE)),
    "exchange.delete of one that is not there": operation(exchange_delete(MISSING), (CONFIGURE, MISSING)),
    "basic.publish": Operation(message(1, b"key", exchange=b"p-source"), frozenset([(WRITE, SOURCE)])),
    "basic.publish to the default exchange": Operation(message(1, b"p-queue"), frozenset([(WRITE, DEFAULT)])),
    "basic.publish to an exchange that is not there": Operation(
        message(1, b"key", exchange=b"p-missing"), frozenset([(WRITE, MISSING)]), 404
    ),
    "basic.consume": operation(methods.BasicConsume(QUEUE, b"tag").encode(), (READ, QUEUE)),
    "basic.consume from a queue that is not there": operation(
        methods.BasicConsume(MISSING, b"tag").encode(), (READ, MISSING), code=404
    ),
    "basic.get": operation(methods.BasicGet(QUEUE).encode(), (READ, QUEUE)),
}


EXCHANGES: Final = (SOURCE, DESTINATION, LETTERS, ALTERNATE, NEW_EXCHANGE, EXCHANGE_WITH_ALTERNATE, INTERNAL)


class Stage:
    """The exchanges and queues of the operations, which guest sets up again for each operation."""

    def __init__(self, users: Users) -> None:
        self._guest = RawClient(users.url()).log_in()
        self._guest.open(1)

    def close(self) -> None:
        self.clear()
        self._guest.close()

    def clear(self) -> None:
        for name in (QUEUE, NEW_QUEUE, QUEUE_WITH_LETTERS):
            self._ask(methods.QueueDelete(name).encode())
        for name in EXCHANGES:
            self._ask(exchange_delete(name))

    def set(self) -> None:
        self.clear()
        for name in (SOURCE, DESTINATION, LETTERS, ALTERNATE):
            self._ask(exchange_declare(name))
        self._ask(exchange_declare(INTERNAL, internal=True))
        self._ask(exchange_declare(EXCHANGE_WITH_ALTERNATE, OTHERWISE))
        self._ask(methods.QueueDeclare(QUEUE).encode())
        self._ask(methods.QueueDeclare(QUEUE_WITH_LETTERS, arguments=DEAD).encode())

    def _ask(self, payload: bytes) -> None:
        self._guest.say(1, payload)
        assert not self._guest.next_method(1).startswith(methods.ChannelClose.HEAD)


@pytest.fixture
def stage(users: Users) -> Iterator[Stage]:
    made = Stage(users)
    yield made
    made.close()


def patterns(needs: Iterable[Pair]) -> dict[str, str]:
    """The patterns that allow exactly *needs*; server-generated names have a random end."""
    given: dict[str, list[str]] = {permission.value: [] for permission in Permission}
    for permission, name in needs:
        given[permission].append("amq\\.gen-.{22}" if name == SERVER_NAMED else name.decode().replace(".", "\\."))
    return {word: f"^({'|'.join(names)})$" if names else "" for word, names in given.items()}


def test_an_operation_needs_its_permissions_and_no_others(users: Users, alice: str, stage: Stage) -> None:
    """RabbitMQ, "Access Control": the permissions and resources that each operation needs."""
    differences = []
    for name, each in OPERATIONS.items():
        stage.set()
        for missing in [*each.needs, None]:
            users.permit(alice, **patterns(each.needs - {missing}))
            with session(users.url(alice)) as client:
                code = outcome(client, each.frames)
            if code != (each.code if missing is None else 403):
                differences.append((name, missing, code))
    assert differences == []


# -- operations that are refused whatever the permissions --------------------------------------------------------------

NOBODYS: Final = {
    "publish to an internal exchange": message(1, b"key", exchange=b"p-internal"),
    "declare the default exchange": method_frame(1, exchange_declare(b"")),
    "delete the default exchange": method_frame(1, exchange_delete(b"")),
    "bind to the default exchange": methods.QueueBind(QUEUE, b"", b"key").frame(1),
    "unbind from the default exchange": method_frame(1, queue_unbind(QUEUE, b"")),
    "link to the default exchange": method_frame(1, exchange_bind(methods.ExchangeBind.KEY, b"", SOURCE)),
    "link from the default exchange": method_frame(1, exchange_bind(methods.ExchangeBind.KEY, DESTINATION, b"")),
    "delete an exchange of the server's": method_frame(1, exchange_delete(b"amq.fanout")),
    "declare an exchange with a name of the server's": method_frame(1, exchange_declare(b"amq.mine")),
    "declare a queue with a name of the server's": methods.QueueDeclare(b"amq.mine").frame(1),
}


def test_objects_of_the_server_are_refused_to_everyone(users: Users, alice: str, stage: Stage) -> None:
    stage.set()
    with session(users.url(alice)) as client:
        codes = {name: outcome(client, frames) for name, frames in NOBODYS.items()}
    assert codes == dict.fromkeys(NOBODYS, 403)


@pytest.mark.parametrize(
    ("said", "tags", "code"),
    [
        ("alice", (), 0),
        ("bob", (), 406),
        ("bob", ("impersonator",), 0),
        ("bob", ("administrator",), 406),
        ("", (), 406),
    ],
)
def test_a_message_names_its_publisher_or_nothing(users: Users, said: str, tags: tuple[str, ...], code: int) -> None:
    """RabbitMQ, Validated User-ID: "if set, … must be equal to the name of the user used to open the connection"."""
    name = f"alice-{secrets.token_hex(4)}"
    users.add(name, *tags)
    users.permit(name)
    raw = properties.build({Property.USER_ID: said.replace("alice", name).encode()})
    with session(users.url(name)) as client:
        assert outcome(client, message(1, b"nowhere", properties=raw)) == code
    users.remove(name)


def test_a_refusal_names_the_default_exchange_as_patterns_have_to(users: Users, alice: str) -> None:
    """RabbitMQ, Access Control: "the default exchange … is amq.default"; patterns match this name, not ``""``."""
    users.permit(alice, write="^other$")
    with session(users.url(alice)) as client:
        close = refusal(client, message(1, b"nowhere"))
    assert close is not None
    assert close.reply_code == 403
    assert "access to exchange 'amq.default' in vhost '/' refused for user" in close.reply_text.decode()


# -- logins ------------------------------------------------------------------------------------------------------------

TELL_ME: Final = table({"capabilities": {"authentication_failure_close": True}})


def refused_login(url: str) -> methods.ConnectionClose:
    """The connection.close of a refused login, for a client with authentication_failure_close."""
    with RawClient(url) as peer:
        peer.begin()
        peer.say(0, peer.start_ok(properties=TELL_ME))
        end = peer.end()
    assert end is not None
    return end


def test_a_capable_client_gets_close_for_a_wrong_password(users: Users, alice: str) -> None:
    """RabbitMQ, Authentication Failure Notifications: connection.close with 403 ACCESS_REFUSED."""
    for url in (users.url(alice, "wr0ng"), users.url("nobody", "wr0ng"), users.url(alice, "")):
        end = refused_login(url)
        assert (end.reply_code, end.reply_text[:14]) == (403, b"ACCESS_REFUSED")
        assert b"wr0ng" not in end.reply_text


def test_an_incapable_client_is_disconnected_after_a_wrong_password(users: Users, alice: str) -> None:
    with RawClient(users.url(alice, "wrong")) as peer:
        peer.begin()
        peer.say(0, peer.start_ok())
        assert peer.end() is None


def test_logins_are_read_alike(users: Users, alice: str) -> None:
    """Mechanisms PLAIN and AMQPLAIN."""
    name = alice.encode()
    responses = (
        (b"PLAIN", b"\0" + name + b"\0" + name),
        (b"AMQPLAIN", table({"LOGIN": alice, "PASSWORD": alice})),
        (b"AMQPLAIN", table({"x": 1, "PASSWORD": alice, "LOGIN": alice})),
    )
    welcome = []
    for mechanism, response in responses:
        with RawClient(users.url()) as peer:
            peer.begin()
            peer.say(0, peer.start_ok(mechanism, response, TELL_ME))
            frame = peer.frame()
            welcome.append(frame is not None and frame.key == methods.ConnectionTune.KEY)
    assert all(welcome)


def test_a_vhost_is_entered_with_a_permission_only(users: Users, alice: str) -> None:
    """AMQP 0-9-1, connection.open: "the server MUST check that the client has permission"."""
    with pytest.raises(ConnectionEnded, match=r"^530"):
        RawClient(users.url(alice, vhost="nowhere")).log_in()
    users.permit(alice, configure="", write="", read="")
    RawClient(users.url(alice)).log_in().close()
    users.revoke(alice)
    with pytest.raises(ConnectionEnded, match=r"^530"):
        RawClient(users.url(alice)).log_in()


# -- changes during a connection ---------------------------------------------------------------------------------------


def test_a_new_password_counts_for_the_next_login_only(users: Users, alice: str) -> None:
    with session(users.url(alice)) as client:
        users.renew(alice, "new")
        assert refused_login(users.url(alice, alice)).reply_code == 403
        RawClient(users.url(alice, "new")).log_in().close()
        assert outcome(client, message(1, b"nowhere")) == 0


def test_a_permission_that_is_taken_away_is_missed_soon(users: Users, alice: str) -> None:
    with session(users.url(alice)) as client:
        publish = message(1, b"nowhere")
        assert outcome(client, publish) == 0
        users.permit(alice, write="")
        wait_until(lambda: outcome(client, publish) == 403, what="the refusal")
        users.permit(alice)
        wait_until(lambda: outcome(client, publish) == 0, what="the permission")


def test_a_user_that_is_removed_is_disconnected(users: Users) -> None:
    """RabbitMQ: "user 'x' was deleted", by force (320)."""
    name = f"alice-{secrets.token_hex(4)}"
    users.add(name)
    users.permit(name)
    with RawClient(users.url(name)) as peer:
        peer.log_in()
        users.remove(name)
        end = peer.end()
    assert end is not None
    assert end.reply_code == 320
