"""The limit of unacknowledged deliveries on a channel."""

import pytest
from pika import frame, spec

from dtx.server.standalone import channel_consumers
from tests.evidence.fuzz.server import converse

_LIMIT = 3
_GET_OK = bytes((0, 60, 0, 71))
"""Class and method of get-ok."""


def said(*methods: object) -> bytes:
    return bytes(b"".join(frame.Method(1, method).marshal() for method in methods))


def published(body: bytes) -> bytes:
    header = frame.Header(1, len(body), spec.BasicProperties()).marshal()
    return bytes(said(spec.Basic.Publish(routing_key="q")) + header + frame.Body(1, body).marshal())


@pytest.mark.parametrize("settle", [False, True], ids=["none", "one"])
async def test_messages_got_without_settling_are_limited(monkeypatch: pytest.MonkeyPatch, settle: bool) -> None:
    """Unacknowledged messages stay in memory, and no memory limit counts them."""
    monkeypatch.setattr(channel_consumers, "MAX_UNACKED", _LIMIT)
    gets = [said(spec.Basic.Get(queue="q")) for _ in range(_LIMIT)]
    unread = [said(spec.Basic.Get(queue="q", no_ack=True))]
    acked = [said(spec.Basic.Ack(delivery_tag=1))] if settle else []
    begin = said(spec.Channel.Open(), spec.Queue.Declare(queue="q"))
    messages = [published(b"%d" % number) for number in range(_LIMIT + 2)]
    sent = await converse([begin, *messages, *gets, *unread, *acked, said(spec.Basic.Get(queue="q"))])
    assert sent.count(_GET_OK) == _LIMIT + 1 + settle
    assert (b"3 deliveries are not acknowledged: settle some" in sent) is not settle
