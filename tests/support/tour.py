"""A tour of the web pages: operators decide branches without a transaction manager. Every step is checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.auth.users import AccountEditor
from dtx.client import XA_HEURCOM, XA_HEURRB, XAER_NOTA, XaFlag, Xid
from tests.support.browser import Browser, Visitor
from tests.support.crash import Scene, work

REASON = "the order service lost its log, ticket 4711"
PASSWORDS = {"vera": "look-4-vera", "olga": "decide-4-olga", "otto": "decide-4-otto", "carla": "many-4-carla"}
TAGS = {"vera": "monitoring", "olga": "operator", "otto": "operator", "carla": "administrator"}


@dataclass(slots=True)
class Tour:
    """Walks through the pages.

    Args:
        scene: a dtx with its API.
        browser: the browser of all visitors.
        pictures: a directory for screenshots; ``None``: no screenshots.
        tell: called with a description of each step.
    """

    scene: Scene
    browser: Browser
    pictures: Path | None = None
    tell: Callable[[str], object] = lambda _: None
    visitors: list[Visitor] = field(default_factory=list)
    _count: int = 0

    def populate(self) -> None:
        """Add a user of every role."""
        editor = AccountEditor(self.scene.database, "dtx")
        for name, password in PASSWORDS.items():
            editor.add_user(name, password.encode(), [TAGS[name]])

    def visitor(self, name: str, page: str = "") -> Visitor:
        """A user of :data:`PASSWORDS`, signed in."""
        found = self.browser.visitor(self.scene.service.admin_url)
        self.visitors.append(found)
        return found.enter(name, PASSWORDS[name], page)

    def orphan(self, order: str) -> Xid:
        """A prepared branch without a transaction manager; it published to *out* and consumed from *in*."""
        for queue in ("in", "out"):
            self.scene.declare(queue)
        self.scene.fill("in", b'{"order": "consumed"}')
        with self.scene.connected() as connection:
            xa, xid = work(
                connection.channel(),
                publish={"out": [b'{"pay": 30}', bytes(range(256))]},
                consume={"in": 1},
                xid=Xid(4660, order.encode(), b"queue"),
            )
            assert xa.prepare(xid) is XaFlag.OK
        return xid

    def shoot(self, visitor: Visitor, name: str) -> None:
        """Take a numbered screenshot."""
        self._count += 1
        self.tell(f"{self._count:2} {name}")
        visitor.page.wait_for_load_state()
        if self.pictures is not None:
            visitor.shoot(self.pictures / f"{self._count:02}-{name.replace(' ', '-')}.png")

    def orphan_is_decided(self) -> None:
        """An orphan is found, inspected, dry-run, heuristically rolled back with a reason, and forgotten."""
        scene = self.scene
        xid = self.orphan("order-4711")
        olga = self.browser.visitor(scene.service.admin_url)
        self.visitors.append(olga)
        olga.open("branches?q=order-47")
        self.shoot(olga, "sign in")
        olga.sign_in("olga", PASSWORDS["olga"])
        olga.page.get_by_role("link", name="order-4711/queue").wait_for()
        assert "prepared" in olga.text()
        self.shoot(olga, "the orphan is found")
        olga.follow("order-4711/queue")
        seen = olga.text()
        assert str(xid) in seen
        assert "2 published, 1 consumed" in seen
        assert "prepare: xa-ok" in seen
        self.shoot(olga, "inspected")
        olga.follow("Contents of message 0")
        assert '{"pay": 30}' in olga.text()
        self.shoot(olga, "contents of a message")
        olga.open_branch(xid, scene.vhost)
        olga.choose("Roll back heuristically")
        self.shoot(olga, "why")
        said = olga.dry_run(REASON)
        assert "xa-heurrb" in said
        assert said.count("dropped") == 2
        assert said.count("put-back") == 1
        assert scene.states() == {xid: "prepared"}
        self.shoot(olga, "dry run")
        olga.confirm()
        assert "The answer is xa-heurrb" in olga.text()
        assert REASON in olga.text()
        assert scene.states() == {xid: "heuristic"}
        assert scene.bodies("in") == [b'{"order": "consumed"}']
        self.shoot(olga, "rolled back")
        with scene.coordinator() as coordinator:
            for ask in (coordinator.commit, coordinator.rollback):
                with pytest.raises(XA_HEURRB):
                    ask(xid)
        self.tell("   the transaction manager comes back, asks for commit and for rollback, and is told xa-heurrb")
        olga.open("outcomes")
        assert "order-4711/queue" in olga.page.locator("#live-kept").inner_text()
        self.shoot(olga, "kept until forget")
        olga.open_branch(xid, scene.vhost)
        olga.choose("Forget the outcome")
        assert "404" in olga.dry_run("corrected in the order system")
        self.shoot(olga, "dry run of forget")
        olga.confirm()
        assert "no longer in the log" in olga.text()
        self.shoot(olga, "forgotten")
        with scene.coordinator() as coordinator, pytest.raises(XAER_NOTA, match="forgotten"):
            coordinator.commit(xid)
        olga.open("archive")
        assert "dropped" in olga.text()
        self.shoot(olga, "archive")

    def two_race(self) -> None:
        """Two operators decide one branch at the same time; the second gets a conflict."""
        xid = self.orphan("order-4712")
        olga, otto = self.visitor("olga"), self.visitor("otto")
        for person, order in ((olga, "Commit heuristically"), (otto, "Roll back heuristically")):
            person.open_branch(xid, self.scene.vhost)
            person.choose(order)
            person.dry_run(f"says {order}")
        olga.confirm()
        assert "The answer is xa-heurcom" in olga.text()
        self.shoot(olga, "the first one decides")
        otto.confirm()
        said = otto.page.locator("dialog").inner_text()
        assert "Nothing was done, because the branch has changed" in said
        assert "412" in said
        self.shoot(otto, "the second one is told so")
        otto.follow("Show the branch")
        assert "says Commit heuristically" in otto.text()
        self.shoot(otto, "who was faster")
        with self.scene.coordinator() as coordinator:
            with pytest.raises(XA_HEURCOM):
                coordinator.rollback(xid)
            coordinator.forget(xid)

    def viewer_is_refused(self) -> None:
        """A viewer that tries to decide gets 403."""
        xid = self.orphan("order-4713")
        vera = self.visitor("vera")
        vera.open_branch(xid, self.scene.vhost)
        assert "Orders need the role operator" in vera.text()
        assert vera.page.get_by_role("link", name="heuristically").count() == 0
        self.shoot(vera, "a viewer sees no orders")
        words = f"xid={xid}&vhost={self.scene.vhost}"
        for page in (f"decide?{words}&action=rollback", f"message?{words}&position=0", "audit", "bulk"):
            assert vera.open(page).status == 403, page
        self.shoot(vera, "and is refused where it tries")
        mark = vera.page.locator("input[name=mark]").first.get_attribute("value")
        status = vera.page.evaluate(
            """([path, order]) => fetch(path, {method: "POST", body: new URLSearchParams(order)})
                .then((answer) => answer.status)""",
            [f"/console/decide?{words}&action=rollback", {"mark": mark, "reason": "mine", "stage": "do"}],
        )
        assert status == 403
        assert self.scene.states()[xid] == "prepared"

    def many_are_decided(self) -> None:
        """One order for several branches: choose, dry run, run."""
        for number in range(3):
            self.orphan(f"batch-{number}")
        carla = self.visitor("carla", "branches?q=batch-*")
        for number in range(2):
            carla.page.get_by_label(f"Choose batch-{number}/queue").check()
        self.shoot(carla, "some are chosen")
        carla.follow("Decide about chosen branches", "button")
        carla.page.get_by_label("Reason").fill(REASON)
        carla.follow("Dry run", "button")
        assert "The order: Roll back 2 branches heuristically." in carla.text()
        rows = carla.page.locator("tbody tr").all_inner_texts()
        assert ["2 dropped, 1 put-back" in row for row in rows] == [True, True]
        self.shoot(carla, "dry run of many")
        carla.follow("Roll back 2 branches heuristically", "button")
        assert "2 of 2 done" in carla.text()
        self.shoot(carla, "many are decided")
        states = {xid.gtrid: state for xid, state in self.scene.states().items() if xid.gtrid.startswith(b"batch")}
        assert states == {b"batch-0": "heuristic", b"batch-1": "heuristic", b"batch-2": "prepared"}

    def everything_else(self) -> None:
        """Open the pages that only show data; without a broker."""
        carla = self.visitor("carla")
        with self.scene.connected() as connection:
            work(connection.channel(), publish={"out": [b"x"]}, xid=Xid(1, b"under way", b"1"), end=False)
            for page, words in (
                ("", "in doubt"),
                ("branches", "order-4713/queue"),
                ("queues", "out"),
                ("queue?name=out", "Purge"),
                ("topology?action=delete-queue&vhost=/&name=out", "Messages that are lost"),
                ("topology?action=declare-queue", "Declare"),
                ("topology?action=bind&end=source", "binding"),
                ("queue/messages?vhost=/&name=out", "Messages"),
                ("publish", "Publish"),
                ("bindings", "Bindings"),
                ("consumers", "Consumers"),
                ("user?name=carla", "carla"),
                ("reconciliation", "econciliation"),
                ("exchanges", "amq.topic"),
                ("exchange?name=amq.default", "Bindings from this exchange"),
                ("connections", "under way/1"),
                ("outcomes", "forgotten"),
                ("transaction?gtrid=" + b"order-4711".hex(), "prepared"),
                ("audit", REASON),
                ("users", "carla"),
                ("permissions", "guest"),
                ("vhosts", "1 virtual host"),
                ("tokens", "There are no tokens."),
                ("quotas", "virtual host"),
            ):
                assert carla.open(page).status == 200
                assert words in carla.text()
                self.shoot(carla, page.partition("?")[0].replace("/", " ") or "overview")
            carla.open("connections")
            carla.page.locator("a[id^=connection-]").first.click()
            self.shoot(carla, "connection")

    def secrets_are_nowhere(self) -> None:
        """No page contains a secret, no browser reports an error, and no request goes to another server."""
        token = OperatorLog(self.scene.database, "dtx").make_token("tour", OperatorRole.COORDINATOR, "test")
        holder = self.browser.visitor(self.scene.service.admin_url)
        self.visitors.append(holder)
        holder.enter("", token, "audit")
        assert "token:tour" in holder.text()
        database = urlsplit(self.scene.database).password
        words = [token, token[4:], "argon2", *PASSWORDS.values()] + ([database] if database else [])
        cookies = [cookie["value"] for visitor in self.visitors for cookie in visitor.page.context.cookies()]
        assert len(cookies) == len(self.visitors)
        for visitor in self.visitors:
            visitor.require_peace()
            for text in visitor.seen:
                assert not [word for word in words if word in text]
                if "set-cookie" not in text:
                    assert not [cookie for cookie in cookies if cookie in text]
