"""Branches that have not voted, as operators see them. Only the member where they began knows them.

Each member has a page of its own branches. The page of all has the first branches of these pages together. It ends
where the page of any member ends, because that member may have more before the next branch of another one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, Final, Protocol, cast
from uuid import UUID

from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.slices import in_slices
from dtx.xa.model import Association, State
from dtx.xa.value import value
from dtx.xa.xid import Xid

MOST_PLACES: Final = 20
"""Channels of one branch that another member names."""
_KEPT: Final = 10_000
"""Branches that are kept while a page is searched."""
_PAGE_BYTES: Final = 48 << 10
"""Bytes of JSON for another member: a message between members has at most 64 KiB."""


class _Place(Protocol):
    """The part of a server's channel that is shown."""

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""


@value
class UnvotedFilter:
    """A page of branches that have not voted; ``None`` does not restrict it.

    Args:
        owner, vhost, state: of the branches.
        after: only branches with greater ids.
        limit: maximum number.
    """

    owner: str | None = None
    vhost: str | None = None
    state: State | None = None
    after: UUID | None = None
    limit: int = 100

    def to_json(self) -> dict[str, Any]:
        """The filter for another member."""
        after = None if self.after is None else str(self.after)
        return {"owner": self.owner, "vhost": self.vhost, "state": self.state, "after": after, "limit": self.limit}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "UnvotedFilter":
        """The filter of another member. Raises KeyError, ValueError, TypeError or XaError: it is malformed."""
        state, after = given["state"], given["after"]
        return cls(
            owner=given["owner"],
            vhost=given["vhost"],
            state=None if state is None else State(state),
            after=None if after is None else UUID(after),
            limit=int(given["limit"]),
        )


@value
class UnvotedBranch:
    """A branch that has not voted.

    Args:
        associated, suspended: numbers of channels with such an association.
        places: these channels: connection, channel, association.
        member: where it began, ``host:pid``; ``None`` for this dtx.
    """

    id: UUID
    xid: Xid
    vhost: str
    owner: str
    state: str
    started_at: float
    publishes: int
    consumes: int
    bytes: int
    timeout: int
    associated: int
    suspended: int
    places: tuple[tuple[int, int, str], ...] = ()
    member: str | None = None

    @classmethod
    def of_entry(cls, entry: BranchRuntime) -> "UnvotedBranch":
        """The branch as it is now."""
        ties, work = entry.branch.associations, entry.work
        hows = list(ties.values())
        return cls(
            id=entry.id,
            xid=entry.xid,
            vhost=entry.vhost,
            owner=entry.branch.owner,
            state=entry.branch.state,
            started_at=entry.started_at,
            publishes=0 if work is None else work.publishes,
            consumes=0 if work is None else work.consumes,
            bytes=0 if work is None else work.bytes,
            timeout=entry.branch.timeout,
            associated=hows.count(Association.ASSOCIATED),
            suspended=hows.count(Association.SUSPENDED),
            # the core accepts any hashable object as a channel; here they are the servers' channels
            places=tuple((*cast("_Place", channel).place, how.value) for channel, how in ties.items()),
        )

    def to_json(self) -> dict[str, Any]:
        """The branch for another member."""
        found = {name: getattr(self, name) for name in _PLAIN}
        return found | {"id": str(self.id), "xid": str(self.xid), "places": self.places[:MOST_PLACES]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], member: str) -> "UnvotedBranch":
        """A branch of another *member*. Raises KeyError, ValueError, TypeError or XaError: it is malformed."""
        places = tuple((connection, channel, how) for connection, channel, how in given["places"])
        plain = {name: given[name] for name in _PLAIN}
        return cls(id=UUID(given["id"]), xid=Xid.parse(given["xid"]), places=places, member=member, **plain)


_PLAIN: Final = (
    "vhost", "owner", "state", "started_at", "publishes", "consumes", "bytes", "timeout", "associated", "suspended",
)  # fmt: skip


@value
class UnvotedPage:
    """Branches in the order of their ids, which is that of their beginnings.

    Args:
        branches: of the page.
        more: whether there are others after it.
    """

    branches: Sequence[UnvotedBranch]
    more: bool

    def to_json(self) -> dict[str, Any]:
        """The page for another member, shortened to what one message can carry."""
        rows: list[dict[str, Any]] = []
        size = 0
        for branch in self.branches:
            row = branch.to_json()
            size += len(json.dumps(row))
            if size > _PAGE_BYTES and rows:
                return {"unvoted": rows, "more": True}
            rows.append(row)
        return {"unvoted": rows, "more": self.more}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], member: str) -> "UnvotedPage":
        """A page of another *member*. Raises KeyError, ValueError, TypeError or XaError: it is malformed."""
        return cls(
            branches=[UnvotedBranch.from_json(row, member) for row in given["unvoted"]], more=given["more"] is True
        )


async def unvoted_page(entries: Iterable[BranchRuntime], wanted: UnvotedFilter) -> UnvotedPage:
    """The page of *entries*, the branches of this dtx."""

    def matches(entry: BranchRuntime) -> bool:
        return (
            entry.record is None
            and wanted.owner in (None, entry.branch.owner)
            and wanted.vhost in (None, entry.vhost)
            and wanted.state in (None, entry.branch.state)
            and (wanted.after is None or entry.id > wanted.after)
        )

    found: list[BranchRuntime] = []
    async for entry in in_slices(entries):
        if matches(entry):
            found.append(entry)
            if len(found) > _KEPT:
                found = nsmallest(wanted.limit + 1, found, key=lambda each: each.id)
    found = nsmallest(wanted.limit + 1, found, key=lambda each: each.id)
    shown = found[: wanted.limit]
    return UnvotedPage(branches=[UnvotedBranch.of_entry(entry) for entry in shown], more=len(found) > len(shown))


def merged(pages: Sequence[UnvotedPage], limit: int) -> UnvotedPage:
    """One page of *limit* branches at most, from the pages of all members."""
    ends = [page.branches[-1].id for page in pages if page.more and page.branches]
    found = sorted((branch for page in pages for branch in page.branches), key=lambda branch: branch.id)
    if ends:
        end = min(ends)
        found = [branch for branch in found if branch.id <= end]
    return UnvotedPage(branches=found[:limit], more=bool(ends) or len(found) > limit)
