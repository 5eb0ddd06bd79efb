"""Topic permissions of standalone mode and RabbitMQ: the same keys and operations get the same refusals."""

import secrets
from collections.abc import Iterator
from typing import Final

import pytest

from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import put_long, put_short
from tests.support.processes import wait_until
from tests.support.raw import message, session
from tests.support.topology import table
from tests.support.users import Users, outcome, refusal

TOPIC: Final = "amq.topic"
PATTERNS: Final = ("", ".*", "^a", r"^a\.b$", "b$", "^$", "^(a|c)", "^#$", r"\*")
KEYS: Final = ("", "a", "a.b", "b", "c.d.b", "#", "*", "a.*", "x")


def publish(key: str, exchange: str = TOPIC, raw: bytes = b"\x00\x00") -> bytes:
    return message(1, key.encode(), exchange=exchange.encode(), properties=raw)


def unbind(queue: str, exchange: str, key: str) -> bytes:
    names = put_short(queue.encode()) + put_short(exchange.encode()) + put_short(key.encode())
    return method_frame(1, methods.QueueUnbind.HEAD + b"\x00\x00" + names + put_long(b""))


def bind(queue: str, exchange: str, key: str) -> bytes:
    return method_frame(1, methods.QueueBind(queue.encode(), exchange.encode(), key.encode()).encode())


def link(key: int, destination: str, source: str, routing_key: str) -> bytes:
    names = b"".join(put_short(name.encode()) for name in (destination, source, routing_key))
    return method_frame(1, key.to_bytes(4, "big") + b"\x00\x00" + names + b"\x00" + put_long(b""))


@pytest.fixture
def queue(users: Users, alice: str) -> Iterator[str]:
    """A queue that alice declares and deletes after the test."""
    name = f"topics-{secrets.token_hex(4)}"
    with session(users.url(alice)) as client:
        client.open(1)
        client.say(1, methods.QueueDeclare(name.encode()).encode())
        client.read_method(1, methods.QueueDeclareOk.KEY)
        yield name
        client.say(1, methods.QueueDelete(name.encode()).encode())
        client.read_method(1, methods.QueueDeleteOk.KEY)


def codes(users: Users, alice: str, *frames: bytes) -> list[int]:
    with session(users.url(alice)) as client:
        return [outcome(client, each) for each in frames]


def test_a_user_without_topic_permissions_may_use_every_key(users: Users, alice: str, queue: str) -> None:
    """RabbitMQ, Topic Authorisation: "if there are no topic permissions … the operation is allowed"."""
    users.permit_topic(alice, "another.exchange", write="", read="")
    assert codes(users, alice, publish("a"), bind(queue, TOPIC, "a"), unbind(queue, TOPIC, "a")) == [0, 0, 0]


# Whether each pattern matches each key; the same for publishing and binding.
EXPECTED: Final = {
    (pattern, key): found
    for pattern, allowed in {
        "": {""},
        ".*": set(KEYS),
        "^a": {"a", "a.b", "a.*"},
        r"^a\.b$": {"a.b"},
        "b$": {"a.b", "b", "c.d.b"},
        "^$": {""},
        "^(a|c)": {"a", "a.b", "c.d.b", "a.*"},
        "^#$": {"#"},
        r"\*": {"*", "a.*"},
    }.items()
    for key in KEYS
    for found in [key in allowed]
}


def test_a_pattern_is_searched_in_the_routing_key(users: Users, alice: str, queue: str) -> None:
    """Topic Authorisation: "the routing key of a published message, or the binding key", by regular expression."""
    differences = []
    for pattern in PATTERNS:
        for permission in ("write", "read"):
            others = {"write": "", "read": ""} | {permission: pattern}
            users.permit_topic(alice, TOPIC, **others)
            with session(users.url(alice)) as client:
                for key in KEYS:
                    frames = publish(key) if permission == "write" else bind(queue, TOPIC, key)
                    code = outcome(client, frames)
                    if code != (0 if EXPECTED[pattern, key] else 403):
                        differences.append((pattern, permission, key, code))
    assert differences == []


def test_binding_and_unbinding_of_queues_and_exchanges_need_to_read(users: Users, alice: str, queue: str) -> None:
    users.permit_topic(alice, TOPIC, write="", read="^mine")
    for key, code in (("mine", 0), ("yours", 403)):
        operations = (
            bind(queue, TOPIC, key),
            unbind(queue, TOPIC, key),
            link(methods.ExchangeBind.KEY, "amq.fanout", TOPIC, key),
            link(methods.ExchangeUnbind.KEY, "amq.fanout", TOPIC, key),
        )
        assert codes(users, alice, *operations) == [code] * len(operations)
    # a topic exchange as destination needs no topic permission
    assert codes(users, alice, *(
        link(row.KEY, TOPIC, "amq.fanout", "yours") for row in (methods.ExchangeBind, methods.ExchangeUnbind)
    )) == [0, 0]  # fmt: skip


@pytest.mark.parametrize("exchange", ["amq.direct", "amq.fanout", "amq.headers", ""])
def test_topic_permissions_mean_nothing_to_other_exchanges(users: Users, alice: str, queue: str, exchange: str) -> None:
    users.permit_topic(alice, exchange or "amq.default", write="", read="")
    assert codes(users, alice, publish("a", exchange)) == [0]
    if exchange:
        assert codes(users, alice, bind(queue, exchange, "a"), unbind(queue, exchange, "a")) == [0, 0]


def test_topic_permissions_come_behind_those_on_the_exchange(users: Users, alice: str) -> None:
    users.permit_topic(alice, TOPIC)
    users.permit(alice, write="", read="")
    assert codes(users, alice, publish("a"), bind("nowhere", TOPIC, "a")) == [403, 403]


def test_patterns_contain_the_names_of_user_and_vhost(users: Users, alice: str) -> None:
    """Topic Authorisation: "variable expansion": {username} and {vhost}."""
    users.permit_topic(alice, TOPIC, write="^{username}[.]", read="")
    keys_of = (f"{alice}.x", "bob.x", "{username}.x")
    assert codes(users, alice, *map(publish, keys_of)) == [0, 403, 403]
    users.permit_topic(alice, TOPIC, write="^{vhost}$", read="")
    assert codes(users, alice, publish("/"), publish("other")) == [0, 403]


def test_other_recipients_are_not_judged(users: Users, alice: str) -> None:
    """RabbitMQ checks only the routing key, not the keys in the headers CC and BCC."""
    users.permit_topic(alice, TOPIC, write="^mine", read="")
    raw = properties.build({Property.HEADERS: table({"CC": ["yours"]})})
    assert codes(users, alice, publish("mine", raw=raw)) == [0]


def test_a_refusal_names_the_topic(users: Users, alice: str) -> None:
    users.permit_topic(alice, TOPIC, write="", read="")
    operations = {"a.b": publish("a.b"), "k": link(methods.ExchangeBind.KEY, "amq.fanout", TOPIC, "k")}
    with session(users.url(alice)) as client:
        for key, frames in operations.items():
            close = refusal(client, frames)
            assert close is not None
            assert close.reply_code == 403
            what = f"access to topic '{key}' in exchange 'amq.topic' in vhost '/' refused for user '{alice}'"
            assert close.reply_text.decode() == f"ACCESS_REFUSED - {what}"


def test_a_topic_permission_counts_for_open_connections_and_is_lifted(users: Users, alice: str) -> None:
    with session(users.url(alice)) as client:
        assert outcome(client, publish("a")) == 0
        users.permit_topic(alice, TOPIC, write="^b", read="")
        wait_until(lambda: outcome(client, publish("a")) == 403, what="the refusal")
        assert outcome(client, publish("b")) == 0
        users.lift_topics(alice)
        wait_until(lambda: outcome(client, publish("a")) == 0, what="the permission")


def test_topic_permissions_go_with_the_user(users: Users) -> None:
    name = f"alice-{secrets.token_hex(4)}"
    for _ in range(2):
        users.add(name)
        users.permit(name)
        assert codes(users, name, publish("a")) == [0]
        users.permit_topic(name, TOPIC, write="", read="")
        assert codes(users, name, publish("a")) == [403]
        users.remove(name)
