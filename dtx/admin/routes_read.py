"""Routes that change nothing: branches and their messages, journal, archive, audit log, clients, and the state of dtx.

An export is a stream. Each message has a line of JSON, which is followed by its body; ``bytes`` in the line is the
length of the body.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import Iterator
from heapq import nsmallest
from http import HTTPStatus
from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from dtx.admin import forms
from dtx.admin.api_context import (
    API,
    Active,
    ApiContext,
    Arrived,
    Asker,
    Connected,
    ConnectionNumber,
    Context,
    Limit,
    Vhost,
    XidPath,
    page_of,
)
from dtx.admin.branch_filter import FilterForm
from dtx.admin.identity import Identity
from dtx.admin.message_properties import decode_properties
from dtx.admin.problems import NOT_ACTIVE, Problem, refusals
from dtx.admin.safe_text import exact_name
from dtx.auth.roles import OperatorRole
from dtx.log import pages
from dtx.log.pages import (
    BRANCH_CURSORS,
    JOURNAL_CURSORS,
    BranchFilter,
    Cursor,
    JournalFilter,
    JournalRow,
    Sort,
    branch_cursor,
    branch_page,
    history,
)
from dtx.log.reader import Detail, Export, LogReader, Messages, Piece
from dtx.log.records import JournalEvent
from dtx.manager.branches import AGES, BranchStats, branch_stats
from dtx.manager.unvoted import UnvotedFilter, merged, unvoted_page
from dtx.store.slices import finish
from dtx.xa.model import State
from dtx.xa.xid import Xid

LINES: Final = 500
"""Journal lines in the answer about a branch. A branch has about three, but an xid can be used many times."""
LAST_POSITION: Final = 2**31 - 1
"""The highest position of a message in a branch."""
MessageCursor = Annotated[
    int | None,
    Query(ge=0, le=LAST_POSITION, description="Cursor from the previous answer: messages after this position."),
]
Positions = Annotated[list[int], Query(description="Only these messages.", max_length=10_000)]
GtridPath = Annotated[str, Path(description="The gtrid in hexadecimal.")]
BranchId = Annotated[UUID, Path(description="Id of the branch.")]
ArchivedPosition = Annotated[int, Path(ge=0, lt=1 << 31, description="Position of the message in the branch.")]
AfterConnection = Annotated[int, Query(description="Cursor from the previous page.")]
UserFilter = Annotated[str | None, Query(max_length=255, description="Only of this user.")]
VhostFilter = Annotated[str | None, Query(max_length=255, description="Only of this virtual host.")]
MessagePosition = Annotated[int, Path(description="Position of the message in the branch, from 0 on.")]
MESSAGES_TYPE: Final = "application/vnd.dtx.messages"
COUNT: Final = "x-dtx-messages"
"""Header with the number of messages of an export; a stream that was broken off has fewer."""
_PAGE: Final = refusals({HTTPStatus.BAD_REQUEST: "A state, an xid, a gtrid or the cursor is malformed."})
_BRANCH: Final = refusals(
    {HTTPStatus.BAD_REQUEST: "The xid is malformed.", HTTPStatus.NOT_FOUND: "No such branch is in the log."}
)
_MESSAGE: Final = refusals(
    {
        HTTPStatus.BAD_REQUEST: "The xid is malformed.",
        HTTPStatus.NOT_FOUND: "No such branch is in the log, or it has no such message.",
    }
)
_ARCHIVED: Final = refusals({HTTPStatus.NOT_FOUND: "The archive has no such message."})
_CLIENT: Final = refusals(
    {HTTPStatus.NOT_FOUND: "There is no such connection.", HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE}
)
_CLIENTS: Final = refusals({HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE})
router = APIRouter(prefix=API)


def xid_of(words: str) -> Xid:
    """The xid in a path.

    Raises:
        Problem: 400, it is malformed.
    """
    try:
        return Xid.parse(words)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def wanted_of(query: FilterForm, rm: str) -> BranchFilter:
    """The filter for the log of *rm*.

    Raises:
        Problem: 400, a state is unknown, or a pattern is malformed.
    """
    try:
        return query.wanted(rm)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


class BranchQuery(FilterForm):
    """A filter for branches, with order and page."""

    limit: Limit = 100
    cursor: Annotated[str, Field(max_length=600)] | None = Field(
        default=None, description="Cursor from the previous page."
    )
    sort: Sort = Field(
        default=Sort.STARTED, description="Sort key; branches with equal keys are in the order of their start."
    )
    descending: bool = Field(default=False, description="Reverse the order.")


@router.get("/branches", tags=["branches"], responses=_PAGE)
async def list_branches(who: Asker, context: Context, query: Annotated[BranchQuery, Query()]) -> forms.Page:
    """List branches that have voted and are not completed, by start time or by *sort*."""
    who.require(OperatorRole.VIEWER)
    wanted = wanted_of(query, context.rm)
    by, descending, limit = query.sort, query.descending, query.limit
    try:
        after = None if query.cursor is None else BRANCH_CURSORS[by].parse(query.cursor)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None
    found = await context.read(
        lambda log: branch_page(log, wanted, after=after, limit=limit + 1, by=by, descending=descending)
    )
    shown, last = page_of(found, limit)
    return forms.Page(
        branches=[forms.BranchForm.of_record(item.branch, item) for item in shown],
        cursor=None if last is None else str(branch_cursor(last.branch, by)),
    )


@router.get("/branches/{xid}", tags=["branches"], responses=_BRANCH)
async def show_branch(
    who: Asker,
    context: Context,
    xid: XidPath,
    vhost: Vhost = "/",
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of messages.")] = 100,
    cursor: MessageCursor = None,
) -> forms.DetailForm:
    """Show one branch with its journal and one page of its messages."""
    who.require(OperatorRole.VIEWER)
    wanted = xid_of(xid)
    messages = Messages(after=-1 if cursor is None else cursor, limit=limit, bodies=False)

    def ask(log: LogReader) -> tuple[list[Detail], list[JournalRow]]:
        return (
            log.show(wanted, vhost=vhost, rm=context.rm, messages=messages),
            history(log, wanted, vhost=vhost, rm=context.rm, limit=LINES),
        )

    found, lines = await context.read(ask)
    if not found:
        raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {wanted}")
    return forms.DetailForm.of_detail(found[0], lines)


@router.get("/branches/{xid}/messages/{position}", tags=["branches"], responses=_MESSAGE)
async def view_message(
    who: Asker, context: Context, xid: XidPath, position: MessagePosition, vhost: Vhost = "/"
) -> forms.Contents:
    """Show one message with its contents. Needs the role operator; recorded in the audit log."""
    return await message_contents(who, context, xid, position, vhost, action="view")


async def message_contents(
    who: Identity, context: ApiContext, xid: str, position: int, vhost: str, *, action: Literal["view", "export"]
) -> forms.Contents:
    """One message with its contents; the audit log records the request as *action*."""
    wanted = xid_of(xid)

    async def work() -> tuple[str, forms.Contents]:
        who.require(OperatorRole.OPERATOR)
        # The database cannot compare a number beyond the range of positions, so no message is read for one.
        only = Messages(after=position - 1, limit=1) if 0 <= position <= LAST_POSITION else Messages(limit=0)
        found = await context.read(lambda log: log.show(wanted, vhost=vhost, rm=context.rm, messages=only))
        if not found:
            raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {wanted}")
        for item in found[0].work:
            if item.position == position:
                return f"{action}ed", forms.Contents.exported(item)
        raise Problem(HTTPStatus.NOT_FOUND, f"the branch has no message {position} (xid {xid})")

    return await context.audited(who, action, f"{vhost} {xid}", "", {"position": position}, work)


@router.get("/status", tags=["service"])
async def show_status(who: Asker, context: Context) -> forms.StatusForm:
    """Show the state of dtx: branches by state and age, phase-two connections, leases, memory."""
    who.require(OperatorRole.VIEWER)
    return await status(context)


async def status(context: ApiContext) -> forms.StatusForm:
    """The state of dtx, without a check of the role."""
    leases = await context.read(lambda log: log.leases())
    active = context.active
    commits: list[forms.CommitConnectionForm] = []
    found = BranchStats()
    if active is not None:
        found = await branch_stats(active.manager.entries())
        commits = [
            forms.CommitConnectionForm.of(each, vhost=vhost) for vhost, each in active.commit_connections.items()
        ]
    return forms.StatusForm(
        rm=context.rm,
        active=active is not None and active.lease_valid(),
        draining=active is not None and active.manager.draining,
        branches={str(state): number for state, number in found.states.items()},
        ages={str(state): ages for state, ages in found.ages.items()},
        age_bounds=list(AGES),
        stuck=found.stuck,
        oldest_prepared_at=found.oldest_prepared,
        in_doubt_bytes=found.in_doubt_bytes,
        held_bytes=0 if active is None else active.manager.budget.used,
        connections=0 if active is None else len(active.connections()),
        usage=[] if active is None else [forms.UsageForm.of_usage(usage) for usage in active.manager.quotas],
        commit_connections=commits,
        lanes=commits,
        leases=[forms.LeaseForm.of_holder(holder) for holder in leases],
    )


@router.get(
    "/branches/{xid}/export",
    tags=["branches"],
    response_class=StreamingResponse,
    responses=_BRANCH
    | {200: {"content": {MESSAGES_TYPE: {}}, "description": "For each message a line of JSON, then its body."}},
)
async def export_branch(
    who: Asker,
    context: Context,
    xid: XidPath,
    vhost: Vhost = "/",
    archived: Annotated[bool, Query(description="Export undelivered messages of a forgotten branch.")] = False,
    position: Positions = [],  # noqa: B006
) -> StreamingResponse:
    """Export all messages of a branch with their bodies. Needs the role operator; recorded in the audit log."""
    wanted = xid_of(xid)

    def export(log: LogReader) -> Export:
        return Export(log, context.rm, vhost, wanted, archived=archived, positions=position)

    async def work() -> tuple[str, int]:
        who.require(OperatorRole.OPERATOR)
        found = await context.read(export)
        if not found.branches:
            where = "the archive has no messages of" if archived else "unknown xid"
            raise Problem(HTTPStatus.NOT_FOUND, f"{where} {xid}")
        return f"{found.count} messages", found.count

    def framed() -> Iterator[bytes]:
        with LogReader(context.url) as log:
            for piece, body in export(log):
                yield json.dumps(_head(piece)).encode() + b"\n"
                yield from body

    detail = {"archived": archived, "positions": position}
    count = await context.audited(who, "export", f"{vhost} {xid}", "", detail, work)
    return StreamingResponse(framed(), media_type=MESSAGES_TYPE, headers={COUNT: str(count)})


def _head(piece: Piece) -> dict[str, object]:
    return {
        "branch": str(piece.branch_id),
        "position": piece.position,
        "kind": str(piece.kind),
        "fate": None if piece.fate is None else str(piece.fate),
        "exchange": exact_name(piece.exchange),
        "routing_key": exact_name(piece.routing_key),
        "queue": None if piece.queue is None else exact_name(piece.queue),
        "bytes": piece.size,
        "properties": decode_properties(piece.properties),
        "header": b64encode(piece.properties).decode(),
    }


def _gtrid_of(words: str) -> bytes:
    try:
        return bytes.fromhex(words)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the gtrid must be hexadecimal: {error}") from None


def _cursor_of(cursor: str | None) -> Cursor | None:
    try:
        return None if cursor is None else JOURNAL_CURSORS.parse(cursor)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


def journal_filter(rm: str, query: forms.XidQuery, events: tuple[JournalEvent, ...] = ()) -> JournalFilter:
    """The filter for the log of *rm*.

    Raises:
        Problem: 400, the xid or the gtrid is malformed.
    """
    return JournalFilter(
        rm=rm,
        xid=None if query.xid is None else xid_of(query.xid),
        gtrid=None if query.gtrid is None else _gtrid_of(query.gtrid),
        vhost=query.vhost,
        owner=query.owner,
        events=events,
        since=forms.seconds(query.since),
        until=forms.seconds(query.until),
    )


async def journal_page(
    context: ApiContext, asked: JournalFilter, *, cursor: str | None, limit: int, latest_first: bool
) -> forms.JournalPage:
    """A page of the journal, without a check of the role."""
    after = _cursor_of(cursor)
    found = await context.read(
        lambda log: pages.journal_page(log, asked, after=after, latest_first=latest_first, limit=limit + 1)
    )
    shown, last = page_of(found, limit)
    return forms.JournalPage(
        lines=[forms.JournalForm.of_entry(row.entry) for row in shown],
        cursor=None if last is None else str(last.cursor),
    )


@router.get("/journal", tags=["journal"], responses=_PAGE)
async def show_journal(
    who: Asker, context: Context, query: Annotated[forms.JournalQuery, Query()]
) -> forms.JournalPage:
    """List journal lines, for example of one xid. The oldest line comes first by default."""
    who.require(OperatorRole.VIEWER)
    asked = journal_filter(context.rm, query, tuple(query.event))
    return await journal_page(context, asked, cursor=query.cursor, limit=query.limit, latest_first=query.latest_first)


@router.get("/transactions/{gtrid}", tags=["journal"], responses=_PAGE)
async def show_transaction(
    who: Asker, context: Context, gtrid: GtridPath, query: Annotated[forms.PastQuery, Query()]
) -> forms.JournalPage:
    """List journal lines of all branches of one global transaction; *gtrid* is hexadecimal."""
    who.require(OperatorRole.VIEWER)
    asked = journal_filter(context.rm, forms.XidQuery(gtrid=gtrid, **query.model_dump()))
    return await journal_page(context, asked, cursor=query.cursor, limit=query.limit, latest_first=False)


@router.get("/outcomes", tags=["journal"], responses=_PAGE)
async def list_outcomes(
    who: Asker, context: Context, query: Annotated[forms.OutcomeQuery, Query()]
) -> forms.JournalPage:
    """List outcomes of completed branches, latest first."""
    who.require(OperatorRole.VIEWER)
    strange = set(query.event) - set(pages.OUTCOMES)
    if strange:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{min(strange)} is no outcome: use /dtx/v1/journal")
    asked = journal_filter(context.rm, query, tuple(query.event) or pages.OUTCOMES)
    return await journal_page(context, asked, cursor=query.cursor, limit=query.limit, latest_first=True)


@router.get("/archive", tags=["archive"], responses=_PAGE)
async def list_archive(who: Asker, context: Context, query: Annotated[forms.XidQuery, Query()]) -> forms.ArchivePage:
    """List undelivered messages of forgotten branches, latest first."""
    who.require(OperatorRole.VIEWER)
    asked, after, limit = journal_filter(context.rm, query), _cursor_of(query.cursor), query.limit
    found = await context.read(lambda log: pages.archive_page(log, asked, after=after, limit=limit + 1))
    shown, last = page_of(found, limit)
    return forms.ArchivePage(
        messages=[forms.ArchivedForm.of_archived(kept.message, bytes=kept.bytes) for kept in shown],
        cursor=None if last is None else str(last.cursor),
    )


@router.get("/archive/{branch}/{position}", tags=["archive"], responses=_ARCHIVED)
async def view_archived(
    who: Asker, context: Context, branch: BranchId, position: ArchivedPosition
) -> forms.ArchivedContents:
    """Show one archived message with its contents. Needs the role operator; recorded in the audit log."""
    return await archived_contents(who, context, branch, position, action="view")


@router.get("/duplicates", tags=["archive"])
async def list_duplicates(
    who: Asker, context: Context, query: Annotated[forms.DuplicateQuery, Query()]
) -> list[forms.DuplicateForm]:
    """List the latest second copies that dtx did not deliver."""
    who.require(OperatorRole.VIEWER)
    queue = None if query.queue is None else query.queue.encode()
    found = await context.read(
        lambda log: pages.duplicates(log, context.rm, vhost=query.vhost, queue=queue, limit=query.limit)
    )
    return [forms.DuplicateForm.of_row(each) for each in found]


@router.get("/members", tags=["service"])
async def list_members(who: Asker, context: Context) -> list[forms.MemberForm]:
    """List the active dtx that share the branches (--advertise); empty if one dtx is alone."""
    who.require(OperatorRole.VIEWER)
    return [forms.MemberForm.of_row(row) for row in await context.read(lambda log: log.members(context.rm))]


async def archived_contents(
    who: Identity, context: ApiContext, branch: UUID, position: int, *, action: Literal["view", "export"]
) -> forms.ArchivedContents:
    """One archived message with its contents; the audit log records the request as *action*."""

    async def work() -> tuple[str, forms.ArchivedContents]:
        who.require(OperatorRole.OPERATOR)
        kept = await context.read(lambda log: pages.message_of_archive(log, context.rm, branch, position))
        if kept is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"the archive has no message {position} of branch {branch}")
        return f"{action}ed", forms.ArchivedContents.exported_from_archive(kept)

    return await context.audited(who, action, f"archived branch {branch}", "", {"position": position}, work)


@router.get("/audit", tags=["operators"])
async def show_audit(who: Asker, context: Context, query: Annotated[forms.AuditQuery, Query()]) -> forms.AuditPage:
    """List the audit log: user, action and reason, latest first."""
    who.require(OperatorRole.COORDINATOR)
    found = await asyncio.to_thread(
        lambda: context.operator_log.audit_lines(
            before=query.cursor,
            actor=query.actor,
            action=query.action,
            subject=query.subject,
            since=forms.seconds(query.since),
            until=forms.seconds(query.until),
            limit=query.limit + 1,
        )
    )
    shown, last = page_of(found, query.limit)
    return forms.AuditPage(lines=[forms.AuditForm.of(line) for line in shown], cursor=None if last is None else last.id)


def clients_of(active: Active, user: str | None, vhost: str | None) -> Iterator[tuple[Connected, Arrived]]:
    """The connections of a user, in a virtual host, or all."""
    for client, arrival in active.connections().items():
        if user in (None, client.who.user) and vhost in (None, client.who.vhost):
            yield client, arrival


@router.get("/connections", tags=["clients"], responses=_CLIENTS)
async def list_connections(
    who: Asker,
    context: Context,
    user: UserFilter = None,
    vhost: VhostFilter = None,
    cursor: AfterConnection = 0,
    limit: Limit = 100,
) -> forms.ConnectionPage:
    """List client connections."""
    who.require(OperatorRole.VIEWER)
    active, _ = context.require_active()
    later = ((client, arrival) for client, arrival in clients_of(active, user, vhost) if client.id > cursor)
    found = nsmallest(limit + 1, later, key=lambda pair: pair[0].id)
    shown, last = page_of(found, limit)
    return forms.ConnectionPage(
        connections=await forms.ConnectionForm.of_clients(shown),
        cursor=None if last is None else last[0].id,
    )


@router.get("/connections/{number}", tags=["clients"], responses=_CLIENT)
async def show_connection(who: Asker, context: Context, number: ConnectionNumber) -> forms.ClientForm:
    """Show one connection with its channels and the branches that they work for."""
    who.require(OperatorRole.VIEWER)
    client, arrival = client_of(context, number)
    return await forms.ClientForm.of_client(client, arrival)


def client_of(context: ApiContext, number: int) -> tuple[Connected, Arrived]:
    """The client connection with that number.

    Raises:
        Problem: 404, there is none; 503, this dtx is not the active one.
    """
    active, _ = context.require_active()
    for client, arrival in active.connections().items():
        if client.id == number:
            return client, arrival
    raise Problem(HTTPStatus.NOT_FOUND, f"there is no connection {number}")


@router.get("/associations", tags=["clients"], responses=_CLIENTS)
async def list_associations(
    who: Asker,
    context: Context,
    owner: UserFilter = None,
    vhost: VhostFilter = None,
    state: Annotated[State | None, Query(description="Only in this state.")] = None,
    cursor: Annotated[UUID | None, Query(description="Cursor from the previous page.")] = None,
    limit: Limit = 100,
) -> forms.AssociationPage:
    """List branches that have not voted, by the time of their start. They exist in the memory of their dtx only.

    All members are asked (--advertise). *missing* has those that did not answer within 2 seconds.
    """
    who.require(OperatorRole.VIEWER)
    active, _ = context.require_active()
    wanted = UnvotedFilter(owner=owner, vhost=vhost, state=state, after=cursor, limit=limit)
    pages, missing = [await unvoted_page(active.manager.entries(), wanted)], list[str]()
    if active.manager.others is not None:
        theirs, missing = await active.manager.others.unvoted(wanted)
        pages += theirs
    page = merged(pages, limit)
    return forms.AssociationPage(
        associations=[forms.AssociationForm.of_branch(branch) for branch in page.branches],
        cursor=str(page.branches[-1].id) if page.more else None,
        missing=missing,
    )


@router.get("/scans", tags=["clients"], responses=_CLIENTS)
async def list_scans(
    who: Asker,
    context: Context,
    user: UserFilter = None,
    vhost: VhostFilter = None,
    cursor: Annotated[str, Query(pattern=r"^\d{1,18}-\d{1,5}$", description="Cursor from the previous page.")] = "0-0",
    limit: Limit = 100,
) -> forms.ScanPage:
    """List open recovery scans. Some transaction managers never end them."""
    who.require(OperatorRole.VIEWER)
    active, _ = context.require_active()
    connection, _, channel = cursor.partition("-")
    after = int(connection), int(channel)
    scans: list[forms.ScanForm] = []

    def find() -> Iterator[None]:
        for client, _ in list(clients_of(active, user, vhost)):
            for number, channel in client.channels.items():
                if channel.scan is not None and (client.id, number) > after:
                    scans.append(forms.ScanForm.of_scan(client, number, channel.scan))
            yield

    await finish(find())
    found = nsmallest(limit + 1, scans, key=lambda scan: (scan.connection, scan.channel))
    shown, last = page_of(found, limit)
    return forms.ScanPage(scans=shown, cursor=None if last is None else f"{last.connection}-{last.channel}")
