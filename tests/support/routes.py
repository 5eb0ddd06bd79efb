"""The routes of the operators' API, with the role that each needs."""

from typing import Final

from dtx.auth.roles import OperatorRole

VIEWER, OPERATOR, COORDINATOR = OperatorRole
WHY: Final = {"reason": "to see who may"}
NAMED: Final = {"name": "nobody", **WHY}
TOPIC: Final = {**NAMED, "exchange": "amq.topic"}
_RABBITMQ: Final = {
    VIEWER: """
    /overview
    /cluster-name
    /nodes
    /nodes/{name}
    /vhosts
    /vhosts/{name}
    /vhosts/{vhost}/connections
    /vhosts/{vhost}/channels
    /connections
    /connections/{name}
    /connections/{name}/channels
    /channels
    /channels/{name}
    /consumers
    /consumers/{vhost}
    /exchanges
    /exchanges/{vhost}
    /exchanges/{vhost}/{name}
    /exchanges/{vhost}/{name}/bindings/source
    /exchanges/{vhost}/{name}/bindings/destination
    /queues
    /queues/{vhost}
    /queues/{vhost}/{name}
    /queues/{vhost}/{name}/bindings
    /bindings
    /bindings/{vhost}
    /bindings/{vhost}/e/{source}/q/{destination}
    /bindings/{vhost}/e/{source}/e/{destination}
    /bindings/{vhost}/e/{source}/q/{destination}/{props}
    /bindings/{vhost}/e/{source}/e/{destination}/{props}
    /extensions
    /feature-flags
    /global-parameters
    /operator-policies
    /operator-policies/{vhost}
    /parameters
    /parameters/{name}
    /parameters/{name}/{vhost}
    /policies
    /policies/{vhost}
    /user-limits
    /user-limits/{user}
    /vhost-limits
    /vhost-limits/{vhost}
    /whoami
    /aliveness-test/{vhost}
    /healthchecks/node
    /healthchecks/node/{name}
    /health/checks/virtual-hosts
    /health/checks/certificate-expiration/{within}/{unit}
    /health/checks/alarms
    /health/checks/local-alarms
    /health/checks/node-is-quorum-critical
    /health/checks/node-is-mirror-sync-critical
    /health/checks/port-listener/{port}
    /health/checks/protocol-listener/{protocol}
    """,
    COORDINATOR: """
    /vhosts/{vhost}/permissions
    /vhosts/{vhost}/topic-permissions
    /users
    /users/without-permissions
    /users/{user}
    /users/{user}/permissions
    /users/{user}/topic-permissions
    /permissions
    /permissions/{vhost}/{user}
    /topic-permissions
    /topic-permissions/{vhost}/{user}
    """,
}
"""Paths of RabbitMQ's management API that are read, by the role that they need."""
_ALL: Final = dict.fromkeys(("configure", "write", "read"), ".*")
_SENT: Final = {"routing_key": "q", "properties": {}, "payload": "", "payload_encoding": "string"}
_GET: Final = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
ROUTES: Final[dict[str, tuple[OperatorRole | None, object]]] = {
    "GET /healthz": (None, None),
    "GET /readyz": (None, None),
    "GET /metrics": (VIEWER, None),
    "GET /metrics/detailed": (VIEWER, None),
    "GET /dtx/v1/status": (VIEWER, None),
    "GET /dtx/v1/branches": (VIEWER, None),
    "GET /dtx/v1/branches/{xid}": (VIEWER, None),
    "GET /dtx/v1/branches/{xid}/messages/{position}": (OPERATOR, None),
    "GET /dtx/v1/branches/{xid}/export": (OPERATOR, None),
    "POST /dtx/v1/branches/{xid}/{action}": (OPERATOR, WHY),
    "POST /dtx/v1/branches/{xid}/discard": (OPERATOR, {**WHY, "positions": [0]}),
    "POST /dtx/v1/branches/{xid}/redirect": (OPERATOR, {**WHY, "position": 0, "exchange": "", "routing_key": "out"}),
    "POST /dtx/v1/bulk": (COORDINATOR, {**WHY, "action": "commit", "filter": {}, "dry_run": True}),
    "GET /dtx/v1/journal": (VIEWER, None),
    "GET /dtx/v1/transactions/{gtrid}": (VIEWER, None),
    "GET /dtx/v1/outcomes": (VIEWER, None),
    "GET /dtx/v1/archive": (VIEWER, None),
    "GET /dtx/v1/archive/{branch}/{position}": (OPERATOR, None),
    "GET /dtx/v1/duplicates": (VIEWER, None),
    "POST /dtx/v1/duplicates/{branch}/{position}/restore": (OPERATOR, {**WHY, "queue": "out"}),
    "GET /dtx/v1/members": (VIEWER, None),
    "POST /dtx/v1/members/rotate-secret": (COORDINATOR, WHY),
    "GET /dtx/v1/connections": (VIEWER, None),
    "GET /dtx/v1/connections/{number}": (VIEWER, None),
    "POST /dtx/v1/connections/{number}/close": (OPERATOR, WHY),
    "GET /dtx/v1/associations": (VIEWER, None),
    "GET /dtx/v1/scans": (VIEWER, None),
    "GET /dtx/v1/audit": (COORDINATOR, None),
    "GET /dtx/v1/tokens": (COORDINATOR, None),
    "POST /dtx/v1/tokens": (COORDINATOR, {"name": "made", "role": "viewer"}),
    "DELETE /dtx/v1/tokens/{name}": (COORDINATOR, None),
    "GET /dtx/v1/users": (COORDINATOR, None),
    "POST /dtx/v1/users": (COORDINATOR, {**NAMED, "name": "made", "password": "s3cret-w0rd"}),
    "POST /dtx/v1/users/password": (COORDINATOR, {**NAMED, "password": "s3cret-w0rd"}),
    "POST /dtx/v1/users/tags": (COORDINATOR, {**NAMED, "tags": []}),
    "POST /dtx/v1/users/remove": (COORDINATOR, NAMED),
    "POST /dtx/v1/users/grant": (COORDINATOR, NAMED),
    "POST /dtx/v1/users/revoke": (COORDINATOR, NAMED),
    "POST /dtx/v1/users/grant-topic": (COORDINATOR, TOPIC),
    "POST /dtx/v1/users/revoke-topic": (COORDINATOR, TOPIC),
    "GET /dtx/v1/vhosts": (VIEWER, None),
    "POST /dtx/v1/vhosts": (COORDINATOR, {**NAMED, "name": "made"}),
    "POST /dtx/v1/vhosts/remove": (COORDINATOR, NAMED),
    "PUT /api/exchanges/{vhost}/{name}": (COORDINATOR, {}),
    "DELETE /api/exchanges/{vhost}/{name}": (COORDINATOR, None),
    "POST /api/exchanges/{vhost}/{name}/publish": (COORDINATOR, _SENT),
    "PUT /api/queues/{vhost}/{name}": (COORDINATOR, {}),
    "DELETE /api/queues/{vhost}/{name}": (COORDINATOR, None),
    "DELETE /api/queues/{vhost}/{name}/contents": (COORDINATOR, None),
    "POST /api/queues/{vhost}/{name}/get": (COORDINATOR, _GET),
    "POST /api/bindings/{vhost}/e/{source}/q/{destination}": (COORDINATOR, {}),
    "POST /api/bindings/{vhost}/e/{source}/e/{destination}": (COORDINATOR, {}),
    "DELETE /api/bindings/{vhost}/e/{source}/q/{destination}/{props}": (COORDINATOR, None),
    "DELETE /api/bindings/{vhost}/e/{source}/e/{destination}/{props}": (COORDINATOR, None),
    "DELETE /api/connections/{name}": (COORDINATOR, None),
    "PUT /api/vhosts/{name}": (COORDINATOR, None),
    "DELETE /api/vhosts/{name}": (COORDINATOR, None),
    "PUT /api/users/{user}": (COORDINATOR, {"password": "s3cret-w0rd", "tags": ""}),
    "DELETE /api/users/{user}": (COORDINATOR, None),
    "PUT /api/permissions/{vhost}/{user}": (COORDINATOR, _ALL),
    "DELETE /api/permissions/{vhost}/{user}": (COORDINATOR, None),
    "PUT /api/topic-permissions/{vhost}/{user}": (COORDINATOR, {**_ALL, "exchange": "amq.topic"}),
    "DELETE /api/topic-permissions/{vhost}/{user}": (COORDINATOR, None),
    "GET /api/definitions": (COORDINATOR, None),
    "GET /api/definitions/{vhost}": (COORDINATOR, None),
    "POST /api/definitions": (COORDINATOR, {}),
    "POST /api/definitions/{vhost}": (COORDINATOR, {}),
    **{f"GET /api{path}": (role, None) for role, paths in _RABBITMQ.items() for path in paths.split()},
}
"""The role that each route needs, and a valid body. Every change is written to the audit log, allowed or not."""
