"""The activity of a branch and the progress of its units change only as their tables permit."""

import time
from collections.abc import Callable

import pytest

from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.api import UnitProgress
from dtx.xa.branch import Branch
from tests.support.client import new_xid

Move = Callable[[BranchRuntime], None]
MOVES: dict[str, Move] = {
    "claim": BranchRuntime.claim,
    "mark_uncertain": BranchRuntime.mark_uncertain,
    "reread": BranchRuntime.reread,
    "known": BranchRuntime.known,
    "done": BranchRuntime.done,
}
WAYS: dict[str, tuple[str, ...]] = {
    "idle": (),
    "running": ("claim",),
    "failing": ("claim", "mark_uncertain"),
    "uncertain": ("claim", "mark_uncertain", "done"),
    "rereading": ("claim", "mark_uncertain", "done", "reread"),
}
"""The moves that lead to each activity."""
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
    ("running", "mark_uncertain"): "failing",
    ("failing", "mark_uncertain"): "failing",
    ("failing", "done"): "uncertain",
    ("uncertain", "reread"): "rereading",
    ("rereading", "known"): "running",
    ("rereading", "done"): "uncertain",
}


def entry(way: str) -> BranchRuntime:
    """A branch with that activity."""
    made = BranchRuntime(Branch(xid=new_xid(), owner="guest", timeout=0), "/", now=time.time())
    for move in WAYS[way]:
        MOVES[move](made)
    return made


def seen(of: BranchRuntime) -> tuple[bool, bool, bool]:
    """The properties that callers read."""
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


UNSENT, SENT, REFUSED, APPLIED, ANSWERED = UnitProgress
REACHED: dict[UnitProgress, tuple[UnitProgress, ...]] = {
    UNSENT: (),
    SENT: (SENT,),
    REFUSED: (SENT, REFUSED),
    APPLIED: (SENT, APPLIED),
    ANSWERED: (SENT, APPLIED, ANSWERED),
}
"""The steps that lead to each progress."""
FOLLOWS = {
    (UNSENT, UNSENT),
    (UNSENT, SENT),
    (UNSENT, ANSWERED),
    (SENT, UNSENT),
    (SENT, SENT),
    (SENT, REFUSED),
    (SENT, APPLIED),
    (REFUSED, UNSENT),
    (APPLIED, UNSENT),
    (APPLIED, ANSWERED),
    (ANSWERED, ANSWERED),
}


@pytest.mark.parametrize("reached", UnitProgress)
@pytest.mark.parametrize("to", UnitProgress)
def test_units_go_forward_or_begin_anew(reached: UnitProgress, to: UnitProgress) -> None:
    branch = entry("idle")
    for progress in REACHED[reached]:
        branch.move_units(progress)
    if (reached, to) in FOLLOWS:
        branch.move_units(to)
        assert (branch.applied, branch.answered) == (to in {APPLIED, ANSWERED}, to is ANSWERED)
    else:
        with pytest.raises(AssertionError, match=str(branch.xid)):
            branch.move_units(to)
        assert branch.progress is reached
