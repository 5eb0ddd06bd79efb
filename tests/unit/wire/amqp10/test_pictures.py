"""The pictures in the specification of transactions, drawn from the engine's dialogues (golden: ``pictures/``)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dtx.wire.amqp10.message import data, value
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Coordinator,
    Declare,
    Discharge,
    Disposition,
    Role,
    Source,
    Target,
    TransactionalState,
    Transfer,
)
from tests.unit.wire.amqp10.peer import attach, flow, transfer
from tests.unit.wire.amqp10.resource import Picture

GOLDEN = Path(__file__).parent / "pictures"
CONTROL = Attach(
    name="txn-ctl",
    handle=0,
    role=Role.SENDER,
    initial_delivery_count=0,
    source=Source(),
    target=Coordinator(capabilities=("amqp:local-transactions",)),
)
IN_IT = TransactionalState(txn_id=b"0")
RETIRED = TransactionalState(txn_id=b"0", outcome=ACCEPTED)


def declare(picture: Picture) -> None:
    picture.say(transfer(0), value(Declare()), "AmqpValue( Declare() )")


def discharge(picture: Picture, delivery_id: int, fail: bool = False) -> None:
    link = picture.peer.server.names["txn-ctl", Role.RECEIVER]
    link.grant(1)
    picture.peer.heard()
    body = value(Discharge(txn_id=b"0", fail=fail))
    picture.say(transfer(delivery_id), body, f"AmqpValue( Discharge(txn-id=0, fail={fail}) )")


def declaring(picture: Picture) -> None:
    declare(picture)


def discharging(picture: Picture) -> None:
    declare(picture)
    discharge(picture, 57)


def publishing(picture: Picture) -> None:
    declare(picture)
    picture.say(attach("to", Role.SENDER, 1, source=Source(), target=Target(address="q")))
    picture.peer.server.names["to", Role.RECEIVER].grant(5)
    picture.peer.heard()
    picture.say(transfer(1, 1, state=IN_IT), data(b"x"), "... payload ...")
    discharge(picture, 2)


def receiving(picture: Picture) -> None:
    declare(picture)
    picture.say(attach("from", Role.RECEIVER, 2, source=Source(address="q"), target=Target()))
    picture.say(flow(2, delivery_count=0, link_credit=3))
    picture.say(Disposition(role=Role.RECEIVER, first=0, last=2, state=RETIRED))


def acquiring(picture: Picture) -> None:
    declare(picture)
    picture.say(attach("from", Role.RECEIVER, 2, source=Source(address="q"), target=Target()))
    picture.say(flow(2, delivery_count=0, link_credit=3, drain=True, properties={"txn-id": b"0"}))
    picture.say(Disposition(role=Role.RECEIVER, first=0, last=2, state=RETIRED))
    discharge(picture, 3)


def partial(picture: Picture) -> None:
    """The specification has no picture of it, but a MUST in 4.4.1."""
    declare(picture)
    picture.say(attach("to", Role.SENDER, 1, source=Source(), target=Target(address="q")))
    picture.peer.server.names["to", Role.RECEIVER].grant(5)
    picture.peer.heard()
    picture.say(
        Transfer(handle=1, delivery_id=1, delivery_tag=b"1", more=True, state=IN_IT), data(b"x"), "... payload ..."
    )
    discharge(picture, 2)
    assert picture.resource.rolled_back == [b"0"]


@pytest.mark.parametrize("draw", [declaring, discharging, publishing, receiving, acquiring, partial])
def test_a_dialogue_goes_as_the_text_draws_it(draw: Callable[[Picture], None]) -> None:
    picture = Picture()
    picture.say(CONTROL)
    draw(picture)
    golden = GOLDEN / f"{draw.__name__}.txt"
    assert picture.drawn() == golden.read_text(encoding="utf-8")
