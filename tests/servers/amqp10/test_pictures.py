"""The pictures in the specification of transactions, run against a service, frame by frame.

The controller sends the frames of the pictures, and those that open the connection, the session and the links. The
resource's frames are drawn: transfers, and one line for each delivery of a disposition, which may name several.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.endpoint import AMQP, Amqp10FrameSplitter, frame
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Begin,
    Close,
    Coordinator,
    Declare,
    Declared,
    Discharge,
    Disposition,
    Flow,
    Role,
    Source,
    Target,
    TransactionalState,
    Transfer,
    read_performative,
)
from tests.servers.amqp10.raw import SECONDS, Raw
from tests.support.client import take_all
from tests.support.service import DtxService
from tests.unit.wire.amqp10.peer import attach, flow, transfer
from tests.unit.wire.amqp10.resource import drawn

CONTROL, TO, FROM = 0, 1, 2
WINDOW = 2048
DECLARED = "DISPOSITION(role=receiver, first=0, settled=True, state=Declared(txn-id=0))"
RETIRED = "DISPOSITION(role=sender, first={}, settled=True, state=Accepted())"


class Picture:
    """A controller that sends what a test wants, and draws what it receives.

    Args:
        raw: an open connection, whose engine is not used from now on.
    """

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._splitter = Amqp10FrameSplitter(1 << 20)
        self._attached: set[str] = set()
        self._closed = False
        self.lines: list[str] = []
        self.txn_id = b""
        self._say(Begin(remote_channel=None, next_outgoing_id=0, incoming_window=WINDOW, outgoing_window=WINDOW))

    def _say(self, said: Composite, payload: bytes = b"") -> None:
        self._raw.socket.sendall(frame(AMQP, 0, encode(said) + payload))

    def attach(self, name: str, role: Role, handle: int, **fields: Any) -> None:
        """Attach a link, and wait until the resource has attached its end, and given credit if it receives."""
        self._say(attach(name, role, handle, **fields))
        self._until(lambda: name in self._attached)

    def control(self) -> None:
        """Attach a control link, and declare a transaction."""
        target = Coordinator(capabilities=("amqp:local-transactions",))
        self.attach("txn-ctl", Role.SENDER, CONTROL, source=Source(), target=target)
        self.say(transfer(0, CONTROL), message.value(Declare()), hears=1)

    def discharge(self, delivery_id: int, *, hears: int = 1) -> None:
        """Discharge with success."""
        self.say(transfer(delivery_id, CONTROL), message.value(Discharge(txn_id=self.txn_id)), hears=hears)

    def say(self, said: Composite, payload: bytes = b"", *, hears: int) -> None:
        """Send a frame, and wait for *hears* lines."""
        wanted = len(self.lines) + hears
        self._say(said, payload)
        self._until(lambda: len(self.lines) >= wanted)

    def close(self) -> None:
        """Close, and receive all frames before the resource's close."""
        self._say(Close())
        self._until(lambda: self._closed)

    def _until(self, condition: Any) -> None:
        limit = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < limit, self.lines
            data = self._raw.socket.recv(1 << 16)
            assert data, self.lines
            buffer, frames = self._splitter.feed(data)
            for kind, _, start, end in frames:
                if kind == AMQP and start != end:
                    self._hear(read_performative(buffer, start, end)[0])

    def _hear(self, said: Any) -> None:
        match said:
            case Attach():
                if said.role is Role.SENDER:
                    self._attached.add(said.name)
                else:
                    self._awaits = said.name
            case Flow() if said.handle is not None and said.drain:
                self.lines.append(f"FLOW(drain=True, link-credit={said.link_credit})")
            case Flow() if said.handle is not None:
                self._attached.add(self._awaits)
            case Transfer():
                self.lines.append(drawn(replace(said, handle=0, state=self._drawn(said.state))))
            case Disposition():
                for number in range(said.first, (said.first if said.last is None else said.last) + 1):
                    self.lines.append(drawn(replace(said, first=number, last=None, state=self._drawn(said.state))))
            case Close():
                assert said.error is None, said
                self._closed = True
            case _:
                pass

    def _drawn(self, state: Any) -> Any:
        if isinstance(state, Declared):
            self.txn_id = state.txn_id
        if isinstance(state, Declared | TransactionalState):
            assert state.txn_id == self.txn_id
            return replace(state, txn_id=b"0")
        return state


@pytest.fixture
def picture(service: DtxService) -> Iterator[Picture]:
    with Raw(service) as raw:
        yield Picture(raw.opened())


def put(channel: BlockingChannel, queue: str, count: int) -> None:
    """Publish *count* persistent messages."""
    confirming = channel.connection.channel()
    confirming.confirm_delivery()
    for number in range(count):
        confirming.basic_publish("", queue, b"%d" % number, BasicProperties(delivery_mode=2))


def test_declaring_and_discharging(picture: Picture) -> None:
    """4.2 and 4.3; the delivery ids between those of the pictures are for transactional work."""
    picture.control()
    picture.discharge(1)
    picture.close()
    assert picture.lines == [DECLARED, "DISPOSITION(role=receiver, first=1, settled=True, state=Accepted())"]


def test_transactional_publish(picture: Picture, channel: BlockingChannel, queue: str) -> None:
    """4.4.1."""
    picture.control()
    picture.attach("to", Role.SENDER, TO, source=Source(), target=Target(address=queue))
    state = TransactionalState(txn_id=picture.txn_id)
    picture.say(transfer(1, TO, state=state), message.data(b"payload"), hears=1)
    assert take_all(channel, queue) == []
    picture.discharge(2)
    picture.close()
    assert picture.lines == [
        DECLARED,
        "DISPOSITION(role=receiver, first=1, settled=True, state=TransactionalState(txn-id=0, outcome=Accepted()))",
        "DISPOSITION(role=receiver, first=2, settled=True, state=Accepted())",
    ]
    assert take_all(channel, queue, at_least=1) == [b"payload"]


@pytest.mark.parametrize("acquires", [False, True], ids=["receive", "acquisition"])
def test_transactional_receive_and_acquisition(
    picture: Picture, channel: BlockingChannel, queue: str, acquires: bool
) -> None:
    """4.4.2 and 4.4.3, and the discharge that "may immediately settle the transfers"."""
    put(channel, queue, 10)
    picture.control()
    picture.attach("from", Role.RECEIVER, FROM, source=Source(address=queue), target=Target())
    asks: dict[str, Any] = {"incoming_window": WINDOW, "next_outgoing_id": 1, "delivery_count": 0, "link_credit": 10}
    if acquires:
        asks |= {"drain": True, "properties": {"txn-id": picture.txn_id}}
    picture.say(flow(FROM, **asks), hears=10)
    state = TransactionalState(txn_id=picture.txn_id, outcome=ACCEPTED)
    picture.say(Disposition(role=Role.RECEIVER, first=0, last=9, state=state), hears=0)
    picture.discharge(1, hears=11)
    picture.close()
    sent = ", state=TransactionalState(txn-id=0)" if acquires else ""
    accepted = "DISPOSITION(role=receiver, first=1, settled=True, state=Accepted())"
    ends = [RETIRED.format(number) for number in range(10)]
    drained = [line for line in picture.lines if line.startswith("FLOW")]
    lines = [line for line in picture.lines if not line.startswith("FLOW")]
    assert lines[:11] == [DECLARED, *(f"TRANSFER(handle=0, delivery-id={number}{sent})" for number in range(10))]
    assert sorted(lines[11:]) == sorted([accepted, *ends])
    assert all(line == "FLOW(drain=True, link-credit=0)" for line in drained)
    assert take_all(channel, queue) == []
