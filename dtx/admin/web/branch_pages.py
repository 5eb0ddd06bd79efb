"""Pages about branches: the list of those in doubt, the page of one branch, and orders about one and many branches.

The page of one branch shows its journal, its messages, and the answers to its transaction manager.
"""

import asyncio
from base64 import b64decode
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from dtx.admin import forms, routes_orders, routes_read
from dtx.admin.branch_filter import FilterForm
from dtx.admin.forms import BulkForm, JournalQuery, PastQuery
from dtx.admin.message_properties import decode_properties, flat
from dtx.admin.problems import Problem, as_problem
from dtx.admin.safe_text import preview
from dtx.admin.web.page_request import Fields, Visit, Visitor, build, read_form, reads, total
from dtx.admin.web.rendering import HEADERS, address, redirect_to
from dtx.auth.roles import OperatorRole
from dtx.config.values import parse_duration
from dtx.log.pages import Sort, branch_count, journal_count
from dtx.log.records import JournalEvent, LogState
from dtx.xa.answers import answers
from dtx.xa.codes import Heuristic, XaError
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid

router = APIRouter()
STATES: Final = tuple(str(state) for state in LogState)
DEFAULT_EXCHANGE: Final = "(default)"
"""The text in forms for the default exchange, whose name is empty."""
_PLAIN: Final = ("vhost", "owner", "format_id", "queue")
NAMES: Final = ("q", "state", "older", "stuck", "exchange", "branch", *_PLAIN)
"""Fields of a search."""
_PLACES: Final = ("exchange", "vhost", "owner", "queue")
PAGE: Final = 50
ACTIONS: Final = ("rollback", "commit", "forget", "retry")
_COLUMNS: Final = (Sort.STATE, Sort.STARTED, Sort.OWNER, Sort.MESSAGES, Sort.BYTES)
MESSAGES: Final = 100
"""Messages of a branch on one page."""
_PREVIEW: Final = 4_000
"""Characters of a body in its preview."""
_HEADLINES: Final = {
    "commit": "Commit heuristically",
    "rollback": "Roll back heuristically",
    "forget": "Forget the outcome",
    "retry": "Retry",
    "discard": "Discard a message",
    "redirect": "Redirect a message",
}
_OFFERED: Final = {
    "prepared": ("rollback", "commit"),
    "committing": ("retry",),
    "rolling-back": ("retry",),
    "heuristic-committing": ("retry",),
    "heuristic-rolling-back": ("retry",),
    "heuristic": ("forget",),
}
"""Orders that the page offers, by state. The manager checks each order."""
_TM_ANSWERS: Final = {
    JournalEvent.PREPARED: "prepare: xa-ok",
    JournalEvent.READ_ONLY: "prepare: xa-rdonly",
    JournalEvent.TIMED_OUT: "first request: xa-rbtimeout",
    JournalEvent.STUCK: "541: the outcome is not known yet",
    JournalEvent.COMMITTED: "commit: xa-ok",
    JournalEvent.ROLLED_BACK: "rollback: xa-ok",
    JournalEvent.FORGOTTEN: "404 from now on",
}
"""The answers to the transaction manager, by event of the journal."""

Words = Annotated[str, Query(max_length=300)]
Host = Annotated[str, Query(max_length=255)]


def asked(given: QueryParams | Fields) -> dict[str, list[str]]:
    """The fields of a search that are not empty. Blanks at the ends belong to names."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        kept = [value if name in _PLACES else value.strip() for value in given.getlist(name) if value.strip()]
        if kept:
            found[name] = kept
    return found


def filter_of(fields: Mapping[str, list[str]]) -> FilterForm:
    """The filter of the fields of a search.

    Raises:
        Problem: 422, a field is malformed.
    """
    values: dict[str, Any] = {name: fields[name][-1] for name in _PLAIN if name in fields}
    values["state"] = fields.get("state", [])
    values["branch"] = fields.get("branch", [])
    if "exchange" in fields:
        name = fields["exchange"][-1]
        values["exchange"] = "" if name == DEFAULT_EXCHANGE else name
    if "stuck" in fields:
        values["stuck"] = fields["stuck"][-1] == "yes"
    if "older" in fields:
        values["older_than"] = _seconds(fields["older"][-1])
    if "q" in fields:
        values |= _search_values(fields["q"][-1])
    return build(FilterForm, values)


def _seconds(words: str) -> float:
    try:
        return parse_duration(words)
    except ValueError as error:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"age: {error}") from None


def _search_values(words: str) -> dict[str, Any]:
    """A whole xid finds the branches of its transaction; text is searched within gtrids; patterns are used as typed."""
    if words.count(":") == 2:
        try:
            xid = Xid.parse(words)
        except XaError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, error.reason) from None
        return {"format_id": xid.format_id, "gtrid": f"hex:{xid.gtrid.hex()}"}
    if "*" in words or words.startswith("hex:"):
        return {"gtrid": words}
    return {"gtrid": f"*{words}*"}


@router.get("/branches")
@reads(*NAMES, "sort", "descending", "cursor")
async def show_branches(request: Request, visit: Visitor) -> Response:
    """The list of branches that have voted and are not completed."""
    given = request.query_params
    fields = asked(given)
    by, descending = given.get("sort") or Sort.STARTED, given.get("descending") == "yes"
    order = {"sort": by if by != Sort.STARTED else None, "descending": "yes" if descending else None}
    problem: Problem | None = None
    branches: list[Any] = []
    cursor: str | None = None
    count = 0
    try:
        query = build(
            routes_read.BranchQuery,
            {
                **filter_of(fields).model_dump(exclude_none=True),
                "sort": by,
                "descending": descending,
                "limit": PAGE,
                "cursor": given.get("cursor") or None,
            },
        )
        found = await routes_read.list_branches(visit.who, visit.context, query)
        branches, cursor = list(found.branches), found.cursor
        wanted = routes_read.wanted_of(query, visit.context.rm)
        count = await total(visit, branches, query.cursor, cursor, lambda log: branch_count(log, wanted))
    except Problem as error:
        problem = error
    return visit.show(
        "branches.html",
        HTTPStatus.OK if problem is None else problem.status,
        fields=fields,
        problem=None if problem is None else problem.detail,
        branches=branches,
        total=count,
        states=STATES,
        sort=str(by),
        descending=descending,
        order=order,
        columns={str(by): _ordered(fields, by, str(order["sort"] or Sort.STARTED), descending) for by in _COLUMNS},
        first=address("branches", **fields, **order) if given.get("cursor") else None,
        more=address("branches", **fields, **order, cursor=cursor) if cursor else None,
        many=address("bulk", **fields),
        narrowed=any(name not in {"q", "state"} for name in fields),
        live="branches",
    )


def _ordered(fields: dict[str, list[str]], by: Sort, now: str, descending: bool) -> str:
    """The address of the same list in the order *by*; in descending order if *by* is its present order."""
    descends = by == now and not descending
    return address("branches", **fields, sort=by, descending="yes" if descends else None)


@router.get("/bulk")
@reads(*NAMES)
async def ask_about_many(request: Request, visit: Visitor) -> Response:
    """The form of an order about all branches of a search."""
    visit.who.require(OperatorRole.COORDINATOR)
    return _bulk_page(visit, asked(request.query_params))


@router.post("/bulk")
@reads(*NAMES)
async def decide_many(request: Request, visit: Visitor) -> Response:
    """The steps of an order about many branches: the chosen branches, the dry run, and the order itself.

    The search is in the address, because browsers change line ends in fields. Chosen branches are fields.
    """
    form = await read_form(request, visit)
    fields = asked(request.query_params) | asked(form)
    stage, action, reason = form.one("stage"), form.one("action") or ACTIONS[0], form.one("reason")
    if stage == "choose":
        visit.who.require(OperatorRole.COORDINATOR)
        if "branch" not in fields:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "no branch is chosen: choose some, or search")
        return _bulk_page(visit, {"branch": fields["branch"]}, action)
    try:
        order = build(
            BulkForm,
            {
                "action": action,
                "filter": filter_of(fields),
                "reason": reason,
                "dry_run": stage != "do",
                "confirm": form.one("confirm") or None,
            },
        )
        answer = await routes_orders.decide_many(visit.who, visit.context, order)
    except (Problem, XaError) as error:
        problem = as_problem(error)
        return _bulk_page(visit, fields, action, reason, problem=problem)
    return _bulk_page(visit, fields, action, reason, answer=answer)


def _bulk_page(
    visit: Visit,
    fields: dict[str, list[str]],
    action: str = ACTIONS[0],
    reason: str = "",
    *,
    answer: object = None,
    problem: Problem | None = None,
) -> Response:
    return visit.show(
        "bulk.html",
        HTTPStatus.OK if problem is None else problem.status,
        fields=fields,
        chosen=fields.get("branch", []),
        search={name: values for name, values in fields.items() if name != "branch"},
        action=action,
        actions=ACTIONS,
        reason=reason,
        answer=answer,
        problem=None if problem is None else problem.detail,
        most=routes_orders.MOST_AT_ONCE,
        everything=filter_of(fields) == FilterForm() if problem is None else False,
    )


@router.get("/branch")
async def show_branch(
    visit: Visitor,
    xid: Words,
    vhost: Host = "/",
    start: Annotated[int, Query(alias="from", ge=0, le=routes_read.LAST_POSITION)] = 0,
) -> Response:
    """The page of a branch: its present state, and the journal of its xid."""
    wanted = routes_read.xid_of(xid)
    query = JournalQuery(xid=str(wanted), vhost=vhost, limit=routes_read.LINES)
    journal, detail = await asyncio.gather(
        routes_read.show_journal(visit.who, visit.context, query), _detail(visit, xid, vhost, start, MESSAGES)
    )
    if detail is None and not journal.lines:
        raise Problem(HTTPStatus.NOT_FOUND, f"nothing is known about {wanted} in virtual host {vhost}")
    return visit.show(
        "branch.html",
        xid=wanted,
        vhost=vhost,
        detail=detail,
        branch=None if detail is None else detail.branch,
        lines=[(line, _tm_answer(line)) for line in journal.lines],
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
        return await routes_read.show_branch(visit.who, visit.context, xid, vhost, most, start - 1 if start else None)
    except Problem as problem:
        if problem.status is not HTTPStatus.NOT_FOUND:
            raise
        return None


def _tm_answer(line: forms.JournalForm) -> str:
    if line.event == JournalEvent.HEURISTIC and line.outcome is not None:
        return f"commit and rollback: {Heuristic(line.outcome).flag.wire_name}, until forget"
    return _TM_ANSWERS.get(JournalEvent(line.event), "")


def _asked_now(branch: forms.BranchForm) -> list[tuple[str, str]]:
    """Calls of the transaction manager and the answers that they would get now."""
    outcome = None if branch.outcome is None else Heuristic(branch.outcome).flag.wire_name

    def answer_text(word: str) -> str:
        if word.isdecimal():
            return word
        return outcome or word if word == "heur…" else f"xa-{word}"

    state = State(branch.state)
    return [
        (str(operation), " or ".join(dict.fromkeys(answer_text(word) for word in answers(state, operation))))
        for operation in (Operation.COMMIT, Operation.ROLLBACK, Operation.FORGET)
    ]


@router.get("/message")
async def show_message(visit: Visitor, xid: Words, position: int, vhost: Host = "/") -> Response:
    """One message with its contents. Viewing it is recorded in the audit log."""
    found = await routes_read.view_message(visit.who, visit.context, xid, position, vhost)
    return contents_page(
        visit,
        found,
        xid=routes_read.xid_of(xid),
        vhost=vhost,
        archived=None,
        back=address("branch", xid=xid, vhost=vhost),
        body=address("message/body", xid=xid, vhost=vhost, position=position),
    )


def contents_page(visit: Visit, found: forms.Contents, **context: object) -> Response:
    """The page of a message, with its properties and the beginning of its body."""
    return visit.show(
        "message.html",
        message=found,
        properties=flat(decode_properties(b64decode(found.properties))),
        preview=preview(b64decode(found.body), _PREVIEW),
        **context,
    )


@router.get("/message/body")
async def download_body(visit: Visitor, xid: Words, position: int, vhost: Host = "/") -> Response:
    """The body of a message, as a download."""
    found = await routes_read.message_contents(visit.who, visit.context, xid, position, vhost, action="export")
    return attachment(b64decode(found.body), f"message-{position}.bin")


def attachment(body: bytes, name: str) -> Response:
    """A response that browsers save as a file and never show, whatever it contains."""
    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"', "Content-Security-Policy": "sandbox"}
    return Response(body, media_type="application/octet-stream", headers=headers)


@router.get("/decide")
async def ask_to_decide(
    visit: Visitor, xid: Words, action: Annotated[str, Query(max_length=20)], vhost: Host = "/", position: str = ""
) -> Response:
    """The form of an order about one branch."""
    visit.who.require(OperatorRole.OPERATOR)
    return await _decide_page(visit, xid, vhost, action, {"position": position})


@router.post("/decide")
async def decide(
    request: Request, visit: Visitor, xid: Words, action: Annotated[str, Query(max_length=20)], vhost: Host = "/"
) -> Response:
    """The dry run of an order, and then the order, for the version of the branch in the dry run.

    The address names the branch, because browsers change line ends in fields.
    """
    form = await read_form(request, visit)
    given = form.non_empty("reason", "version", "position", "exchange", "routing_key", "queue")
    if action not in _HEADLINES:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no order {action!r}")
    dry_run = form.one("stage") != "do"
    order = repr((xid, vhost, action, form.all("position"), *map(form.exactly, ("exchange", "routing_key", "queue"))))
    try:
        permitted = visit.who.role.includes(OperatorRole.OPERATOR)  # without the role, the answer is 403
        if permitted and not dry_run and not visit.session.take_dry_run(order, form.one("version")):
            raise Problem(HTTPStatus.PRECONDITION_REQUIRED, "there was no dry run of this order: run the dry run first")
        done = await _order(visit, xid, vhost, action, form, dry_run=dry_run)
    except (Problem, XaError) as error:
        return await _decide_page(visit, xid, vhost, action, given, problem=as_problem(error))
    if dry_run:
        visit.session.add_dry_run(order, str(done.forecast.version))
        return await _decide_page(visit, xid, vhost, action, given, forecast=done.forecast)
    visit.session.notice = f"{_HEADLINES[action]}: done. The answer is {done.answer}."
    return redirect_to(address("branch", xid=xid, vhost=vhost))


async def _order(visit: Visit, xid: str, vhost: str, action: str, form: Fields, *, dry_run: bool) -> forms.DoneForm:
    common: dict[str, Any] = {
        "reason": form.one("reason"),
        "dry_run": dry_run,
        "version": form.one("version") or None,
    }
    match action:
        case "discard":
            discard = build(forms.DiscardForm, {**common, "positions": form.all("position")})
            return await routes_orders.discard(visit.who, visit.context, xid, discard, vhost)
        case "redirect":
            where = {"position": form.one("position"), "queue": form.exactly("queue") or None}
            where |= {"exchange": form.exactly("exchange"), "routing_key": form.exactly("routing_key")}
            redirect = build(forms.RedirectForm, {**common, **where})
            return await routes_orders.redirect(visit.who, visit.context, xid, redirect, vhost)
        case "commit" | "rollback" | "forget" | "retry":
            return await routes_orders.decide(
                visit.who, visit.context, xid, action, build(forms.OrderForm, common), vhost
            )
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
    wanted = routes_read.xid_of(xid)
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
    """The journal of all branches of one global transaction."""
    query = PastQuery(cursor=cursor or None)
    found = await routes_read.show_transaction(visit.who, visit.context, gtrid, query)
    asked = routes_read.journal_filter(visit.context.rm, forms.XidQuery(gtrid=gtrid))
    readable = Xid(0, bytes.fromhex(gtrid)).readable
    return visit.show(
        "transaction.html",
        gtrid=gtrid,
        readable=None if readable is None else readable.removesuffix("/"),
        lines=found.lines,
        total=await total(visit, found.lines, cursor, found.cursor, lambda log: journal_count(log, asked)),
        more=address("transaction", gtrid=gtrid, cursor=found.cursor) if found.cursor else None,
        live="journal",
    )
