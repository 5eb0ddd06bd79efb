"""Requests between members over real sockets: the handshake of their secret, answers, limits, lost connections."""

import asyncio
import json
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pika import BlockingConnection, URLParameters
from structlog.testing import capture_logs

from dtx.config import Address
from dtx.server.client_session import ClientSession
from dtx.server.listener import AcceptedConnection, Listener
from dtx.server.members import client as client_module
from dtx.server.members import server as server_module
from dtx.server.members.client import PeerClient, PeerLost, PeerUnreachable
from dtx.server.members.messages import CLIENT, MAX_MESSAGE, SERVER, Greeting, encode, new_greeting, proof
from dtx.server.members.server import PeerServer, PeerSession
from dtx.server.standalone.client import Parts
from dtx.server.standalone.connection import StandaloneConnection
from dtx.telemetry import Metrics
from dtx.wire.amqp09.frames import Protocol
from tests.evidence.fuzz.server import whole

SECRET = b"0123456789abcdef"
HEADER = Protocol.DTX_MEMBER.value
Answer = dict[str, Any]


class Member:
    """A listener with a server for peers, and the clients of other members."""

    def __init__(self) -> None:
        self.secrets = [SECRET]
        self.handle: Callable[[Answer], Awaitable[Answer]] = self.echo
        self.requests: list[Answer] = []
        self.gate = asyncio.Event()
        self.clients: list[PeerClient] = []
        self.peers = PeerServer("b", lambda: self.secrets, self.run, handshake_timeout=20.0)
        self.listener = Listener(
            max_connections=4, max_handshakes=2, members=True, header_timeout=20.0, metrics=Metrics()
        )
        self.sessions: list[PeerSession] = []
        self.parts: Parts | None = None
        """For clients of AMQP."""
        self.writers: list[asyncio.StreamWriter] = []

    async def run(self, request: Answer) -> Answer:
        return await self.handle(request)

    async def echo(self, request: Answer) -> Answer:
        self.requests.append(request)
        return {"echo": request}

    async def wait(self, request: Answer) -> Answer:
        self.requests.append(request)
        await self.gate.wait()
        return request

    async def open(self, tls: ssl.SSLContext | None = None) -> None:
        self.address = Address(*await self.listener.bind("127.0.0.1", 0, tls))
        await self.listener.accept(self.new_session)

    def new_session(self, connection: AcceptedConnection, header: bytes) -> ClientSession | None:
        if header == Protocol.AMQP_0_9_1.value and self.parts is not None:
            return StandaloneConnection(self.parts, connection)
        if header != HEADER:
            return None
        self.sessions.append(self.peers.session(connection))
        return self.sessions[-1]

    def client(self, *secrets: bytes, tls: ssl.SSLContext | None = None) -> PeerClient:
        scheme = "amqp" if tls is None else "amqps"
        self.clients.append(PeerClient(f"{scheme}://{self.address}", "a", lambda: secrets or (SECRET,), tls))
        return self.clients[-1]

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        stream = await asyncio.open_connection(*self.address)
        self.writers.append(stream[1])
        return stream

    async def logged_in(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection after its handshake."""
        reader, writer = await self.raw()
        writer.write(HEADER)
        theirs, own = Greeting(**await read(reader)), new_greeting("raw")
        writer.write(encode({**own._asdict(), "proofs": [proof(SECRET, CLIENT, theirs, own)]}))
        assert set(await read(reader)) == {"proof"}
        return reader, writer

    async def close(self) -> None:
        self.gate.set()
        for writer in self.writers:
            writer.close()
        for client in self.clients:
            await client.close()
        self.listener.stop_accepting()
        await self.listener.close(b"", 5)
        await self.peers.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert not self.peers.requests


async def read(reader: asyncio.StreamReader) -> Answer:
    """The next message."""
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 20), "big")
    message: Answer = json.loads(await reader.readexactly(size))
    return message


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the connection was closed."""
    try:
        return await asyncio.wait_for(reader.read(-1), 20)
    except ConnectionResetError:
        return b""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def member() -> AsyncIterator[Member]:
    made = Member()
    await made.open()
    yield made
    await made.close()


class Impostor:
    """A server that runs a script for each connection."""

    def __init__(self, script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.script = script
        self.accepted = 0

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.run, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        return f"amqp://{host}:{port}"

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            await self.script(reader, writer)
        finally:
            writer.close()

    async def __aexit__(self, *_: object) -> None:
        self.server.close()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End the connection without a handshake."""
    writer.close()


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The handshake of a server with the right secret."""
    await reader.readexactly(8)
    own = new_greeting("b")
    writer.write(encode(own._asdict()))
    message = await read(reader)
    theirs = Greeting(message["name"], message["nonce"])
    writer.write(encode({"proof": proof(SECRET, SERVER, theirs, own)}))


# -- requests and answers


async def test_a_request_gets_its_answer(member: Member) -> None:
    client = member.client()
    assert await client.ask({"op": "commit", "xid": "é"}, 20) == {"echo": {"op": "commit", "xid": "é"}}
    assert await client.ask({"op": "rollback"}, 20) == {"echo": {"op": "rollback"}}
    assert len(member.sessions) == 1
    assert member.sessions[0].who.user == "a"


async def test_answers_return_out_of_order(member: Member) -> None:
    order = list(range(200))
    random.Random(7).shuffle(order)
    gates = [asyncio.Event() for _ in order]

    async def handle(request: Answer) -> Answer:
        member.requests.append(request)
        await gates[request["place"]].wait()
        return {"was": request["place"]}

    member.handle = handle
    client = member.client()
    asked = [asyncio.create_task(client.ask({"place": place}, 20)) for place in range(200)]
    await until(lambda: len(member.requests) == 200)
    for place in order:
        gates[place].set()
        assert await asked[place] == {"was": place}
    assert len(member.sessions) == 1


async def test_requests_are_equal_at_every_cut(member: Member) -> None:
    reader, writer = await member.logged_in()
    data = encode({"id": 1, "body": "x" * 20})
    for cut in range(1, len(data)):
        writer.write(data[:cut])
        await until(lambda: len(member.sessions[0]._messages._buffer) == cut)  # noqa: B023 - awaited here
        writer.write(data[cut:])
        assert await read(reader) == {"echo": {"body": "x" * 20}, "id": 1}
    writer.write(data * 30)
    for _ in range(30):
        assert (await read(reader))["id"] == 1


async def test_the_longest_message_arrives_and_longer_ones_do_not(member: Member) -> None:
    client = member.client()
    member.handle = lambda request: asyncio.sleep(0, {"size": len(request["body"])})
    room = MAX_MESSAGE - len(encode({"body": "", "id": 1})) + 4
    assert await client.ask({"body": "x" * room}, 20) == {"size": room}
    with pytest.raises(PeerUnreachable, match="more than 65536"):
        await client.ask({"body": "x" * (room + 1)}, 20)


async def test_a_handler_that_fails_loses_its_request(member: Member) -> None:
    async def fail(request: Answer) -> Answer:
        raise RuntimeError("secret detail")

    client = member.client()
    for handle in (fail, lambda _: asyncio.sleep(0, {"body": "x" * MAX_MESSAGE})):
        member.handle = handle
        with capture_logs() as lines, pytest.raises(PeerLost, match="handler"):
            await client.ask({}, 20)
        assert [line["event"] for line in lines if line["log_level"] == "error"] == ["request of a peer failed"]
    member.handle = member.echo
    assert await client.ask({}, 20) == {"echo": {}}, "the connection goes on"


async def test_a_failed_request_reveals_no_details(member: Member) -> None:
    async def fail(request: Answer) -> Answer:
        raise RuntimeError("secret detail")

    member.handle = fail
    reader, writer = await member.logged_in()
    writer.write(encode({"id": 5}))
    assert await read(reader) == {"id": 5, "failed": "internal error"}


# -- the secret


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ([b"old"], [b"old", b"new"]),
        ([b"old", b"new"], [b"old"]),
        ([b"new", b"old"], [b"new"]),
        ([b"old", b"new"], [b"new", b"old"]),
        ([b"new"], [b"old", b"new"]),
    ],
)
async def test_members_with_a_common_secret_connect(member: Member, server: list[bytes], client: list[bytes]) -> None:
    member.secrets = server
    assert await member.client(*client).ask({}, 20) == {"echo": {}}


@pytest.mark.parametrize("valid", [[SECRET], []])
async def test_a_client_with_a_wrong_secret_is_refused(member: Member, valid: list[bytes]) -> None:
    member.secrets = valid
    client = member.client(b"wrong-secret")
    with capture_logs() as lines, pytest.raises(PeerUnreachable, match="closed the connection in the handshake"):
        await client.ask({}, 20)
    await until(lambda: not member.listener.sessions)
    assert member.requests == []
    assert "a peer is refused" in {line["event"] for line in lines}
    assert "wrong-secret" not in str(lines)
    assert SECRET.decode() not in str(lines)


async def test_a_server_with_a_wrong_secret_gets_no_request() -> None:
    received: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        own = new_greeting("b")
        writer.write(encode(own._asdict()))
        message = await read(reader)
        theirs = Greeting(message["name"], message["nonce"])
        writer.write(encode({"proof": proof(b"guess", SERVER, theirs, own)}))
        received.append(await ended(reader))

    async with Impostor(pretend) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerUnreachable, match="another secret"):
            await client.ask({"op": "commit"}, 20)
        await until(lambda: received == [b""])
        await client.close()


async def test_another_member_at_an_address_gets_no_request(member: Member) -> None:
    """The address of a load balancer leads to any member: that one would say that it does not have the branch."""
    client = PeerClient(f"amqp://{member.address}", "a", lambda: [SECRET], peer="c")
    member.clients.append(client)
    with pytest.raises(PeerUnreachable, match="it is another member, b: correct --advertise"):
        await client.ask({"n": 1}, 5)
    assert not member.requests
    member.clients.append(right := PeerClient(f"amqp://{member.address}", "a", lambda: [SECRET], peer="b"))
    assert (await right.ask({"n": 1}, 5))["echo"]["n"] == 1


async def test_a_proof_of_a_client_proves_no_server() -> None:
    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(encode(new_greeting("a")._asdict()))
        writer.write(encode({"proof": (await read(reader))["proofs"][0]}))
        await ended(reader)

    async with Impostor(reflect) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerUnreachable, match="another secret"):
            await client.ask({}, 20)
        await client.close()


def test_a_proof_is_for_one_side_and_two_greetings() -> None:
    first, second, third = new_greeting("a"), new_greeting("a"), new_greeting("b")
    pairs = [(first, second), (second, first), (first, third), (second, third)]
    made = {proof(SECRET, side, *pair) for side in (CLIENT, SERVER) for pair in pairs}
    assert len(made) == 8


async def test_a_recorded_proof_is_of_no_use_again(member: Member) -> None:
    first, second = [await member.raw() for _ in range(2)]
    own = new_greeting("raw")
    first[1].write(HEADER)
    theirs = Greeting(**await read(first[0]))
    recorded = encode({**own._asdict(), "proofs": [proof(SECRET, CLIENT, theirs, own)]})
    second[1].write(HEADER)
    await read(second[0])
    second[1].write(recorded)
    assert await ended(second[0]) == b""
    first[1].write(recorded)
    assert set(await read(first[0])) == {"proof"}


@pytest.mark.parametrize(
    "sent",
    [
        encode({"id": 1, "op": "commit"}),
        encode({"name": "x", "nonce": "y", "proofs": []}),
        encode({"name": "x", "nonce": "y", "proofs": ["é", "\ud800", 5, None, {}]}),
        encode({"name": "x", "nonce": "y", "proofs": "0" * 64}),
        encode({"name": 5, "nonce": "y", "proofs": []}),
        (5000).to_bytes(4, "big"),
    ],
)
async def test_nothing_is_handled_before_the_proof(member: Member, sent: bytes) -> None:
    reader, writer = await member.raw()
    writer.write(HEADER)
    assert "nonce" in await read(reader)
    writer.write(sent + encode({"id": 2, "op": "commit"}))
    assert await ended(reader) == b""
    assert member.requests == []


# -- limits and malformed data


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_MESSAGE + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"AMQP\x00\x00\x09\x01",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x02\xff\xfe",
        encode({"id": True}),
        encode({"id": "1"}),
        (60_000).to_bytes(4, "big") + b"[" * 60_000,
        (60_000).to_bytes(4, "big") + b"1" * 60_000,
    ],
)
async def test_a_malformed_message_ends_the_connection(member: Member, sent: bytes) -> None:
    reader, writer = await member.logged_in()
    with capture_logs() as lines:
        writer.write(sent)
        assert await ended(reader) == b""
    assert [line["event"] for line in lines if line["event"].startswith("a peer")] == ["a peer broke the protocol"]
    assert member.requests == []


@pytest.mark.parametrize("sent", [b"", HEADER[:5], HEADER, HEADER + b"\x00\x00\x00\x09{"])
async def test_a_handshake_without_end_is_closed(sent: bytes) -> None:
    member = Member()
    member.listener.header_timeout = 0.05
    member.peers.handshake_timeout = 0.05
    await member.open()
    reader, writer = await member.raw()
    writer.write(sent)
    await ended(reader)
    await until(lambda: not member.listener.sessions)
    writer.close()
    await member.close()


async def test_handshakes_of_one_address_are_limited(member: Member) -> None:
    streams = [await member.raw() for _ in range(2)]
    for reader, writer in streams:
        writer.write(HEADER)
        await read(reader)
    reader, _ = await member.raw()
    assert await ended(reader) == b""


async def test_members_have_places_above_the_limit(member: Member) -> None:
    for _ in range(6):
        await member.logged_in()
    assert await member.client().ask({}, 20) == {"echo": {}}


async def test_a_connection_has_a_limit_of_requests_under_way(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_UNDER_WAY", 8)
    member.handle = member.wait
    client = member.client()
    asked = [asyncio.create_task(client.ask({"n": n}, 20)) for n in range(50)]
    await until(lambda: len(member.requests) == 8)
    await asyncio.sleep(0.05)
    assert len(member.requests) == 8
    member.gate.set()
    assert await asyncio.gather(*asked) == [{"n": n} for n in range(50)]


async def test_a_peer_that_reads_no_answers_sends_no_more_requests(member: Member) -> None:
    async def handle(request: Answer) -> Answer:
        member.requests.append(request)
        return {"body": "x" * 60_000}

    member.handle = handle
    reader, writer = await member.logged_in()
    writer.write(encode({"id": 1}) * 600)
    await until(lambda: member.sessions[0]._is_slow and not member.peers.requests)
    assert len(member.requests) < 600
    for _ in range(600):
        assert (await read(reader))["id"] == 1


async def test_a_client_has_a_limit_of_waiting_requests(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_WAITING", 3)
    member.handle = member.wait
    client = member.client()
    asked = [asyncio.create_task(client.ask({}, 20)) for _ in range(3)]
    await until(lambda: len(member.requests) == 3)
    with pytest.raises(PeerUnreachable, match="3 requests wait"):
        await client.ask({}, 20)
    member.gate.set()
    await asyncio.gather(*asked)
    assert await client.ask({}, 20) == {}


async def test_a_member_that_reads_nothing_gets_a_limited_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        await stalled.wait()

    stalled = asyncio.Event()
    async with Impostor(stall) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        asked = [asyncio.create_task(client.ask({"body": "x" * 60_000}, 20)) for _ in range(400)]
        done, waiting = await asyncio.wait(asked, timeout=1)
        assert {type(task.exception()) for task in done} == {PeerUnreachable}
        stalled.set()
        await asyncio.wait(waiting)
        assert {type(task.exception()) for task in waiting} == {PeerLost}
        await client.close()


# -- lost connections


async def test_a_dead_member_is_unreachable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAUSE", 20.0)
    impostor = Impostor(refuse)
    async with impostor as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with capture_logs() as lines:
            for _ in range(3):
                with pytest.raises(PeerUnreachable, match="handshake"):
                    await client.ask({}, 20)
            assert impostor.accepted == 1, "a failed attempt is remembered"
            client._refused_until = 0.0
            with pytest.raises(PeerUnreachable):
                await client.ask({}, 20)
        assert impostor.accepted == 2
        assert [line["event"] for line in lines] == ["a member cannot be reached"], "it is logged once"
        await client.close()


async def test_each_failure_after_a_connection_is_logged() -> None:
    scripts = iter((refuse, welcome, refuse))

    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(scripts)(reader, writer)
        with suppress(asyncio.IncompleteReadError):
            await read(reader)

    async with Impostor(follow) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with capture_logs() as lines:
            for wanted in (PeerUnreachable, PeerLost, PeerUnreachable):
                client._refused_until = 0.0
                with pytest.raises(wanted):
                    await client.ask({}, 20)
        assert [line["event"] for line in lines] == ["a member cannot be reached"] * 2
        await client.close()


async def test_requests_share_one_attempt_to_connect(member: Member) -> None:
    client = member.client()
    assert await asyncio.gather(*(client.ask({"n": n}, 20) for n in range(50))) == [
        {"echo": {"n": n}} for n in range(50)
    ]
    assert len(member.sessions) == 1


async def test_a_silent_server_costs_the_time_of_a_request() -> None:
    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended(reader)

    async with Impostor(be_silent) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerUnreachable, match=r"within 0.05 s"):
            await client.ask({}, 0.05)
        await client.close()
        with pytest.raises(PeerUnreachable, match="shutting down"):
            await client.ask({}, 20)


async def test_a_client_that_closes_waits_for_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 600.0)

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended(reader)

    async with Impostor(be_silent) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        asked = asyncio.create_task(client.ask({}, 600))
        await until(lambda: client._connecting is not None)
        async with asyncio.timeout(20):
            await client.close()
            with pytest.raises(PeerUnreachable):
                await asked


async def test_a_connection_made_too_late_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_SECONDS", 0.05)
    gate = asyncio.Event()
    received: list[bytes] = []

    async def be_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await welcome(reader, writer)
        received.append(await ended(reader))

    async with Impostor(be_late) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerUnreachable, match="no connection"):
            await client.ask({}, 0.05)
        gate.set()
        await until(lambda: received == [b""])
        await client.close()


@pytest.mark.parametrize("greeting", [b"AMQP\x00\x00\x09\x01", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x02[]"])
async def test_another_server_is_no_member(greeting: bytes) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await ended(reader)

    async with Impostor(greet) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerUnreachable, match="no member"):
            await client.ask({}, 20)
        await client.close()


async def test_a_request_is_lost_with_its_connection() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        await read(reader)

    async with Impostor(die) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        for _ in range(2):
            with pytest.raises(PeerLost, match="connection"):
                await client.ask({}, 20)
        await client.close()


async def test_a_connection_lost_after_its_handshake_costs_no_time() -> None:
    async with Impostor(welcome) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with capture_logs() as lines:
            for _ in range(30):
                client._refused_until = 0.0
                async with asyncio.timeout(20):
                    with pytest.raises((PeerLost, PeerUnreachable)):
                        await client.ask({}, 600)
        assert all(line["reason"] for line in lines)
        await client.close()


async def test_a_second_answer_is_ignored() -> None:
    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        for _ in range(2):
            number = (await read(reader))["id"]
            writer.write(encode({"id": number, "n": 1}) + encode({"id": number, "n": 2}) + encode({"id": 99}))
        await ended(reader)

    async with Impostor(repeat) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        for _ in range(2):
            assert await client.ask({}, 20) == {"n": 1}
        await client.close()


async def test_a_reset_connection_gets_no_more_requests(member: Member) -> None:
    client = member.client()
    await client.ask({}, 20)
    transport: Any = member.sessions[0]._transport._transport
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
    await until(lambda: client.link is None)
    assert await client.ask({}, 20) == {"echo": {}}


async def test_half_an_answer_is_no_answer() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        writer.write(encode({"id": (await read(reader))["id"]})[:-1])

    async with Impostor(half) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerLost, match="connection"):
            await client.ask({}, 20)
        await client.close()


@pytest.mark.parametrize("answer", [b"\xff" * 4, encode({}), encode({"id": None}), b"\x00\x00\x00\x01{"])
async def test_a_malformed_answer_loses_the_request(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await welcome(reader, writer)
        await read(reader)
        writer.write(answer)
        await ended(reader)

    async with Impostor(reply) as address:
        client = PeerClient(address, "a", lambda: [SECRET])
        with pytest.raises(PeerLost, match="connection"):
            await client.ask({}, 20)
        await client.close()


async def test_the_answer_after_a_late_one_is_right(member: Member) -> None:
    async def late(request: Answer) -> Answer:
        member.requests.append(request)
        await member.gate.wait()
        return {"late": True}

    client = member.client()
    await client.ask({}, 20)
    member.handle = late
    with pytest.raises(PeerLost, match="in time"):
        await client.ask({}, 0.05)
    member.handle = member.echo
    member.gate.set()
    assert await client.ask({"n": 1}, 20) == {"echo": {"n": 1}}


async def test_a_silent_connection_gets_no_more_requests(member: Member) -> None:
    """The network may be cut without a sign: a new connection is refused, or works."""
    client = member.client()
    await client.ask({}, 20)
    member.handle = member.wait
    other = asyncio.create_task(client.ask({"n": 1}, 20))
    await until(lambda: len(member.requests) == 2)
    with pytest.raises(PeerLost):
        await client.ask({}, 0.05)
    member.handle = member.echo
    assert await client.ask({"n": 2}, 20) == {"echo": {"n": 2}}
    assert len(member.sessions) == 2
    member.gate.set()
    assert await other == {"n": 1}, "the old connection waits for its answers"
    await until(lambda: len(member.listener.sessions) == 1)


async def test_a_slow_request_leaves_a_busy_connection(member: Member) -> None:
    client = member.client()
    member.handle = member.wait
    slow = asyncio.create_task(client.ask({}, 1))
    await until(lambda: len(member.requests) == 1)
    member.handle = member.echo
    await client.ask({}, 20)
    with pytest.raises(PeerLost, match="in time"):
        await slow
    await client.ask({}, 20)
    assert len(member.sessions) == 1


async def test_a_cancelled_request_leaves_the_connection(member: Member) -> None:
    member.handle = member.wait
    client = member.client()
    asked = asyncio.create_task(client.ask({}, 20))
    await until(lambda: len(member.requests) == 1)
    asked.cancel()
    await asyncio.wait((asked,))
    member.gate.set()
    assert await client.ask({"n": 1}, 20) == {"n": 1}
    assert len(member.sessions) == 1


async def test_a_member_that_returns_is_connected_again(member: Member) -> None:
    client = member.client()
    await client.ask({}, 20)
    member.sessions[0].stop(b"")
    await until(lambda: client.link is None)
    assert await client.ask({"n": 1}, 20) == {"echo": {"n": 1}}
    assert len(member.sessions) == 2


async def test_a_stopping_member_answers_its_requests_first(member: Member) -> None:
    member.handle = member.wait
    client = member.client()
    asked = asyncio.create_task(client.ask({"n": 1}, 20))
    await until(lambda: len(member.requests) == 1)
    member.sessions[0].stop(b"")
    late = asyncio.create_task(client.ask({"n": 2}, 20))
    await asyncio.sleep(0.02)
    member.gate.set()
    assert await asked == {"n": 1}
    with pytest.raises(PeerLost):
        await late
    assert member.requests == [{"n": 1}]


async def test_a_request_goes_on_after_its_sender_left(member: Member) -> None:
    member.handle = member.wait
    client = member.client()
    asked = asyncio.create_task(client.ask({}, 20))
    await until(lambda: len(member.requests) == 1)
    await client.close()
    with pytest.raises(PeerLost, match="connection"):
        await asked
    await until(lambda: member.sessions[0].stage.value == "ended")
    (request,) = member.peers.requests
    member.sessions[0].stop(b"")
    member.gate.set()
    await request
    await until(lambda: not member.listener.sessions)


async def test_a_closed_server_cancels_its_requests(member: Member) -> None:
    member.handle = member.wait
    asked = asyncio.create_task(member.client().ask({}, 20))
    await until(lambda: len(member.requests) == 1)
    await member.peers.close()
    assert not member.peers.requests
    await member.listener.close(b"", 1)
    with pytest.raises(PeerLost):
        await asked


async def test_an_idle_connection_is_closed(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_SECONDS", 0.05)
    client = member.client()
    await client.ask({}, 20)
    await until(lambda: client.link is None and not member.listener.sessions)
    assert await client.ask({}, 20) == {"echo": {}}
    member.handle = lambda _: asyncio.sleep(0.2, {"slow": True})
    assert await client.ask({}, 20) == {"slow": True}, "a connection with a request is not idle"


async def test_a_connection_of_a_silent_peer_is_closed(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_SILENCE", 0.05)
    member.handle = member.wait
    client = member.client()
    asked = asyncio.create_task(client.ask({}, 20))
    await asyncio.sleep(0.2)
    assert not asked.done(), "a request is under way"
    member.gate.set()
    await asked
    await until(lambda: not member.listener.sessions)


@pytest.mark.parametrize("address", ["", "127.0.0.1:5672", "http://h:1", "amqp://", "amqp://h:99999"])
def test_an_address_has_a_scheme_and_a_host(address: str) -> None:
    with pytest.raises(ValueError, match=r"address of a member|[Pp]ort"):
        PeerClient(address, "a", lambda: [SECRET])


def test_the_port_of_an_address_has_a_default() -> None:
    clients = [PeerClient(f"{scheme}://h", "a", lambda: [SECRET]) for scheme in ("amqp", "amqps")]
    assert [client.address.port for client in clients] == [5672, 5671]


# -- TLS


def contexts(certificates: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return server, ssl.create_default_context(cafile=certificates / "ca.pem")


async def test_members_connect_with_tls(certificates: Path) -> None:
    server, trusting = contexts(certificates)
    member = Member()
    await member.open(server)
    assert await member.client(tls=trusting).ask({"body": "x" * 60_000}, 20) == {"echo": {"body": "x" * 60_000}}
    with pytest.raises(PeerUnreachable, match="certificate verify failed"):
        await member.client(tls=ssl.create_default_context()).ask({}, 20)
    plain = PeerClient(f"amqp://{member.address}", "a", lambda: [SECRET])
    with pytest.raises(PeerUnreachable):
        await plain.ask({}, 20)
    await plain.close()
    await member.close()


async def test_peers_without_tls_are_logged_once(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as lines:
        await (await member.logged_in())[1].drain()
        assert [line for line in lines if line["log_level"] == "warning"] == []
        monkeypatch.setattr(AcceptedConnection, "is_local", False)
        for _ in range(2):
            await member.client().ask({}, 20)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["members connect without TLS"]


# -- other clients and random bytes


async def test_members_and_clients_share_a_port(member: Member) -> None:
    def publish_and_get() -> bytes | None:
        with BlockingConnection(URLParameters(f"amqp://guest:guest@{member.address}/")) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            channel.basic_publish("", "q", b"body")
            body: bytes | None = channel.basic_get("q", auto_ack=True)[2]
            return body

    async with whole() as (member.parts, _):
        client = member.client()
        await client.ask({}, 20)
        assert await asyncio.to_thread(publish_and_get) == b"body"
        await client.ask({}, 20)
        await until(lambda: len(member.listener.sessions) == 1)


async def test_another_protocol_is_refused(member: Member) -> None:
    reader, writer = await member.raw()
    writer.write(b"DTXM\x00\x00\x02\x00")
    assert await ended(reader) == Protocol.AMQP_0_9_1.value


@pytest.mark.parametrize("seed", range(3))
async def test_random_bytes_leave_nothing_behind(member: Member, seed: int) -> None:
    """Before and after the handshake; the member closes at the end and looks for tasks."""
    dice = random.Random(seed)
    valid = encode({"id": 1, "op": "commit"})
    for turn in range(200):
        reader, writer = await (member.logged_in() if turn % 2 else member.raw())
        noise = bytearray(valid * dice.randrange(1, 4) if dice.random() < 0.5 else dice.randbytes(dice.randrange(200)))
        for _ in range(dice.randrange(4)):
            if noise:
                noise[dice.randrange(len(noise))] = dice.randrange(256)
        writer.write((b"" if turn % 2 else HEADER) + noise)
        if dice.random() < 0.5:
            await asyncio.sleep(0)
        if dice.random() < 0.5:
            writer.write_eof()
            await ended(reader)
        writer.transport.abort()
    await until(lambda: not member.listener.sessions and not member.listener._connections)
    assert all(session.ended.done() for session in member.sessions)
    assert member.listener._handshakes == {}
    assert await member.client().ask({}, 20) == {"echo": {}}
