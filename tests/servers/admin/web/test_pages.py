"""Every page and every action in a browser."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from dtx.client import XaFlag, Xid
from tests.servers.admin.test_orders import stuck
from tests.support.browser import Browser, Visitor
from tests.support.client import connected
from tests.support.crash import PERSISTENT, Stage, StandaloneStage, work
from tests.support.npm import AXE, with_package
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN
from tests.support.tour import PASSWORDS, REASON, Tour

PAGES = (
    "", "branches", "outcomes", "archive", "connections", "audit", "bulk?state=prepared", "branch?xid={0}",
    "decide?xid={0}&action=rollback", "message?xid={0}&position=0", "reconciliation", "users", "user?name=carla",
    "permissions", "vhosts", "tokens", "quotas", "change?action=make-user", "change?action=remove-user&name=carla",
    "change?action=grant&name=carla", "change?action=make-token",
    "queues", "queue?name={1}", "queue/messages?name={1}", "publish",
    "exchanges", "exchange?name=amq.default", "exchange?name={1}", "bindings", "consumers",
    "topology?action=declare-queue", "topology?action=declare-exchange", "topology?action=bind&end=source",
    *(f"topology?action={action}&vhost=/&name={{1}}" for action in ("purge-queue", "delete-queue", "delete-exchange")),
    "topology?action=bind&vhost=/&kind=queue&destination={1}",
    "topology?action=unbind&vhost=/&source={1}&kind=queue&destination={1}&key={1}",
)  # fmt: skip

LONG_NAME = "long-name-" * 25 + "queue"


def prepared(site: StandaloneStage, gtrid: bytes, *bodies: bytes, bqual: bytes = b"b", count: int = 1) -> Xid:
    """A prepared branch that publishes to *out*."""
    site.declare("out")
    xid = Xid(7, gtrid, bqual)
    with site.connected() as connection:
        xa, _ = work(connection.channel(), publish={"out": [*(bodies or (b"body",))] * count}, xid=xid)
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def rows(visitor: Visitor) -> list[str]:
    """The names of the listed branches."""
    return [text.strip() for text in visitor.page.locator("#live-list tbody th a").all_inner_texts()]


def test_branches_are_searched_filtered_and_put_in_order(tour: Tour, site: StandaloneStage) -> None:
    for number in range(3):
        prepared(site, b"find-%d" % number, b"x" * (30 - 10 * number))
    binary = prepared(site, b"\x00\xff\x01find")
    carla = tour.visitor("carla", "branches")
    for typed, found in (
        ("find-1", ["find-1/b"]),
        ("find-*", ["find-0/b", "find-1/b", "find-2/b"]),
        ("ind-", ["find-0/b", "find-1/b", "find-2/b"]),
        ("hex:00ff01*", [str(binary)]),
        (str(binary), [str(binary)]),
        ("no such thing", []),
    ):
        carla.page.get_by_label("Global transaction id").fill(typed)
        carla.follow("Search", "button")
        assert rows(carla) == found, typed
    carla.open("branches?q=find-*")
    carla.page.get_by_role("columnheader", name="Size").get_by_role("link").click()
    expect(carla.page.locator("th[aria-sort=ascending]")).to_contain_text("Size")
    assert rows(carla) == ["find-2/b", "find-1/b", "find-0/b"]
    carla.page.get_by_role("columnheader", name="Size").get_by_role("link").click()
    expect(carla.page.locator("th[aria-sort=descending]")).to_contain_text("Size")
    assert rows(carla) == ["find-0/b", "find-1/b", "find-2/b"]
    for query, count in (
        ("older=1h", 0),
        ("owner=nobody", 0),
        ("format_id=7", 4),
        ("exchange=(default)", 4),
        ("stuck=yes", 0),
    ):
        carla.open(f"branches?q=*find*&{query}")
        assert len(rows(carla)) == count, query
        assert carla.page.locator("details#narrow").get_attribute("open") is not None
    for query in ("older=soon", "format_id=x", "state=lost", "q=1:zz:", "cursor=nonsense", "sort=weight"):
        assert carla.open(f"branches?{query}").status in {400, 422}
        assert carla.page.get_by_role("alert").count() == 1
    carla.require_peace()


def test_pages_of_branches_follow_each_other(tour: Tour, site: StandaloneStage) -> None:
    made = {f"page-{number:03}/b" for number in range(120)}
    site.declare("out")
    with site.connected() as connection:
        channel = connection.channel()
        for number in range(120):
            xa, xid = work(channel, xid=Xid(7, b"page-%03d" % number, b"b"), publish={"out": [b"x"]})
            xa.prepare(xid)
    carla = tour.visitor("carla", "branches?q=page-*&sort=owner")
    seen = rows(carla)
    expect(carla.page.locator("caption")).to_have_text("120 branches, 50 on this page")
    while carla.page.get_by_role("link", name="Next page").count():
        carla.follow("Next page")
        seen += rows(carla)
    assert (len(seen), set(seen)) == (120, made)
    expect(carla.page.locator("caption")).to_have_text("120 branches, 20 on this page")
    carla.follow("First page")
    assert rows(carla) == seen[:50]
    carla.follow("Decide about all matching branches")
    assert "page-*" in carla.text()
    carla.page.get_by_label("Reason").fill(REASON)
    carla.follow("Dry run", "button")
    assert "The order: Roll back 120 branches heuristically." in carla.text()
    prepared(site, b"page-late")
    carla.follow("Roll back 120 branches heuristically", "button")
    expect(carla.page.get_by_role("alert")).to_contain_text("the branches have changed since the dry run")
    assert {state for xid, state in site.states().items() if xid.gtrid.startswith(b"page")} == {"prepared"}


def test_a_branch_of_many_messages_is_shown_in_pieces(tour: Tour, site: StandaloneStage) -> None:
    xid = prepared(site, b"many messages", b"x", count=250)
    olga = tour.visitor("olga")
    olga.open_branch(xid)
    assert olga.page.locator("#live-messages tbody tr").count() == 100
    olga.follow("Next messages")
    expect(olga.page.locator("#live-messages tbody td").first).to_have_text("100")
    olga.open(f"branch?xid={xid}&from=200")
    assert olga.page.locator("#live-messages tbody tr").count() == 50
    expect(olga.page.locator("#live-messages caption")).to_have_text("Messages 200 to 249 of 250")
    assert olga.page.get_by_role("link", name="Next messages").count() == 0
    olga.follow("Previous messages")
    expect(olga.page.locator("#live-messages tbody td").first).to_have_text("100")


def test_contents_are_safe_to_look_at_and_can_be_kept(tour: Tour, site: StandaloneStage, tmp_path: Path) -> None:
    nasty = b"<script>alert(1)</script>\xe2\x80\xae\x1b[31m\"'&"
    site.declare("out")
    xid = Xid(7, b"<img src=x onerror=alert(1)>", b"\"'>")
    with site.connected() as connection:
        channel = connection.channel()
        xa, _ = work(channel, xid=xid, end=False)
        headers = {"<b>": "<i>", "table": {"inner": ["\u202e", 1, True]}}
        properties = type(PERSISTENT)(content_type="text/html", headers=headers, delivery_mode=2)
        channel.basic_publish("", "out", nasty, properties)
        channel.basic_publish("", "out", b"\x00\x01\xff" * 3_000_000)
        xa.end(xid)
        xa.prepare(xid)
    olga = tour.visitor("olga")
    olga.open_branch(xid)
    assert "<img src=x onerror=alert(1)>" in olga.page.locator("h1").inner_text()
    olga.follow("Contents of message 0")
    body = olga.page.locator("pre.body").inner_text()
    assert "<script>alert(1)</script>" in body
    assert "\u202e" not in body
    assert "\\x1b" in body
    said = olga.page.locator("section", has=olga.page.get_by_role("heading", name="Properties")).inner_text()
    assert "headers.table.inner[0]" in said
    assert "<i>" in said
    assert "\u202e" not in said
    with olga.page.expect_download() as kept:
        olga.page.get_by_role("link", name="Download").click()
    kept.value.save_as(tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == nasty
    assert kept.value.suggested_filename == "message-0.bin"
    olga.open(f"message?xid={xid}&position=1")
    assert olga.page.locator("pre.body").inner_text().startswith("hex 0001ff00")
    assert len(olga.page.content()) < 20_000
    carla = tour.visitor("carla", "audit")
    assert (carla.text().count("viewed"), carla.text().count("exported")) == (2, 1)
    olga.require_peace()


def test_orders_work_without_any_script(site: StandaloneStage, people: None, browser: Browser) -> None:
    xid = prepared(site, b"no scripts")
    olga = browser.visitor(site.service.admin_url, scripts=False)
    olga.enter("olga", PASSWORDS["olga"], "branches?q=no+scripts")
    olga.follow("no scripts/b")
    assert olga.page.get_by_role("button", name="Copy").count() == 0
    assert not olga.page.locator("#live-mark").is_visible()
    olga.follow("Commit heuristically")
    olga.page.get_by_label("Reason").fill(REASON)
    olga.follow("Dry run", "button")
    assert "xa-heurcom" in olga.text()
    assert site.states()[xid] == "prepared"
    olga.follow("Commit heuristically", "button")
    assert "The answer is xa-heurcom" in olga.text()
    assert site.states()[xid] == "heuristic"
    olga.page.reload()
    assert "The answer is xa-heurcom" not in olga.text(), "the answer is shown once"


def test_orders_reach_a_virtual_host_with_line_ends(postgres: PostgresServer, browser: Browser) -> None:
    """Browsers change line ends in fields, so the virtual host is in the address of each form."""
    one, other = Xid(7, b"one", b"b"), Xid(7, b"other", b"b")
    with StandaloneStage(postgres, options=ADMIN) as stage:
        assert Operator(stage.service.admin_url).ask("PUT", "/api/vhosts/a%0Ab").status == 201
        with connected(stage.service.url(vhost="a\nb")) as connection:
            channel = connection.channel()
            channel.queue_declare("out", durable=True)
            for xid in (one, other):
                work(channel, publish={"out": [b"x"]}, xid=xid)[0].prepare(xid)
        guest = browser.visitor(stage.service.admin_url, scripts=False)
        guest.enter("guest", "guest", "branches?vhost=a%0Ab")
        guest.follow("one/b")
        guest.follow("Roll back heuristically")
        guest.page.get_by_label("Reason").fill(REASON)
        guest.follow("Dry run", "button")
        guest.follow("Roll back heuristically", "button")
        assert "The answer is xa-heurrb" in guest.text()
        guest.open("branches?vhost=a%0Ab&state=prepared")
        guest.follow("Decide about all matching branches")
        guest.page.get_by_label("Reason").fill(REASON)
        guest.follow("Dry run", "button")
        guest.follow("Roll back 1 branch heuristically", "button")
        assert "1 of 1 done" in guest.text()
        assert stage.states() == {one: "heuristic", other: "heuristic"}


def test_an_order_needs_a_reason_and_a_suitable_branch(tour: Tour, site: StandaloneStage) -> None:
    xid = prepared(site, b"no reason")
    olga = tour.visitor("olga")
    olga.open(f"decide?xid={xid}&action=rollback")
    olga.page.locator("#reason").evaluate("(area) => { area.required = false; area.value = '   '; }")
    olga.follow("Dry run", "button")
    expect(olga.page.get_by_role("alert")).to_contain_text("422")
    assert olga.open(f"decide?xid={xid}&action=destroy").status == 422
    olga.open(f"decide?xid={xid}&action=forget")
    olga.page.get_by_label("Reason").fill(REASON)
    olga.follow("Dry run", "button")
    expect(olga.page.get_by_role("alert")).to_contain_text("forget is illegal in state prepared")
    assert site.states()[xid] == "prepared"


def test_a_connection_is_shown_and_closed(tour: Tour, site: StandaloneStage) -> None:
    site.declare("out")
    with pytest.raises(Exception, match="320"), site.connected() as connection:  # noqa: PT012
        work(connection.channel(), publish={"out": [b"x"]}, xid=Xid(7, b"at work", b"1"), end=False)
        olga = tour.visitor("olga", "connections")
        assert "at work/1" in olga.page.locator("#live-open").inner_text()
        with olga.page.expect_navigation():
            olga.page.locator("#live-open").get_by_role("link").first.click()
        assert "at work/1" in olga.text()
        olga.page.get_by_role("link", name="Close connection").click()
        olga.page.locator("dialog #reason").fill("it hangs")
        olga.page.locator("dialog .danger").click()
        expect(olga.page.locator("main .note.good")).to_contain_text("is closed")
        connection.process_data_events(10)
    olga.require_peace()


def test_stuck_messages_are_redirected_or_discarded(
    shared_rabbitmq: RabbitNode, postgres: PostgresServer, browser: Browser
) -> None:
    """A stuck branch shows the broker's message and its own messages, which can be redirected, retried or discarded."""
    with Stage(shared_rabbitmq, postgres, options=ADMIN) as stage:
        tour = Tour(stage, browser)
        tour.populate()
        first = stuck(stage)
        olga = tour.visitor("olga")
        assert "1\nstuck" in olga.page.locator("#live-cards").inner_text()
        olga.follow("stuck")
        assert "no exchange 'gone'" in olga.text()
        olga.open_branch(first, stage.vhost)
        send = ("dialog .primary", "Enter")
        olga.press_keys(("#m1-redirect", "Enter"), ("#routing_key", "spare"), ("#reason", REASON), send)
        expect(olga.page.locator("dialog")).to_contain_text("xa-ok")
        assert olga.page.get_by_label("Routing key").input_value() == "spare"
        olga.confirm()
        olga.choose("Retry")
        olga.dry_run(REASON)
        olga.confirm()
        assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])
        second = stuck(stage)
        olga.open_branch(second, stage.vhost)
        olga.press_keys(("#m1-discard", "Enter"), ("#reason", REASON), send)
        expect(olga.page.locator("dialog")).to_contain_text("xa-heurmix")
        olga.confirm()
        assert "mixed" in olga.text()
        assert "discarded" in olga.page.locator("#live-messages").inner_text()
        olga.require_peace()


@pytest.fixture(scope="module")
def long_xid(site: StandaloneStage) -> Xid:
    """A branch with the longest possible xid; and a queue and an exchange with the longest possible name."""
    site.declare(LONG_NAME)
    with site.connected() as connection:
        channel = connection.channel()
        channel.exchange_declare(LONG_NAME, durable=True)
        channel.queue_bind(LONG_NAME, LONG_NAME, LONG_NAME)
    return prepared(site, b"x" * 64, bqual=bytes(range(64)))


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark"), (3840, "light")])
def test_every_page_fits_and_everything_has_a_name(
    site: StandaloneStage, people: None, browser: Browser, long_xid: Xid, width: int, scheme: str
) -> None:
    """390 px to 4k, light and dark: nothing is outside the window; names, headings, captions, contrast (WCAG AA)."""
    carla = browser.visitor(site.service.admin_url, width=width, scheme="dark" if scheme == "dark" else "light")
    carla.enter("carla", PASSWORDS["carla"])
    audits = {}
    for page in PAGES:
        assert carla.open(page.format(long_xid, LONG_NAME)).ok, page
        audits[page] = json.loads(carla.page.evaluate(AUDIT))
        dark = carla.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(16, 22, 28)"
        assert dark is (scheme == "dark"), page
    scrolling = {page: found.pop("scrolls") for page, found in audits.items()}
    assert not any(scrolling.values()) or width == 390, f"only at 390 px a table may be too wide: {scrolling}"
    nothing: dict[str, object] = {
        "beyond": [],
        "nameless": [],
        "captionless": [],
        "main": 1,
        "h1": 1,
        "skipped": [],
        "twice": [],
        "cut": [],
        "faint": [],
    }
    assert audits == dict.fromkeys(PAGES, nothing)
    carla.require_peace()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    directory = with_package(AXE, tmp_path_factory.mktemp("axe"))
    return (directory / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_nothing_on_any_page(
    site: StandaloneStage, people: None, browser: Browser, long_xid: Xid, axe: str, width: int, scheme: str
) -> None:
    """The rules of axe-core: WCAG 2.2 AA and best practices. A client consumes meanwhile."""
    carla = browser.visitor(site.service.admin_url, width=width, scheme="dark" if scheme == "dark" else "light")

    def reported() -> object:
        carla.page.evaluate(axe)
        return carla.page.evaluate(
            "() => axe.run().then((found) => found.violations.map((each) => [each.id, each.nodes[0].html]))"
        )

    with site.connected() as connection:
        connection.channel().basic_consume(LONG_NAME, lambda *_: None)
        carla.open()
        assert reported() == [], "the sign-in"
        carla.enter("carla", PASSWORDS["carla"])
        for page in PAGES:
            assert carla.open(page.format(long_xid, LONG_NAME)).ok, page
            assert reported() == [], page
        carla.open("connections")
        carla.page.locator("a[id^=connection-]").first.click()
        assert reported() == [], "a connection"
        assert carla.open("queue?name=none").status == 404
        assert reported() == [], "an error"
    carla.require_peace()


AUDIT = """() => {
    const shown = (item) => item.checkVisibility({checkOpacity: false}) && item.type !== "hidden";
    const name = (item) => (item.getAttribute("aria-label") || item.labels?.[0]?.innerText || item.innerText
        || item.getAttribute("alt") || "").trim();
    const where = (item) => item.outerHTML.slice(0, 80);
    const inside = (item) => item.closest(".wide, .sr, dialog, .skip");
    const colour = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (part) => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
    const luminance = ([red, green, blue]) => 0.2126 * light(red) + 0.7152 * light(green) + 0.0722 * light(blue);
    const ground = (item) => {
        const found = item && colour(getComputedStyle(item).backgroundColor);
        return !item ? [255, 255, 255] : found.length === 3 ? found : ground(item.parentElement);
    };
    const contrast = (item) => {
        const both = [colour(getComputedStyle(item).color), ground(item)].map((each) => luminance(each) + 0.05);
        return Math.max(...both) / Math.min(...both);
    };
    const speaks = (item) => [...item.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const ids = [...document.querySelectorAll("[id]")].map((item) => item.id);
    const levels = [...document.querySelectorAll("h1, h2, h3, h4")].filter(shown).map((item) => +item.tagName[1]);
    return JSON.stringify({
        beyond: [...document.querySelectorAll("body *")].filter((item) => shown(item) && !inside(item)
            && item.getBoundingClientRect().right > innerWidth + 1).map(where),
        nameless: [...document.querySelectorAll("a, button, input, select, textarea, [role=group], section")]
            .filter(shown).filter((item) => !name(item) && !item.getAttribute("aria-labelledby")).map(where),
        captionless: [...document.querySelectorAll("table")].filter((item) => !item.caption).map(where),
        scrolls: [...document.querySelectorAll(".wide")].filter((box) => box.scrollWidth > box.clientWidth + 1)
            .map(where),
        cut: [...document.querySelectorAll(".stacks [data-label]")].filter(shown)
            .filter((cell) => cell.scrollHeight > cell.clientHeight + 2).map(where),
        faint: [...document.querySelectorAll("body *")].filter(shown).filter(speaks)
            .filter((item) => contrast(item) < 4.5).map(where),
        main: document.querySelectorAll("main").length,
        h1: document.querySelectorAll("h1").length,
        skipped: levels.filter((level, index) => index && level > levels[index - 1] + 1),
        twice: ids.filter((id, index) => ids.indexOf(id) !== index),
    });
}"""


def test_an_order_is_given_with_the_keyboard_alone(tour: Tour, site: StandaloneStage) -> None:
    xid = prepared(site, b"keyboard")
    olga = tour.visitor("olga")
    olga.open_branch(xid)
    keyboard = olga.page.keyboard
    keyboard.press("Tab")
    expect(olga.page.locator(".skip")).to_be_focused()
    keyboard.press("Enter")
    for _ in range(12):
        keyboard.press("Tab")
        if olga.page.locator("#do-rollback:focus").count():
            break
    expect(olga.page.locator("#do-rollback")).to_be_focused()
    keyboard.press("Enter")
    expect(olga.page.locator("dialog #reason")).to_be_focused()
    keyboard.press("Escape")
    expect(olga.page.locator("#do-rollback")).to_be_focused()
    keyboard.press("Enter")
    expect(olga.page.locator("dialog #reason")).to_be_focused()
    keyboard.type(REASON)
    keyboard.press("Tab")
    keyboard.press("Enter")
    olga.page.locator("dialog .danger").wait_for()
    expect(olga.page.locator("dialog #reason")).to_be_focused()
    keyboard.press("Tab")
    expect(olga.page.locator("dialog .danger")).to_be_focused()
    keyboard.press("Enter")
    expect(olga.page.locator("main .note.good")).to_contain_text("xa-heurrb")
    assert site.states()[xid] == "heuristic"


def test_an_xid_is_copied(site: StandaloneStage, people: None, browser: Browser) -> None:
    xid = prepared(site, b"copy me")
    permissions = ("clipboard-read", "clipboard-write")
    carla = browser.visitor(site.service.admin_url, permissions=permissions).enter("carla", PASSWORDS["carla"])
    carla.open("branches?q=copy+me")
    carla.page.get_by_role("button", name="Copy xid").first.click()
    expect(carla.page.locator("#say")).to_have_text("Copied")
    assert carla.page.evaluate("() => navigator.clipboard.readText()") == str(xid)
