"""Access to the operators' API: credentials, roles, origins and host names, and secrets that it never shows."""

import json
import socket
import ssl
from pathlib import Path

import pytest
import trustme

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.auth.users import AccountEditor
from dtx.client import Xid
from tests.servers.admin.conftest import orphan, somebody
from tests.support.client import new_xid
from tests.support.crash import Scene, StandaloneStage, work
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN, DtxService


@pytest.mark.parametrize("path", ["/dtx/v1/branches", "/dtx/v1/status", "/metrics", "/dtx/v1/audit", "/dtx/v1/tokens"])
def test_every_path_needs_credentials(shared: StandaloneStage, path: str) -> None:
    url = shared.service.admin_url
    for nobody in (
        Operator(url, user=""),
        Operator(url, password="wrong"),
        Operator(url, user="nobody"),
        Operator(url, token="dtx_made-up"),
    ):
        answer = nobody.ask("GET", path)
        assert (answer.status, answer.headers["content-type"]) == (401, "application/problem+json")
        assert answer.headers["www-authenticate"].startswith("Basic")


def test_sign_ins_that_are_refused_are_in_the_trail(alone: StandaloneStage) -> None:
    url = alone.service.admin_url
    AccountEditor(alone.database, "dtx").add_user("nora", b"their own", [])
    for nobody in (
        Operator(url, password="wrong"),
        Operator(url, user="nora", password="their own"),
        Operator(url, token="dtx_made-up"),
    ):
        assert nobody.ask("GET", "/dtx/v1/status").status in {401, 403}
    lines = Operator(url).get("/dtx/v1/audit", action="sign-in")["lines"]
    assert [(line["actor"], line["subject"], line["result"][:4]) for line in lines] == [
        ("unknown", "token", "401:"),
        ("nora", "password", "403:"),
        ("guest", "password", "401:"),
    ]
    assert {(line["role"], line["address"]) for line in lines} == {("none", "127.0.0.1")}
    assert "made-up" not in json.dumps(lines)


def test_users_come_in_by_their_tags(alone: StandaloneStage) -> None:
    url = alone.service.admin_url
    for name, tag in (("vera", "monitoring"), ("olga", "operator"), ("carla", "administrator"), ("nora", None)):
        AccountEditor(alone.database, "dtx").add_user(name, b"their own", [tag] if tag else [])
        person = Operator(url, user=name, password="their own")
        statuses = [
            person.ask("GET", "/dtx/v1/status").status,
            person.order("commit", new_xid(), dry_run=True).status,
            person.ask("GET", "/dtx/v1/audit").status,
        ]
        expected = {"monitoring": [200, 403, 403], "operator": [200, 404, 403], "administrator": [200, 404, 200]}
        assert statuses == expected.get(tag or "", [403, 403, 403]), name


def test_a_token_ends_when_it_is_revoked_or_expires(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    made = boss.ask("POST", "/dtx/v1/tokens", {"name": "prometheus", "role": "viewer"})
    assert made.status == 201
    viewer = Operator(alone.service.admin_url, token=made.body["secret"])
    assert viewer.ask("GET", "/metrics").status == 200
    (listed,) = boss.get("/dtx/v1/tokens")
    assert (listed["name"], listed["role"], listed["made_by"]) == ("prometheus", "viewer", "guest")
    assert made.body["secret"] not in json.dumps(listed)
    assert boss.ask("POST", "/dtx/v1/tokens", {"name": "prometheus", "role": "viewer"}).status == 409
    assert boss.ask("DELETE", "/dtx/v1/tokens/prometheus", {}).status == 204
    assert viewer.ask("GET", "/metrics").status == 401
    secret = OperatorLog(alone.database, "dtx").make_token("brief", OperatorRole.VIEWER, "test", seconds=-1)
    assert Operator(alone.service.admin_url, token=secret).ask("GET", "/metrics").status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 404),
    ],
)
def test_an_order_from_a_foreign_page_is_refused(shared: StandaloneStage, headers: dict[str, str], status: int) -> None:
    """CSRF: browsers add basic credentials to every request that a page makes them send."""
    body = {"reason": "because"}
    answer = Operator(shared.service.admin_url).ask(
        "POST", f"/dtx/v1/branches/{new_xid()}/commit", body, headers=headers
    )
    assert answer.status == status


@pytest.mark.parametrize("path", ["/dtx/v1/status", "/metrics", "/openapi.json", "/", "/console/sign-in", "/nothing"])
def test_an_unknown_host_name_is_refused(shared: StandaloneStage, path: str) -> None:
    """DNS rebinding: a page of evil.example would have the same origin as dtx."""
    boss = Operator(shared.service.admin_url)
    refused = boss.ask("GET", path, headers={"Host": "evil.example:15673"})
    assert (refused.status, refused.headers["content-type"]) == (421, "application/problem+json")
    assert refused.body["detail"] == "'evil.example:15673' is not a known name of this dtx: add it to --admin-host"
    assert boss.ask("GET", path, headers={"Host": "dtx.example:15673"}).status in {200, 404}
    assert boss.ask("GET", "/healthz", headers={"Host": "evil.example"}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/dtx/v1/branches/1:61:/commit", {}, 422),
        ("/dtx/v1/branches/1:61:/commit", {"reason": ""}, 422),
        ("/dtx/v1/branches/1:61:/commit", {"reason": "x" * 2001}, 422),
        ("/dtx/v1/branches/1:61:/commit", {"reason": "x", "force": True}, 422),
        ("/dtx/v1/branches/1:61:/destroy", {"reason": "x"}, 422),
        ("/dtx/v1/branches/nonsense/commit", {"reason": "x"}, 400),
        ("/dtx/v1/branches/1:61:/commit", {"reason": "x" * (1 << 20)}, 413),
        ("/dtx/v1/branches/1:61:/discard", {"reason": "x", "positions": []}, 422),
        ("/dtx/v1/bulk", {"action": "commit", "reason": "x", "filter": {"state": ["lost"]}}, 400),
        ("/dtx/v1/bulk", {"action": "commit", "reason": "x", "filter": {"gtrid": "hex:zz"}}, 400),
        ("/dtx/v1/nothing", {}, 404),
    ],
)
def test_a_wrong_request_is_answered_with_a_problem(
    shared: StandaloneStage, path: str, body: object, status: int
) -> None:
    answer = Operator(shared.service.admin_url).ask("POST", path, body)
    assert (answer.status, answer.body["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"


def test_former_paths_answer_as_deprecated(shared: StandaloneStage) -> None:
    """RFC 9745: "The Deprecation HTTP response header field"."""
    boss = Operator(shared.service.admin_url)
    new = boss.ask("GET", "/dtx/v1/audit", limit=1)
    old = boss.ask("GET", "/api/audit", limit=1, cursor=new.body["cursor"])
    assert (old.status, old.headers["deprecation"], "deprecation" in new.headers) == (200, "@1795737600", False)
    refused = boss.ask("POST", "/api/branches/1:61:/commit", {"reason": ""})
    assert (refused.status, "deprecation" in refused.headers) == (422, True)


def test_secrets_are_nowhere_in_logs_metrics_and_trail(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    secret = boss.ask("POST", "/dtx/v1/tokens", {"name": "x", "role": "coordinator"}).body["secret"]
    holder = Operator(alone.service.admin_url, token=secret)
    Operator(alone.service.admin_url, password="s3cret-guess").ask("GET", "/dtx/v1/status")
    said = (
        json.dumps(holder.get("/dtx/v1/audit"))
        + holder.get("/metrics").decode()
        + json.dumps(holder.get("/openapi.json"))
    )
    said += alone.service.log_path.read_text()
    for word in (secret, secret[4:], "s3cret-guess", "argon2"):
        assert word not in said


def test_the_document_names_every_route(shared: StandaloneStage) -> None:
    document = Operator(shared.service.admin_url, user="").get("/openapi.json")
    assert {"/dtx/v1/branches", "/dtx/v1/branches/{xid}/{action}", "/dtx/v1/bulk", "/healthz", "/metrics"} <= set(
        document["paths"]
    )


def test_a_standby_reports_that_it_is_one(alone: StandaloneStage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with DtxService(database=alone.database, options=("--admin-listen", f"127.0.0.1:{port}"), start=False) as standby:
        standby.start(wait=False)
        url = f"http://127.0.0.1:{port}"
        alone.wait_for(lambda: _status(url, "/healthz") == 200, "the standby's API")
        assert _status(url, "/readyz") == 503
        assert Operator(url).order("commit", new_xid()).status == 503
        assert _status(alone.service.admin_url, "/readyz") == 200
        alone.service.kill9()
        standby.wait_ready()
        assert _status(url, "/readyz") == 200


def _status(url: str, path: str) -> int:
    try:
        return Operator(url, user="").ask("GET", path).status
    except OSError:
        return 0


def test_a_port_that_is_taken_is_named(postgres: PostgresServer, migrated_postgres_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        service = DtxService(database=migrated_postgres_url, options=("--admin-listen", where))
        with pytest.raises(RuntimeError, match=rf"exit status 6[\s\S]*{where}[\s\S]*--no-admin"), service:
            pass


def test_the_api_speaks_tls(postgres: PostgresServer, migrated_postgres_url: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = (*ADMIN, "--admin-tls-cert", str(chain), "--admin-tls-key", str(key))
    with DtxService(database=migrated_postgres_url, options=options) as service:
        assert service.admin_url.startswith("https://")
        assert Operator(service.admin_url, ca=trusting).get("/dtx/v1/status")["active"]


def test_filters_and_pages_find_each_branch_once(scene: Scene) -> None:
    xids = [str(orphan(scene)) for _ in range(5)]
    viewer = somebody(scene, OperatorRole.VIEWER)
    seen: list[str] = []
    cursor = None
    while True:
        page = viewer.get("/dtx/v1/branches", limit=2, cursor=cursor)
        seen += [branch["xid"] for branch in page["branches"]]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert seen == xids
    assert [branch["xid"] for branch in viewer.get("/dtx/v1/branches", descending=True)["branches"]] == xids[::-1]
    ids = [branch["id"] for branch in viewer.get("/dtx/v1/branches")["branches"]]
    assert [branch["id"] for branch in viewer.get("/dtx/v1/branches", branch=ids[3])["branches"]] == ids[3:4]
    gtrid = _gtrid(xids[2])
    for query, expected in (
        ({"gtrid": f"hex:{gtrid.hex()}"}, xids[2:3]),
        ({"gtrid": f"hex:{gtrid[:-1].hex()}*"}, [xid for xid in xids if _gtrid(xid).startswith(gtrid[:-1])]),
        ({"gtrid": f"hex:*{gtrid[1:].hex()}"}, xids[2:3]),
        ({"gtrid": "no such*"}, []),
        ({"format_id": 1 << 31}, []),
        ({"owner": "guest", "vhost": scene.vhost, "state": "prepared"}, xids),
        ({"owner": "somebody"}, []),
        ({"state": "heuristic"}, []),
        ({"queue": "in"}, xids),
        ({"queue": "out"}, xids),
        ({"queue": "nowhere"}, []),
        ({"exchange": ""}, xids),
        ({"exchange": "amq.topic"}, []),
        ({"older_than": 3600}, []),
        ({"stuck": False}, xids),
        ({"stuck": True}, []),
    ):
        assert [branch["xid"] for branch in viewer.get("/dtx/v1/branches", **query)["branches"]] == expected, query
    detail = viewer.branch(Xid.parse(xids[0]), scene.vhost)
    assert [line["event"] for line in detail["journal"]] == ["prepared"]
    of_transaction = viewer.get("/dtx/v1/transactions/" + xids[0].split(":")[1])
    assert of_transaction == {"lines": detail["journal"], "cursor": None}
    assert viewer.get("/dtx/v1/journal", xid=xids[0]) == of_transaction


@pytest.mark.parametrize("sort", ["bytes", "messages", "owner", "state"])
@pytest.mark.parametrize("descending", [False, True])
def test_pages_in_another_order_find_each_branch_once_too(alone: StandaloneStage, sort: str, descending: bool) -> None:
    alone.declare("out")
    with alone.connected() as connection:
        for bodies in ([b"long"], [b"a", b"b"], [b"long"], [b"a", b"b", b"c"], [b"x" * 10]):
            xa, xid = work(connection.channel(), publish={"out": bodies})
            xa.prepare(xid)
    viewer = somebody(alone, OperatorRole.VIEWER)
    seen: list[dict[str, object]] = []
    cursor = None
    while True:
        page = viewer.get("/dtx/v1/branches", limit=2, cursor=cursor, sort=sort, descending=descending)
        seen += page["branches"]
        cursor = page["cursor"]
        if cursor is None:
            break
    keys = {
        "bytes": lambda branch: branch["bytes"],
        "messages": lambda branch: branch["publishes"] + branch["consumes"],
        "owner": lambda branch: branch["owner"],
        "state": lambda branch: branch["state"],
    }
    assert len({branch["id"] for branch in seen}) == len(seen) == 5
    assert seen == sorted(seen, key=lambda branch: (keys[sort](branch), branch["id"]), reverse=descending)
    for wrong in ("nonsense", str(seen[0]["id"]), f"{seen[0]['id']}."):
        answer = viewer.ask("GET", "/dtx/v1/branches", sort="bytes", cursor=wrong)
        assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json")


def _gtrid(xid: str) -> bytes:
    return bytes.fromhex(xid.split(":")[1])
