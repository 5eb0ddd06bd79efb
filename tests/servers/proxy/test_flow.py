"""Large messages, fast publishers and slow consumers: dtx passes on the data and buffers little of it."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, HEADER
from dtx.wire.amqp09.methods import DtxSelect, DtxSelectOk
from tests.conftest import ServiceFactory
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

MIB = 1 << 20


class Memory:
    """The largest resident memory of a process from now on."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the high-water mark
        self._before = self._peak()

    def _peak(self) -> int:
        words = next(line for line in self._status.read_text().splitlines() if line.startswith("VmHWM")).split()
        return int(words[1]) * 1024

    @property
    def growth(self) -> int:
        """In bytes."""
        return self._peak() - self._before


@pytest.fixture
def memory(service: DtxService) -> Memory:
    """The memory of the service."""
    return Memory(service.pid)


def pieces(size: int) -> Iterator[bytes]:
    """*size* bytes in pieces of 1 MiB that differ."""
    block = hashlib.shake_128(b"block").digest(MIB)
    for number in range(size // MIB):
        yield number.to_bytes(4, "big") + block[4:]


@pytest.mark.parametrize("selected", [False, True], ids=["plain", "selected"])
def test_a_message_of_200_mb_passes_through(
    service: DtxService, queue: str, memory: Memory, rabbitmq: RabbitNode, selected: bool
) -> None:
    size = 200 * MIB
    with logged_in(service.url()) as peer:
        if selected:
            peer.say(1, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
        body = b"".join(pieces(size))
        peer.send_raw(message(1, queue.encode(), body))
        peer.say(1, methods.BasicGet(queue.encode(), no_ack=not selected).encode())
        peer.wait(methods.BasicGetOk.KEY)
        peer.wait(HEADER)
        digest, received = hashlib.sha256(), 0
        while received < size:
            payload = peer.wait(BODY).payload
            digest.update(payload)
            received += len(payload)
        assert digest.digest() == hashlib.sha256(body).digest()
        if selected:
            peer.say(1, methods.BasicAck(1).encode())
        peer.close()
    assert rabbitmq.count(queue) == 0
    # A selected channel keeps unsettled messages up to --max-kept-bytes (this message is larger).
    assert memory.growth < 24 * MIB


def test_a_publisher_is_no_faster_than_the_broker(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy], queue: str
) -> None:
    """Back-pressure reaches the client: while the broker reads nothing, dtx stops reading too."""
    between = proxy("127.0.0.1", rabbitmq.port)
    service = dtx_service(broker=f"amqp://guest:guest@127.0.0.1:{between.port}/", env={"DTX_UPSTREAM_HEARTBEAT": "60"})
    with logged_in(service.url()) as peer:
        between.stall("up")
        memory = Memory(service.pid)
        one = message(1, queue.encode(), bytes(MIB))
        peer.socket.settimeout(1)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 200 * MIB:
                sent += peer.socket.send(one[sent % len(one) :])
        assert sent < 100 * MIB
        assert memory.growth < 16 * MIB
        between.resume()
        peer.socket.settimeout(30)
        peer.send_raw(one[sent % len(one) :])
        peer.close()
    messages = sent // len(one) + 1
    assert rabbitmq.count(queue) == messages


def test_a_slow_consumer_gets_everything(service: DtxService, queue: str, memory: Memory, rabbitmq: RabbitNode) -> None:
    """The other direction: messages that the consumer does not read stay at the broker."""
    with rabbitmq.channel() as channel:
        for number in range(100):
            channel.basic_publish("", queue, number.to_bytes(4, "big") * (MIB // 4))
    with logged_in(service.url()) as peer:
        peer.say(1, methods.BasicConsume(queue.encode(), b"slow", no_ack=True).encode())
        time.sleep(1.5)  # the broker would send all of it meanwhile
        assert memory.growth < 16 * MIB
        for number in range(100):
            peer.wait(methods.BasicDeliver.KEY)
            body = b""
            while len(body) < MIB:
                body += peer.wait(BODY).payload
            assert body == number.to_bytes(4, "big") * (MIB // 4)
    assert memory.growth < 16 * MIB


def test_both_directions_at_full_speed(service: DtxService, queue: str, memory: Memory) -> None:
    count, size = 4000, 16384
    with logged_in(service.url()) as producer, logged_in(service.url()) as consumer:
        consumer.say(1, methods.BasicConsume(queue.encode(), b"fast", no_ack=True).encode())
        consumer.wait(methods.BasicConsumeOk.KEY)
        one = message(1, queue.encode(), bytes(size))
        sender = threading.Thread(target=producer.send_raw, args=(one,) * count)
        sender.start()
        for _ in range(count):
            consumer.wait(BODY)
        sender.join()
        producer.close()
        consumer.close()
    assert memory.growth < 32 * MIB


def test_a_blocked_publisher_loses_nothing_when_it_leaves(
    service: DtxService, queue: str, rabbitmq: RabbitNode
) -> None:
    """Messages sent before the client hangs up are delivered when the broker accepts publishes again."""
    rabbitmq.memory_alarm(on=True)
    with logged_in(service.url()) as peer:
        for _ in range(50):
            peer.send_raw(message(1, queue.encode(), bytes(1000)))
    rabbitmq.memory_alarm(on=False)
    wait_until(lambda: rabbitmq.count(queue) == 50, what="50 messages")


def test_a_blocked_publisher_waits_for_the_answer_to_its_close(
    service: DtxService, queue: str, rabbitmq: RabbitNode
) -> None:
    with logged_in(service.url()) as peer:
        rabbitmq.memory_alarm(on=True)
        peer.send_raw(message(1, queue.encode(), b"blocked"))
        peer.say(0, methods.ConnectionClose(200, b"bye").encode())
        peer.socket.settimeout(7)
        with pytest.raises(TimeoutError):
            peer.frame()
        rabbitmq.memory_alarm(on=False)
        peer.socket.settimeout(20)
        peer.wait(methods.ConnectionCloseOk.KEY)
    assert rabbitmq.count(queue) == 1


def test_an_idle_service_uses_no_processor(service: DtxService) -> None:
    with RawClient(service.url()) as peer:
        peer.log_in()

        def used() -> float:
            fields = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        before = used()
        time.sleep(4)  # the measurement itself
        assert used() - before <= 0.08


def test_frames_waiting_behind_a_commit_of_acks_are_limited(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy], queue: str
) -> None:
    """No frame may come between tx.commit and commit-ok: while the broker is silent, the client waits too."""
    with rabbitmq.channel() as channel:
        channel.basic_publish("", queue, b"1")
    between = proxy("127.0.0.1", rabbitmq.port)
    service = dtx_service(broker=f"amqp://guest:guest@127.0.0.1:{between.port}/", env={"DTX_UPSTREAM_HEARTBEAT": "60"})
    with logged_in(service.url()) as peer:
        peer.say(1, DtxSelect().encode(), methods.BasicGet(queue.encode()).encode())
        peer.wait(BODY)
        between.stall("up")
        memory = Memory(service.pid)
        peer.say(1, methods.BasicAck(1).encode())
        asking = methods.QueuePurge(b"x" * 250, no_wait=True).frame(1) * 4000
        peer.socket.settimeout(1)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 100 * MIB:
                sent += peer.socket.send(asking)
        assert sent < 50 * MIB
        assert memory.growth < 32 * MIB
        between.resume()
