"""The routes about what has happened: the journal, how branches ended, the archive, and who did what."""

import asyncio
from http import HTTPStatus
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query

from dtx.admin import past_forms as forms
from dtx.admin.desk import Desk
from dtx.admin.forms import JournalForm
from dtx.admin.identity import Identity
from dtx.admin.looking import Asker, TheDesk, xid_of
from dtx.admin.problems import Problem
from dtx.log import past
from dtx.log.operator_tables import Role
from dtx.log.past import Asked, Mark
from dtx.log.records import JournalEvent

router = APIRouter(prefix="/api")


def _gtrid_of(words: str) -> bytes:
    try:
        return bytes.fromhex(words)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"a gtrid is hexadecimal: {error}") from None


def _mark_of(cursor: str | None) -> Mark | None:
    try:
        return None if cursor is None else Mark.parse(cursor)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def _asked(query: forms.XidQuery, events: tuple[JournalEvent, ...] = ()) -> Asked:
    return Asked(
        xid=None if query.xid is None else xid_of(query.xid),
        gtrid=None if query.gtrid is None else _gtrid_of(query.gtrid),
        vhost=query.vhost,
        owner=query.owner,
        events=events,
        since=forms.seconds(query.since),
        until=forms.seconds(query.until),
    )


async def journal_page(
    desk: Desk, asked: Asked, *, cursor: str | None, limit: int, latest_first: bool
) -> forms.JournalPage:
    """A page of the journal, for whoever may see it."""
    after = _mark_of(cursor)
    found = await desk.read(
        lambda log: past.lines(log, desk.rm, asked, after=after, latest_first=latest_first, limit=limit + 1)
    )
    shown = found[:limit]
    return forms.JournalPage(
        lines=[JournalForm.of(told.entry) for told in shown],
        cursor=str(shown[-1].mark) if len(found) > limit else None,
    )


@router.get("/journal", tags=["journal"])
async def show_journal(who: Asker, desk: TheDesk, query: Annotated[forms.JournalQuery, Query()]) -> forms.JournalPage:
    """What the journal has, about an xid for example; the oldest line first, unless it is asked for otherwise."""
    who.require(Role.VIEWER)
    asked = _asked(query, tuple(query.event))
    return await journal_page(desk, asked, cursor=query.cursor, limit=query.limit, latest_first=query.latest_first)


@router.get("/transactions/{gtrid}", tags=["journal"])
async def show_transaction(
    who: Asker, desk: TheDesk, gtrid: str, query: Annotated[forms.PastQuery, Query()]
) -> forms.JournalPage:
    """What the journal has about all branches of one global transaction; *gtrid* in hexadecimal."""
    who.require(Role.VIEWER)
    asked = _asked(forms.XidQuery(gtrid=gtrid, **query.model_dump()))
    return await journal_page(desk, asked, cursor=query.cursor, limit=query.limit, latest_first=False)


@router.get("/outcomes", tags=["journal"])
async def list_outcomes(who: Asker, desk: TheDesk, query: Annotated[forms.OutcomeQuery, Query()]) -> forms.JournalPage:
    """How branches ended, latest first: the outcome memory."""
    who.require(Role.VIEWER)
    strange = set(query.event) - set(past.OUTCOMES)
    if strange:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{min(strange)} ends no branch: /api/journal has it")
    asked = _asked(query, tuple(query.event) or past.OUTCOMES)
    return await journal_page(desk, asked, cursor=query.cursor, limit=query.limit, latest_first=True)


@router.get("/archive", tags=["archive"])
async def list_archive(who: Asker, desk: TheDesk, query: Annotated[forms.XidQuery, Query()]) -> forms.ArchivePage:
    """Messages that nobody got, of branches that were forgotten; what came last first."""
    who.require(Role.VIEWER)
    asked, after, limit = _asked(query), _mark_of(query.cursor), query.limit
    found = await desk.read(lambda log: past.archived(log, desk.rm, asked, after=after, limit=limit + 1))
    shown = found[:limit]
    return forms.ArchivePage(
        messages=[forms.ArchivedForm.of_archive(kept) for kept in shown],
        cursor=str(shown[-1].mark) if len(found) > limit else None,
    )


@router.get("/archive/{branch}/{position}", tags=["archive"])
async def view_archived(
    who: Asker, desk: TheDesk, branch: UUID, position: Annotated[int, Path(ge=0, lt=1 << 31)]
) -> forms.ArchivedContents:
    """One message of the archive with its contents. It takes an operator, as reading a branch's messages does."""
    return await archived_contents(who, desk, branch, position, action="view")


async def archived_contents(
    who: Identity, desk: Desk, branch: UUID, position: int, *, action: Literal["view", "export"]
) -> forms.ArchivedContents:
    """The same, written to the trail as *action*."""

    async def work() -> tuple[str, forms.ArchivedContents]:
        who.require(Role.OPERATOR)
        kept = await desk.read(lambda log: past.archived_message(log, desk.rm, branch, position))
        if kept is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"the archive has no message {position} of branch {branch}")
        return f"{action}ed", forms.ArchivedContents.exported_from_archive(kept)

    return await desk.audited(who, action, f"archived branch {branch}", "", {"position": position}, work)


@router.get("/audit", tags=["operators"])
async def show_audit(who: Asker, desk: TheDesk, query: Annotated[forms.AuditQuery, Query()]) -> forms.AuditPage:
    """Who did what, and why: the latest first."""
    who.require(Role.COORDINATOR)
    found = await asyncio.to_thread(
        lambda: desk.trail.trail(
            before=query.cursor,
            actor=query.actor,
            action=query.action,
            subject=query.subject,
            since=forms.seconds(query.since),
            until=forms.seconds(query.until),
            limit=query.limit + 1,
        )
    )
    shown = found[: query.limit]
    return forms.AuditPage(
        lines=[forms.AuditForm.of(line) for line in shown],
        cursor=shown[-1].id if len(found) > query.limit else None,
    )
