"""The routes of the operators' API, with the role that each needs."""

from typing import Final

from dtx.auth.roles import OperatorRole

VIEWER, OPERATOR, COORDINATOR = OperatorRole
WHY: Final = {"reason": "to see who may"}
NAMED: Final = {"name": "nobody", **WHY}
TOPIC: Final = {**NAMED, "exchange": "amq.topic"}
ROUTES: Final[dict[str, tuple[OperatorRole | None, object]]] = {
    "GET /healthz": (None, None),
    "GET /readyz": (None, None),
    "GET /metrics": (VIEWER, None),
    "GET /api/status": (VIEWER, None),
    "GET /api/branches": (VIEWER, None),
    "GET /api/branches/{xid}": (VIEWER, None),
    "GET /api/branches/{xid}/messages/{position}": (OPERATOR, None),
    "GET /api/branches/{xid}/export": (OPERATOR, None),
    "POST /api/branches/{xid}/{action}": (OPERATOR, WHY),
    "POST /api/branches/{xid}/discard": (OPERATOR, {**WHY, "positions": [0]}),
    "POST /api/branches/{xid}/redirect": (OPERATOR, {**WHY, "position": 0, "exchange": "", "routing_key": "out"}),
    "POST /api/bulk": (COORDINATOR, {**WHY, "action": "commit", "filter": {}, "dry_run": True}),
    "GET /api/journal": (VIEWER, None),
    "GET /api/transactions/{gtrid}": (VIEWER, None),
    "GET /api/outcomes": (VIEWER, None),
    "GET /api/archive": (VIEWER, None),
    "GET /api/archive/{branch}/{position}": (OPERATOR, None),
    "GET /api/duplicates": (VIEWER, None),
    "POST /api/duplicates/{branch}/{position}/restore": (OPERATOR, {**WHY, "queue": "out"}),
    "GET /api/connections": (VIEWER, None),
    "GET /api/connections/{number}": (VIEWER, None),
    "POST /api/connections/{number}/close": (OPERATOR, WHY),
    "GET /api/associations": (VIEWER, None),
    "GET /api/scans": (VIEWER, None),
    "GET /api/audit": (COORDINATOR, None),
    "GET /api/tokens": (COORDINATOR, None),
    "POST /api/tokens": (COORDINATOR, {"name": "made", "role": "viewer"}),
    "DELETE /api/tokens/{name}": (COORDINATOR, None),
    "GET /api/users": (COORDINATOR, None),
    "POST /api/users": (COORDINATOR, {**NAMED, "name": "made", "password": "s3cret-w0rd"}),
    "POST /api/users/password": (COORDINATOR, {**NAMED, "password": "s3cret-w0rd"}),
    "POST /api/users/tags": (COORDINATOR, {**NAMED, "tags": []}),
    "POST /api/users/remove": (COORDINATOR, NAMED),
    "POST /api/users/grant": (COORDINATOR, NAMED),
    "POST /api/users/revoke": (COORDINATOR, NAMED),
    "POST /api/users/grant-topic": (COORDINATOR, TOPIC),
    "POST /api/users/revoke-topic": (COORDINATOR, TOPIC),
    "GET /api/vhosts": (VIEWER, None),
    "POST /api/vhosts": (COORDINATOR, {**NAMED, "name": "made"}),
    "POST /api/vhosts/remove": (COORDINATOR, NAMED),
}
"""The role that each route needs, and a valid body. Every change is written to the audit log, allowed or not."""
