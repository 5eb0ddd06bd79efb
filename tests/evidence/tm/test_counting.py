"""The campaign finds differences between the resources."""

from collections.abc import Callable

import pytest

from dtx.client.tm.steps import CommitPoint
from tests.evidence.tm.campaign import IN_RECOVERY, IN_WORK, Ended, Tally, compare, count, ids, table
from tests.support.tm import ALL
from tests.support.tm_child import DIED_AT

Found = dict[str, set[str]]


def agreeing() -> tuple[Tally, Found]:
    """Return six transactions with correct outcomes."""
    tally = Tally(6, committed={"all-1-1", "db1-1-2"}, rolled_back={"undone-1-3"})
    found = {name: {"all-1-1", "all-1-4"} for name in ALL}  # the outcome of the second one was not reported
    found["db1"].add("db1-1-2")
    return tally, found


def test_agreeing_resources_are_correct() -> None:
    tally, found = agreeing()
    compare(tally, found)
    assert tally.wrong == []


@pytest.mark.parametrize(
    ("doom_unreported", "words"),
    [
        (lambda found: found["q2"].discard("all-1-4"), "db1 and q2 differ"),
        (lambda found: found["db1"].add("all-1-5"), "db1 and db2 differ"),
        (lambda found: [ids.discard("all-1-1") for ids in found.values()], "committed and not there: ['all-1-1']"),
        (lambda found: found["db1"].discard("db1-1-2"), "committed and not there: ['db1-1-2']"),
        (lambda found: [ids.add("undone-1-3") for ids in found.values()], "rolled back and there: ['undone-1-3']"),
        (lambda found: found["q1"].add("db1-1-2"), "q1 has what does not belong there"),
    ],
)
def test_disagreeing_resources_are_named(doom_unreported: Callable[[Found], object], words: str) -> None:
    tally, found = agreeing()
    doom_unreported(found)
    compare(tally, found)
    assert any(words in wrong for wrong in tally.wrong), tally.wrong
    assert "| sums agree, each message once | no |" in table(tally, 1)


def test_a_program_that_dies_of_something_else_is_wrong() -> None:
    tally = Tally(3)
    assert count(tally, Ended(DIED_AT + CommitPoint.VOTED, "begun a\ncommitted a\nbegun b\n", "")) == {"a", "b"}
    assert tally.deaths == {CommitPoint.VOTED: 1}
    assert (tally.begun, tally.committed, tally.wrong) == (2, {"a"}, [])
    count(tally, Ended(1, "begun c\n", "ZeroDivisionError"))
    assert tally.wrong == ["a program ended with 1: ZeroDivisionError"]


def test_of_a_hundred_transactions_five_are_undone_and_four_alone() -> None:
    kinds = [id_.partition("-")[0] for id_ in ids(1, 100)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"all": 91, "undone": 5, **dict.fromkeys(ALL, 1)}


def test_every_point_without_heuristic_outcomes_is_a_point_of_death() -> None:
    assert set(CommitPoint) - set(IN_WORK) - set(IN_RECOVERY) == {
        CommitPoint.HEURISTIC_RECORDED,
        CommitPoint.HEURISTIC_FORGOTTEN,
    }
