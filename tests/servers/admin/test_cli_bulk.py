"""Many branches at the command line: listed, filtered, and decided after a dry run; changed branches are skipped."""

import json
from collections.abc import Iterator
from typing import Any, Self

import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.cli import orders, run
from dtx.cli.access import ApiAccess, reach
from dtx.cli.orders import BulkRound, ListedBranch
from dtx.client import XA_HEURRB, XaFlag, XAResource, Xid
from dtx.config import Settings
from tests.servers.admin.conftest import orphan
from tests.support.crash import PERSISTENT, Scene, Stage, StandaloneStage
from tests.support.service import DtxService


def prepared(scene: Scene, names: list[bytes]) -> list[Xid]:
    """One branch for each of these global transactions; each has published one message and is prepared."""
    scene.declare("out")
    xids = [Xid(77, name, b"q") for name in names]
    with scene.connected() as connection:
        xa = XAResource(connection.channel(), timeout=60)
        for xid in xids:
            xa.start(xid)
            xa.channel.basic_publish("", "out", xid.gtrid, PERSISTENT)
            xa.end(xid)
            assert xa.prepare(xid) is XaFlag.OK
    return xids


def listed(said: str) -> list[str]:
    return [json.loads(line)["xid"] for line in said.splitlines()]


def test_branches_are_filtered_alike_from_database_and_api(
    alone: StandaloneStage, capsys: pytest.CaptureFixture[str]
) -> None:
    """List and filter by state, age, owner, vhost, format id, gtrid prefix or wildcard, queue, exchange."""

    def branches(*words: str) -> str:
        assert run(["branches", "--database", alone.database, *words]) == 0
        return capsys.readouterr().out

    orders = [str(xid) for xid in prepared(alone, [b"order-1", b"order-2", b"invoice-1"])]
    other = str(orphan(alone))
    for words, expected in (
        ((), [*orders, other]),
        (("--gtrid", "order-*"), orders[:2]),
        (("--gtrid", "*-1"), [orders[0], orders[2]]),
        (("--gtrid", "hex:" + b"order-2".hex()), orders[1:2]),
        (("--format-id", "77"), orders),
        (("--queue", "in"), [other]),
        (("--exchange", ""), [*orders, other]),
        (("--exchange", "amq.topic"), []),
        (("--owner", "guest", "--vhost", "/", "--state", "prepared", "--state", "heuristic"), [*orders, other]),
        (("--state", "heuristic"), []),
        (("--older-than", "1h"), []),
        (("--stuck",), []),
        (("--not-stuck", "--limit", "2"), orders[:2]),
    ):
        for where in ((), ("--api", alone.service.admin_url)):
            assert listed(branches("--json", *words, *where)) == expected, (words, where)
    tables = [branches(*where) for where in ((), ("--api", alone.service.admin_url))]
    assert all(said.endswith("4 in doubt: 4 prepared\n") for said in tables)
    assert run(["in-doubt", "--gtrid", "hex:zz"]) == 2


def words_of(scene: Scene, running: bool) -> tuple[str, ...]:
    if running:
        return ("--admin-listen", scene.service.admin_url.removeprefix("http://"))
    assert scene.service.stop() == 0
    return ("--broker", scene.service.broker or "", *scene.options[:2]) if isinstance(scene, Stage) else ()


@pytest.mark.parametrize("running", [True, False], ids=["a dtx is asked", "no dtx runs"])
def test_many_are_decided_after_a_dry_run(scene: Scene, running: bool) -> None:
    """An order for all branches of a filter needs a dry run first."""
    xids = prepared(scene, [b"order-%d" % number for number in range(120)])
    (left,) = prepared(scene, [b"invoice"])
    words = ("bulk", "rollback", "--gtrid", "order-*", *words_of(scene, running))
    dry = scene.service.run(*words, "--dry-run")
    assert "rollback of 120 branches; answers to their transaction managers: 120 xa-heurrb" in dry.stderr
    assert set(scene.states().values()) == {"prepared"}
    unanswered = scene.service.run(*words, "--reason", "x", check=False)
    assert (unanswered.returncode, set(scene.states().values())) == (2, {"prepared"})
    assert scene.service.run(*words, "--reason", "the site is lost", "--yes").stdout == "120 of 120 done\n"
    states = scene.states()
    assert (states.pop(left), set(states.values())) == ("prepared", {"heuristic"})
    if not running:
        scene.service.start()
    with scene.coordinator() as coordinator, pytest.raises(XA_HEURRB):
        coordinator.commit(xids[7])
    trail = json.loads(scene.service.run("audit", "--json", "--limit", "1", "--action", "bulk-rollback").stdout)
    assert (trail["reason"], trail["result"]) == ("the site is lost", "120 of 120 done")


def test_a_refused_branch_is_named_and_does_not_stop_others(alone: StandaloneStage) -> None:
    xids = prepared(alone, [b"order-%d" % number for number in range(3)])
    where = ("--api", alone.service.admin_url, "--reason", "x", "--yes")
    alone.service.run("commit", str(xids[1]), *where)
    done = alone.service.run("bulk", "rollback", "--gtrid", "order-*", *where, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "2 of 3 done")
    assert f"{xids[1]}  /  not done: rollback is illegal in state heuristic" in done.stdout
    assert alone.service.run("bulk", "rollback", *where, check=False).returncode == 2  # no filter
    said = alone.service.run("bulk", "forget", "--state", "heuristic", "--json", *where).stdout
    assert [json.loads(line)["done"] for line in said.splitlines()] == [True] * 3
    assert alone.states() == {}


def test_a_branch_changed_since_the_dry_run_is_skipped(alone: StandaloneStage) -> None:
    xids = prepared(alone, [b"order-%d" % number for number in range(4)])
    settings = Settings.load({"database": alone.database})
    access = ApiAccess(api=alone.service.admin_url, ca=None, token_file=None)
    with reach(settings, access, orders=True) as api:
        found = list(map(ListedBranch.of, api.pages("/dtx/v1/branches", "branches", gtrid="order-*", limit=1000)))
        chosen = BulkRound(api, "rollback", {"gtrid": "order-*"}, "x", found)
        assert len(chosen.forecast()) == chosen.count == 4
        with alone.coordinator() as coordinator:
            coordinator.commit(xids[0])  # its transaction manager decides it after all
        alone.service.run("commit", str(xids[2]), "--reason", "x", "--yes", "--api", alone.service.admin_url)
        results = {result["xid"]: result["done"] for result in chosen.carry_out()}
    assert results == {str(xids[0]): False, str(xids[1]): True, str(xids[2]): False, str(xids[3]): True}
    assert alone.bodies("out") == [b"order-0", b"order-2"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the progress bar on a terminal."""
    steps: list[int] = []

    class Bar:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_task(self, *_: object, **__: Any) -> int:
            return 0

        def advance(self, _: int, count: int) -> None:
            steps.append(count)

    monkeypatch.setattr("rich.progress.Progress", lambda *_, **__: Bar())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    return steps


def test_how_far_it_has_come_is_shown_on_a_terminal(
    alone: StandaloneStage, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_ROUND", 100)
    prepared(alone, [b"order-%d" % number for number in range(101)])
    where = ["--database", alone.database, "--api", alone.service.admin_url]
    assert run(["bulk", "commit", "--gtrid", "order-*", "--reason", "x", "--yes", *where]) == 0
    assert counted == [1] * 101 + [100, 1, 100, 1]  # the listing, the dry run, the order


def test_an_interrupted_bulk_order_reports_its_progress(
    alone: StandaloneStage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    xids = prepared(alone, [b"order-%d" % number for number in range(5)])
    monkeypatch.setattr(orders, "_ROUND", 2)
    carry_out, rounds = BulkRound.carry_out, iter(range(5))

    def stopped(self: BulkRound) -> Iterator[dict[str, Any]]:
        if next(rounds) == 1:
            raise KeyboardInterrupt
        yield from carry_out(self)

    monkeypatch.setattr(BulkRound, "carry_out", stopped)
    where = ["--database", alone.database, "--api", alone.service.admin_url]
    assert run(["bulk", "commit", "--gtrid", "order-*", "--reason", "x", "--yes", *where]) == 130
    said = capsys.readouterr()
    assert (said.out, "up to 2 more were under way" in said.err) == ("2 of 2 done\n", True)
    assert [alone.states()[xid] for xid in xids] == ["heuristic"] * 2 + ["prepared"] * 3


def test_a_bulk_order_takes_a_coordinator(alone: StandaloneStage) -> None:
    prepared(alone, [b"order-1"])
    token = OperatorLog(alone.database, "dtx").make_token("olga", OperatorRole.OPERATOR, "test")
    words = ("bulk", "rollback", "--gtrid", "order-*", "--reason", "x", "--yes", "--api", alone.service.admin_url)
    with DtxService(env={"DTX_TOKEN": token}, start=False) as far:
        said = far.run(*words, check=False)
    assert (said.returncode, "but this needs a coordinator" in said.stderr) == (1, True)
    assert set(alone.states().values()) == {"prepared"}
