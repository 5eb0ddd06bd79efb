"""An operator who completes a prepared branch, or redirects a message, through the HTTP API."""

import time
from http import HTTPStatus
from typing import Final

from dtx.client import Xid
from tests.evidence.matrix.cases import Decision
from tests.evidence.matrix.stages import MatrixStage
from tests.support.operator import Answered, Operator

_INSISTING: Final = 60.0
"""Seconds for which an order with an unknown outcome is repeated."""


def decide(stage: MatrixStage, xid: Xid, decision: Decision) -> None:
    """Commit or roll back *xid*, unless it has been decided already.

    Raises:
        OSError: dtx is gone, or the outcome is not known.
    """
    deadline = time.monotonic() + _INSISTING
    while (answer := _order(stage, xid, decision)).status != HTTPStatus.OK:
        if answer.status == HTTPStatus.CONFLICT and stage.states().get(xid) != "prepared":
            return  # an earlier order was carried out, but its answer was lost
        if answer.status != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            raise ConnectionError(f"{decision} {xid}: {answer}")
        time.sleep(0.05)


def redirect(stage: MatrixStage, xid: Xid, position: int, queue: str) -> None:
    """Redirect the message at *position*, with which *xid* is stuck, to *queue*; it may not be stuck any more.

    Raises:
        OSError: dtx is gone, or the outcome is not known.
    """
    answer = _order(stage, xid, "redirect", position=position, routing_key=queue)
    if answer.status not in {HTTPStatus.OK, HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
        raise ConnectionError(f"redirect {position} of {xid}: {answer}")


def retry(stage: MatrixStage, xid: Xid) -> None:
    """Retry the stuck branch *xid*; it may not be stuck any more, or be stuck again.

    Raises:
        OSError: dtx is gone, or gave an unexpected answer.
    """
    answer = _order(stage, xid, "retry")
    if answer.status not in {
        HTTPStatus.OK,
        HTTPStatus.CONFLICT,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.SERVICE_UNAVAILABLE,
    }:
        raise ConnectionError(f"retry {xid}: {answer}")


def _order(stage: MatrixStage, xid: Xid, action: str, **more: object) -> Answered:
    operator = Operator(f"http://127.0.0.1:{stage.admin_port}", token=stage.token)
    return operator.order(action, xid, vhost=stage.vhost, reason="the transaction manager is gone", **more)
