"""Pages that update themselves, and the limits of these updates."""

import http.client
import re
from contextlib import closing
from urllib.parse import urlsplit

from playwright.sync_api import Route, expect

from dtx.client import Xid
from tests.servers.admin.web.test_login import ask, sign_in
from tests.servers.admin.web.test_pages import prepared
from tests.support.crash import StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.service import ADMIN
from tests.support.tour import Tour


def at_port(options: tuple[str, ...], port: int | None) -> tuple[str, ...]:
    """The *options*, with the API at a fixed *port*."""
    return tuple(f"127.0.0.1:{port}" if word == ADMIN[-1] else word for word in options)


def test_a_page_updates_its_data_but_not_the_users_input(tour: Tour, site: StandaloneStage) -> None:
    prepared(site, b"live-0")
    carla = tour.visitor("carla", "branches?q=live-*")
    expect(carla.page.locator("#live-word")).to_have_text("live")
    carla.page.get_by_label("Choose live-0/b").check()
    carla.page.get_by_role("link", name="live-0/b").focus()
    prepared(site, b"live-1")
    expect(carla.page.get_by_role("link", name="live-1/b")).to_be_visible(timeout=30_000)
    expect(carla.page.get_by_label("Choose live-0/b")).to_be_checked()
    expect(carla.page.get_by_role("link", name="live-0/b")).to_be_focused()
    carla.require_peace()


def test_the_overview_announces_changes_to_screen_readers(tour: Tour, site: StandaloneStage) -> None:
    carla = tour.visitor("carla")
    before = int(carla.page.locator("#live-cards .figure").first.inner_text())
    prepared(site, b"aloud")
    expect(carla.page.locator("#live-cards .figure").first).to_have_text(str(before + 1), timeout=30_000)
    expect(carla.page.locator("#say")).to_contain_text(f"{before + 1} in doubt")


def test_the_overview_draws_its_series(tour: Tour, site: StandaloneStage) -> None:
    """Each has its present number as text, and the server draws its line."""
    prepared(site, b"series")
    site.declare("series")
    site.fill("series", *(b"x" for _ in range(7)))
    carla = tour.visitor("carla")
    in_doubt = carla.page.locator("#live-cards .figure").first.inner_text()
    expected: dict[str, str | re.Pattern[str]] = {
        "Branches in doubt": f"{in_doubt} at most",
        "Messages in queues": re.compile("ready [1-9]"),
    }
    for title, words in expected.items():
        figure = carla.page.locator("figure", has_text=title)
        expect(figure.locator("figcaption")).to_contain_text(words, timeout=30_000)
        expect(figure.locator("polyline").first).to_have_attribute("points", re.compile(r"\d"))
    expect(carla.page.locator("figure", has_text="Delay")).to_contain_text("ms", timeout=30_000)
    expect(carla.page.locator("figure", has_text="Messages per second")).to_contain_text("/s")
    carla.follow("8 hours")
    expect(carla.page.locator("#live-series text").filter(has_text="8h ago").first).to_be_visible()
    assert carla.open("?window=2h").status == 422
    carla.require_peace()


def test_a_branch_page_shows_another_operators_decision(tour: Tour, site: StandaloneStage) -> None:
    xid = prepared(site, b"watched")
    olga, otto = tour.visitor("olga"), tour.visitor("otto")
    for person in (olga, otto):
        person.open_branch(xid)
    otto.choose("Commit heuristically")
    otto.dry_run("somebody has to")
    otto.confirm()
    expect(olga.page.locator("#live-journal")).to_contain_text("somebody has to", timeout=30_000)
    expect(olga.page.locator("#live-state")).to_contain_text("heuristic")


def test_a_paused_page_does_not_change(tour: Tour, site: StandaloneStage) -> None:
    carla = tour.visitor("carla", "branches?q=still-*")
    expect(carla.page.locator("#live-word")).to_have_text("live")
    carla.page.get_by_role("button", name="Pause").click()
    expect(carla.page.locator("#live-word")).to_have_text("paused")
    prepared(site, b"still-1")
    other = tour.visitor("carla", "branches?q=still-*")
    expect(other.page.get_by_role("link", name="still-1/b")).to_be_visible()
    assert carla.page.get_by_role("link", name="still-1/b").count() == 0
    carla.page.get_by_role("button", name="Resume").click()
    expect(carla.page.get_by_role("link", name="still-1/b")).to_be_visible(timeout=30_000)


def test_an_update_requested_before_the_pause_is_ignored(tour: Tour, site: StandaloneStage) -> None:
    carla = tour.visitor("carla", "branches?q=late-*")
    expect(carla.page.locator("#live-word")).to_have_text("live")
    # otherwise the refresh of the first beat could show the branch before the pause
    site.wait_for(lambda: carla.page.evaluate("() => seen !== undefined && !busy"), "the end of the first refresh")
    held: list[Route] = []

    def hold(route: Route) -> None:
        if route.request.headers.get("x-dtx-part") == "live" and not held:
            held.append(route)
        else:
            route.continue_()

    carla.page.route("**/console/branches?*", hold)
    prepared(site, b"late-1")
    site.wait_for(lambda: carla.page.evaluate("() => busy") and bool(held), "a refresh that is under way")
    carla.page.get_by_role("button", name="Pause").click()
    expect(carla.page.locator("#live-word")).to_have_text("paused")
    with carla.page.expect_response(lambda answer: answer.request == held[0].request) as told:
        held[0].continue_()
    assert "late-1" in told.value.text()
    site.wait_for(lambda: carla.page.evaluate("() => !busy"), "the end of that refresh")
    expect(carla.page.locator("#live-word")).to_have_text("paused")
    assert carla.page.get_by_role("link", name="late-1/b").count() == 0
    carla.page.get_by_role("button", name="Resume").click()
    expect(carla.page.get_by_role("link", name="late-1/b")).to_be_visible(timeout=30_000)
    carla.require_peace()


def test_a_page_survives_a_restart_and_reports_the_logout(postgres: PostgresServer, tour: Tour) -> None:
    """Sessions are in memory, so a restart ends them. The page shows that instead of old data."""
    with StandaloneStage(postgres, options=ADMIN) as own:
        port = urlsplit(own.service.admin_url).port
        own.service.options = at_port(own.service.options, port)
        visitor = tour.browser.visitor(own.service.admin_url).enter("guest", "guest")
        expect(visitor.page.locator("#live-word")).to_have_text("live")
        own.service.kill9()
        expect(visitor.page.locator("#live-word")).not_to_have_text("live", timeout=30_000)
        own.service.start()
        expect(visitor.page.locator("#live-word")).to_contain_text("signed out", timeout=60_000)


def test_pages_that_watch_do_not_hold_up_the_end(postgres: PostgresServer, tour: Tour) -> None:
    with StandaloneStage(postgres, options=ADMIN) as own:
        visitor = tour.browser.visitor(own.service.admin_url).enter("guest", "guest")
        expect(visitor.page.locator("#live-word")).to_have_text("live")
        assert own.service.stop() == 0
        assert "timeout graceful shutdown exceeded" not in own.service.log_path.read_text().lower()


def test_too_many_watchers_are_refused_with_a_reason(site: StandaloneStage) -> None:
    url = site.service.admin_url
    cookie = sign_in(url, "guest", "guest")
    parts = urlsplit(url)
    assert parts.hostname is not None
    watchers: list[http.client.HTTPConnection] = []
    statuses: list[int] = []
    try:
        for _ in range(103):
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
            watchers.append(connection)
            connection.request("GET", "/console/live", headers={"Cookie": cookie})
            answer = connection.getresponse()
            statuses.append(answer.status)
            if answer.status == 200:
                assert answer.readline() in {b": alive\n", b"event: beat\n"}
        assert (statuses[:100], set(statuses[100:])) == ([200] * 100, {503})
        assert ask(url, "/console/", Cookie=cookie).status == 200
    finally:
        for connection in watchers:
            with closing(connection):
                pass
    site.wait_for(lambda: _status(url, cookie) == 200, "room for a watcher")


def _status(url: str, cookie: str) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None
    with closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)) as connection:
        connection.request("GET", "/console/live", headers={"Cookie": cookie})
        return connection.getresponse().status


def test_a_standby_shows_the_log_and_refuses_orders(site: StandaloneStage, tour: Tour) -> None:
    xid = prepared(site, b"standby")
    standby = site.another_service(start=False)
    port = free_port()
    standby.options = at_port(standby.options, port)
    standby.start(wait=False)
    url = f"http://127.0.0.1:{port}"
    site.wait_for(lambda: _answers(url), "the standby's pages")
    visitor = tour.browser.visitor(url).enter("guest", "guest")
    assert "not the active one" in visitor.text()
    visitor.open_branch(xid)
    assert "prepared" in visitor.text()
    visitor.choose("Commit heuristically")
    visitor.page.locator("dialog #reason").fill("try")
    visitor.page.get_by_role("button", name="Dry run").click()
    expect(visitor.page.locator("dialog [role=alert]")).to_contain_text("this dtx is not the active one")
    assert visitor.open("connections").status == 503
    assert site.states()[Xid(7, b"standby", b"b")] == "prepared"


def _answers(url: str) -> bool:
    try:
        return ask(url, "/healthz").status == 200
    except OSError:
        return False
