"""Clients that do not wait for answers."""

import struct
import threading

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import header_frame, method_frame
from tests.support.raw import body_frames, session
from tests.support.service import DtxService

CYCLES = 1_000


def method(key: int, arguments: bytes = b"") -> bytes:
    return struct.pack(">I", key) + arguments


def test_a_thousand_methods_behind_a_slow_one_keep_order(standalone: DtxService) -> None:
    """Each tx.commit waits for the disk; methods sent after it wait for the commit."""
    with session(standalone.url("guest", "guest")) as client:
        client.open(1)
        client.say(1, method(methods.QueueDeclare.KEY, b"\0\0\x04many\x02\0\0\0\0"), method(methods.TxSelect.KEY))
        client.read_method(1, methods.QueueDeclareOk.KEY)
        client.read_method(1, methods.TxSelectOk.KEY)
        publish = method_frame(1, method(methods.BasicPublish.KEY, b"\0\0\0\x04many\0"))
        commit = method_frame(1, method(methods.TxCommit.KEY))
        bodies = [b"%d" % number for number in range(CYCLES)]
        cycles = [
            publish + header_frame(1, 60, len(body), b"\0\0") + body_frames(1, body, 4096)[0] + commit
            for body in bodies
        ]
        sender = threading.Thread(target=client.send_raw, args=(b"".join(cycles),))
        sender.start()
        for _ in bodies:
            client.read_method(1, methods.TxCommitOk.KEY)
        sender.join()
        assert client.take(1, "many") == bodies[0]
        client.say(1, method(methods.QueueDeclare.KEY, b"\0\0\x04many\x02\0\0\0\0"))
        declared = client.read_method(1, methods.QueueDeclareOk.KEY)
        assert struct.unpack(">I", declared[9:13]) == (CYCLES - 1,)
