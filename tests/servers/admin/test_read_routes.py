"""What else operators read over HTTP, page by page: clients, scans, status, outcomes, messages and the audit trail."""

from collections.abc import Callable
from typing import Any

import pytest
from pika.exceptions import ConnectionClosedByBroker

from dtx.auth.roles import OperatorRole
from dtx.client import XaFlag, XAResource, Xid
from dtx.wire.amqp09.methods import DtxRecover
from tests.servers.admin.conftest import orphan, somebody
from tests.support.client import new_xid
from tests.support.crash import Scene, StandaloneStage, work
from tests.support.operator import Operator
from tests.support.raw import session


def pages(ask: Callable[..., Any], path: str, of: str, **query: object) -> list[Any]:
    """The items of all pages of *path*, which has one item a page."""
    found: list[Any] = []
    cursor = None
    while True:
        page = ask(path, limit=1, cursor=cursor, **query)
        found += page[of]
        assert len(page[of]) <= 1
        cursor = page["cursor"]
        if cursor is None:
            return found


def test_a_client_is_listed_with_the_branches_of_its_channels(scene: Scene) -> None:
    """Connections and associations: user, address, channels, and the branches of each channel."""
    viewer = somebody(scene, OperatorRole.VIEWER)
    one, other = new_xid(), new_xid()
    with scene.connected() as connection, scene.connected():
        channels = [connection.channel() for _ in range(3)]
        first, second = (XAResource(channel) for channel in channels[:2])
        first.start(one)
        first.end(one, suspend=True)
        first.start(other)
        second.start(other, join=True)
        channels[2].confirm_delivery()
        clients = pages(viewer.get, "/dtx/v1/connections", "connections", vhost=scene.vhost)
        assert len(clients) == 2
        client = clients[0]
        assert (client["user"], client["protocol"], client["tls"]) == ("guest", "AMQP 0-9-1", False)
        assert client["address"].startswith("127.0.0.1:")
        counts = [client[key] for key in ("channels", "selected", "associated", "suspended", "scans")]
        assert (client["state"], counts) == ("running", [3, 2, 2, 1, 0])
        seen = viewer.get(f"/dtx/v1/connections/{client['id']}")
        assert seen["connection"] == client
        ties = [[(tie["xid"], tie["association"]) for tie in channel["branches"]] for channel in seen["channels"]]
        assert ties == [[(str(one), "suspended"), (str(other), "associated")], [(str(other), "associated")], []]
        assert [channel["mode"] for channel in seen["channels"]] == ["dtx", "dtx", "confirm"]
        found = pages(viewer.get, "/dtx/v1/associations", "associations", vhost=scene.vhost, state="active")
        branches = {branch["xid"]: branch for branch in found}  # both may have begun in the same millisecond
        assert branches.keys() == {str(one), str(other)}
        joined = branches[str(other)]
        assert [place["channel"] for place in joined["channels"]] == [1, 2]
        assert (joined["associated"], joined["owner"]) == (2, "guest")
        assert viewer.get("/dtx/v1/associations", state="idle")["associations"] == []
        assert viewer.get("/dtx/v1/connections", user="nobody")["connections"] == []
    assert viewer.ask("GET", "/dtx/v1/connections/0").status == 404


def test_messages_of_a_branch_are_seen_page_by_page(scene: Scene) -> None:
    viewer, operator = somebody(scene, OperatorRole.VIEWER), somebody(scene, OperatorRole.OPERATOR)
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"one", b"two")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"a", b"bb", b"ccc"]}, consume={"in": 2})
        assert xa.prepare(xid) is XaFlag.OK
    path = f"/dtx/v1/branches/{xid}"
    seen: list[tuple[str, int]] = []
    cursor = None
    for count in (2, 2, 1):
        found = viewer.get(path, vhost=scene.vhost, limit=2, cursor=cursor)
        assert len(found["messages"]) == count
        seen += [(message["kind"], message["bytes"]) for message in found["messages"]]
        cursor = found["cursor"]
    assert cursor is None
    assert sorted(seen) == [("consume", 3), ("consume", 3), ("publish", 1), ("publish", 2), ("publish", 3)]
    assert viewer.ask("GET", path, vhost=scene.vhost, limit=1001).status == 422
    assert viewer.ask("GET", path, vhost=scene.vhost, cursor=2**31).status == 422
    assert operator.ask("GET", f"{path}/messages/{2**70}", vhost=scene.vhost).status == 404
    assert operator.get(f"{path}/messages/1", vhost=scene.vhost)["position"] == 1


def test_a_closed_connection_gets_the_operators_reason(scene: Scene) -> None:
    viewer, operator = somebody(scene, OperatorRole.VIEWER), somebody(scene, OperatorRole.OPERATOR)
    with scene.connected() as connection:
        XAResource(connection.channel()).start(new_xid())
        (client,) = viewer.get("/dtx/v1/connections", vhost=scene.vhost)["connections"]
        path = f"/dtx/v1/connections/{client['id']}/close"
        assert viewer.ask("POST", path, {"reason": "it hangs"}).status == 403
        assert operator.ask("POST", path, {}).status == 422
        assert operator.ask("POST", path, {"reason": "it hangs"}).status == 202
        with pytest.raises(ConnectionClosedByBroker, match="closed by an operator: it hangs") as closed:
            connection.process_data_events(time_limit=30)
    assert closed.value.reply_code == 320
    scene.wait_for(lambda: not viewer.get("/dtx/v1/connections", vhost=scene.vhost)["connections"], "its end")
    assert operator.ask("POST", path, {"reason": "again"}).status == 404
    trail = somebody(scene, OperatorRole.COORDINATOR).get("/dtx/v1/audit", action="disconnect")["lines"]
    assert [line["result"][:6] for line in trail] == ["404: t", "closed", "403: t"]
    assert {line["reason"] for line in trail} == {"again", "it hangs"}


def test_an_open_scan_is_seen_until_it_is_ended(alone: StandaloneStage) -> None:
    viewer = somebody(alone, OperatorRole.VIEWER)
    with alone.connected() as connection:
        xa = XAResource(connection.channel())
        xids = [Xid(1, bytes([number]) * 64, b"b" * 64) for number in range(60)]
        for xid in xids:
            prepare(xa, xid)
        with session(alone.service.url(), frame_max=4096) as client:
            client.open(1)
            handed_out = client.ask(1, DtxRecover(startscan=True, endscan=False))
            assert isinstance(handed_out, list)
            (scan,) = pages(viewer.get, "/dtx/v1/scans", "scans")
            assert (scan["channel"], scan["user"], scan["vhost"]) == (1, "guest", "/")
            assert scan["left"] == len(xids) - len(handed_out) > 0
            client.ask(1, DtxRecover(startscan=False, endscan=True))
            assert pages(viewer.get, "/dtx/v1/scans", "scans") == []


def prepare(xa: XAResource, xid: Xid) -> None:
    """Prepare a branch that publishes one message."""
    xa.start(xid)
    xa.channel.basic_publish("", "nowhere", b"x")
    xa.end(xid)
    assert xa.prepare(xid) is XaFlag.OK


def test_status_has_states_ages_memory_commit_connections_and_leases(scene: Scene) -> None:
    viewer = somebody(scene, OperatorRole.VIEWER)
    orphan(scene)
    with scene.connected() as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(new_xid())
        channel.basic_publish("", "out", bytes(5000))
        status = viewer.get("/dtx/v1/status")
    assert status["branches"] == {"prepared": 1, "active": 1}
    assert status["ages"]["prepared"] == [1, 0, 0, 0, 0]
    assert (status["active"], status["stuck"]) == (True, 0)
    assert status["in_doubt_bytes"] >= len(b"published" + b"consumed")
    assert status["held_bytes"] >= 5000
    (found,) = [usage for usage in status["usage"] if usage["scope"] == "vhost" and usage["name"] == scene.vhost]
    assert found["used"].pop("bytes") >= 5000
    assert found == {
        "scope": "vhost",
        "name": scene.vhost,
        "used": {"branches": 2, "in-doubt": 1, "connections": 1, "channels": 1},
        "quota": {},
    }
    assert status["oldest_prepared_at"] is not None
    connections = [connection for connection in status["commit_connections"] if connection["vhost"] == scene.vhost]
    assert [(connection["problem"], connection["channels"], connection["waiting"]) for connection in connections] == (
        [] if isinstance(scene, StandaloneStage) else [(None, 16, 0)]
    )
    (lease,) = status["leases"]
    assert lease["epoch"] >= 1
    assert 0 < lease["remaining"] <= 2


def test_outcomes_are_found_by_xid_time_and_kind(alone: StandaloneStage) -> None:
    """Outcomes of completed branches, which dtx remembers."""
    viewer = somebody(alone, OperatorRole.VIEWER)
    xids = [new_xid() for _ in range(3)]
    with alone.connected() as connection:
        xa = XAResource(connection.channel())
        for xid in xids:
            prepare(xa, xid)
        xa.commit(xids[0])
        xa.rollback(xids[1])
        xa.commit(xids[2])
    found = pages(viewer.get, "/dtx/v1/outcomes", "lines")
    assert [line["xid"] for line in found] == [str(xids[number]) for number in (2, 1, 0)]
    assert [line["event"] for line in found] == ["committed", "rolled-back", "committed"]
    for query, expected in (
        ({"event": "rolled-back"}, [1]),
        ({"xid": str(xids[0])}, [0]),
        ({"gtrid": xids[2].gtrid.hex()}, [2]),
        ({"since": found[1]["at"]}, [2, 1]),
        ({"until": found[1]["at"]}, [0]),
        ({"owner": "guest", "vhost": "/"}, [2, 1, 0]),
        ({"vhost": "elsewhere"}, []),
    ):
        assert [line["xid"] for line in pages(viewer.get, "/dtx/v1/outcomes", "lines", **query)] == [
            str(xids[number]) for number in expected
        ], query
    events = [line["event"] for line in pages(viewer.get, "/dtx/v1/journal", "lines", latest_first=True)]
    assert events[0] == "committed"
    assert len(events) == 6


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dtx/v1/outcomes?event=prepared", 400),
        ("/dtx/v1/outcomes?cursor=x", 400),
        ("/dtx/v1/outcomes?since=yesterday", 422),
        ("/dtx/v1/outcomes?since=2026-01-01T00:00:00", 422),
        ("/dtx/v1/journal?event=lost", 422),
        ("/dtx/v1/journal?xid=nonsense", 400),
        ("/dtx/v1/transactions/zz", 400),
        ("/dtx/v1/archive?gtrid=zz", 400),
        ("/dtx/v1/archive/nonsense/0", 422),
        ("/dtx/v1/archive/00000000-0000-0000-0000-000000000000/0", 404),
        ("/dtx/v1/archive/00000000-0000-0000-0000-000000000000/99999999999999999999", 422),
        ("/dtx/v1/scans?cursor=1", 422),
        ("/dtx/v1/associations?state=lost", 422),
        ("/dtx/v1/associations?cursor=1", 422),
        ("/dtx/v1/connections?limit=1001", 422),
        ("/dtx/v1/connections/99999999999999999999", 404),
        ("/dtx/v1/audit?cursor=-1", 422),
        ("/dtx/v1/audit?subject=%00", 200),
        ("/dtx/v1/journal?owner=%00", 422),
    ],
)
def test_a_wrong_query_is_answered_with_a_problem(shared: StandaloneStage, path: str, status: int) -> None:
    answer = Operator(shared.service.admin_url).ask("GET", path)
    assert answer.status == status, answer
    if status != 200:
        assert answer.headers["content-type"] == "application/problem+json"


def test_the_trail_is_searched_page_by_page(alone: StandaloneStage) -> None:
    xid = new_xid()
    operator, boss = somebody(alone, OperatorRole.OPERATOR), Operator(alone.service.admin_url)
    for action in ("commit", "rollback", "commit"):
        operator.order(action, xid)
    boss.order("commit", new_xid())
    found = pages(boss.get, "/dtx/v1/audit", "lines")
    assert [(line["actor"], line["action"]) for line in found] == [
        ("guest", "commit"), ("token:operator 0", "commit"), ("token:operator 0", "rollback"),
        ("token:operator 0", "commit"),
    ]  # fmt: skip
    assert len(pages(boss.get, "/dtx/v1/audit", "lines", actor="token:operator 0", action="commit")) == 2
    assert len(pages(boss.get, "/dtx/v1/audit", "lines", subject=str(xid))) == 3
    assert pages(boss.get, "/dtx/v1/audit", "lines", until=found[-1]["at"]) == []
    assert pages(boss.get, "/dtx/v1/audit", "lines", since=found[0]["at"]) == found[:1]
