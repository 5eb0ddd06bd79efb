"""Money moves between queues and two databases in both modes during all faults: nothing is lost."""

import logging
import secrets
from collections.abc import Callable
from math import ceil

import psycopg
import pytest

from tests.evidence.soak.counting import Count
from tests.evidence.soak.money import QUEUES, Coin
from tests.evidence.soak.report import table
from tests.evidence.soak.soak import Soak
from tests.evidence.soak.world import World
from tests.support.broker import MODES, Mode
from tests.support.client import connected
from tests.support.processes import wait_until
from tests.support.rabbitmq_install import is_asked

_MODES: tuple[Mode, ...] = ("alongside",) if is_asked() else MODES
_ROUND = 40.0
"""Seconds between two counts."""


# pika does not close the socket of a connection that is refused or cut during the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("mode", _MODES)
def test_money_is_conserved_while_everything_dies(
    mode: Mode,
    minutes: float,
    caplog: pytest.LogCaptureFixture,
    left_out: Callable[[str], None],
    figures: Callable[..., None],
) -> None:
    """Guarantees: "exactly once when dtx, PostgreSQL, clients or the network die"; else repeated, never lost."""
    caplog.set_level(logging.CRITICAL, "pika")  # it logs each lost connection with many lines
    seed = secrets.randbits(32)
    print(f"seed {seed}")

    def afterwards(world: World, counts: Count) -> None:
        for sentence in world.left_out():
            left_out(sentence)
        every_harm_is_found(world, counts)

    soak = Soak(mode, seed, print, afterwards=afterwards)
    rounds = max(2, ceil(minutes / len(_MODES) * 60 / _ROUND))
    report = soak.run(rounds * _ROUND, each=_ROUND, broker_deaths=lambda number: number % 3 == 1)
    print(table(report))
    counts = {
        "transfers": report.committed,
        "rolled back": report.rolled_back,
        "faults": report.nemesis.total(),
        "lost": len(report.lost),
        "repeated": len(report.repeated),
        "repeated where RabbitMQ died": report.repeated_by_broker_deaths,
        "wrong": len(report.wrong),
    }
    figures(**{f"{mode} {name}": count for name, count in counts.items()})
    assert report.bad == []
    assert report.committed > 0
    assert report.nemesis["dtx killed"] > 0
    assert (report.nemesis["RabbitMQ killed"] > 0) is (mode == "alongside")


def every_harm_is_found(world: World, counts: Count) -> None:
    """Check that a count finds a lost coin, a repeated coin, and a wrong balance."""
    assert counts.count().all == []
    with connected(counts.past_dtx) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        queue = next(queue for queue in QUEUES if channel.queue_declare(queue, passive=True).method.message_count)
        method, properties, body = channel.basic_get(queue)
        assert method is not None
        assert body is not None
        (lost,) = counts.count().all
        assert lost == f"lost: {Coin.of(body).id} in {queue}"
        channel.basic_publish("", queue, body, properties)
        assert counts.count().all == []  # the copy replaces the lost message
        channel.basic_nack(method.delivery_tag)
        channel.queue_declare(queue, passive=True)  # answered after the nack has been processed
        (repeated,) = counts.count().all
        assert repeated == f"repeated: {Coin.of(body).id} is there 2 times instead of 1"
    assert counts.allow_copies(counts.count()) == 1
    assert counts.count().all == []
    with psycopg.connect(world.banks["east"]) as bank:
        bank.execute("UPDATE account SET balance = balance + 1 WHERE name = 'account0'")
    (wrong,) = counts.count().all
    assert wrong.endswith("which its transfers do not explain")
    clients_tell_of_repeats(world, counts)


def clients_tell_of_repeats(world: World, counts: Count) -> None:
    """Check that clients record a repeat when they get a coin that was spent, and remove it."""
    with connected(counts.past_dtx) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for queue in QUEUES:
            for _ in range(channel.queue_declare(queue, passive=True).method.message_count):
                method, properties, body = channel.basic_get(queue)
                assert method is not None
                assert body is not None
                for _ in range(2):
                    channel.basic_publish("", queue, body, properties)
                channel.basic_ack(method.delivery_tag)
    before = len(world.ledger.repeats())
    world.begin("repeats")
    try:
        wait_until(lambda: len(world.ledger.repeats()) > before, seconds=60, what="the first repeat")
    finally:
        world.stop_clients(40)
