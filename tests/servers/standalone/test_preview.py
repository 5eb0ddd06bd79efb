"""Other classes of the preview without a broker, byte by byte: tickets, exchange.query, binding.query, execution."""

import secrets
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxRollbackOk,
    DtxSelect,
    DtxSelectOk,
    DtxSetTimeout,
    DtxStart,
    DtxStartOk,
)
from dtx.wire.amqp09.tables import put_long, put_short
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.postgres import PostgresServer
from tests.support.preview import with_ticket
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService
from tests.support.topology import table
from tests.support.users import StandaloneUsers

FLUSH: Final = methods.ExecutionFlush().encode()
ACCESS: Final = methods.AccessRequest.HEAD + put_short(b"/data") + b"\x1c"
"""access.request for the realm /data: active, write, read."""
K: Final = table({"a": 1})


class Names(NamedTuple):
    """*exchange* is bound to *queue* by k with a=1, to *other* by l, and to the exchange amq.fanout by e."""

    exchange: bytes
    queue: bytes
    other: bytes


@pytest.fixture
def peer(standalone: DtxService) -> Iterator[RawClient]:
    with logged_in(standalone.url()) as connected:
        yield connected


@pytest.fixture
def names(peer: RawClient) -> Names:
    made = Names(*(f"{word}-{secrets.token_hex(4)}".encode() for word in ("exchange", "queue", "other")))
    declare = methods.ExchangeDeclare.HEAD + b"\0\0" + put_short(made.exchange) + put_short(b"topic")
    # auto-delete: deleted with its last binding; the exclusive queues end with the connection
    peer.say(1, declare + b"\x04" + put_long(table({"alternate-exchange": "amq.fanout"})))
    for queue, key, arguments in ((made.queue, b"k", K), (made.other, b"l", b"")):
        peer.say(1, methods.QueueDeclare(queue, exclusive=True).encode())
        peer.say(1, methods.QueueBind(queue, made.exchange, key, arguments=arguments).encode())
    link = methods.ExchangeBind.HEAD + b"\0\0"
    peer.say(1, link + put_short(b"amq.fanout") + put_short(made.exchange) + put_short(b"e") + b"\0" + put_long(b""))
    peer.wait(methods.ExchangeBindOk.KEY)
    return made


def exchange_query(name: bytes, ticket: int = 0) -> bytes:
    return struct.pack(">IH", methods.ExchangeBind.KEY, ticket) + put_short(name)


def binding_query(
    exchange: bytes = b"", queue: bytes = b"", key: bytes = b"", arguments: bytes = b"", ticket: int = 0
) -> bytes:
    words = put_short(exchange) + put_short(queue) + put_short(key)
    return struct.pack(">IH", methods.BindingQuery.KEY, ticket) + words + put_long(arguments)


def asked(peer: RawClient, payload: bytes, answer: int) -> bytes:
    """The encoded arguments of the answer."""
    peer.say(1, payload)
    return peer.wait(answer, channel=1).payload[4:]


def refusal(peer: RawClient, *payloads: bytes) -> methods.ChannelClose:
    """The channel.close that answers on channel 1, which is then opened again."""
    peer.say(1, *payloads)
    close = peer.channel_end(1)
    peer.say(1, methods.ChannelCloseOk().encode())
    peer.open(1)
    return close


# -- exchange.query ----------------------------------------------------------------------------------------------------

DURABLE, NOT_FOUND = b"\x01", b"\x02"


def test_an_exchange_is_described(peer: RawClient, names: Names) -> None:
    """exchange.query-ok: type, durable, not-found, arguments; "if not specified … the default exchange is implied"."""
    arguments = put_long(table({"alternate-exchange": "amq.fanout"}))
    for name, answer in (
        (names.exchange, put_short(b"topic") + b"\x00" + arguments),
        (b"amq.headers", put_short(b"headers") + DURABLE + put_long(b"")),
        (b"", put_short(b"direct") + DURABLE + put_long(b"")),
        # "will be empty if the exchange is not found", and durable "will not be set"
        (b"nope", put_short(b"") + NOT_FOUND + put_long(b"")),
    ):
        assert asked(peer, exchange_query(name), methods.ExchangeBindOk.KEY) == answer, name


# -- binding.query -----------------------------------------------------------------------------------------------------

NO_EXCHANGE, NO_QUEUE, QUEUE_UNMATCHED, KEY_UNMATCHED, ARGUMENTS_UNMATCHED = (1 << bit for bit in range(5))
QUERIES: Final[list[tuple[Callable[[Names], bytes], int]]] = [
    (lambda n: binding_query(n.exchange), 0),
    (lambda n: binding_query(n.exchange, n.queue), 0),
    (lambda n: binding_query(n.exchange, n.queue, b"k"), 0),
    (lambda n: binding_query(n.exchange, n.queue, b"k", K), 0),
    (lambda n: binding_query(n.exchange, b"", b"l"), 0),
    (lambda n: binding_query(n.exchange, b"", b"e"), 0),
    (lambda n: binding_query(n.exchange, b"", b"", K), 0),
    (lambda n: binding_query(b"", n.queue, n.queue), 0),
    (lambda n: binding_query(b"nope"), NO_EXCHANGE),
    (lambda n: binding_query(n.exchange, b"nope"), NO_QUEUE),
    (lambda n: binding_query(b"nope", b"nope", b"k"), NO_EXCHANGE | NO_QUEUE),
    (lambda n: binding_query(b"amq.direct", n.queue), QUEUE_UNMATCHED),
    (lambda n: binding_query(n.exchange, n.queue, b"l"), KEY_UNMATCHED),
    (lambda n: binding_query(n.exchange, n.other, b"l", K), ARGUMENTS_UNMATCHED),
    (lambda n: binding_query(n.exchange, n.queue, b"l", table({"a": 2})), KEY_UNMATCHED | ARGUMENTS_UNMATCHED),
    (lambda n: binding_query(b"amq.direct", n.queue, b"k", K), QUEUE_UNMATCHED | KEY_UNMATCHED | ARGUMENTS_UNMATCHED),
]


def test_a_binding_is_searched_for(peer: RawClient, names: Names) -> None:
    """binding.query-ok: one bit for each part of the query that does not exist or does not match."""
    for query, bits in QUERIES:
        payload = query(names)
        assert asked(peer, payload, methods.BindingQueryOk.KEY) == bytes((bits,)), payload


@pytest.mark.parametrize(
    ("query", "read", "write", "code"),
    [
        (lambda n: exchange_query(n.exchange), "^exchange-", "", 0),
        (lambda n: exchange_query(n.exchange), "", ".*", 403),
        (lambda n: exchange_query(b"nope"), "^exchange-", ".*", 403),
        (lambda _: exchange_query(b""), "", "", 0),
        (lambda n: binding_query(n.exchange, n.queue), "^exchange-", "^queue-", 0),
        (lambda n: binding_query(n.exchange, n.queue), "^(exchange|queue)-", "", 0),
        (lambda n: binding_query(n.exchange, n.queue), "^exchange-", "", 403),
        (lambda n: binding_query(n.exchange, b"nope"), "^exchange-", "", 403),
        (lambda n: binding_query(n.exchange, n.queue), "^queue-", "^queue-", 403),
        (lambda n: binding_query(b"", n.queue), "^queue-", "", 0),
        (lambda n: binding_query(b"", n.queue), "^exchange-", "", 403),
        (lambda n: binding_query(b"", b"", n.queue), "^exchange-", "", 403),
        (lambda _: binding_query(b"", b"", b"nope"), "^exchange-", "", 403),
    ],
)
def test_a_query_without_permission_reveals_nothing(
    standalone: DtxService, names: Names, query: Callable[[Names], bytes], read: str, write: str, code: int
) -> None:
    """The refusal does not show whether the exchange or queue exists; the rules are those in front of a broker."""
    users, user = StandaloneUsers(standalone), f"user-{secrets.token_hex(4)}"
    users.add(user)
    users.permit(user, configure="", write=write, read=read)
    with logged_in(standalone.url(user)) as peer:
        peer.say(1, query(names))
        answer = peer.frame()
    users.remove(user)
    assert answer is not None
    if code:
        close = methods.ChannelClose.decode(answer.payload)
        assert (answer.key, close.reply_code) == (methods.ChannelClose.KEY, code)
        assert b"refused for user" in close.reply_text
    else:
        assert answer.key in (methods.ExchangeBindOk.KEY, methods.BindingQueryOk.KEY)


def test_queries_keep_their_order(peer: RawClient, names: Names) -> None:
    """Each query pipelined between declarations sees only the declarations before it."""
    delete = methods.QueueDelete(names.queue).encode()
    query = binding_query(names.exchange, names.queue)
    declare = methods.QueueDeclare(names.queue, durable=True).encode()
    peer.say(1, query, delete, query, declare, query, delete, exchange_query(names.exchange))
    answers = [peer.frame() for _ in range(7)]
    assert [answer.payload[4:] for answer in answers if answer and answer.key == methods.BindingQueryOk.KEY] == [
        b"\x00",
        bytes((NO_QUEUE,)),
        bytes((QUEUE_UNMATCHED,)),
    ]
    assert answers[-1] is not None
    assert answers[-1].key == methods.ExchangeBindOk.KEY


def test_truncated_queries_end_the_connection(standalone: DtxService) -> None:
    for payload in (binding_query(b"x")[:-1], binding_query(b"x") + b"\0", exchange_query(b"x")[:-1]):
        with logged_in(standalone.url()) as peer:
            peer.say(1, payload)
            end = peer.end()
            assert end is not None
            assert end.reply_code == 502


# -- execution ---------------------------------------------------------------------------------------------------------


def test_a_flush_returns_the_number_of_executed_commands(peer: RawClient) -> None:
    """execution.complete: "the low-water mark for executed command-ids"."""
    queue = f"flush-{secrets.token_hex(4)}".encode()
    assert asked(peer, FLUSH, methods.ExecutionComplete.KEY) == bytes(4)
    peer.say(1, methods.QueueDeclare(queue, exclusive=True).encode())
    for number in range(3):
        peer.send_raw(message(1, queue, b"%d" % number))
    peer.say(1, DtxSelect().encode(), FLUSH, methods.QueueDeclare(queue, passive=True).encode(), FLUSH)
    assert peer.wait(methods.ExecutionComplete.KEY).payload[4:] == struct.pack(">I", 5)
    declared = methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload)
    assert declared.message_count == 3
    assert peer.wait(methods.ExecutionComplete.KEY).payload[4:] == struct.pack(">I", 6)


def test_commands_are_counted_on_their_channel(peer: RawClient) -> None:
    peer.open(2)
    peer.say(1, methods.BasicQos(0, 1).encode(), methods.BasicQos(0, 2).encode(), FLUSH)
    assert peer.wait(methods.ExecutionComplete.KEY, channel=1).payload[4:] == struct.pack(">I", 2)
    peer.say(2, FLUSH)
    assert peer.wait(methods.ExecutionComplete.KEY, channel=2).payload[4:] == bytes(4)


def test_a_flush_in_a_branch_waits_for_earlier_commands(peer: RawClient) -> None:
    xid = new_xid()
    calls: list[DtxCall] = [DtxSelect(), DtxStart(xid=xid), DtxEnd(xid=xid), DtxRollback(xid=xid)]
    peer.say(1, *(call.encode() for call in calls), FLUSH)
    answers = [peer.frame() for _ in range(5)]
    assert [answer.key for answer in answers if answer] == [
        DtxSelectOk.KEY,
        DtxStartOk.KEY,
        DtxEndOk.KEY,
        DtxRollbackOk.KEY,
        methods.ExecutionComplete.KEY,
    ]
    assert answers[-1] is not None
    assert answers[-1].payload[4:] == struct.pack(">I", 4)


# -- access tickets ----------------------------------------------------------------------------------------------------

TICKETED: Final[list[Callable[[Xid], DtxCall]]] = [
    lambda xid: DtxStart(xid=xid),
    lambda xid: DtxEnd(xid=xid),
    lambda xid: DtxPrepare(xid=xid),
    lambda xid: DtxCommit(xid=xid),
    lambda xid: DtxRollback(xid=xid),
    lambda xid: DtxForget(xid=xid),
    lambda xid: DtxSetTimeout(xid=xid, timeout=1),
    lambda _: DtxRecover(startscan=True, endscan=True),
]
QUERIES_WITH: Final[list[Callable[[int], bytes]]] = [
    lambda ticket: exchange_query(b"amq.direct", ticket),
    lambda ticket: binding_query(b"amq.direct", ticket=ticket),
]


@pytest.fixture(scope="module")
def strict(postgres: PostgresServer) -> Iterator[DtxService]:
    """A service with --require-tickets."""
    database = postgres.create_database()
    with DtxService(database=database, options=("--require-tickets",)) as running:
        yield running
    postgres.drop_database(database)


def granted(peer: RawClient) -> int:
    """access.request: the ticket."""
    return int.from_bytes(asked(peer, ACCESS, methods.AccessRequestOk.KEY), "big")


def ticket_refused(close: methods.ChannelClose, name: str) -> bool:
    return close.reply_code == 403 and close.reply_text.startswith(b"ACCESS_REFUSED - " + name.encode())


def test_without_a_ticket_nothing_of_the_preview_is_done(strict: DtxService) -> None:
    """Rule validity: "a valid ticket should be provided", on-failure="access-refused"; the connection stays open."""
    xid = new_xid()
    with logged_in(strict.url()) as peer:
        for ticket in (0, 1, 99):
            for make in TICKETED:
                close = refusal(peer, DtxSelect().encode(), with_ticket(make(xid), ticket))
                assert ticket_refused(close, "dtx-"), (ticket, make(xid))
            for query in QUERIES_WITH:
                assert refusal(peer, query(ticket)).reply_code == 403


def test_with_its_ticket_a_channel_works(strict: DtxService) -> None:
    xid = new_xid()
    queue = f"tickets-{secrets.token_hex(4)}".encode()
    with logged_in(strict.url()) as peer:
        ticket = granted(peer)
        assert ticket
        for query in QUERIES_WITH:
            peer.say(1, query(ticket))
            peer.wait(methods.ExchangeBindOk.KEY, methods.BindingQueryOk.KEY)
        peer.say(1, methods.QueueDeclare(queue, exclusive=True).encode(), DtxSelect().encode())
        peer.say(1, with_ticket(DtxStart(xid=xid), ticket))
        peer.send_raw(message(1, queue, b"one"))
        calls: list[DtxCall] = [DtxSetTimeout(xid=xid, timeout=5), DtxEnd(xid=xid), DtxPrepare(xid=xid)]
        calls += [DtxRecover(startscan=True, endscan=True), DtxCommit(xid=xid)]
        peer.say(1, *(with_ticket(call, ticket) for call in calls))
        peer.wait(DtxCommitOk.KEY)
        peer.say(1, methods.QueuePurge(queue).encode())
        assert peer.wait(methods.QueuePurgeOk.KEY).payload[4:] == struct.pack(">I", 1)


def test_a_ticket_is_for_its_channel(strict: DtxService) -> None:
    with logged_in(strict.url()) as peer:
        ticket = granted(peer)
        peer.open(2)
        peer.say(2, exchange_query(b"amq.direct", ticket))
        assert peer.channel_end(2).reply_code == 403
        peer.say(1, exchange_query(b"amq.direct", ticket))
        peer.wait(methods.ExchangeBindOk.KEY)


def test_select_and_get_timeout_have_no_ticket(strict: DtxService) -> None:
    """In the XML neither method has the field ticket."""
    with logged_in(strict.url()) as peer:
        peer.say(1, DtxSelect().encode())
        peer.wait(DtxSelectOk.KEY)
        assert refusal(peer, DtxGetTimeout(xid=new_xid()).encode()).reply_code == 404


def test_without_required_tickets_only_ticket_0_is_accepted(peer: RawClient) -> None:
    for query in QUERIES_WITH:
        peer.say(1, query(0))
        peer.wait(methods.ExchangeBindOk.KEY, methods.BindingQueryOk.KEY)
        assert refusal(peer, query(7)).reply_code == 403
    start = DtxStart(xid=new_xid())
    assert ticket_refused(refusal(peer, DtxSelect().encode(), with_ticket(start, 7)), "dtx-demarcation.start")
