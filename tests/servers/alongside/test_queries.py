"""exchange.query, binding.query and class execution alongside a broker that has none of them."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from dtx.client.pika_methods import DtxMethod
from dtx.server.alongside import queries
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.frames import Protocol, method_frame
from dtx.wire.amqp09.methods import DtxEnd, DtxEndOk, DtxSelect, DtxSelectOk, DtxStart
from tests.conftest import ServiceFactory
from tests.support.client import new_xid
from tests.support.postgres import PostgresServer
from tests.support.preview import Binding, Exchange, Execution
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

K = tables.entry(b"a", b"I", b"\x00\x00\x00\x01")
"""The table a=1."""


@pytest.fixture(scope="module")
def service(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[DtxService]:
    """A service that can ask the management API as an administrator."""
    database = postgres.create_database()
    options = ("--management", shared_rabbitmq.management_url)
    with DtxService(broker=shared_rabbitmq.url(), database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def peer(service: DtxService, rabbitmq: RabbitNode) -> Iterator[RawClient]:
    """A connection with channel 1 open."""
    with logged_in(service.url()) as opened:
        yield opened


@dataclass(frozen=True)
class Names:
    """An exchange, a queue that is bound to it by ``k`` with a=1, and another queue, bound by ``l`` with a=true."""

    exchange: str
    queue: str
    other: str


@pytest.fixture(scope="module")
def there(shared_rabbitmq: RabbitNode) -> Iterator[Names]:
    """The exchange and the queues that most tests ask for."""
    shared_rabbitmq.mend()
    mark = secrets.token_hex(4)
    names = Names(f"x-{mark}", f"q-{mark}", f"p-{mark}")
    with shared_rabbitmq.channel() as channel:
        arguments: dict[str, Any] = {"alternate-exchange": "amq.fanout", "n": 5, "b": True, "t": {"a": [1, "z"]}}
        channel.exchange_declare(names.exchange, "headers", durable=True, arguments=arguments)
        channel.queue_declare(names.queue)
        channel.queue_declare(names.other)
        channel.queue_bind(names.queue, names.exchange, "k", {"a": 1})
        channel.queue_bind(names.other, names.exchange, "l", {"a": True})
        channel.exchange_bind("amq.fanout", names.exchange, "e")
        yield names
        channel.exchange_delete(names.exchange)
        channel.queue_delete(names.queue)
        channel.queue_delete(names.other)


def octets(method: DtxMethod) -> bytes:
    """The payload of a method frame."""
    return bytes(method.INDEX.to_bytes(4, "big") + b"".join(method.encode()))


def exchange_query(name: str) -> bytes:
    return octets(Exchange.Query(name.encode()))


def binding_query(exchange: str = "", queue: str = "", key: str = "", arguments: bytes = b"") -> bytes:
    return octets(Binding.Query(exchange.encode(), queue.encode(), key.encode(), arguments))


FLUSH = octets(Execution.Flush())


def described(peer: RawClient, name: str, channel: int = 1) -> Exchange.QueryOk:
    """Ask for an exchange."""
    peer.say(channel, exchange_query(name))
    return read_description(peer, channel)


def read_description(peer: RawClient, channel: int = 1) -> Exchange.QueryOk:
    return Exchange.QueryOk().decode(peer.wait(methods.ExchangeBindOk.KEY, channel=channel).payload[4:])


def bits(peer: RawClient, query: bytes, channel: int = 1) -> list[str]:
    """Ask for a binding, and return the names of the bits that are set."""
    peer.say(channel, query)
    answer = Binding.QueryOk().decode(peer.wait(methods.BindingQueryOk.KEY, channel=channel).payload[4:])
    return [name for name, value in vars(answer).items() if value]


def mark(peer: RawClient, channel: int = 1) -> int:
    """Send execution.flush, and return the mark of the answer."""
    peer.say(channel, FLUSH)
    return read_mark(peer, channel)


def read_mark(peer: RawClient, channel: int = 1) -> int:
    frame = peer.wait(methods.ExecutionComplete.KEY, channel=channel)
    return Execution.Complete().decode(frame.payload[4:]).cumulative_execution_mark


def refusal(peer: RawClient, *payloads: bytes, channel: int = 1) -> methods.ChannelClose:
    """The channel.close of the server. Then the channel is opened again, as the connection must stay open."""
    peer.say(channel, *payloads)
    close = peer.channel_end(channel)
    peer.say(channel, methods.ChannelCloseOk().encode())
    peer.open(channel)
    return close


# -- exchange.query


def test_an_exchange_is_described(peer: RawClient, there: Names) -> None:
    """query-ok: "The type of the exchange", "the durability", "not known", "arguments"; these are complete."""
    found = described(peer, there.exchange)
    assert (found.kind, found.durable, found.not_found) == (b"headers", True, False)
    number, truth = (5).to_bytes(8, "big"), b"\x01"
    nested = tables.entry(b"a", b"A", b"l" + (1).to_bytes(8, "big") + b"S" + tables.put_long(b"z"))
    assert {entry[:3] for entry in tables.entries(found.arguments)} == {
        (b"alternate-exchange", b"S", b"amq.fanout"),
        (b"n", b"l", number),
        (b"b", b"t", truth),
        (b"t", b"F", nested),
    }
    gone = described(peer, f"{there.exchange}-not")
    assert (gone.kind, gone.durable, gone.not_found, gone.arguments) == (b"", False, True, b"")


def test_a_transient_exchange_is_reported_as_not_durable(peer: RawClient, rabbitmq: RabbitNode) -> None:
    """durable: "if set the exchange is durable"."""
    name = f"transient-{secrets.token_hex(4)}"
    with rabbitmq.channel() as channel:
        channel.exchange_declare(name, "fanout", auto_delete=True)
        found = described(peer, name)
        channel.exchange_delete(name)
    assert (found.kind, found.durable, found.not_found) == (b"fanout", False, False)


def test_the_default_exchange_is_implied(peer: RawClient) -> None:
    """name: "If not specified explicitly the default exchange is implied"."""
    found = described(peer, "")
    assert (found.kind, found.durable, found.not_found, found.arguments) == (b"direct", True, False, b"")


@pytest.mark.parametrize("name", [".", "..", "a/b", "%2F", "\u00fc?x=1#y"])
def test_a_name_is_a_name_and_no_path(peer: RawClient, rabbitmq: RabbitNode, name: str) -> None:
    """No name of an exchange makes dtx ask the management API for anything else."""
    with rabbitmq.channel() as channel:
        channel.exchange_declare(name, "topic")
        peer.say(1, exchange_query(name))
        answer = peer.frame()
        channel.exchange_delete(name)
    assert answer is not None
    if name in (".", ".."):  # the API cannot name these
        assert (answer.key, methods.ChannelClose.decode(answer.payload).reply_code) == (methods.ChannelClose.KEY, 540)
    else:
        assert Exchange.QueryOk().decode(answer.payload[4:]).kind == b"topic"


# -- binding.query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (lambda n: binding_query(n.exchange), []),
        (lambda n: binding_query(n.exchange, n.queue), []),
        (lambda n: binding_query(n.exchange, n.queue, "k"), []),
        (lambda n: binding_query(n.exchange, n.queue, "k", K), []),
        (lambda n: binding_query(n.exchange, "", "l"), []),
        (lambda n: binding_query("nope"), ["exchange_not_found"]),
        (lambda n: binding_query(n.exchange, "nope"), ["queue_not_found"]),
        (lambda n: binding_query("nope", "nope", "k"), ["exchange_not_found", "queue_not_found"]),
        (lambda n: binding_query("amq.direct", n.queue), ["queue_not_matched"]),
        (
            lambda n: binding_query("amq.direct", n.queue, "k", K),
            ["queue_not_matched", "key_not_matched", "args_not_matched"],
        ),
        (lambda n: binding_query(n.exchange, n.queue, "l"), ["key_not_matched"]),
        (lambda n: binding_query(n.exchange, n.other, "l", K), ["args_not_matched"]),  # there a is true, not 1
        (lambda n: binding_query("", n.queue), []),
        (lambda n: binding_query("", n.queue, n.queue), []),
        (lambda n: binding_query("", n.queue, "k"), ["key_not_matched"]),
        (lambda n: binding_query("", "", n.other), []),
        (lambda n: binding_query("", "", "nope"), ["key_not_matched"]),
        (lambda n: binding_query("", n.queue, "", K), ["args_not_matched"]),
        (lambda n: binding_query("", "nope"), ["queue_not_found"]),
    ],
)
def test_a_binding_is_searched_for(
    peer: RawClient, there: Names, query: Callable[[Names], bytes], expected: Sequence[str]
) -> None:
    """query-ok sets a bit for each part that does not exist, and no bit if the binding exists."""
    assert bits(peer, query(there)) == expected


# -- tickets

QUERIES = [octets(Exchange.Query(b"", 1)), octets(Binding.Query(ticket=1))]
"""Queries with ticket 1, which RabbitMQ gives to every client."""
BOTH_CHANNELS = pytest.mark.parametrize("selected", [False, True], ids=["a channel that passes", "a selected channel"])


@BOTH_CHANNELS
@pytest.mark.parametrize("query", QUERIES, ids=["exchange", "binding"])
def test_a_ticket_that_the_channel_was_not_given_is_refused(peer: RawClient, selected: bool, query: bytes) -> None:
    """ticket: "A valid ticket should be provided", on-failure "access-refused"."""
    if selected:
        peer.say(1, DtxSelect().encode())
        peer.wait(DtxSelectOk.KEY)
    close = refusal(peer, query)
    assert (close.reply_code, close.failed) == (403, int.from_bytes(query[:4], "big"))
    assert b"with ticket 1, which this channel was not given" in close.reply_text


@BOTH_CHANNELS
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_the_ticket_of_access_request_will_do(peer: RawClient, selected: bool, first: bool) -> None:
    """The ticket is requested before or after the channel is selected."""
    request = methods.AccessRequest.HEAD + b"\x05realm\x1f"
    selects = [DtxSelect().encode()] if selected else []
    peer.say(1, *([request, *selects] if first else [*selects, request]))
    answers = {DtxSelectOk.KEY, methods.AccessRequestOk.KEY} if selected else {methods.AccessRequestOk.KEY}
    for _ in range(len(answers)):
        answers.remove(peer.wait(*answers).key)
    peer.say(1, *QUERIES)
    peer.wait(methods.ExchangeBindOk.KEY)
    peer.wait(methods.BindingQueryOk.KEY)


# -- the order of things


@pytest.mark.parametrize("selected", [False, True], ids=["a channel that passes", "a selected channel"])
@pytest.mark.parametrize("number", [1, 1022], ids=["the first channel", "the last channel"])
def test_a_query_has_its_place_between_other_methods(service: DtxService, selected: bool, number: int) -> None:
    """Earlier methods are done before a query, later ones after it. Answers come in the same order."""
    name = f"order-{secrets.token_hex(4)}".encode()
    declare = methods.ExchangeDeclare.HEAD + b"\x00\x00" + tables.put_short(name)
    declare += b"\x05topic\x00\x00\x00\x00\x00"
    delete = methods.ExchangeDelete.HEAD + b"\x00\x00" + tables.put_short(name) + b"\x00"
    flow = methods.ChannelFlow.HEAD + b"\x01"
    ask = exchange_query(name.decode())
    with RawClient(service.url()) as peer:
        peer.log_in()
        peer.open(number)
        if selected:
            peer.say(number, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
        peer.say(number, ask, declare, flow, ask, flow, delete, ask, binding_query(name.decode()), declare, ask, delete)
        answers: list[object] = []
        while len(answers) < 11:
            frame = peer.frame()
            assert frame is not None
            if frame.key == methods.ExchangeBindOk.KEY:
                answers.append(Exchange.QueryOk().decode(frame.payload[4:]).kind or "not found")
            else:
                answers.append(frame.key)
        assert answers == [
            *(
                "not found",
                methods.ExchangeDeclareOk.KEY,
                methods.ChannelFlowOk.KEY,
                b"topic",
                methods.ChannelFlowOk.KEY,
            ),
            *(methods.ExchangeDeleteOk.KEY, "not found", methods.BindingQueryOk.KEY),
            *(methods.ExchangeDeclareOk.KEY, b"topic", methods.ExchangeDeleteOk.KEY),
        ]


def test_a_query_may_come_within_a_branch_and_between_messages(peer: RawClient, there: Names) -> None:
    """The query is no work of the branch. The messages before and after it are."""
    xid = new_xid()
    peer.say(1, DtxSelect().encode(), DtxStart(xid=xid).encode())
    peer.send_raw(message(1, there.queue.encode(), b"one"))
    peer.say(1, exchange_query(there.exchange))
    peer.send_raw(message(1, there.queue.encode(), b"two"))
    peer.say(1, DtxEnd(xid=xid, fail=True).encode())
    assert read_description(peer).kind == b"headers"
    peer.wait(DtxEndOk.KEY)


def test_a_query_behind_a_method_that_fails_is_not_answered(peer: RawClient, there: Names) -> None:
    """The channel is closed by then. The connection stays open."""
    declare = methods.QueueDeclare.HEAD + b"\x00\x00\x04nope\x01\x00\x00\x00\x00"
    assert refusal(peer, declare, exchange_query(there.exchange), exchange_query("")).reply_code == 404
    assert described(peer, there.exchange).kind == b"headers"


@pytest.mark.parametrize("selected", [False, True], ids=["a channel that passes", "a selected channel"])
def test_a_client_may_close_its_channel_behind_a_query(peer: RawClient, there: Names, selected: bool) -> None:
    """It does not wait for the answer. dtx sends nothing on a closed channel: the broker would close the connection."""
    if selected:
        peer.say(1, DtxSelect().encode())
        peer.wait(DtxSelectOk.KEY)
    peer.say(1, exchange_query(there.exchange), methods.ChannelClose(200, b"").encode())
    while (frame := peer.frame()) is not None and frame.key != methods.ChannelCloseOk.KEY:
        assert frame.key == methods.ExchangeBindOk.KEY
    assert frame is not None
    peer.open(1)
    assert described(peer, there.exchange).kind == b"headers"


# -- permissions


@pytest.mark.parametrize(
    ("query", "read", "write", "code"),
    [
        (lambda n: exchange_query(n.exchange), "^x-", "^$", 0),
        (lambda n: exchange_query(n.exchange), "^$", ".*", 403),
        (lambda n: exchange_query("nope"), "^x-", ".*", 403),
        (lambda n: binding_query(n.exchange, n.queue), "^x-", "^q-", 0),
        (lambda n: binding_query(n.exchange, n.queue), "^(x|q)-", "^$", 0),
        (lambda n: binding_query(n.exchange, n.queue), "^x-", "^$", 403),
        (lambda n: binding_query(n.exchange, "nope"), "^x-", "^$", 403),
        (lambda n: binding_query(n.exchange, n.queue), "^q-", "^q-", 403),
        (lambda n: binding_query("", n.queue), "^q-", "^$", 0),
        (lambda n: binding_query("", n.queue), "^x-", "^$", 403),
        (lambda n: binding_query("", "", n.queue), "^x-", "^$", 403),
        (lambda n: binding_query("", "", "nope"), "^x-", "^$", 403),
        (lambda n: exchange_query(""), "^$", "^$", 0),
    ],
)
def test_a_query_without_permission_reveals_nothing(
    service: DtxService,
    rabbitmq: RabbitNode,
    there: Names,
    query: Callable[[Names], bytes],
    read: str,
    write: str,
    code: int,
) -> None:
    """An answer would reveal what the user may not read. The refusal is the same, whether it exists or not."""
    user = f"user-{secrets.token_hex(4)}"
    rabbitmq.add_user(user, configure="^$", write=write, read=read)
    try:
        with logged_in(service.url(user)) as peer:
            peer.say(1, query(there))
            answer = peer.frame()
    finally:
        rabbitmq.delete_user(user)
    assert answer is not None
    if code:
        close = methods.ChannelClose.decode(answer.payload)
        assert (answer.key, close.reply_code) == (methods.ChannelClose.KEY, code)
        assert b"refused for user" in close.reply_text
    else:
        assert answer.key in (methods.ExchangeBindOk.KEY, methods.BindingQueryOk.KEY)


@pytest.mark.parametrize("trouble", ["no administrator", "nobody there", "another broker's"])
def test_without_a_usable_management_api_the_refusal_names_the_remedy(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, trouble: str
) -> None:
    """540, with the name of the setting. The connection stays open, and the order of its methods stays correct."""
    with ExitStack() as stack:
        match trouble:
            case "no administrator":
                rabbitmq.add_user("watcher", tags="monitoring")
                stack.callback(rabbitmq.delete_user, "watcher")
                url = rabbitmq.management_url.replace("//", "//watcher:watcher@")
                words = "401"
            case "nobody there":
                url, words = "http://127.0.0.1:1", "cannot be asked"
            case _:
                other = stack.enter_context(RabbitNode())
                url, words = other.management_url, "another broker"
        service = dtx_service("--management", url)
        with logged_in(service.url()) as peer:
            for query in (exchange_query("amq.topic"), binding_query("amq.topic")):
                close = refusal(peer, query)
                assert close.reply_code == 540
                assert b"--management" in close.reply_text
                assert b"administrator" in close.reply_text
                assert words.encode() in close.reply_text
                assert b"http" not in close.reply_text  # clients do not learn the URL
            assert mark(peer) == 0
            assert described(peer, "").kind == b"direct"


# -- class execution


def test_a_flush_is_answered_when_all_has_been_done(peer: RawClient, rabbitmq: RabbitNode) -> None:
    """execution.complete: "All ids below this mark have been executed"."""
    queue = f"flush-{secrets.token_hex(4)}"
    declare = methods.QueueDeclare.HEAD + b"\x00\x00" + tables.put_short(queue.encode())
    declare += b"\x10\x00\x00\x00\x00"  # no-wait
    assert mark(peer) == 0
    peer.say(1, declare)
    peer.send_raw(message(1, queue.encode(), b"one" * 100_000))
    peer.say(1, FLUSH, exchange_query("amq.topic"), FLUSH)
    assert read_mark(peer) == 2
    assert read_mark(peer) == 3
    with rabbitmq.channel() as channel:
        assert channel.queue_delete(queue).method.message_count == 1


def test_a_selected_channel_counts_each_command_once(peer: RawClient, there: Names) -> None:
    """Also commands that wait for earlier ones: a message, then a get."""
    peer.say(1, DtxSelect().encode())
    peer.send_raw(message(1, there.other.encode(), b"one"))
    get = methods.BasicGet(there.other.encode()).encode()
    peer.say(1, get)
    peer.send_raw(message(1, there.other.encode(), b"two"))
    peer.say(1, FLUSH, get, FLUSH)
    peer.wait(methods.BasicGetOk.KEY)
    assert read_mark(peer) == 4
    peer.wait(methods.BasicGetOk.KEY)
    assert read_mark(peer) == 5
    peer.say(1, methods.BasicAck(1).encode(), methods.BasicAck(2).encode())
    assert mark(peer) == 7


def test_a_channel_whose_commands_passed_unseen_cannot_be_counted(peer: RawClient) -> None:
    """The mark would be wrong, so dtx gives none."""
    qos = methods.BasicQos.HEAD + bytes(7)
    close = refusal(peer, qos, FLUSH)
    assert close.reply_code == 540
    assert b"send one execution.flush before anything else" in close.reply_text


def test_clients_of_amqp_0_9_may_flush_at_any_time(service: DtxService) -> None:
    """The class belongs to AMQP 0-9, so dtx counts all commands of these connections."""
    with RawClient(service.url()) as peer:
        peer.send_raw(Protocol.AMQP_0_9.value)
        peer.wait(methods.ConnectionStart.KEY)
        peer.say(0, peer.start_ok())
        tune = peer.wait(methods.ConnectionTune.KEY)
        peer.say(0, b"".join((methods.ConnectionTuneOk.HEAD, tune.payload[4:])))
        peer.say(0, methods.ConnectionOpen.HEAD + b"\x01/\x00\x00")
        peer.wait(methods.ConnectionOpenOk.KEY)
        peer.open(1)
        qos = methods.BasicQos.HEAD + bytes(7)
        peer.say(1, qos, qos)
        assert mark(peer) == 2


# -- methods that must not reach the broker


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (octets(Binding.QueryOk()), 503),
        (octets(Exchange.QueryOk()), 503),
        ((0x0082_0063).to_bytes(4, "big"), 540),
        ((0x008C_0063).to_bytes(4, "big"), 540),
    ],
)
def test_methods_that_no_client_sends_close_the_channel_alone(peer: RawClient, payload: bytes, code: int) -> None:
    """RabbitMQ would close the connection with all its channels."""
    peer.open(2)
    assert refusal(peer, payload).reply_code == code
    assert described(peer, "", channel=2).kind == b"direct"


def test_a_client_may_report_its_progress(peer: RawClient) -> None:
    """execution.complete: chassis "server" MUST implement it; there is no answer to it."""
    peer.say(1, octets(Execution.Complete(7)))
    assert described(peer, "").kind == b"direct"


@pytest.mark.parametrize(
    "payload",
    [
        exchange_query("x") + b"\x00",
        exchange_query("x")[:-1],
        methods.ExchangeBind.HEAD,
        binding_query("x")[:-1],
        binding_query("x", arguments=b"\x01a?"),
        FLUSH + b"\x00",
    ],
)
def test_malformed_queries_end_the_connection_with_502(peer: RawClient, payload: bytes) -> None:
    """syntax-error: "illegal values for one or more fields"."""
    peer.send_raw(method_frame(1, payload))
    close = peer.end()
    assert close is not None
    assert close.reply_code == 502


def test_exchange_bind_passes(peer: RawClient, there: Names) -> None:
    """exchange.bind has the method number of exchange.query."""
    bind = methods.ExchangeBind.HEAD + b"\x00\x00" + tables.put_short(b"amq.direct")
    bind += tables.put_short(there.exchange.encode()) + b"\x01m" + b"\x00" + tables.put_long(K)
    peer.say(1, bind)
    assert peer.wait(methods.ExchangeBindOk.KEY).payload[4:] == b""
    assert bits(peer, binding_query(there.exchange, "", "m", K)) == []


def test_contents_are_no_commands() -> None:
    """In the key of header and body frames, the frame type has the place of the class."""
    assert not any(map(queries.is_command, (2, 3, methods.ChannelFlow.KEY, methods.ExecutionFlush.KEY)))
    assert queries.is_command(methods.BasicPublish.KEY)
