"""What the management API must say before receipts are trusted: one node, and no queue that may refuse."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dtx.store.rabbitmq.management import Doubts, Management, ManagementError
from dtx.store.rabbitmq.receipts import Receipts
from dtx.store.rabbitmq.trust import Replay, Trust
from tests.support.branches import new_identity

REFUSES = {"overflow": "reject-publish"}
OURS = "dtx.receipts.dtx.0"


class Answers(Management):
    """A management API that answers what a test wants."""

    nodes: list[Any]
    queues: list[Any]
    policies: list[Any]

    async def get(self, path: str) -> Any:
        found = {"nodes": self.nodes, "queues": self.queues, "policies": self.policies, "operator-policies": []}
        return found[path.partition("?")[0].partition("/")[0]]


def api(*, nodes: int = 1, queues: list[Any] | None = None, policies: list[Any] | None = None) -> Answers:
    made = Answers(url="http://127.0.0.1:1", user="guest", password="guest")
    object.__setattr__(made, "nodes", [{"name": f"rabbit@{number}"} for number in range(nodes)])
    object.__setattr__(made, "queues", queues or [])
    object.__setattr__(made, "policies", policies or [])
    return made


@pytest.mark.parametrize(
    ("answers", "of_all", "of_publishes"),
    [
        (api(), None, None),
        (api(queues=[{"name": "q", "arguments": {"x-max-length": 1}}]), None, None),
        (api(nodes=2), "the broker has 2 nodes", None),
        (api(nodes=0), "the broker has 0 nodes", None),
        (api(queues=[{"name": "q", "arguments": {"x-overflow": "reject-publish"}}]), None, "queue 'q' refuses"),
        (api(queues=[{"name": "q", "effective_policy_definition": REFUSES}]), None, "queue 'q' refuses"),
        (api(queues=[{"name": "q", "type": "quorum"}]), None, "queue 'q' is a quorum queue"),
        (api(queues=[{"name": "q", "arguments": {"x-queue-type": "quorum"}}]), None, "queue 'q' is a quorum queue"),
        (api(queues=[{"name": "q", "type": "stream"}, {"name": "c", "type": "classic"}]), None, None),
        (api(queues=[{"name": OURS, "arguments": {"x-message-ttl": 1}}]), f"queue {OURS}", None),
        (api(queues=[{"name": "q", "type": "quorum"}, {"name": OURS, "arguments": {"x-message-ttl": 1}}]), OURS, None),
        (api(queues=[{"name": OURS, "arguments": {"x-expires": 1}}]), None, None),
        (api(queues=[{"name": OURS, "effective_policy_definition": {"expires": 1}}]), f"queue {OURS}", None),
        (api(policies=[{"name": "p", "pattern": "^x", "definition": REFUSES}]), None, "policy 'p' lets queues refuse"),
        (
            api(policies=[{"name": "p", "pattern": ".*", "definition": {"max-length": 1, **REFUSES}}]),
            "applies to dtx's own queues",
            None,
        ),
        (api(policies=[{"name": "p", "pattern": "^x", "definition": {"max-length": 1}}]), None, None),
    ],
)
async def test_receipts_are_trusted_where_nothing_can_refuse(
    answers: Answers, of_all: str | None, of_publishes: str | None
) -> None:
    """The unit: a receipt proves that tx.commit was processed, not that every queue accepted."""
    doubts = await answers.doubts("/", [OURS])
    for expected, found in ((of_all, doubts.of_all), (of_publishes, doubts.of_publishes)):
        assert found is None if expected is None else expected in str(found)


async def test_the_nodes_of_a_cluster_are_enough_for_distrust() -> None:
    trust = Trust("/", "receipts", None, Receipts(new_identity("t")), lambda: None, 2)
    await trust.refresh()
    assert trust.doubts == Doubts(of_all="--broker names several nodes")


@pytest.mark.parametrize(("replay", "nodes", "why"), [("receipts", 1, None), ("receipts", 3, "the broker has 3 nodes")])
async def test_no_setting_makes_receipts_of_a_cluster_trusted(replay: Replay, nodes: int, why: str | None) -> None:
    """A partition can lose a receipt whose acknowledgements have happened: the message would be lost."""
    trust = Trust("/", replay, api(nodes=nodes), Receipts(new_identity("t")), lambda: None, 1)
    await trust.refresh()
    assert trust.doubts.of_all == why


async def test_receipts_can_be_trusted_without_a_management_api() -> None:
    trust = Trust("/", "receipts", None, Receipts(new_identity("t")), lambda: None, 1)
    await trust.refresh()
    assert trust.doubts.of_all is None


async def test_a_detected_cluster_remains_one_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    trust = Trust("/", "receipts", api(nodes=3), Receipts(new_identity("t")), lambda: None, 1)
    await trust.refresh()

    async def away(_self: Management, _path: str) -> Any:
        raise ManagementError("away")

    monkeypatch.setattr(Answers, "get", away)
    await trust.refresh()
    assert trust.doubts.of_all == "the broker has 3 nodes"


@pytest.mark.parametrize(("replay", "why"), [("auto", "no answer within 0.01 seconds"), ("receipts", "3 nodes")])
async def test_a_slow_api_is_asked_again_later(replay: Replay, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new commit connection does not wait for it: the first select of a client would fail."""
    commits: Any = SimpleNamespace(upstream=SimpleNamespace(lock="lock"))
    trust = Trust("/", replay, api(nodes=3), Receipts(new_identity("t")), lambda: commits, 1)
    await trust.refresh()
    answer, asked = asyncio.Event(), 0

    async def slow(_self: Management, path: str) -> Any:
        nonlocal asked
        asked += 1
        await answer.wait()
        return [] if path.startswith(("queues?", "policies", "operator")) else [{"name": "rabbit@0"}]

    monkeypatch.setattr(Answers, "get", slow)
    await trust.refresh(seconds=0.01)
    assert why in str(trust.doubts.of_all)
    answer.set()
    before = asked
    await trust.refresh(since=0)
    assert (asked > before, trust.doubts.of_all) == (True, None)


@pytest.mark.parametrize(("failures", "asked", "why"), [(2, 3, None), (9, 3, "away")], ids=["for a moment", "for long"])
async def test_a_short_outage_of_the_api_keeps_the_trust(
    failures: int, asked: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without trust a unit whose outcome is open is applied again."""
    monkeypatch.setattr("dtx.store.rabbitmq.trust._PAUSES", (0, 0))
    commits: Any = SimpleNamespace(upstream=SimpleNamespace(lock="lock"))
    trust = Trust("/", "auto", api(), Receipts(new_identity("t")), lambda: commits, 1)
    tries = 0

    async def seen(_self: Management, _vhost: str, _queue: str) -> bool:
        nonlocal tries
        tries += 1
        if trust.doubts.of_all is None and tries <= failures:
            raise ManagementError("away")
        return True

    monkeypatch.setattr(Management, "has_queue", seen)
    await trust.refresh()
    assert trust.doubts.of_all is None
    tries = 0
    await trust.refresh()
    assert (tries, trust.doubts.of_all) == (asked, why)
    await trust.refresh()
    assert trust.doubts.of_all is None
