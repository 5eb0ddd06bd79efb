"""What the management API must say before receipts are trusted: one node, and no queue that may refuse."""

from typing import Any

import pytest

from dtx.store.rabbitmq.management import Management

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
    ("answers", "why"),
    [
        (api(), None),
        (api(queues=[{"name": "q", "arguments": {"x-max-length": 1}}]), None),
        (api(nodes=2), "the broker has 2 nodes"),
        (api(nodes=0), "the broker has 0 nodes"),
        (api(queues=[{"name": "q", "arguments": {"x-overflow": "reject-publish"}}]), "queue 'q' refuses"),
        (api(queues=[{"name": "q", "effective_policy_definition": REFUSES}]), "queue 'q' refuses"),
        (api(queues=[{"name": OURS, "arguments": {"x-message-ttl": 1}}]), f"queue {OURS}"),
        (api(policies=[{"name": "p", "pattern": "^x", "definition": REFUSES}]), "policy 'p' lets queues refuse"),
        (
            api(policies=[{"name": "p", "pattern": ".*", "definition": {"max-length": 1}}]),
            "applies to dtx's own queues",
        ),
        (api(policies=[{"name": "p", "pattern": "^x", "definition": {"max-length": 1}}]), None),
    ],
)
async def test_receipts_are_trusted_where_nothing_can_refuse(answers: Answers, why: str | None) -> None:
    """The unit: a receipt proves that tx.commit was processed, not that every queue accepted."""
    said = await answers.distrust("/", [OURS])
    assert said is None if why is None else why in str(said)
