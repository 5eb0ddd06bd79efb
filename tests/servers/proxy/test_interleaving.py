"""Methods that dtx sends itself never come between the frames of a message."""

import pytest

from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.frames import BODY, HEADER
from dtx.wire.amqp09.methods import DtxEnd, DtxRecover, DtxSelect, DtxSelectOk, DtxStart
from tests.support.client import new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import logged_in
from tests.support.service import DtxService

MESSAGES = 10
CALLS = 200


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "plain"])
def test_answers_of_dtx_never_interrupt_the_frames_of_messages(
    service: DtxService, queue: str, rabbitmq: RabbitNode, selected: bool
) -> None:
    """AMQP 0-9-1, 4.2.6: frames of a content are not intermixed with other frames on the same channel."""
    with rabbitmq.channel() as channel:
        for _ in range(MESSAGES):
            channel.basic_publish("", queue, b"x" * 6_000_000)
    with logged_in(service.url()) as peer:
        if selected:
            peer.say(1, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
        peer.say(1, methods.BasicConsume(queue.encode(), b"tag").encode())
        whole = left = asked = 0
        between = []
        while whole < MESSAGES:
            if asked < CALLS:
                asked += 1
                xid = new_xid()
                calls = (
                    (DtxStart(xid=xid), DtxEnd(xid=xid)) if selected else (DtxRecover(startscan=True, endscan=True),)
                )
                peer.send_raw(*(call.frame(1) for call in calls))
            frame = peer.frame()
            assert frame is not None
            if frame.key == methods.BasicDeliver.KEY:
                left = -1
            elif frame.key == HEADER:
                left = content.header(frame.payload).body_size
            elif frame.key == BODY:
                left -= len(frame.payload)
                whole += left == 0
            elif left:
                between.append(hex(frame.key))
        assert not between
