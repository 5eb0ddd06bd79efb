"""The first page: what is in doubt and for how long, what is done, and how dtx is."""

from fastapi import APIRouter
from starlette.responses import Response

from dtx.admin.web.rates import curve, endings, rates
from dtx.admin.web.visits import Visitor
from dtx.log.operator_tables import Role
from dtx.xa.model import State
from dtx.xa.table import IN_DOUBT

router = APIRouter()
_WIDTH, _HEIGHT = 600, 80
_POINTS = 120


@router.get("/")
async def show_overview(visit: Visitor) -> Response:
    """How dtx is, at one glance."""
    visit.who.require(Role.VIEWER)
    status = (await visit.pulse.look()).status
    samples = visit.pulse.samples
    done = endings(samples)
    order = [str(state) for state in State if status.branches.get(str(state))]
    in_doubt = {str(state) for state in IN_DOUBT}
    return visit.show(
        "overview.html",
        status=status,
        states=order,
        in_doubt=in_doubt,
        total=sum(count for state, count in status.branches.items() if state in in_doubt),
        rates=rates(samples),
        curve=curve(done, _WIDTH, _HEIGHT, _POINTS),
        done=done,
        width=_WIDTH,
        height=_HEIGHT,
        lease=next((lease for lease in status.leases if lease.rm == status.rm), None),
        live="always",
    )
