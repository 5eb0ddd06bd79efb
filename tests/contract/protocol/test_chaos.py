"""Branches that move tokens between queues and end in every possible way lose and duplicate no token."""

import random
from concurrent.futures import ThreadPoolExecutor

from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRecover, DtxRollback, DtxSetTimeout, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker
from tests.support.client import bodies, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.raw import RawClient, session
from tests.support.service import DtxService

TOKENS = 200
WORKERS = 16
MOVES = 25


class Worker:
    """A client that moves tokens and may disconnect at any moment."""

    def __init__(self, url: str, source: str, target: str, seed: int) -> None:
        self.url, self.source, self.target = url, source, target
        self.chance = random.Random(seed)
        self.client = self._connect()
        self.left_prepared: list[Xid] = []

    def _connect(self) -> RawClient:
        client = RawClient(self.url).log_in()
        client.open(1, select=True)
        client.open(2)
        return client

    def _leave(self) -> None:
        if self.chance.random() < 0.5:
            self.client.abort()
        else:
            self.client.close()
        self.client = self._connect()

    def _move(self, xid: Xid) -> bool:
        """Move one to three tokens within the branch; return whether the branch ended without failure."""
        client, chance = self.client, self.chance
        source, target = (self.source, self.target) if chance.random() < 0.7 else (self.target, self.source)
        client.ask(1, DtxStart(xid=xid))
        for _ in range(chance.randint(1, 3)):
            body = client.take(1, source)
            if body is not None:
                client.publish(1, target, body)
            if chance.random() < 0.05:
                self._leave()
                return False
        fail = chance.random() < 0.1
        client.ask(1, DtxEnd(xid=xid, fail=fail))
        return not fail

    def run(self) -> list[Xid]:
        """Make all moves; return the xids of branches that may be left prepared."""
        for _ in range(MOVES):
            xid = new_xid()
            if self._move(xid):
                self._complete(xid)
        self.client.close()
        return self.left_prepared

    def _complete(self, xid: Xid) -> None:
        client = self.client
        match self.chance.choice(
            ("two-phase", "one-phase", "rollback", "refuse", "leave", "vanish", "doubt", "close", "late")
        ):
            case "two-phase":
                if client.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK:
                    assert client.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
            case "one-phase":
                assert client.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
            case "rollback":
                assert client.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
            case "refuse":
                if client.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK:
                    assert client.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
            case "leave":  # between end and prepare, which a new connection then sends
                self._leave()
                if self.client.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK:
                    self.left_prepared.append(xid)
            case "vanish":  # during the call: its outcome is unknown
                call = self.chance.choice(
                    (DtxPrepare(xid=xid), DtxCommit(xid=xid, one_phase=True), DtxRollback(xid=xid))
                )
                client.say(2, call.encode())
                self._leave()
                self.left_prepared.append(xid)
            case "doubt":
                if client.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK:
                    self.left_prepared.append(xid)
            case "close":
                client.say(2, DtxPrepare(xid=xid).encode())
                client.close_channel(1)
                client.open(1, select=True)
                client.answer(2, DtxPrepare(xid=xid))
                self.left_prepared.append(xid)
            case "late":
                client.ask(2, DtxSetTimeout(xid=xid, timeout=1))


def test_random_client_actions_neither_lose_nor_repeat_a_token(service: DtxService, broker: Broker) -> None:
    """Commit, rollback: "made available", "discarded", "re-enqueued": each applies to the whole branch, once."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    tokens = [f"{number}".encode() for number in range(TOKENS)]
    with fresh_queue(broker) as source, fresh_queue(broker) as target:
        with broker.channel() as channel:
            channel.confirm_delivery()
            for token in tokens:
                channel.basic_publish("", source, token)
        workers = [Worker(service.url(), source, target, seed + number) for number in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as threads:
            open_ends = [xid for left in threads.map(Worker.run, workers) for xid in left]
        with session(service.url()) as client:
            client.open(1)
            for xid in open_ends:
                _finish(client, xid, commit=workers[0].chance.random() < 0.5)
            assert client.ask(1, DtxRecover(startscan=True, endscan=True)) == []

        def all_there() -> bool:
            return broker.count(source) + broker.count(target) >= TOKENS

        wait_until(all_there, what="the return of all tokens")
        assert sorted(bodies(broker, source) + bodies(broker, target)) == sorted(tokens)


def _finish(client: RawClient, xid: Xid, *, commit: bool) -> None:
    """Complete a branch whose state is unknown here."""
    for call in (DtxPrepare(xid=xid), DtxCommit(xid=xid) if commit else DtxRollback(xid=xid)):
        client.say(1, call.encode())
        payload = client.next_method(1)
        client.unread(1, payload)
        if payload[:2] == b"\x00\x14":
            assert client.refused(1).code in (404, 503)
        else:
            client.answer(1, call)
