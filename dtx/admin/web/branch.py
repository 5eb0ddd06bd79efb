"""One branch: what has happened to it, what it holds, what its transaction manager is told, and the order about it."""

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dtx.admin import deciding, forms, looking, past
from dtx.admin.past_forms import JournalQuery, PastQuery
from dtx.admin.problems import Problem, as_problem
from dtx.admin.shown.properties import decode_properties
from dtx.admin.shown.text import preview
from dtx.admin.web.rendering import HEADERS, address, go_to
from dtx.admin.web.visits import Fields, Visit, Visitor, build, read_form
from dtx.log.operator_tables import Role
from dtx.log.records import JournalEvent
from dtx.xa.codes import Heuristic, XaError
from dtx.xa.diagram import answers
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid

router = APIRouter()
MESSAGES: Final = 100
"""Of a branch, on one page."""
_PREVIEW: Final = 4_000
"""Characters of a body."""
_HEADLINES: Final = {
    "commit": "Commit heuristically",
    "rollback": "Roll back heuristically",
    "forget": "Forget the outcome",
    "retry": "Try again",
    "discard": "Give up a message",
    "redirect": "Send a message elsewhere",
}
_OFFERED: Final = {
    "prepared": ("rollback", "commit"),
    "committing": ("retry",),
    "rolling-back": ("retry",),
    "heuristic-committing": ("retry",),
    "heuristic-rolling-back": ("retry",),
    "heuristic": ("forget",),
}
"""What there can be to do, by state; whether it can be done is judged by who does it."""
_TOLD: Final = {
    JournalEvent.PREPARED: "prepare: xa-ok",
    JournalEvent.READ_ONLY: "prepare: xa-rdonly",
    JournalEvent.TIMED_OUT: "whatever it asks first: xa-rbtimeout",
    JournalEvent.STUCK: "541, it may ask again",
    JournalEvent.COMMITTED: "commit: xa-ok",
    JournalEvent.ROLLED_BACK: "rollback: xa-ok",
    JournalEvent.FORGOTTEN: "404 from now on",
}
"""What the transaction manager is told of it, by the line of the journal."""

Words = Annotated[str, Query(max_length=300)]
Host = Annotated[str, Query(max_length=255)]


@router.get("/branch")
async def show_branch(
    visit: Visitor,
    xid: Words,
    vhost: Host = "/",
    start: Annotated[int, Query(alias="from", ge=0, le=looking.LAST_POSITION)] = 0,
) -> Response:
    """The branch as it is now, and what has become of that xid before."""
    wanted = looking.xid_of(xid)
    query = JournalQuery(xid=str(wanted), vhost=vhost, limit=looking.LINES)
    journal, detail = await asyncio.gather(
        past.show_journal(visit.who, visit.desk, query), _detail(visit, xid, vhost, start, MESSAGES)
    )
    if detail is None and not journal.lines:
        raise Problem(HTTPStatus.NOT_FOUND, f"nothing is known about {wanted} in virtual host {vhost}")
    return visit.show(
        "branch.html",
        xid=wanted,
        vhost=vhost,
        detail=detail,
        branch=None if detail is None else detail.branch,
        lines=[(line, _told(line)) for line in journal.lines],
        cut=journal.cursor is not None,
        messages=[] if detail is None else detail.messages,
        before=address("branch", xid=xid, vhost=vhost, **{"from": max(0, start - MESSAGES)}) if start else None,
        after=None
        if detail is None or detail.cursor is None
        else address("branch", xid=xid, vhost=vhost, **{"from": detail.cursor + 1}),
        offered=() if detail is None else _OFFERED.get(detail.branch.state, ()),
        headlines=_HEADLINES,
        asked_now=[] if detail is None else _asked_now(detail.branch),
        live="branches",
    )


async def _detail(visit: Visit, xid: str, vhost: str, start: int, most: int) -> forms.DetailForm | None:
    """The branch and *most* of its messages from position *start* on, if it is in the log."""
    try:
        return await looking.show_branch(visit.who, visit.desk, xid, vhost, most, start - 1 if start else None)
    except Problem as problem:
        if problem.status is not HTTPStatus.NOT_FOUND:
            raise
        return None


def _told(line: forms.JournalForm) -> str:
    if line.event == JournalEvent.HEURISTIC and line.outcome is not None:
        return f"commit and rollback: {Heuristic(line.outcome).flag.wire_name}, until forget"
    return _TOLD.get(JournalEvent(line.event), "")


def _asked_now(branch: forms.BranchForm) -> list[tuple[str, str]]:
    """How the transaction manager's next call would be answered."""
    outcome = None if branch.outcome is None else Heuristic(branch.outcome).flag.wire_name

    def said(word: str) -> str:
        if word.isdecimal():
            return word
        return outcome or word if word == "heur…" else f"xa-{word}"

    state = State(branch.state)
    return [
        (str(operation), " or ".join(dict.fromkeys(said(word) for word in answers(state, operation))))
        for operation in (Operation.COMMIT, Operation.ROLLBACK, Operation.FORGET)
    ]


@router.get("/message")
async def show_message(visit: Visitor, xid: Words, position: int, vhost: Host = "/") -> Response:
    """One message with its contents. Viewing them is recorded in the trail."""
    found = await looking.view_message(visit.who, visit.desk, xid, position, vhost)
    properties, body = b64decode(found.properties), b64decode(found.body)
    return visit.show(
        "message.html",
        xid=looking.xid_of(xid),
        vhost=vhost,
        message=found,
        archived=None,
        properties=plain(decode_properties(properties)),
        preview=preview(body, _PREVIEW),
        back=address("branch", xid=xid, vhost=vhost),
        body=address("message/body", xid=xid, vhost=vhost, position=position),
    )


@router.get("/message/body")
async def download_body(visit: Visitor, xid: Words, position: int, vhost: Host = "/") -> Response:
    """The body of a message, to keep as a file; browsers are told not to show it."""
    found = await looking.message_contents(visit.who, visit.desk, xid, position, vhost, action="export")
    return attachment(b64decode(found.body), f"message-{position}.bin")


def attachment(body: bytes, name: str) -> Response:
    """Octets that a browser keeps, whatever they are."""
    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"', "Content-Security-Policy": "sandbox"}
    return Response(body, media_type="application/octet-stream", headers=headers)


def plain(properties: dict[str, object]) -> list[tuple[str, str]]:
    """Properties as lines; tables within them have their path before each name."""
    found: list[tuple[str, str]] = []

    def put(name: str, value: object) -> None:
        match value:
            case dict():
                for key, inner in value.items():
                    put(f"{name}.{key}", inner)
            case list():
                for index, inner in enumerate(value):
                    put(f"{name}[{index}]", inner)
            case _:
                found.append((name, str(value)))

    for name, value in properties.items():
        put(name, value)
    return found


@router.get("/decide")
async def ask_to_decide(
    visit: Visitor, xid: Words, action: Annotated[str, Query(max_length=20)], vhost: Host = "/", position: str = ""
) -> Response:
    """The form of an order."""
    visit.who.require(Role.OPERATOR)
    return await _decide_page(visit, xid, vhost, action, {"position": position})


@router.post("/decide")
async def decide(request: Request, visit: Visitor) -> Response:
    """The dry run of an order, and then the order: about the version of the branch that the dry run saw."""
    form = await read_form(request, visit)
    xid, vhost, action = form.one("xid"), form.one("vhost") or "/", form.one("action")
    given = form.given("reason", "version", "position", "exchange", "routing_key", "queue")
    if action not in _HEADLINES:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no order {action!r}")
    dry_run = form.one("stage") != "do"
    order = repr((xid, vhost, action, form.all("position"), *map(form.one, ("exchange", "routing_key", "queue"))))
    try:
        permitted = visit.who.role.includes(Role.OPERATOR)  # who is refused anyway hears of that
        if permitted and not dry_run and not visit.session.take_dry_run(order, form.one("version")):
            raise Problem(HTTPStatus.PRECONDITION_REQUIRED, "there was no dry run of this order: run that first")
        done = await _order(visit, xid, vhost, action, form, dry_run=dry_run)
    except (Problem, XaError) as error:
        return await _decide_page(visit, xid, vhost, action, given, problem=as_problem(error))
    if dry_run:
        visit.session.add_dry_run(order, str(done.forecast.version))
        return await _decide_page(visit, xid, vhost, action, given, forecast=done.forecast)
    visit.session.notice = f"{_HEADLINES[action]}: done, answered {done.answer}."
    return go_to(address("branch", xid=xid, vhost=vhost))


async def _order(visit: Visit, xid: str, vhost: str, action: str, form: Fields, *, dry_run: bool) -> forms.DoneForm:
    common: dict[str, Any] = {
        "reason": form.one("reason"),
        "dry_run": dry_run,
        "version": form.one("version") or None,
    }
    match action:
        case "discard":
            discard = build(forms.DiscardForm, {**common, "positions": form.all("position")})
            return await deciding.discard(visit.who, visit.desk, xid, discard, vhost)
        case "redirect":
            where = {"position": form.one("position"), "queue": form.one("queue") or None}
            where |= {"exchange": form.one("exchange"), "routing_key": form.one("routing_key")}
            redirect = build(forms.RedirectForm, {**common, **where})
            return await deciding.redirect(visit.who, visit.desk, xid, redirect, vhost)
        case "commit" | "rollback" | "forget" | "retry":
            return await deciding.decide(visit.who, visit.desk, xid, action, build(forms.OrderForm, common), vhost)
        case _:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no order {action!r}")


async def _decide_page(
    visit: Visit,
    xid: str,
    vhost: str,
    action: str,
    given: dict[str, str],
    *,
    forecast: forms.ForecastForm | None = None,
    problem: Problem | None = None,
) -> Response:
    wanted = looking.xid_of(xid)
    if action not in _HEADLINES:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no order {action!r}")
    position = given.get("position", "")
    detail = await _detail(visit, xid, vhost, int(position) if position.isdecimal() and len(position) < 10 else 0, 1)
    if detail is None and problem is None:
        raise Problem(HTTPStatus.NOT_FOUND, f"unknown xid {wanted}")
    return visit.show(
        "decide.html",
        HTTPStatus.OK if problem is None else problem.status,
        xid=wanted,
        vhost=vhost,
        action=action,
        headline=_HEADLINES[action],
        branch=None if detail is None else detail.branch,
        message=_message(detail, position),
        given=given,
        forecast=forecast,
        problem=problem,
        conflict=problem is not None and problem.status in {HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT},
    )


def _message(detail: forms.DetailForm | None, position: str) -> forms.MessageForm | None:
    messages: Sequence[forms.MessageForm] = () if detail is None else detail.messages
    return next((message for message in messages if str(message.position) == position), None)


@router.get("/transaction")
async def show_transaction(visit: Visitor, gtrid: Annotated[str, Query(max_length=128)], cursor: str = "") -> Response:
    """What the journal has about all branches of one global transaction."""
    query = PastQuery(cursor=cursor or None)
    found = await past.show_transaction(visit.who, visit.desk, gtrid, query)
    branches = sorted({(line.xid, line.vhost) for line in found.lines})
    readable = Xid(0, bytes.fromhex(gtrid)).readable
    return visit.show(
        "transaction.html",
        gtrid=gtrid,
        readable=None if readable is None else readable.removesuffix("/"),
        lines=found.lines,
        branches=branches,
        more=address("transaction", gtrid=gtrid, cursor=found.cursor) if found.cursor else None,
        live="journal",
    )
