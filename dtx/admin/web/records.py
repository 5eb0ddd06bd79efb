"""What has happened: how branches ended, what nobody got, and who did what."""

from base64 import b64decode
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dtx.admin import looking, past
from dtx.admin.past_forms import AuditQuery, OutcomeQuery, XidQuery
from dtx.admin.shown.properties import decode_properties
from dtx.admin.shown.text import preview
from dtx.admin.web.branch import attachment, plain
from dtx.admin.web.rendering import address
from dtx.admin.web.visits import Visitor, build
from dtx.log.past import OUTCOMES
from dtx.log.records import WITH_OUTCOME

router = APIRouter()
_PAGE = 50
_PREVIEW = 4_000


def _given(request: Request, *names: str) -> dict[str, str]:
    """What was typed into those fields of a search."""
    return {name: request.query_params[name].strip() for name in names if request.query_params.get(name, "").strip()}


@router.get("/outcomes")
async def show_outcomes(request: Request, visit: Visitor) -> Response:
    """How branches ended; and heuristic outcomes, which are kept until they are forgotten."""
    given = _given(request, "xid", "owner", "vhost", "event")
    query = build(
        OutcomeQuery,
        {
            **{name: value for name, value in given.items() if name != "event"},
            "event": [given["event"]] if "event" in given else [],
            "cursor": request.query_params.get("cursor") or None,
            "limit": _PAGE,
        },
    )
    ended = await past.list_outcomes(visit.who, visit.desk, query)
    wanted = looking.BranchQuery(state=sorted(str(state) for state in WITH_OUTCOME), limit=_PAGE)
    kept = await looking.list_branches(visit.who, visit.desk, wanted)
    return visit.show(
        "outcomes.html",
        given=given,
        events=OUTCOMES,
        kept=kept.branches,
        all_kept=address("branches", state=wanted.state) if kept.cursor else None,
        lines=ended.lines,
        first=address("outcomes", **given) if query.cursor else None,
        more=address("outcomes", **given, cursor=ended.cursor) if ended.cursor else None,
        live="branches",
    )


@router.get("/archive")
async def show_archive(request: Request, visit: Visitor) -> Response:
    """Messages that nobody got, of branches that were forgotten."""
    given = _given(request, "xid", "owner", "vhost")
    cursor = request.query_params.get("cursor") or None
    found = await past.list_archive(visit.who, visit.desk, build(XidQuery, {**given, "cursor": cursor, "limit": _PAGE}))
    return visit.show(
        "archive.html",
        given=given,
        messages=found.messages,
        first=address("archive", **given) if cursor else None,
        more=address("archive", **given, cursor=found.cursor) if found.cursor else None,
    )


@router.get("/archive/message")
async def show_archived(visit: Visitor, branch: UUID, position: int) -> Response:
    """One of them with its contents. Viewing them is recorded in the trail."""
    found = await past.view_archived(visit.who, visit.desk, branch, position)
    return visit.show(
        "message.html",
        xid=looking.xid_of(found.xid),
        vhost=found.vhost,
        message=found,
        archived=found.archived_at,
        properties=plain(decode_properties(b64decode(found.properties))),
        preview=preview(b64decode(found.body), _PREVIEW),
        back=address("archive", xid=found.xid),
        body=address("archive/body", branch=branch, position=position),
    )


@router.get("/archive/body")
async def download_archived(visit: Visitor, branch: UUID, position: int) -> Response:
    """Its body, to keep as a file."""
    found = await past.archived_contents(visit.who, visit.desk, branch, position, action="export")
    return attachment(b64decode(found.body), f"message-{position}.bin")


@router.get("/audit")
async def show_audit(request: Request, visit: Visitor, cursor: Annotated[str, Query(max_length=20)] = "") -> Response:
    """Who did what, and why."""
    given = _given(request, "actor", "action", "subject")
    query = build(AuditQuery, {**given, "cursor": cursor or None, "limit": _PAGE})
    found = await past.show_audit(visit.who, visit.desk, query)
    return visit.show(
        "audit.html",
        given=given,
        lines=found.lines,
        first=address("audit", **given) if cursor else None,
        more=address("audit", **given, cursor=found.cursor) if found.cursor else None,
        live="audit",
    )
