"""The messages of a branch with their bodies, as a stream: to keep before they are given up, or to look at elsewhere.

Of each message there is a line of JSON, and then its body: as many octets as ``bytes`` in that line says.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from dtx.admin.forms import text
from dtx.admin.looking import Asker, TheDesk, Vhost, xid_of
from dtx.admin.problems import Problem
from dtx.admin.shown.properties import decode_properties
from dtx.log.exporting import Export, Piece
from dtx.log.operator_tables import Role
from dtx.log.reading import LogReader

router = APIRouter(prefix="/api")
MEDIA_TYPE: Final = "application/vnd.dtx.messages"
COUNT: Final = "x-dtx-messages"
"""How many messages the stream has: one that was cut short has fewer."""


@router.get(
    "/branches/{xid}/export",
    tags=["branches"],
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}, "description": "Lines of JSON, each with its body behind it."}},
)
async def export_branch(
    who: Asker,
    desk: TheDesk,
    xid: str,
    vhost: Vhost = "/",
    archived: Annotated[bool, Query(description="What nobody got of a branch that was forgotten.")] = False,
    position: Annotated[list[int], Query(description="These messages alone.", max_length=10_000)] = [],  # noqa: B006
) -> StreamingResponse:
    """All messages of a branch with their bodies. It takes an operator: what they say is not everybody's business."""
    wanted = xid_of(xid)

    def export(log: LogReader) -> Export:
        return Export(log, desk.rm, vhost, wanted, archived=archived, positions=position)

    async def work() -> tuple[str, int]:
        who.require(Role.OPERATOR)
        found = await desk.read(export)
        if not found.branches:
            where = "the archive has nothing of" if archived else "unknown xid"
            raise Problem(HTTPStatus.NOT_FOUND, f"{where} {xid}")
        return f"{found.count} messages", found.count

    def framed() -> Iterator[bytes]:
        with LogReader(desk.url) as log:
            for piece, body in export(log):
                yield json.dumps(_head(piece)).encode() + b"\n"
                yield from body

    detail = {"archived": archived, "positions": position}
    count = await desk.audited(who, "export", f"{vhost} {xid}", "", detail, work)
    return StreamingResponse(framed(), media_type=MEDIA_TYPE, headers={COUNT: str(count)})


def _head(piece: Piece) -> dict[str, object]:
    return {
        "branch": str(piece.branch_id),
        "position": piece.position,
        "kind": str(piece.kind),
        "fate": None if piece.fate is None else str(piece.fate),
        "exchange": text(piece.exchange),
        "routing_key": text(piece.routing_key),
        "queue": None if piece.queue is None else text(piece.queue),
        "bytes": piece.size,
        "properties": decode_properties(piece.properties),
        "header": b64encode(piece.properties).decode(),
    }
