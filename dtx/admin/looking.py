"""The routes that change nothing."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from dtx.admin import forms
from dtx.admin.desk import Desk
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem
from dtx.log.listing import Cursor, Sort, Wanted, gtrid_pattern, page
from dtx.log.operator_tables import Role
from dtx.log.reading import Detail, Line, LogReader, Messages
from dtx.log.records import LogState
from dtx.manager.branches import AGES, BranchStats, branch_stats
from dtx.telemetry import LaneNumbers
from dtx.xa.xid import Xid

Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
Vhost = Annotated[forms.Name, Query(description="The virtual host: the same xid may be in two.")]


LINES: Final = 500
"""Of the journal, beside a branch: it has about three, but an xid can be used again and again."""
LAST_POSITION: Final = 2**31 - 1
"""Of a message in a branch."""
MessageCursor = Annotated[
    int | None,
    Query(ge=0, le=LAST_POSITION, description="Of the answer before: messages behind that position."),
]


def desk_of(request: Request) -> Desk:
    """What the application stands on."""
    desk: Desk = request.app.state.desk
    return desk


async def identify(request: Request) -> Identity:
    """Who asks."""
    return await desk_of(request).gate.identify(request)


Asker = Annotated[Identity, Depends(identify)]
TheDesk = Annotated[Desk, Depends(desk_of)]
router = APIRouter(prefix="/api")


def xid_of(words: str) -> Xid:
    """The xid in a path.

    Raises:
        Problem: 400, it is none.
    """
    try:
        return Xid.parse(words)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def wanted_of(form: forms.FilterForm) -> Wanted:
    """The filter in terms of the log.

    Raises:
        Problem: 400, an unknown state or a pattern that is none.
    """
    try:
        return Wanted(
            vhost=form.vhost,
            owner=form.owner,
            format_id=form.format_id,
            states=tuple(LogState(state) for state in form.state),
            ids=tuple(form.branch),
            gtrid=None if form.gtrid is None else gtrid_pattern(form.gtrid),
            queue=None if form.queue is None else form.queue.encode(),
            exchange=None if form.exchange is None else form.exchange.encode(),
            older_than=form.older_than,
            stuck=form.stuck,
        )
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


class BranchQuery(forms.FilterForm):
    """A filter, and which page of what it finds."""

    limit: Limit = 100
    cursor: Annotated[str, Field(max_length=600)] | None = None
    sort: Sort = Field(default=Sort.STARTED, description="Branches equal in that come in the order of their start.")
    descending: bool = False


@router.get("/branches", tags=["branches"])
async def list_branches(who: Asker, desk: TheDesk, query: Annotated[BranchQuery, Query()]) -> forms.Page:
    """Branches that have voted and are not completed, by the time of their start or as *sort* says."""
    who.require(Role.VIEWER)
    wanted = wanted_of(query)
    by, descending, limit = query.sort, query.descending, query.limit
    try:
        after = None if query.cursor is None else Cursor.parse(query.cursor, by)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
    found = await desk.read(
        lambda log: page(log, desk.rm, wanted, after=after, limit=limit + 1, by=by, descending=descending)
    )
    shown = found[:limit]
    return forms.Page(
        branches=[forms.BranchForm.of(item.branch, item) for item in shown],
        cursor=str(Cursor.of(shown[-1].branch, by)) if len(found) > limit else None,
    )


@router.get("/branches/{xid}", tags=["branches"])
async def show_branch(
    who: Asker,
    desk: TheDesk,
    xid: str,
    vhost: Vhost = "/",
    limit: Annotated[int, Query(ge=1, le=1000, description="How many messages at most.")] = 100,
    cursor: MessageCursor = None,
) -> forms.DetailForm:
    """One branch with its journal and its messages, a page of them."""
    who.require(Role.VIEWER)
    wanted = xid_of(xid)
    messages = Messages(after=-1 if cursor is None else cursor, limit=limit, bodies=False)

    def ask(log: LogReader) -> tuple[list[Detail], list[Line]]:
        return (
            log.show(wanted, vhost=vhost, rm=desk.rm, messages=messages),
            log.history(wanted, vhost=vhost, rm=desk.rm, limit=LINES),
        )

    found, lines = await desk.read(ask)
    if not found:
        raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {wanted}")
    return forms.DetailForm.of(found[0], lines)


@router.get("/branches/{xid}/messages/{position}", tags=["branches"])
async def view_message(who: Asker, desk: TheDesk, xid: str, position: int, vhost: Vhost = "/") -> forms.Contents:
    """One message with its contents. It takes an operator: what messages say is not everybody's business."""
    return await message_contents(who, desk, xid, position, vhost, action="view")


async def message_contents(
    who: Identity, desk: Desk, xid: str, position: int, vhost: str, *, action: Literal["view", "export"]
) -> forms.Contents:
    """The same, written to the trail as *action*."""
    wanted = xid_of(xid)

    async def work() -> tuple[str, forms.Contents]:
        who.require(Role.OPERATOR)
        # A number that no message can have is that of none; of the others, that one alone is read.
        only = Messages(after=position - 1, limit=1) if 0 <= position <= LAST_POSITION else Messages(limit=0)
        found = await desk.read(lambda log: log.show(wanted, vhost=vhost, rm=desk.rm, messages=only))
        if not found:
            raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {wanted}")
        for item in found[0].work:
            if item.position == position:
                return f"{action}ed", forms.Contents.exported(item)
        raise Problem(HTTPStatus.NOT_FOUND, f"the branch has no message {position} (xid {xid})")

    return await desk.audited(who, action, f"{vhost} {xid}", "", {"position": position}, work)


@router.get("/status", tags=["service"])
async def show_status(who: Asker, desk: TheDesk) -> forms.StatusForm:
    """How dtx is: branches by state and age, lanes, leases, memory."""
    who.require(Role.VIEWER)
    return await status(desk)


async def status(desk: Desk) -> forms.StatusForm:
    """The same, for whoever may see it."""
    leases = await desk.read(lambda log: log.leases())
    active = desk.active
    lanes: Mapping[str, LaneNumbers] = {}
    found = BranchStats()
    if active is not None:
        found = await branch_stats(active.manager.entries())
        lanes = active.lanes()
    return forms.StatusForm(
        rm=desk.rm,
        active=active is not None and active.lease_valid(),
        draining=active is not None and active.manager.draining,
        branches={str(state): number for state, number in found.states.items()},
        ages={str(state): ages for state, ages in found.ages.items()},
        age_bounds=list(AGES),
        stuck=found.stuck,
        oldest_prepared_at=forms.moment(found.oldest_prepared),
        in_doubt_bytes=found.in_doubt_bytes,
        held_bytes=0 if active is None else active.manager.budget.used,
        connections=0 if active is None else len(active.connections()),
        usage=[] if active is None else [forms.UsageForm.of(usage) for usage in active.manager.quotas],
        lanes=[forms.LaneForm.of(vhost, lane) for vhost, lane in lanes.items()],
        leases=[forms.LeaseForm.of(holder) for holder in leases],
    )
