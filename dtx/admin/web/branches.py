"""Branches: those that are in doubt, found and put in order; and an order about many of them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from dtx.admin import deciding, looking
from dtx.admin.forms import BulkForm, FilterForm
from dtx.admin.problems import Problem, as_problem
from dtx.admin.web.rendering import address
from dtx.admin.web.visits import Fields, Visit, Visitor, build, read_form
from dtx.config.values import parse_duration
from dtx.log.listing import Sort
from dtx.log.operator_tables import Role
from dtx.log.records import LogState
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

STATES: Final = tuple(str(state) for state in LogState)
DEFAULT_EXCHANGE: Final = "(default)"
"""What is typed for the exchange that has an empty name."""
_PLAIN: Final = ("vhost", "owner", "format_id", "queue")
NAMES: Final = ("q", "state", "older", "stuck", "exchange", "branch", *_PLAIN)
"""The fields of a search."""


def asked(given: QueryParams | Fields) -> dict[str, list[str]]:
    """The fields of a search that say something, as they were typed."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        values = given.getlist(name) if isinstance(given, QueryParams) else given.all(name)
        kept = [value.strip() for value in values if value.strip()]
        if kept:
            found[name] = kept
    return found


def filter_of(fields: Mapping[str, list[str]]) -> FilterForm:
    """The filter that they mean.

    Raises:
        Problem: 422, one of them is not as it must be.
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
        values |= _looked_for(fields["q"][-1])
    return build(FilterForm, values)


def _seconds(words: str) -> float:
    try:
        return parse_duration(words)
    except ValueError as error:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"age: {error}") from None


def _looked_for(words: str) -> dict[str, Any]:
    """A whole xid means the branches of its transaction; text is looked for within the gtrid, patterns as they are."""
    if words.count(":") == 2:
        try:
            xid = Xid.parse(words)
        except XaError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, error.reason) from None
        return {"format_id": xid.format_id, "gtrid": f"hex:{xid.gtrid.hex()}"}
    if "*" in words or words.startswith("hex:"):
        return {"gtrid": words}
    return {"gtrid": f"*{words}*"}


router = APIRouter()
PAGE: Final = 50
ACTIONS: Final = ("rollback", "commit", "forget", "retry")
_COLUMNS: Final = (Sort.STATE, Sort.STARTED, Sort.OWNER, Sort.MESSAGES, Sort.BYTES)


@router.get("/branches")
async def show_branches(request: Request, visit: Visitor) -> Response:
    """Branches that have voted and are not completed."""
    given = request.query_params
    fields = asked(given)
    by, descending = given.get("sort") or Sort.STARTED, given.get("descending") == "yes"
    order = {"sort": by if by != Sort.STARTED else None, "descending": "yes" if descending else None}
    problem: Problem | None = None
    branches: list[Any] = []
    cursor: str | None = None
    try:
        query = build(
            looking.BranchQuery,
            {
                **filter_of(fields).model_dump(exclude_none=True),
                "sort": by,
                "descending": descending,
                "limit": PAGE,
                "cursor": given.get("cursor") or None,
            },
        )
        found = await looking.list_branches(visit.who, visit.desk, query)
        branches, cursor = list(found.branches), found.cursor
    except Problem as error:
        problem = error
    return visit.show(
        "branches.html",
        HTTPStatus.OK if problem is None else problem.status,
        fields=fields,
        problem=None if problem is None else problem.detail,
        branches=branches,
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
    """The address of the same branches in the order *by*; backwards where they are in it."""
    turn = by == now and not descending
    return address("branches", **fields, sort=by, descending="yes" if turn else None)


@router.get("/bulk")
async def ask_about_many(request: Request, visit: Visitor) -> Response:
    """An order about all branches of a search: what is to be done, and why."""
    visit.who.require(Role.COORDINATOR)
    return _bulk_page(visit, asked(request.query_params))


@router.post("/bulk")
async def decide_many(request: Request, visit: Visitor) -> Response:
    """Chosen branches; then the dry run; then, as that has said, the order itself."""
    form = await read_form(request, visit)
    fields = asked(form)
    stage, action, reason = form.one("stage"), form.one("action") or ACTIONS[0], form.one("reason")
    if stage == "choose":
        visit.who.require(Role.COORDINATOR)
        if "branch" not in fields:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "no branch is chosen: tick some of them, or search")
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
        answer = await deciding.decide_many(visit.who, visit.desk, order)
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
        action=action,
        actions=ACTIONS,
        reason=reason,
        answer=answer,
        problem=None if problem is None else problem.detail,
        most=deciding.MOST_AT_ONCE,
        everything=filter_of(fields) == FilterForm() if problem is None else False,
    )
