"""Links from exchanges: each has a queue of its own, bound as its address or a filter says."""

import secrets
from collections.abc import Iterator

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Durability,
    Error,
    ExpiryPolicy,
    Role,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described, Symbol
from tests.servers.amqp10.raw import Raw, body
from tests.support.broker import Mode, only_alongside
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService
from tests.support.users import RabbitUsers, StandaloneUsers, Users

TOPIC = "apache.org:legacy-amqp-topic-binding:string"
SELECTOR = "apache.org:selector-filter:string"
CLERK = "clerk-subscribing"


@pytest.fixture
def exchange(channel: BlockingChannel) -> Iterator[str]:
    """A fresh topic exchange."""
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.exchange_declare(name, "topic")
    yield name
    channel.connection.channel().exchange_delete(name)


@pytest.fixture
def users(mode: Mode, service: DtxService, request: pytest.FixtureRequest) -> Iterator[Users]:
    """The users of the service, with a clerk, to whom each test gives permissions."""
    made: Users = StandaloneUsers(service)
    if mode == "alongside":
        made = RabbitUsers(request.getfixturevalue("rabbitmq"))
    made.add(CLERK)
    yield made
    made.remove(CLERK)


def attached(raw: Raw, session: Session, address: str, **options: object) -> Source:
    """Attach a link with credit, and return its source."""
    _, source = raw.receiver(session, address, credit=10, name=f"from-{secrets.token_hex(4)}", **options)
    return source


def refusal(raw: Raw, session: Session, source: Source, *, credit: int = 0) -> Error:
    """The error with which a link from *source* is refused."""
    link = session.new_link(f"refused-{secrets.token_hex(4)}", Role.RECEIVER)
    link.attach(source=source, target=Target())
    if credit:
        link.grant(credit)
    error = raw.detached(link)
    assert error is not None
    return error


def filters(**named: tuple[str, str]) -> dict[str, Described]:
    """A filter set."""
    return {name: Described(Symbol(kind), value) for name, (kind, value) in named.items()}


def test_a_link_from_an_exchange_gets_messages_with_its_key(
    service: DtxService, channel: BlockingChannel, exchange: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        source = attached(raw, session, f"/exchanges/{exchange}/a.*")
        assert source.address == f"/exchanges/{exchange}/a.*"
        assert source.expiry_policy is ExpiryPolicy.LINK_DETACH  # dtx uses only this policy
        for key in ("a.b", "b.a", "a.c"):
            channel.basic_publish(exchange, key, key.encode(), BasicProperties(headers={"n": 1}))
        found = [raw.take() for _ in range(2)]
        assert [body(one) for one in found] == [b"a.b", b"a.c"]
        said = message.read(found[0].payload)
        assert said.message_annotations["x-exchange"] == exchange
        assert said.message_annotations["x-routing-key"] == "a.b"


def test_each_link_has_all_messages_for_itself(service: DtxService, channel: BlockingChannel, exchange: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        attached(raw, session, f"/exchanges/{exchange}")
        assert attached(raw, session, f"/exchanges/{exchange}", distribution_mode="copy").distribution_mode == "copy"
        channel.basic_publish(exchange, "any.thing", b"to both")
        assert [body(raw.take()) for _ in range(2)] == [b"to both"] * 2


def test_a_source_reports_the_filters_in_place(service: DtxService, channel: BlockingChannel, exchange: str) -> None:
    """3.5.3: "the sending endpoint sets the filter actually in place"."""
    asked = filters(subject=(TOPIC, "*.order"), selector=(SELECTOR, "n > 1"))
    with Raw(service) as raw:
        session = raw.opened().begin()
        source = attached(raw, session, f"/exchanges/{exchange}", filter=asked)
        assert source.filter == {"subject": asked["subject"]}
        channel.basic_publish(exchange, "new.bill", b"no")
        channel.basic_publish(exchange, "new.order", b"yes")
        assert body(raw.take()) == b"yes"


def test_a_queue_reports_that_it_applies_no_filter(service: DtxService, queue: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        assert attached(raw, session, queue, filter=filters(subject=(TOPIC, "a"))).filter is None
        error = refusal(raw, session, Source(address=queue, distribution_mode="copy"))
        assert (error.condition, "browsing" in str(error.description)) == ("amqp:not-implemented", True)


def test_every_type_of_exchange_is_a_source(service: DtxService, channel: BlockingChannel) -> None:
    headers = {"h": Described(Symbol("apache.org:legacy-amqp-headers-binding:map"), {"x-match": "any", "region": "eu"})}
    with Raw(service) as raw:
        session = raw.opened().begin()
        attached(raw, session, "/exchanges/amq.fanout")
        channel.basic_publish("amq.fanout", "any", b"fanout")
        assert body(raw.take()) == b"fanout"
        assert attached(raw, session, "/exchanges/amq.headers", filter=headers).filter == headers
        channel.basic_publish("amq.headers", "", b"us", BasicProperties(headers={"region": "us"}))
        channel.basic_publish("amq.headers", "", b"eu", BasicProperties(headers={"region": "eu"}))
        assert body(raw.take()) == b"eu"
        attached(raw, session, "/exchanges/amq.direct/k")
        channel.basic_publish("amq.direct", "k", b"direct")
        assert body(raw.take()) == b"direct"
        error = refusal(raw, session, Source(address="/exchanges/amq.direct"))
        assert (error.condition, "name a key" in str(error.description)) == ("amqp:precondition-failed", True)


def test_a_direct_exchange_of_ones_own_needs_a_key_too(service: DtxService, channel: BlockingChannel) -> None:
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.exchange_declare(name, "direct")
    with Raw(service) as raw:
        session = raw.opened().begin()
        assert refusal(raw, session, Source(address=f"/exchanges/{name}")).condition == "amqp:precondition-failed"
    channel.exchange_delete(name)


def test_messages_wait_for_credit_and_go_with_the_link(
    service: DtxService, channel: BlockingChannel, exchange: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, f"/exchanges/{exchange}/k", credit=1)
        for number in range(3):
            channel.basic_publish(exchange, "k", b"%d" % number)
        first = raw.take()
        session.dispose(Role.RECEIVER, [first.delivery_id], ACCEPTED, settled=True)
        link.grant(1)
        assert [body(first), body(raw.take())] == [b"0", b"1"]
        raw.detach(session, link)
        attached(raw, session, f"/exchanges/{exchange}/k")
        channel.basic_publish(exchange, "k", b"later")
        assert body(raw.take()) == b"later"


def test_nothing_is_left_of_a_link(service: DtxService, channel: BlockingChannel, exchange: str) -> None:
    """Its queue is deleted with the link or the connection, and then an exchange with auto-delete is deleted."""
    gone = f"{exchange}-auto"
    channel.exchange_declare(gone, "fanout", auto_delete=True)
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, f"/exchanges/{gone}", name="first")
        raw.receiver(session, f"/exchanges/{gone}", name="second")
        raw.detach(session, link)
        channel.exchange_declare(gone, passive=True)

    def is_gone() -> bool:
        with channel.connection.channel() as probe:
            try:
                probe.exchange_declare(gone, passive=True)
            except Exception:  # noqa: BLE001 - 404 closes the channel
                return True
        return False

    wait_until(is_gone)


@only_alongside
def test_nothing_is_left_of_a_link_that_the_broker_refuses(
    service: DtxService, rabbitmq: RabbitNode, users: Users
) -> None:
    """The queue was declared before its binding was refused."""
    users.permit(CLERK, "^amq.gen", "^amq.gen", "^amq.gen")

    def queues() -> set[str]:
        return {queue["name"] for queue in rabbitmq.api("GET", "/api/queues/%2F?columns=name")}

    with Raw(service, user=CLERK, password=CLERK) as raw:
        session = raw.opened().begin()
        before = queues()
        error = refusal(raw, session, Source(address="/exchanges/amq.topic/a.b"))
        assert error.condition == "amqp:unauthorized-access"
        wait_until(lambda: queues() <= before)


@pytest.mark.parametrize(
    "options",
    [{"durable": Durability.UNSETTLED_STATE}, {"expiry_policy": ExpiryPolicy.NEVER}, {"timeout": 60}],
    ids=["durable", "never", "timeout"],
)
def test_a_durable_subscription_is_a_queue(service: DtxService, options: dict[str, object]) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        error = refusal(raw, session, Source(address="/exchanges/amq.topic/a", **options))  # type: ignore[arg-type]
        assert error.condition == "amqp:not-implemented"
        assert "attach to /queues/NAME" in str(error.description)


def test_an_exchange_that_is_not_there_is_no_source(service: DtxService) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        for address in ("/exchanges/no-such-exchange", "/exchanges/no-such-exchange/key"):
            assert refusal(raw, session, Source(address=address)).condition == "amqp:not-found"


@pytest.mark.parametrize(
    ("configure", "write", "read"),
    [
        ("^$", "^amq.gen", "^amq.(gen|topic)"),
        ("^amq.gen", "^$", "^amq.(gen|topic)"),
        ("^amq.gen", "^amq.gen", "^amq.gen"),
        ("^amq.gen", "^amq.gen", "^amq.topic"),
    ],
)
def test_a_link_needs_permissions_for_declare_bind_and_consume(
    service: DtxService, users: Users, configure: str, write: str, read: str
) -> None:
    """Configure, write and read on a queue that the server names, and read on the exchange."""
    users.permit(CLERK, configure, write, read)
    with Raw(service, user=CLERK, password=CLERK) as raw:
        session = raw.opened().begin()
        error = refusal(raw, session, Source(address="/exchanges/amq.topic/a.b"), credit=1)
        assert error.condition == "amqp:unauthorized-access"


def test_a_link_needs_its_topic(service: DtxService, users: Users, channel: BlockingChannel) -> None:
    users.permit(CLERK, "^amq.gen", "^amq.gen", "^amq.(gen|topic)")
    users.permit_topic(CLERK, "amq.topic", read="^a")
    with Raw(service, user=CLERK, password=CLERK) as raw:
        session = raw.opened().begin()
        for address in ("/exchanges/amq.topic/b.a", "/exchanges/amq.topic"):
            assert refusal(raw, session, Source(address=address)).condition == "amqp:unauthorized-access"
        attached(raw, session, "/exchanges/amq.topic/a.b")
        channel.basic_publish("amq.topic", "a.b", b"mine")
        assert body(raw.take()) == b"mine"


def test_messages_acquired_from_an_exchange_are_retired_in_a_transaction(
    service: DtxService, channel: BlockingChannel, exchange: str, queue: str
) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        attached(raw, session, f"/exchanges/{exchange}/k")
        channel.basic_publish(exchange, "k", b"once")
        taken = raw.take()
        txn_id = raw.declare(session, control)
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [taken.delivery_id], state, settled=True)
        to = raw.sender(session, queue)
        raw.post(to, body(taken), txn_id, settled=True)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)
