"""The routes that change nothing."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request

from dtx.admin import forms
from dtx.admin.desk import Desk, LaneFacts
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem
from dtx.log.listing import Wanted, gtrid_pattern, page
from dtx.log.operator_tables import Role
from dtx.log.reading import Detail, Line, LogReader
from dtx.log.records import LogState
from dtx.xa.model import Association
from dtx.xa.xid import Xid

Limit = Annotated[int, Query(ge=1, le=1000, description="How many at most.")]
Vhost = Annotated[str, Query(description="The virtual host: the same xid may be in two.")]


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
    cursor: UUID | None = None


@router.get("/branches", tags=["branches"])
async def list_branches(who: Asker, desk: TheDesk, query: Annotated[BranchQuery, Query()]) -> forms.Page:
    """Branches that have voted and are not completed, by the time of their start."""
    who.require(Role.VIEWER)
    wanted = wanted_of(query)
    found = await desk.read(lambda log: page(log, desk.rm, wanted, after=query.cursor, limit=query.limit + 1))
    shown = found[: query.limit]
    return forms.Page(
        branches=[forms.BranchForm.of(item.branch, item) for item in shown],
        cursor=str(shown[-1].branch.id) if len(found) > query.limit else None,
    )


@router.get("/branches/{xid}", tags=["branches"])
async def show_branch(who: Asker, desk: TheDesk, xid: str, vhost: Vhost = "/") -> forms.DetailForm:
    """One branch with its messages and its journal."""
    who.require(Role.VIEWER)
    detail, lines = await _detail(desk, xid_of(xid), vhost)
    return forms.DetailForm.of(detail, lines)


async def _detail(desk: Desk, xid: Xid, vhost: str) -> tuple[Detail, list[Line]]:
    def ask(log: LogReader) -> tuple[list[Detail], list[Line]]:
        return log.show(xid, vhost=vhost, rm=desk.rm), log.history(xid, vhost=vhost, rm=desk.rm)

    found, lines = await desk.read(ask)
    if not found:
        raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {xid}")
    return found[0], lines


@router.get("/branches/{xid}/messages/{position}", tags=["branches"])
async def export_message(who: Asker, desk: TheDesk, xid: str, position: int, vhost: Vhost = "/") -> forms.Contents:
    """One message with its contents. It takes an operator: what messages say is not everybody's business."""
    who.require(Role.OPERATOR)

    async def work() -> tuple[str, forms.Contents]:
        detail, _ = await _detail(desk, xid_of(xid), vhost)
        for item in detail.work:
            if item.position == position:
                return "exported", forms.Contents.exported(item)
        raise Problem(HTTPStatus.NOT_FOUND, f"the branch has no message {position} (xid {xid})")

    return await desk.audited(who, "export", f"{vhost} {xid}", "", {"position": position}, work)


@router.get("/journal", tags=["journal"])
async def show_journal(
    who: Asker, desk: TheDesk, xid: str, vhost: Annotated[str | None, Query()] = None
) -> list[forms.JournalForm]:
    """All that the journal has about an xid, oldest first."""
    who.require(Role.VIEWER)
    wanted = xid_of(xid)
    lines = await desk.read(lambda log: log.history(wanted, vhost=vhost, rm=desk.rm))
    return [forms.JournalForm.of(line) for line in lines]


@router.get("/transactions/{gtrid}", tags=["journal"])
async def show_transaction(who: Asker, desk: TheDesk, gtrid: str) -> list[forms.JournalForm]:
    """All that the journal has about the branches of one global transaction; *gtrid* in hexadecimal."""
    who.require(Role.VIEWER)
    try:
        octets = bytes.fromhex(gtrid)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"a gtrid is hexadecimal: {error}") from None
    lines = await desk.read(lambda log: log.transaction(octets, rm=desk.rm))
    return [forms.JournalForm.of(line) for line in lines]


@router.get("/outcomes", tags=["journal"])
async def list_outcomes(who: Asker, desk: TheDesk, limit: Limit = 100) -> list[forms.JournalForm]:
    """How the latest branches ended, latest first."""
    who.require(Role.VIEWER)
    lines = await desk.read(lambda log: log.endings(limit=limit, rm=desk.rm))
    return [forms.JournalForm.of(line) for line in lines]


@router.get("/archive", tags=["journal"])
async def show_archive(who: Asker, desk: TheDesk, xid: str) -> list[forms.ArchivedForm]:
    """Messages that nobody got, of forgotten branches, with their contents."""
    who.require(Role.OPERATOR)
    active, _ = desk.require_active()

    async def work() -> tuple[str, list[forms.ArchivedForm]]:
        found = await active.manager.log.read_archive(xid_of(xid))
        return f"{len(found)} messages", [forms.ArchivedForm.of_archive(kept) for kept in found]

    return await desk.audited(who, "archive", xid, "", {}, work)


@router.get("/connections", tags=["clients"])
async def list_connections(who: Asker, desk: TheDesk) -> list[forms.ConnectionForm]:
    """Clients that are connected."""
    who.require(Role.VIEWER)
    active, _ = desk.require_active()
    return [
        forms.ConnectionForm(id=client.id, user=client.who.user, vhost=client.who.vhost, channels=len(client.channels))
        for client in active.connections()
    ]


@router.get("/associations", tags=["clients"])
async def list_associations(who: Asker, desk: TheDesk, limit: Limit = 1000) -> list[forms.AssociationForm]:
    """Branches that have not voted: nobody but this dtx knows them."""
    who.require(Role.VIEWER)
    active, _ = desk.require_active()
    found: list[forms.AssociationForm] = []
    for entry in active.manager.entries():
        if entry.record is None and len(found) < limit:
            ties = Counter(entry.branch.associations.values())
            found.append(
                forms.AssociationForm(
                    xid=str(entry.xid),
                    vhost=entry.vhost,
                    owner=entry.branch.owner,
                    state=entry.branch.state,
                    associated=ties[Association.ASSOCIATED],
                    suspended=ties[Association.SUSPENDED],
                    timeout=entry.branch.timeout,
                )
            )
    return found


@router.get("/status", tags=["service"])
async def show_status(who: Asker, desk: TheDesk) -> forms.StatusForm:
    """How dtx is: branches by state, lanes, leases."""
    who.require(Role.VIEWER)
    leases = await desk.read(lambda log: log.leases())
    active = desk.active
    states: Counter[str] = Counter()
    lanes: Mapping[str, LaneFacts] = {}
    if active is not None:
        states.update(entry.branch.state for entry in active.manager.entries())
        lanes = active.lanes()
    return forms.StatusForm(
        rm=desk.rm,
        active=active is not None and active.lease_valid(),
        draining=active is not None and active.manager.draining,
        branches=dict(states),
        lanes=[
            forms.LaneForm(vhost=vhost, problem=lane.problem, distrust=lane.distrust, blocked=lane.blocked)
            for vhost, lane in lanes.items()
        ],
        leases=[
            forms.LeaseForm(
                rm=item.rm,
                holder=item.holder,
                epoch=item.epoch,
                taken_at=forms.moment(item.taken_at),
                remaining=item.remaining if item.remaining > float("-inf") else None,
            )
            for item in leases
        ],
    )


@router.get("/audit", tags=["operators"])
async def show_audit(
    who: Asker, desk: TheDesk, limit: Limit = 100, before: Annotated[int | None, Query()] = None
) -> list[forms.AuditForm]:
    """Who did what, and why: the latest first."""
    who.require(Role.COORDINATOR)
    lines = await asyncio.to_thread(lambda: desk.trail.trail(before=before, limit=limit))
    return [
        forms.AuditForm(
            id=line.id,
            at=forms.moment(line.at),
            actor=line.actor,
            role=line.role,
            address=line.address,
            action=line.action,
            subject=line.subject,
            reason=line.reason,
            detail=line.detail,
            result=line.result,
        )
        for line in lines
    ]
