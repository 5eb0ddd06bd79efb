"""A selected channel whose channel at the broker ends, without a broker behind it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtx.server.alongside.channel import Channel
from dtx.server.alongside.selected import SelectedChannel
from dtx.store.rabbitmq.taking import TakingChannel
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.store.work import Budget
from dtx.wire.amqp09 import answers, keys, requests
from dtx.wire.amqp09.calls import DtxMethod, Prepare, encode_call
from dtx.wire.amqp09.frames import FrameSplitter, method_frame
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

CLOSE = requests.close(keys.CHANNEL_CLOSE, 403, b"ACCESS_REFUSED - no", keys.BASIC_PUBLISH)
ANSWER = answers.flags_ok(1, DtxMethod.PREPARE_OK, XaFlag.RBROLLBACK)
P = 9
"""The channel at the broker that publishes."""


def key_of(frame: bytes) -> int:
    return int.from_bytes(frame[7:11], "big")


class Rig:
    """A channel with the number 1 on both sides, and whatever it has to do with."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        """To the client."""
        self.finish: Any = None
        """Answers the call that runs."""
        nothing = lambda *_: None  # noqa: E731
        upstream: Any = SimpleNamespace(handlers={}, is_lost=False, lock="", write=nothing, exclusive=ExclusiveQueues())
        upstream.free = lambda number: upstream.handlers.pop(number, None)
        self.upstream = upstream
        manager = SimpleNamespace(budget=Budget(1000), channel_lost=nothing)
        self.session: Any = SimpleNamespace(
            upstream=upstream,
            manager=manager,
            metrics=SimpleNamespace(),
            channels={},
            id=1,
            who=None,
            frame_max=4096,
            speaks_0_9=False,
            sort=nothing,
            forget=nothing,
            drained=nothing,
            replay=nothing,
            release_client=nothing,
            to_client=self.said.append,
        )
        before = Channel(cast("Any", self.session), 1, 1)
        keeper: Any = SimpleNamespace(taking_ended=nothing, release_client=nothing)
        taking = TakingChannel(upstream, 1, 1000, manager.budget, b"", keeper)
        self.channel = SelectedChannel(before, taking, P)
        self.session.channels[1] = self.channel
        self.channel.coordination = SimpleNamespace(run=self._run)  # type: ignore[assignment]

    def _run(self, _call: object, _who: object, _frame_max: int, finish: object) -> None:
        self.finish = finish

    def client(self, payload: bytes) -> None:
        """The client sends a method."""
        frame = method_frame(1, payload)
        self.channel.client_frame(key_of(frame), frame, 0, len(frame))

    def broker(self, number: int, payload: bytes) -> None:
        """The broker sends a method."""
        frame = method_frame(number, payload)
        self.upstream.handlers[number].frame(key_of(frame), frame, 0, len(frame))

    @property
    def keys(self) -> list[int]:
        """The methods that the client got."""
        return [key for data in self.said for key, _, _, _ in FrameSplitter(0).feed(data)[1]]


@pytest.fixture
def rig() -> Rig:
    """A channel on which a prepare runs."""
    rig = Rig()
    rig.client(encode_call(Prepare(xid=Xid(1, b"g", b"b"))))
    return rig


@pytest.mark.parametrize("number", [1, P], ids=["that consumes", "that publishes"])
def test_an_answer_comes_before_the_end_of_its_channel(rig: Rig, number: int) -> None:
    """What a prepare has decided is told, whatever the broker thinks of the channel by then."""
    rig.broker(number, CLOSE)
    assert rig.said == []
    rig.finish(ANSWER)
    assert rig.said == [ANSWER, method_frame(1, CLOSE)]


def test_a_channel_that_is_gone_can_be_closed_before_its_answer(rig: Rig) -> None:
    """The client waits no longer, and there is nothing left to close but what it publishes on."""
    rig.broker(1, CLOSE)
    rig.client(requests.close(keys.CHANNEL_CLOSE, 200, b"never mind"))
    rig.broker(P, requests.CHANNEL_CLOSE_OK)
    rig.finish(ANSWER)
    assert rig.keys == [keys.CHANNEL_CLOSE_OK]
