"""Whole branches from start to end, as hand-written dialogues in the folder ``dialogues``.

A line that starts with a time is an event: the request or incident, its channel and its vote. The indented line below
it shows the new state of the branch and the effects of the step, in order.
"""

import re
from pathlib import Path
from typing import Final

import pytest

from dtx.xa.branch import Branch, step
from dtx.xa.codes import Heuristic, XaError
from dtx.xa.model import Happened, Operation, State, Vote
from tests.unit.xa.support import HERE, XID, event_of, words

FOLDER: Final = Path(__file__).with_name("dialogues")
EVENT: Final = re.compile(
    r"(?P<now>\d+)s (?P<operation>[a-z-]+)"
    r"(?: on (?P<channel>\d+))?(?: to (?P<seconds>\d+)s)?(?: \[(?P<vote>\w+)\])?(?: because (?P<reason>.+))?"
)
FOUND: Final = re.compile(r"found in the log: (?P<state>[a-z-]+)(?: \((?P<outcome>[a-z-]+)\))?")


def _stands(branch: Branch) -> str:
    channels = ", ".join(f"{how} on {channel}" for channel, how in sorted(branch.associations.items(), key=str))
    deadline = "" if branch.deadline is None else f" until {branch.deadline:g}s"
    return branch.state + deadline + (f" ({channels})" if channels else "")


def _play(text: str) -> str:
    """*text* with every indented line computed again."""
    branch = Branch(xid=XID, owner="alice", timeout=60)
    lines = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if (found := FOUND.fullmatch(line)) is not None:
            outcome = Heuristic(found["outcome"]) if found["outcome"] else None
            branch = Branch(xid=XID, owner="alice", state=State(found["state"]), outcome=outcome)
        elif (said := EVENT.fullmatch(line)) is not None:
            operation, vote = Operation(said["operation"]), Vote(said["vote"] or "nothing")
            event = event_of(operation, vote, said["channel"] or HERE, int(said["seconds"] or 0))
            if said["reason"]:
                event = Happened(operation=operation, vote=vote, reason=said["reason"])
            try:
                branch, effects = step(branch, event, float(said["now"]))
            except XaError as error:
                lines.append(f"    refused {error}")
            else:
                lines.append(f"    {_stands(branch)}: {words(effects)}".rstrip(" :"))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_branch_follows_its_dialogue(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert _play(text) == text


def test_the_dialogues_are_there() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 15
