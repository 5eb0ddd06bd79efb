"""Pages of branches that have not voted, of one dtx and of several members together."""

import json
from uuid import UUID

import pytest

from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.unvoted import MOST_PLACES, UnvotedBranch, UnvotedFilter, UnvotedPage, merged, unvoted_page
from dtx.server.members.messages import MAX_MESSAGE
from dtx.xa.branch import Branch
from dtx.xa.codes import XaError
from dtx.xa.model import Association, ChannelId, State
from dtx.xa.xid import Xid


class Channel:
    """A channel of a client."""

    def __init__(self, number: int) -> None:
        self.place = (7, number)


def an_entry(number: int, *, owner: str = "guest", channels: int = 0) -> BranchRuntime:
    """A branch that has not voted."""
    ties: dict[ChannelId, Association] = {Channel(each): Association.SUSPENDED for each in range(channels)}
    branch = Branch(
        xid=Xid(1, b"\xff" * 60 + b"%04d" % number, b"\xff" * 64), owner=owner, state=State.ACTIVE, associations=ties
    )
    return BranchRuntime(branch, "/", now=float(number))


async def test_a_page_has_the_branches_that_match() -> None:
    entries = [an_entry(number, owner="ab"[number % 2], channels=number) for number in range(6)]
    ids = sorted(entry.id for entry in entries[1::2])
    page = await unvoted_page(entries, UnvotedFilter(owner="b", limit=2))
    assert ([branch.id for branch in page.branches], page.more) == (ids[:2], True)
    rest = await unvoted_page(entries, UnvotedFilter(owner="b", limit=2, after=page.branches[-1].id))
    assert ([branch.id for branch in rest.branches], rest.more) == (ids[2:], False)
    third = UnvotedBranch.of_entry(entries[3])
    assert third.places == ((7, 0, "suspended"), (7, 1, "suspended"), (7, 2, "suspended"))
    assert (third.associated, third.suspended, third.started_at) == (0, 3, 3.0)
    none = await unvoted_page(entries, UnvotedFilter(state=State.IDLE))
    assert (none.branches, none.more) == ([], False)


async def test_a_page_fits_into_one_message() -> None:
    """The other member gets the first branches, and asks again for the others."""
    entries = [an_entry(number, owner="\N{SNOWMAN}" * 255, channels=100) for number in range(200)]
    page = await unvoted_page(entries, UnvotedFilter(limit=1000))
    sent = json.dumps(page.to_json())
    assert len(sent) < MAX_MESSAGE - 100
    found = UnvotedPage.from_json(json.loads(sent), "host:1")
    assert found.more
    assert 0 < len(found.branches) < 200
    first, known = found.branches[0], page.branches[0]
    assert (first.id, first.xid, first.owner, first.member) == (known.id, known.xid, known.owner, "host:1")
    assert (first.suspended, len(first.places)) == (100, MOST_PLACES)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_of_members_together_miss_nothing(limit: int) -> None:
    """A member may have more branches than its page, before those of another one."""
    members = [[an_entry(number) for number in range(size)] for size in (0, 5, 11)]
    seen: list[UUID] = []
    after: UUID | None = None
    while True:
        wanted = UnvotedFilter(limit=limit, after=after)
        pages = [await unvoted_page(entries, wanted) for entries in members]
        pages[2] = UnvotedPage(branches=pages[2].branches[:2], more=pages[2].more or len(pages[2].branches) > 2)
        page = merged(pages, limit)
        assert len(page.branches) <= limit
        seen += [branch.id for branch in page.branches]
        if not page.more:
            break
        after = seen[-1]
    assert seen == sorted(entry.id for entries in members for entry in entries)


def test_a_filter_survives_its_way() -> None:
    for wanted in (UnvotedFilter(), UnvotedFilter(owner="o", vhost="v", state=State.IDLE, after=UUID(int=1), limit=7)):
        assert UnvotedFilter.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted


@pytest.mark.parametrize("damage", [{"id": "x"}, {"xid": "x"}, {"places": [1]}, {"owner": ...}])
def test_a_malformed_branch_is_refused(damage: dict[str, object]) -> None:
    row = UnvotedBranch.of_entry(an_entry(1)).to_json() | damage
    if row["owner"] is ...:
        del row["owner"]
    with pytest.raises((KeyError, ValueError, TypeError, XaError)):
        UnvotedBranch.from_json(row, "host:1")
