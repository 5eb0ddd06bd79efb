"""An operator who decides a prepared branch, by the HTTP API."""

import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

from dtx.client import Xid
from tests.crash.matrix.cases import Decision
from tests.crash.matrix.stages import MatrixStage

_INSISTING: Final = 60.0
"""Seconds for which an order is repeated whose outcome is not known."""


def decide(stage: MatrixStage, xid: Xid, decision: Decision) -> None:
    """Commit or roll back *xid*, unless that has been decided already.

    Raises:
        OSError: dtx is gone, or has not said what became of it.
    """
    deadline = time.monotonic() + _INSISTING
    while True:
        try:
            _order(stage, xid, decision)
        except urllib.error.HTTPError as error:
            with error:
                said = f"{error.code} {error.read().decode(errors='replace')}"
            if error.code == HTTPStatus.CONFLICT and stage.states().get(xid) != "prepared":
                return  # an earlier order was decided, though nobody heard of it
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise ConnectionError(f"{decision} {xid}: {said}") from None
            time.sleep(0.05)
        else:
            return


def _order(stage: MatrixStage, xid: Xid, decision: Decision) -> None:
    path = f"/api/branches/{quote(str(xid), safe='')}/{decision}?vhost={quote(stage.vhost, safe='')}"
    request = urllib.request.Request(
        f"http://127.0.0.1:{stage.admin_port}{path}",
        data=json.dumps({"reason": "the transaction manager is gone"}).encode(),
        headers={"Authorization": f"Bearer {stage.token}", "Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
