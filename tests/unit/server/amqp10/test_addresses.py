"""Addresses of nodes."""

import pytest

from dtx.server.amqp10.addresses import ExchangeAddress, QueueAddress, of_queue, parse, reply_name
from dtx.wire.amqp10.errors import AmqpError, Condition


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("payments", QueueAddress(b"payments")),
        ("a/b", QueueAddress(b"a/b")),
        ("größe", QueueAddress("größe".encode())),
        ("/queues/payments", QueueAddress(b"payments")),
        ("/queues/a%2Fb%20c", QueueAddress(b"a/b c")),
        ("/exchanges/logs", ExchangeAddress(b"logs", None)),
        ("/exchanges/logs/", ExchangeAddress(b"logs", b"")),
        ("/exchanges/logs/a.b%2Fc", ExchangeAddress(b"logs", b"a.b/c")),
    ],
)
def test_an_address_names_a_queue_or_exchange_and_key(address: str, meant: object) -> None:
    assert parse(address) == meant


@pytest.mark.parametrize(
    "address",
    [
        "", None, 7, "/", "/queue/x", "/queues/", "/queues/a/b", "/queues/%zz", "/queues/%2", "/exchanges/",
        "/exchanges//k", "/exchanges/a/b/c", "/queues/" + "a" * 256, "b" * 256,
    ],
)  # fmt: skip
def test_an_invalid_address_is_refused(address: object) -> None:
    with pytest.raises(AmqpError, match="is not an address: use /queues/NAME") as refusal:
        parse(address)
    assert refusal.value.condition is Condition.INVALID_FIELD


@pytest.mark.parametrize("name", [b"payments", b"a/b %", "größe".encode(), b"\xff\x00"])
def test_the_address_of_a_queue_means_that_queue(name: bytes) -> None:
    assert parse(of_queue(name)) == QueueAddress(name)
    assert reply_name(of_queue(name)) == name


def test_amqp_0_9_clients_can_reply_only_to_queues() -> None:
    assert reply_name("/exchanges/logs/key") is None
    assert reply_name("/nowhere") is None
