"""How the global transactions of the whole fleet stand, as the pipeline has found."""

from http import HTTPStatus

from fastapi import APIRouter, Request
from starlette.responses import Response

from dtx.admin.problems import Problem
from dtx.admin.web.rendering import address
from dtx.admin.web.visits import Visitor
from dtx.log import verdicts
from dtx.log.operator_tables import Role
from dtx.log.verdicts import Place

router = APIRouter()
_PAGE = 50
_FIELDS = ("verdict", "gtrid", "rm", "owner")


@router.get("/reconciliation")
async def show_reconciliation(request: Request, visit: Visitor) -> Response:
    """The totals, and what somebody has to look at."""
    visit.who.require(Role.VIEWER)
    given = {name: text for name in _FIELDS if (text := request.query_params.get(name, "").strip())}
    cursor = request.query_params.get("cursor", "")
    gtrid = _gtrid(given["gtrid"]) if "gtrid" in given else None
    after = _place(cursor) if cursor else None
    run = await visit.desk.read(verdicts.reconciled)
    found = await visit.desk.read(
        lambda log: verdicts.found(
            log,
            word=given.get("verdict"),
            gtrid=gtrid,
            rm=given.get("rm"),
            owner=given.get("owner"),
            after=after,
            limit=_PAGE + 1,
        )
    )
    shown = found[:_PAGE]
    more = None
    if len(found) > _PAGE:
        end = shown[-1]
        place = Place(last_at=end.last_at, gtrid=end.gtrid, format_id=end.format_id)
        more = address("reconciliation", **given, cursor=str(place))
    return visit.show(
        "reconciliation.html",
        given=given,
        run=run,
        found=shown,
        first=address("reconciliation", **given) if cursor else None,
        more=more,
    )


def _gtrid(words: str) -> bytes:
    """A gtrid is typed in hexadecimal, or as it is where it is text."""
    try:
        return bytes.fromhex(words)
    except ValueError:
        return words.encode()


def _place(cursor: str) -> Place:
    try:
        return Place.parse(cursor)
    except (ValueError, TypeError):
        raise Problem(HTTPStatus.BAD_REQUEST, f"{cursor[:80]!r} is no cursor") from None
