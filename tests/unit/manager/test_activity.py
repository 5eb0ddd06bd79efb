"""Whose turn it is on a branch: a turn is taken once, and given back."""

import time
from collections.abc import Callable

import pytest

from dtx.manager.entry import Entry
from dtx.xa.branch import Branch
from tests.support.client import new_xid

Move = Callable[[Entry], None]
MOVES: dict[str, Move] = {
    "claim": Entry.claim,
    "lost_track": Entry.lost_track,
    "reread": Entry.reread,
    "known": Entry.known,
    "done": Entry.done,
}
WAYS: dict[str, tuple[str, ...]] = {
    "idle": (),
    "running": ("claim",),
    "failing": ("claim", "lost_track"),
    "uncertain": ("claim", "lost_track", "done"),
    "rereading": ("claim", "lost_track", "done", "reread"),
}
"""How a branch comes into each state of affairs."""
SEEN = {
    "idle": (True, False, False),
    "running": (False, True, False),
    "failing": (False, True, True),
    "uncertain": (False, False, True),
    "rereading": (False, True, True),
}
LEADS = {
    ("idle", "claim"): "running",
    ("running", "done"): "idle",
    ("running", "lost_track"): "failing",
    ("failing", "lost_track"): "failing",
    ("failing", "done"): "uncertain",
    ("uncertain", "reread"): "rereading",
    ("rereading", "known"): "running",
    ("rereading", "done"): "uncertain",
}


def entry(way: str) -> Entry:
    """A branch in that state of affairs."""
    made = Entry(Branch(xid=new_xid(), owner="guest", timeout=0), "/", now=time.time())
    for move in WAYS[way]:
        MOVES[move](made)
    return made


def seen(of: Entry) -> tuple[bool, bool, bool]:
    """What others see."""
    return of.idle, of.busy, of.uncertain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("move", MOVES)
def test_a_turn_is_taken_once_and_given_back(way: str, move: str) -> None:
    branch = entry(way)
    assert seen(branch) == SEEN[way]
    if (way, move) in LEADS:
        MOVES[move](branch)
        assert seen(branch) == SEEN[LEADS[way, move]]
    else:
        with pytest.raises(AssertionError, match=str(branch.xid)):
            MOVES[move](branch)
