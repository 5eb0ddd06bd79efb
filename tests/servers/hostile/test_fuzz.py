"""Mutated streams of real clients are sent to a running service: it survives, and other clients lose nothing."""

import contextlib
import os
import random
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.wire.amqp09 import handshake, tables
from tests.evidence.fuzz import corpus
from tests.evidence.fuzz.conversations import MUTATIONS, broker_of_its_own, conversation, flip
from tests.support.broker import Broker, Mode
from tests.support.client import bodies
from tests.support.processes import resident
from tests.support.raw import RawClient
from tests.support.service import DtxService

STREAMS = int(os.environ.get("DTX_FUZZ_STREAMS", "60"))
SEED = os.environ.get("DTX_FUZZ_SEED", secrets.token_hex(4))
TOGETHER: Final = 6
"""Clients at the same time. Most of the time each waits for an answer that does not come."""
MOST_MEMORY = 64 << 20
"""Bytes that all streams of a test together may cost dtx: it keeps nothing of a client that has left."""


def speak(
    service: DtxService, rng: random.Random, queue: bytes, say: Callable[[random.Random, bytes], list[bytes]]
) -> None:
    """One client: a real conversation with one mutation, in pieces of any size."""
    with RawClient(service.url()) as peer, contextlib.suppress(OSError):
        peer.log_in(frame_max=rng.choice((4096, 131072)))
        peer.open(1, 2)
        data = b"".join(rng.choice(MUTATIONS)(rng, say(rng, queue)))
        while data:
            size = rng.choice((1, 7, 100, 4096, len(data)))
            peer.send_raw(data[:size])
            data = data[size:]
        peer.socket.settimeout(rng.choice((0.01, 0.05, 0.2)))
        with contextlib.suppress(TimeoutError):
            peer.drain()


def together(client: Callable[..., None], *arguments: Iterable[object]) -> None:
    """One client for each of *arguments*, all at once."""
    with ThreadPoolExecutor(thread_name_prefix="client", max_workers=25) as threads:
        list(threads.map(client, *arguments))


def healthy(service: DtxService) -> None:
    """Check that the log has no unexpected error."""
    log = service.log_path.read_text(errors="replace")
    for sign in ("Traceback", "call failed", "session failed", "operation failed", "Fatal error"):
        assert sign not in log, log[log.index(sign) - 500 :][:6000]


def test_mutated_streams_harm_no_client(
    mode: Mode, service: DtxService, through: BlockingConnection, queue: str, broker: Broker
) -> None:
    print(f"DTX_FUZZ_SEED={SEED}")
    fuzzed = f"{queue}-fuzzed"
    bystander = through.channel()
    bystander.confirm_delivery()
    bystander.queue_declare(fuzzed, durable=True)
    before = resident(service.pid)

    def client(number: int) -> None:
        with_all = mode == "standalone" and number % 2
        rng = random.Random(f"{SEED} {number}")
        speak(service, rng, fuzzed.encode(), broker_of_its_own if with_all else conversation)

    try:
        for first in range(0, STREAMS, TOGETHER):
            numbers = range(first, min(first + TOGETHER, STREAMS))
            together(client, numbers)
            for number in numbers:
                bystander.basic_publish("", queue, b"%d" % number, mandatory=True)
            assert service.running, numbers
            healthy(service)
        assert bodies(broker, queue) == [b"%d" % number for number in range(STREAMS)]
        assert resident(service.pid) - before < MOST_MEMORY
    finally:
        bystander.queue_delete(fuzzed)


@pytest.mark.parametrize("name", ["conversation", "opening"])
def test_inputs_found_by_fuzzing_harm_no_client(
    name: str, service: DtxService, through: BlockingConnection, queue: str, broker: Broker
) -> None:
    """The stored inputs that reach most of the code, over a real socket, also alongside a real broker."""
    bystander = through.channel()
    bystander.confirm_delivery()
    inputs = corpus.stored(name)
    assert inputs
    vhosts = [broker.add_vhost() for _ in range(TOGETHER)]  # deleted with everything that the inputs declare
    before = resident(service.pid)

    def client(path: Path, vhost: str) -> None:
        with RawClient(service.url(vhost=vhost)) as peer, contextlib.suppress(OSError):
            if name == "opening":
                peer.begin()
            else:
                peer.log_in()
                peer.open(1, 2)
            peer.send_raw(path.read_bytes()[1:])  # the first byte is for the fuzzer
            peer.socket.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                peer.drain()

    for first in range(0, len(inputs), TOGETHER):
        paths = inputs[first : first + TOGETHER]
        together(client, paths, vhosts)
        for number in range(first, first + len(paths)):
            bystander.basic_publish("", queue, b"%d" % number, mandatory=True)
        assert service.running, paths
        healthy(service)
    for vhost in vhosts:
        broker.delete_vhost(vhost)
    assert bodies(broker, queue) == [b"%d" % number for number in range(len(inputs))]
    assert resident(service.pid) - before < MOST_MEMORY


@pytest.mark.parametrize("amqplain", [False, True], ids=["PLAIN", "AMQPLAIN"])
@pytest.mark.parametrize("step", ["header", "start-ok", "tune-ok", "open"])
def test_mutated_handshakes_harm_no_client(
    service: DtxService, through: BlockingConnection, step: str, amqplain: bool
) -> None:
    login = tables.entry(b"LOGIN", b"S", b"guest") + tables.entry(b"PASSWORD", b"S", b"guest")
    print(f"DTX_FUZZ_SEED={SEED}")

    def client(number: int) -> None:
        rng = random.Random(f"{SEED} {step} {amqplain} {number}")
        with RawClient(service.url()) as peer, contextlib.suppress(OSError, AssertionError):
            if step == "header":
                said = flip(rng, [b"AMQP\x00\x00\x09\x01"])
            else:
                said = rng.choice(MUTATIONS[:3])(rng, [intact(peer)])
            peer.send_raw(*said)
            peer.socket.settimeout(0.1)
            peer.drain()

    def intact(peer: RawClient) -> bytes:
        """The unchanged bytes of this step, after all earlier steps."""
        mechanism, response = (handshake.AMQPLAIN, login) if amqplain else (handshake.PLAIN, None)
        if step == "start-ok":
            peer.begin()
            return peer.start_ok(mechanism, response).frame(0)
        peer.authenticate(mechanism, response)
        if step == "tune-ok":
            return peer.tune_ok().frame(0)
        peer.say(0, peer.tune_ok())
        return peer.address.open.frame(0)

    together(client, range(25))
    healthy(service)
    assert through.channel().is_open
