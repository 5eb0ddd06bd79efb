"""A branch of one member is completed through another."""

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import trustme

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.client import (
    XA_HEURCOM,
    XAER_DUPID,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    Coordinator,
    XaFlag,
    XAResource,
    Xid,
)
from tests.support.client import connected, new_xid
from tests.support.crash import PERSISTENT, Stage, work
from tests.support.operator import Operator
from tests.support.processes import short_directory
from tests.support.service import ADMIN


def prepared(stage: Stage, queue: str, *bodies: bytes) -> Xid:
    """A branch of the first member that has voted."""
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={queue: list(bodies)})
        assert xa.prepare(xid) is XaFlag.OK
    return xid


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_a_prepared_branch_ends_through_another_member(stage: Stage, commit: bool) -> None:
    other, queue = stage.another_service(), stage.declare("q")
    stage.fill(queue, b"in")
    with stage.connected() as connection:
        xa, xid = work(connection.channel(), publish={queue: [b"out"]}, consume={queue: 1})
        assert xa.prepare(xid) is XaFlag.OK
        with stage.coordinator(other) as coordinator, stage.coordinator() as mine:
            assert list(coordinator.recover()) == list(mine.recover()) == [xid]
            assert (coordinator.commit if commit else coordinator.rollback)(xid) is XaFlag.OK
            assert list(coordinator.recover()) == list(mine.recover()) == []
            ending = "committed" if commit else "rolled-back"
            for each in (coordinator, mine):
                with pytest.raises(XAER_NOTA, match=f"completed: {ending}"):
                    each.commit(xid)
    assert stage.bodies(queue) == ([b"out"] if commit else [b"in"])
    assert stage.history(xid) == ["prepared", ending]


def test_another_member_votes_and_commits_in_one_phase(stage: Stage) -> None:
    """The log does not have branches that have not voted: all members are asked."""
    other, queue = stage.another_service(), stage.declare("q")
    with stage.connected() as connection, stage.coordinator(other) as coordinator:
        xa, xid = work(connection.channel(), publish={queue: [b"a"]})
        assert coordinator.get_timeout(xid) == 60
        coordinator.set_timeout(xid, 100)
        assert coordinator.get_timeout(xid) == xa.get_timeout(xid) == 100
        assert coordinator.prepare(xid) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK
        _, xid = work(connection.channel(), publish={queue: [b"b"]})
        assert coordinator.commit(xid, one_phase=True) is XaFlag.OK
        _, xid = work(connection.channel(), publish={queue: [b"c"]})
        assert coordinator.rollback(xid) is XaFlag.OK
        _, xid = work(connection.channel())
        assert coordinator.prepare(xid) is XaFlag.RDONLY
    assert stage.bodies(queue) == [b"a", b"b"]


def test_an_unknown_branch_is_unknown_to_all_members(stage: Stage) -> None:
    other = stage.another_service()
    with stage.coordinator(other) as coordinator:
        for call in (coordinator.commit, coordinator.rollback, coordinator.forget, coordinator.get_timeout):
            with pytest.raises(XAER_NOTA, match="unknown xid"):
                call(new_xid())


def test_work_is_joined_only_where_the_branch_began(stage: Stage) -> None:
    other, queue = stage.another_service(), stage.declare("q")
    with stage.connected() as connection, stage.connected(other) as elsewhere:
        _, xid = work(connection.channel(), publish={queue: [b"a"]})
        for start in ({"join": True}, {"resume": True}):
            with pytest.raises(XAER_PROTO, match="another member has the branch") as refused:
                XAResource(elsewhere.channel()).start(xid, **start)
            assert refused.value.facts == {"member": f"amqp://127.0.0.1:{stage.service.port}"}
            with pytest.raises(XAER_NOTA):
                XAResource(elsewhere.channel()).start(new_xid(), **start)
        XAResource(connection.channel()).start(xid, join=True)


def test_an_xid_that_has_voted_elsewhere_is_refused_at_once(stage: Stage) -> None:
    """Rule alreadyAssociated: "the xid has previously been seen by the broker … reply code 530"."""
    other, queue = stage.another_service(), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    with stage.connected(other) as elsewhere:
        with pytest.raises(XAER_DUPID, match="another member has the branch"):
            XAResource(elsewhere.channel()).start(xid)
        with pytest.raises(XAER_PROTO, match="another member has the branch"):
            XAResource(elsewhere.channel()).start(xid, join=True)
        for number in range(2):
            xa, free = work(elsewhere.channel(), publish={queue: [b"%d" % number]})
            assert xa.commit(free, one_phase=True) is XaFlag.OK


def test_connections_know_their_member(stage: Stage) -> None:
    other = stage.another_service()
    seen = []
    for service in (stage.service, stage.service, other):
        with stage.connected(service) as connection:
            properties = connection._impl.server_properties
            seen.append((properties["capabilities"]["dtx"], properties["dtx_member"]))
    assert seen[0] == seen[1] != seen[2]


def test_operators_give_orders_at_any_member(stage: Stage) -> None:
    """The member that has the branch carries it out."""
    other, queue = stage.another_service(*ADMIN), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    words = ("--vhost", stage.vhost, "--reason", "its manager is lost")
    dry = other.run("commit", str(xid), *words, "--dry-run").stdout
    assert "heuristic" in dry
    assert stage.states() == {xid: "prepared"}
    other.run("commit", str(xid), *words, "--yes")
    assert stage.bodies(queue) == [b"a"]
    assert stage.states() == {xid: "heuristic"}
    refused = other.run("rollback", str(xid), *words, "--yes", check=False)
    assert (refused.returncode != 0, "illegal in state heuristic" in refused.stderr) == (True, True)
    with stage.coordinator() as coordinator, pytest.raises(XA_HEURCOM):
        coordinator.commit(xid)
    other.run("forget", str(xid), *words, "--yes")
    assert stage.states() == {}


def test_a_stuck_branch_of_another_member_is_repaired(stage: Stage) -> None:
    other = stage.another_service(*ADMIN)
    for queue in ("out", "gone", "spare"):
        stage.declare(queue)
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_declare("orders", "fanout", durable=True)
        direct.queue_bind("gone", "orders")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = work(channel, publish={"out": [b"a"]}, end=False)
        channel.basic_publish("orders", "", b"b", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_delete("orders")
    with stage.coordinator(other) as coordinator:
        with pytest.raises(XAER_RMFAIL, match="no exchange 'orders'"):
            coordinator.commit(xid)
        assert list(coordinator.recover()) == [xid]
    where = ("--vhost", stage.vhost, "--reason", "moved by hand", "--yes")
    other.run("redirect", str(xid), "1", *where, "--exchange", "", "--routing-key", "spare")
    other.run("retry", str(xid), *where)
    assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])
    assert stage.states() == {}


def test_metrics_count_members_and_requests(stage: Stage) -> None:
    other, queue = stage.another_service(*ADMIN), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    with stage.coordinator(other) as coordinator:
        with pytest.raises(XAER_NOTA):
            coordinator.commit(new_xid())
        assert coordinator.commit(xid) is XaFlag.OK
    xid = prepared(stage, queue, b"b")
    secret = OperatorLog(stage.database, "dtx").make_token("scraper", OperatorRole.VIEWER, "test")
    viewer = Operator(other.admin_url, token=secret)
    found = scraped(viewer)
    assert found["dtx_members"] == 2
    requests = {key: number for key, number in found.items() if key.startswith("dtx_forwarded_requests_total")}
    assert requests == {
        'dtx_forwarded_requests_total{operation="commit",result="done"}': 1,
        'dtx_forwarded_requests_total{operation="commit",result="elsewhere"}': 1,
    }
    assert found['dtx_forwarded_request_seconds_count{operation="commit"}'] == 2
    assert 0 < found['dtx_forwarded_request_seconds_sum{operation="commit"}'] < 2
    assert (found["dtx_takeovers_total"], found["dtx_branches_adopted_total"]) == (0, 0)
    stage.service.signal(signal.SIGKILL)
    stage.service.wait()
    stage.wait_for(lambda: scraped(viewer)["dtx_branches_adopted_total"] == 1, "a takeover")
    found = scraped(viewer)
    assert (found["dtx_takeovers_total"], found["dtx_members"]) == (1, 1)
    with stage.coordinator(other) as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK


def scraped(viewer: Operator) -> dict[str, float]:
    """The metrics that *viewer* reads."""
    lines = viewer.get("/metrics").decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_doctor_lists_the_members(stage: Stage) -> None:
    other = stage.another_service()
    found = other.run("doctor", check=False).stdout
    names = rf"\S+:{stage.service.pid} and \S+:{other.pid} \(epoch 1\): active as dtx\n"
    assert re.search(names, found)
    assert "stand by" not in found
    for service in (stage.service, other):
        address = f"amqp://127.0.0.1:{service.port}"
        assert re.search(rf"\S+:{service.pid} at {address} has 0 branches in the log \(epoch \d+\); its lease", found)


def test_members_are_listed_with_their_branches(stage: Stage) -> None:
    other, queue = stage.another_service(), stage.declare("q")
    prepared(stage, queue, b"a")
    found = json.loads("[" + ",".join(other.run("members", "list", "--json").stdout.splitlines()) + "]")
    assert [(row["holder"].rpartition(":")[2], row["branches"]) for row in found] == [
        (str(stage.service.pid), 1),
        (str(other.pid), 0),
    ]
    assert found[1]["address"] == f"amqp://127.0.0.1:{other.port}"
    assert all(0 < row["remaining"] <= 2 for row in found)


def test_unvoted_branches_of_all_members_are_listed(stage: Stage) -> None:
    other, queue = stage.another_service(*ADMIN), stage.declare("q")
    viewer = Operator(
        other.admin_url, token=OperatorLog(stage.database, "dtx").make_token("v", OperatorRole.VIEWER, "test")
    )

    def listed() -> tuple[list[tuple[str, str | None, int]], list[str]]:
        found = viewer.get("/dtx/v1/associations")
        rows = [(row["xid"], row["member"], row["publishes"]) for row in found["associations"]]
        return rows, found["missing"]

    with stage.connected() as connection, stage.connected(other) as elsewhere:
        _, first = work(connection.channel(), publish={queue: [b"a"]})
        _, second = work(elsewhere.channel(), publish={queue: [b"b", b"c"]})
        holder = other.run("members", "list", "--json").stdout.splitlines()[0]
        name = json.loads(holder)["holder"]
        assert listed() == ([(str(first), name, 1), (str(second), None, 2)], [])
        said = other.run("members", "unvoted", "--json").stdout
        assert [json.loads(line)["xid"] for line in said.splitlines()] == [str(first), str(second)]
        page = viewer.get("/dtx/v1/associations", limit=1)
        assert [row["xid"] for row in page["associations"]] == [str(first)]
        page = viewer.get("/dtx/v1/associations", limit=1, cursor=page["cursor"])
        assert ([row["xid"] for row in page["associations"]], page["cursor"]) == ([str(second)], None)
        with psycopg.connect(stage.database, autocommit=True) as database:  # its lease does not run out
            database.execute("UPDATE dtx.member SET expires_at = 'infinity'")
        stage.service.pause()
        try:
            assert listed() == ([(str(second), None, 2)], [name])
            run = other.run("members", "unvoted")
            assert f"{name} did not answer" in run.stderr
        finally:
            stage.service.resume()


@pytest.mark.parametrize("demands", [False, True], ids=["server", "both"])
def test_members_verify_each_other_by_their_authority(stage: Stage, certificates: Path, demands: bool) -> None:
    """The far member may demand certificates of clients that another authority has signed."""
    authority = ("--member-ca", str(certificates / "ca.pem"))
    own = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    with short_directory("clients") as place:
        trustme.CA().cert_pem.write_to_path(place / "clients.pem")
        clients = ("--tls-ca", str(place / "clients.pem")) if demands else ()
        far = stage.another_service(*own, *authority, *clients, "--advertise", "amqps://127.0.0.1")
        near = stage.another_service(*own, *authority, *clients, "--advertise", "amqps://127.0.0.1", *ADMIN)
        said = near.run("members", "unvoted").stderr
        assert f":{far.pid} did not answer" not in said
        stranger = stage.another_service(*own, "--advertise", "amqps://127.0.0.1", *ADMIN)
        assert f":{far.pid} did not answer" in stranger.run("members", "unvoted").stderr


def test_the_secret_changes_while_members_run(stage: Stage) -> None:
    """The last two are valid, so members may see the new one at different times."""
    other, queue = stage.another_service(), stage.declare("q")

    def secrets() -> list[bytes]:
        with psycopg.connect(stage.database) as database:
            rows = database.execute("SELECT secret FROM dtx.member_secret ORDER BY made_at").fetchall()
        return [secret for (secret,) in rows]

    seen = [secrets()]
    for number in range(2, 5):
        said = other.run("members", "rotate-secret", "--reason", "a test").stdout
        assert f"members: {number}" in said
        seen.append(secrets())
        xid = prepared(stage, queue, b"a")
        with stage.coordinator(other) as coordinator:
            assert coordinator.commit(xid) is XaFlag.OK
        late = stage.another_service()
        xid = prepared(stage, queue, b"a")
        with stage.coordinator(late) as coordinator:
            assert coordinator.commit(xid) is XaFlag.OK
    assert [len(each) for each in seen] == [1, 2, 2, 2]
    assert [each[0] for each in seen[1:]] == [each[-1] for each in seen[:-1]]
    audited = other.run("audit", "--json").stdout
    assert audited.count('"rotate-secret"') == 3
    assert not any(secret.hex() in audited for each in seen for secret in each)


def test_no_member_calls_a_branch_unknown_while_one_is_silent(stage: Stage) -> None:
    """It may have the branch."""
    other, queue = stage.another_service("--lease-ttl", "60"), stage.declare("q")
    with stage.connected() as connection:
        _, xid = work(connection.channel(), publish={queue: [b"a"]})
        with psycopg.connect(stage.database, autocommit=True) as database:  # its lease does not run out
            database.execute("UPDATE dtx.member SET expires_at = 'infinity'")
        stage.service.pause()
        try:
            with stage.coordinator(other) as coordinator:
                with pytest.raises(XAER_RMFAIL, match="another member may have the branch"):
                    coordinator.commit(xid, one_phase=True)
                stage.service.resume()
                assert coordinator.get_timeout(xid) == 60
                stage.service.pause()
                with pytest.raises(XAER_RMFAIL, match="not answered, so the outcome is not known"):
                    coordinator.commit(xid, one_phase=True)
        finally:
            stage.service.resume()
        # until then, another commit is answered with the result of the one under way
        stage.wait_for(lambda: "committed" in stage.history(xid), "the end of the commit")
        with stage.coordinator(other) as coordinator, pytest.raises(XAER_NOTA, match="completed: committed"):
            coordinator.commit(xid)
    assert stage.bodies(queue) == [b"a"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_members_take_the_branches_of_one_that_ends(stage: Stage, end: signal.Signals) -> None:
    others, queue = [stage.another_service() for _ in range(2)], stage.declare("q")
    xids = [prepared(stage, queue, b"%d" % number) for number in range(20)]
    stage.service.signal(end)
    stage.service.wait()
    with stage.coordinator(others[0]) as coordinator:
        assert set(coordinator.recover()) == set(xids)
        for xid in xids[:10]:
            assert coordinator.commit(xid) is XaFlag.OK
    with stage.coordinator(others[1]) as coordinator:
        assert set(coordinator.recover()) == set(xids[10:])
        for xid in xids[10:]:
            assert coordinator.commit(xid) is XaFlag.OK
        assert list(coordinator.recover()) == []
    assert sorted(stage.bodies(queue)) == sorted(b"%d" % number for number in range(20))


def test_a_member_that_stops_waits_for_its_branches(stage: Stage) -> None:
    """They vote at it, and commit at another one. It takes no new ones."""
    other, queue = stage.another_service(), stage.declare("q")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = work(channel, publish={queue: [b"a"]}, end=False)
        stage.service.signal(signal.SIGTERM)
        stage.wait_for(lambda: b'"stopping"' in stage.service.log_path.read_bytes(), "the signal")
        with pytest.raises(XAER_RMERR, match="takes no new branches"):
            XAResource(connection.channel()).start(new_xid())
        channel.basic_publish("", queue, b"b")
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    assert stage.service.wait() == 0
    with stage.coordinator(other) as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies(queue) == [b"a", b"b"]


def test_a_stalled_member_is_fenced(stage: Stage) -> None:
    """Its lease runs out, its branches are taken, and it ends when it goes on."""
    other, queue = stage.another_service(), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    stage.service.pause()
    with stage.coordinator(other) as coordinator:

        def commits() -> bool:
            try:
                return coordinator.commit(xid) is XaFlag.OK
            except XAER_RMFAIL:
                return False

        stage.wait_for(commits, "a commit by another member")
    stage.service.resume()
    assert stage.service.wait() == 5
    assert stage.bodies(queue) == [b"a"]
    assert stage.history(xid) == ["prepared", "committed"]


def test_two_members_commit_one_branch_at_the_same_time(stage: Stage) -> None:
    """One carries it out, both answer with its result, and the message comes once."""
    others, queue = [stage.another_service() for _ in range(2)], stage.declare("q")
    with ThreadPoolExecutor(3) as threads:
        for number in range(20):
            xid = prepared(stage, queue, b"%d" % number)
            start = threading.Barrier(3)

            def commit(member: int, xid: Xid = xid, start: threading.Barrier = start) -> XaFlag | str:
                with stage.coordinator([stage.service, *others][member]) as coordinator:
                    start.wait()
                    try:
                        return coordinator.commit(xid)
                    except XAER_NOTA as error:
                        return str(error)

            answers = list(threads.map(commit, range(3)))
            assert XaFlag.OK in answers
            assert all(answer is XaFlag.OK or "completed: committed" in str(answer) for answer in answers)
    assert sorted(stage.bodies(queue)) == sorted(b"%d" % number for number in range(20))


def test_a_user_controls_only_his_own_branches_through_members(stage: Stage) -> None:
    """The owner of a branch checks the user again."""
    stage.node.add_user("stranger", vhost=stage.vhost)
    other, queue = stage.another_service(), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    with connected(other.url("stranger", vhost=stage.vhost)) as connection, Coordinator(connection) as coordinator:
        assert list(coordinator.recover()) == []
        with pytest.raises(XAER_RMERR, match="another user's"):
            coordinator.commit(xid)
    with stage.coordinator(other) as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK


def test_the_ended_branch_of_another_user_is_unknown(stage: Stage) -> None:
    stage.node.add_user("stranger", vhost=stage.vhost)
    other, queue = stage.another_service(), stage.declare("q")
    xid = prepared(stage, queue, b"a")
    with stage.coordinator(other) as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    stage.wait_for_state(xid, None)
    url = other.url("stranger", vhost=stage.vhost)
    with connected(url) as connection, pytest.raises(XAER_NOTA, match="unknown xid"):
        Coordinator(connection).rollback(xid)


def test_a_handover_takes_seconds_while_clients_ask(stage: Stage) -> None:
    """Requests for unknown xids read the members, as the watch does."""
    other, queue = stage.another_service(), stage.declare("q")
    xids = [prepared(stage, queue, b"%d" % number) for number in range(5)]
    over = threading.Event()

    def ask() -> None:
        with stage.coordinator(other) as coordinator:
            while not over.is_set():
                with pytest.raises((XAER_NOTA, XAER_RMFAIL)):
                    coordinator.rollback(new_xid())

    asking = stage.background(ask)
    try:
        stage.service.signal(signal.SIGTERM)
        stage.service.wait()
        with stage.coordinator(other) as coordinator:
            for xid in xids:
                assert coordinator.commit(xid) is XaFlag.OK
    finally:
        over.set()
        asking.result()
    assert len(stage.bodies(queue)) == 5


def test_members_have_receipts_of_their_own(stage: Stage) -> None:
    """One that purges its own, or ends, removes none of another."""
    other, queue = stage.another_service(), stage.declare("q")
    for service in (stage.service, other):
        with stage.connected(service) as connection:
            xa, xid = work(connection.channel(), publish={queue: [b"a"]})
            assert xa.prepare(xid) is xa.commit(xid) is XaFlag.OK
    assert len({name.rpartition(".")[0] for name in stage.receipt_queues()}) == 2
