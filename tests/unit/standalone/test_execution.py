"""Class execution of the AMQP 0-9 preview, sent by a client: "server, implement MUST"."""

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import FrameSplitter, method_frame
from tests.evidence.fuzz.server import TWO_CHANNELS, converse

FLUSH = method_frame(1, methods.ExecutionFlush().encode())


async def test_execution_complete_of_a_client_is_taken() -> None:
    """There is nothing to do, because dtx sends no flush. It does not count as a command."""
    complete = method_frame(1, methods.ExecutionComplete.HEAD + (7).to_bytes(4, "big"))
    sent = await converse([TWO_CHANNELS, complete, FLUSH])
    buffer, frames = FrameSplitter(0).feed(sent)
    key, channel, start, end = frames[-1]
    assert (key, channel, buffer[start + 11 : end - 1]) == (methods.ExecutionComplete.KEY, 1, bytes(4))


@pytest.mark.parametrize("mark", [b"", b"\0\0\0", b"\0\0\0\0\0"])
async def test_a_malformed_execution_complete_ends_the_connection(mark: bytes) -> None:
    sent = await converse([TWO_CHANNELS, method_frame(1, methods.ExecutionComplete.HEAD + mark)])
    assert b"execution.complete is truncated or too long" in sent
