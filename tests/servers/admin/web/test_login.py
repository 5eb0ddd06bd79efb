"""Sign-in to the web pages, the length of sessions, and what pages of other sites cannot do."""

import http.client
import re
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from fastapi.routing import APIRoute

from dtx.admin.web import account_pages, branch_pages, broker_pages, login, topology_pages
from dtx.admin.web import site as pages
from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.auth.users import AccountEditor
from dtx.client import Xid
from tests.servers.admin.conftest import orphan
from tests.support.browser import Browser
from tests.support.client import new_xid
from tests.support.crash import StandaloneStage
from tests.support.service import ADMIN, DtxService
from tests.support.tour import PASSWORDS, Tour

FORM = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    text: str


def ask(url: str, path: str, fields: dict[str, str] | str | None = None, *, method: str = "", **headers: str) -> Answer:
    """Send one request with any headers, as a browser would not. Redirects are not followed."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    body = urlencode(fields) if isinstance(fields, dict) else fields
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        given = {"Content-Type": FORM, "Origin": url, **given}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, given)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)
    finally:
        connection.close()


def sign_in(url: str, name: str, password: str) -> str:
    """Sign in, and return the cookie of the session."""
    answer = ask(url, "/console/sign-in", {"name": name, "password": password})
    assert answer.status == 303, answer.text
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    return f"{cookie.key}={cookie.value}"


def mark_of(text: str) -> str:
    """The mark of the session in the forms of a page."""
    found = re.search(r'name="mark" value="([^"]+)"', text)
    assert found is not None
    return found[1]


_ARCHIVED = "branch=00000000-0000-0000-0000-000000000000&position=0"
PAGES = {
    "": OperatorRole.VIEWER,
    "branches": OperatorRole.VIEWER,
    "branch?xid=1:61:": OperatorRole.VIEWER,
    "decide?xid=1:61:&action=commit": OperatorRole.OPERATOR,
    "message?xid=1:61:&position=0": OperatorRole.OPERATOR,
    "message/body?xid=1:61:&position=0": OperatorRole.OPERATOR,
    "bulk": OperatorRole.COORDINATOR,
    "outcomes": OperatorRole.VIEWER,
    "reconciliation": OperatorRole.VIEWER,
    "archive": OperatorRole.VIEWER,
    f"archive/message?{_ARCHIVED}": OperatorRole.OPERATOR,
    f"archive/body?{_ARCHIVED}": OperatorRole.OPERATOR,
    "connections": OperatorRole.VIEWER,
    "connection?number=999999": OperatorRole.VIEWER,
    "connection/close?number=999999": OperatorRole.OPERATOR,
    "audit": OperatorRole.COORDINATOR,
    "transaction?gtrid=61": OperatorRole.VIEWER,
    "queues": OperatorRole.VIEWER,
    "queue?name=nothing": OperatorRole.VIEWER,
    "exchanges": OperatorRole.VIEWER,
    "exchange?name=amq.direct": OperatorRole.VIEWER,
    "bindings": OperatorRole.VIEWER,
    "consumers": OperatorRole.VIEWER,
    "topology?action=declare-queue": OperatorRole.OPERATOR,
    "topology?action=purge-queue&vhost=/&name=nothing": OperatorRole.OPERATOR,
    "queue/messages?name=nothing": OperatorRole.OPERATOR,
    "publish": OperatorRole.OPERATOR,
    "live": OperatorRole.VIEWER,
    "users": OperatorRole.COORDINATOR,
    "user?name=guest": OperatorRole.COORDINATOR,
    "permissions": OperatorRole.COORDINATOR,
    "vhosts": OperatorRole.VIEWER,
    "tokens": OperatorRole.COORDINATOR,
    "quotas": OperatorRole.VIEWER,
    "change?action=make-user": OperatorRole.COORDINATOR,
}
"""The role that each page needs."""
OBJECTS = {
    "declare-queue": "name=new",
    "purge-queue": "name=orders",
    "delete-queue": "name=orders",
    "declare-exchange": "name=new",
    "delete-exchange": "name=new",
    "bind": "source=amq.topic&kind=queue&destination=orders",
    "unbind": "source=amq.topic&kind=queue&destination=orders&key=~",
}
"""The object of each change of queues, exchanges and bindings, in the address of its form."""
FORMS = {
    "decide?xid=1:61:&action=commit": OperatorRole.OPERATOR,
    "bulk": OperatorRole.COORDINATOR,
    "connection/close": OperatorRole.OPERATOR,
    "change?action=make-vhost&name=made": OperatorRole.COORDINATOR,
    **{f"topology?action={action}&vhost=/&{place}": OperatorRole.OPERATOR for action, place in OBJECTS.items()},
    "queue/messages?name=x": OperatorRole.OPERATOR,
    "publish": OperatorRole.OPERATOR,
    "sign-out": OperatorRole.VIEWER,
}
"""The role that each form needs."""


def test_every_page_and_every_form_is_here() -> None:
    there: dict[str, set[str]] = {"GET": set(), "POST": set()}
    for part in (login, branch_pages, broker_pages, topology_pages, account_pages, pages):
        for route in part.router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods or ():
                there[method].add(route.path.removeprefix("/"))
    assert there["GET"] == {page.partition("?")[0] for page in PAGES} | {"sign-in", "static/{name}"}
    assert OBJECTS.keys() == topology_pages.TOPOLOGY_CHANGES.keys()
    assert there["POST"] == {form.partition("?")[0] for form in FORMS} | {"sign-in"}


@pytest.mark.parametrize("page", PAGES)
def test_every_page_needs_a_login(site: StandaloneStage, page: str) -> None:
    for cookie in ("", "dtx_session=", "dtx_session=made-up"):
        answer = ask(site.service.admin_url, f"/console/{page}", Cookie=cookie)
        assert (answer.status, answer.headers["location"].partition("?")[0]) == (303, "/console/sign-in")


@pytest.mark.parametrize("page", PAGES)
def test_every_page_refuses_unknown_query_keys(site: StandaloneStage, page: str) -> None:
    """Issue 25: "unknown query keys are refused"."""
    cookie = sign_in(site.service.admin_url, "guest", "guest")
    for key in ("usr", "visit"):
        answer = ask(site.service.admin_url, f"/console/{page}{'&' if '?' in page else '?'}{key}=x", Cookie=cookie)
        assert (answer.status, f"no query key &#39;{key}&#39;" in answer.text) == (422, True)


def test_an_order_without_its_dry_run_is_refused(site: StandaloneStage) -> None:
    """The server checks that there was a dry run, as a client can send any form."""
    url = site.service.admin_url
    cookie = sign_in(url, "guest", "guest")
    xid = orphan(site)
    path = f"/console/decide?xid={xid}&action="
    page = ask(url, f"{path}commit", Cookie=cookie)
    form = {"mark": mark_of(page.text), "reason": "because"}

    def decided(action: str = "commit", **fields: str) -> int:
        return ask(url, path + action, {**form, **fields}, Cookie=cookie).status

    assert decided(stage="do") == 428
    assert decided(stage="do", version="1") == 428
    said = ask(url, f"{path}commit", {**form, "stage": "look"}, Cookie=cookie)
    found = re.search(r'name="version" value="(\d+)"', said.text)
    assert found is not None
    assert decided(stage="do", version=found[1], action="rollback") == 428
    assert decided(stage="do") == 428
    assert site.states()[xid] == "prepared"
    assert decided(stage="do", version=found[1]) == 303
    assert site.states()[xid] == "heuristic"
    assert decided(stage="do", version=found[1]) == 428


def test_the_console_does_not_accept_credentials_of_the_api(site: StandaloneStage) -> None:
    assert ask(site.service.admin_url, "/").headers["location"] == "/console/"
    basic = "Basic Z3Vlc3Q6Z3Vlc3Q="
    assert ask(site.service.admin_url, "/dtx/v1/status", Authorization=basic).status == 200
    assert ask(site.service.admin_url, "/console/", Authorization=basic).status == 303
    cookie = sign_in(site.service.admin_url, "guest", "guest")
    assert ask(site.service.admin_url, "/console/", Cookie=cookie).status == 200
    assert ask(site.service.admin_url, "/dtx/v1/status", Cookie=cookie).status == 401


def test_the_cookie_is_limited_to_pages_and_hidden_from_scripts(site: StandaloneStage) -> None:
    answer = ask(site.service.admin_url, "/console/sign-in", {"name": "guest", "password": "guest"})
    words = {word.strip().lower() for word in answer.headers["set-cookie"].split(";")}
    assert {"httponly", "samesite=strict", "path=/console"} <= words
    assert "secure" not in words, "without TLS browsers do not send a secure cookie"
    assert len(next(iter(SimpleCookie(answer.headers["set-cookie"]).values())).value) >= 43


def test_with_tls_the_cookie_is_secure(migrated_postgres_url: str, certificates: Path, browser: Browser) -> None:
    words = ("--admin-tls-cert", str(certificates / "server.pem"), "--admin-tls-key", str(certificates / "server.key"))
    with DtxService(database=migrated_postgres_url, options=(*ADMIN, *words)) as service:
        visitor = browser.visitor(service.admin_url, trusting=True).enter("guest", "guest")
        (cookie,) = visitor.page.context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        visitor.require_peace()


def test_behind_a_named_proxy_with_tls_the_cookie_is_secure(migrated_postgres_url: str) -> None:
    words = ("--admin-proxy", "127.0.0.1")
    with DtxService(database=migrated_postgres_url, options=(*ADMIN, *words)) as service:
        fields = {"name": "guest", "password": "guest"}
        for scheme, secure in (("https", True), ("http", False)):
            origin = f"{scheme}://{urlsplit(service.admin_url).netloc}"
            answer = ask(service.admin_url, "/console/sign-in", fields, Origin=origin, X_Forwarded_Proto=scheme)
            assert answer.status == 303
            assert ("Secure" in answer.headers["set-cookie"].split("; ")) is secure
            assert ("strict-transport-security" in answer.headers) is secure


@pytest.mark.parametrize(
    ("name", "password", "status"),
    [
        ("guest", "gu3ss-me", 401),
        ("nobody", "gu3ss-me", 401),
        ("", "", 401),
        ("", "dtx_made-up", 401),
        ("nora", "hers", 403),
    ],
)
def test_a_refused_login_gets_a_reason_and_no_cookie(
    site: StandaloneStage, people: None, name: str, password: str, status: int
) -> None:
    if name == "nora":
        AccountEditor(site.database, "dtx").add_user("nora", b"hers", [])
    answer = ask(site.service.admin_url, "/console/sign-in", {"name": name, "password": password})
    assert (answer.status, "set-cookie" in answer.headers) == (status, False)
    assert 'role="alert"' in answer.text
    assert not password or password not in answer.text


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/",
        "//evil.example/",
        "/\\evil.example",
        "/console/\\evil",
        "/console/\r\nSet-Cookie: a=b",
        "/console",
        "/dtx/v1/status",
        "javascript:alert(1)",
    ],
)
def test_a_login_never_redirects_to_another_site(site: StandaloneStage, wanted: str) -> None:
    fields = {"name": "guest", "password": "guest", "next": wanted}
    answer = ask(site.service.admin_url, "/console/sign-in", fields)
    assert answer.headers["location"] == "/console/"
    assert answer.headers["set-cookie"].count("=") < 8


def test_after_signing_in_the_page_that_was_wanted_comes(tour: Tour) -> None:
    carla = tour.visitor("carla", "branches?q=ein+Umlaut+%C3%A4&state=prepared")
    assert carla.page.url.endswith("/console/branches?q=ein+Umlaut+%C3%A4&state=prepared")
    assert carla.page.locator("#q").input_value() == "ein Umlaut ä"
    carla.require_peace()


def test_signing_out_ends_the_session_everywhere(tour: Tour) -> None:
    carla = tour.visitor("carla")
    (cookie,) = carla.page.context.cookies()
    carla.page.get_by_role("button", name="Sign out").click()
    carla.page.get_by_role("heading", name="Sign in").wait_for()
    assert carla.page.context.cookies() == []
    kept = f"{cookie['name']}={cookie['value']}"
    assert ask(tour.scene.service.admin_url, "/console/", Cookie=kept).status == 303


def test_a_session_ends_with_user_password_tag_or_token(site: StandaloneStage) -> None:
    url, editor, trail = site.service.admin_url, AccountEditor(site.database, "dtx"), OperatorLog(site.database, "dtx")
    editor.add_user("temp", b"first", ["operator"])
    cookie = sign_in(url, "temp", "first")
    assert ask(url, "/console/", Cookie=cookie).status == 200
    editor.set_password("temp", b"second")
    assert ask(url, "/console/", Cookie=cookie).status == 303
    cookie = sign_in(url, "temp", "second")
    editor.set_tags("temp", [])
    assert ask(url, "/console/", Cookie=cookie).status == 303
    editor.set_tags("temp", ["monitoring"])
    cookie = sign_in(url, "temp", "second")
    editor.set_tags("temp", ["administrator"])
    assert ask(url, "/console/audit", Cookie=cookie).status == 200, "a new role applies at once"
    editor.remove_user("temp")
    assert ask(url, "/console/", Cookie=cookie).status == 303
    cookie = sign_in(url, "", trail.make_token("visitor", OperatorRole.VIEWER, "test"))
    assert ask(url, "/console/", Cookie=cookie).status == 200
    trail.revoke_token("visitor")
    trail.make_token("visitor", OperatorRole.VIEWER, "test")
    assert ask(url, "/console/", Cookie=cookie).status == 303, "a session ends with its token"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 303),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_a_form_from_a_foreign_page_is_refused(site: StandaloneStage, headers: dict[str, str], status: int) -> None:
    """CSRF: every form needs the origin of dtx, the sign-in form as well."""
    fields = {"name": "guest", "password": "guest"}
    answer = ask(site.service.admin_url, "/console/sign-in", fields, **headers)
    assert (answer.status, "set-cookie" in answer.headers) == (status, status == 303)


def test_a_form_without_an_origin_is_refused(site: StandaloneStage) -> None:
    parts = urlsplit(site.service.admin_url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", "/console/sign-in", "name=guest&password=guest", {"Content-Type": FORM})
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("name", ["vera", "olga", "carla"])
def test_pages_and_forms_are_refused_to_other_roles(site: StandaloneStage, people: None, name: str) -> None:
    url, having = (
        site.service.admin_url,
        {"vera": OperatorRole.VIEWER, "olga": OperatorRole.OPERATOR, "carla": OperatorRole.COORDINATOR}[name],
    )
    AccountEditor(site.database, "dtx").grant(name, "/", configure=".*", write=".*", read=".*")
    cookie = sign_in(url, name, PASSWORDS[name])
    mark = mark_of(ask(url, "/console/", Cookie=cookie).text)
    for page, role in PAGES.items():
        if page != "live":  # its answer does not end
            status = ask(url, f"/console/{page}", Cookie=cookie).status
            assert (status == 403) != having.includes(role), (page, status)
            assert status < 500
    fields = {"mark": mark, "xid": str(new_xid()), "action": "rollback", "reason": "x", "stage": "do"}
    for number in ("1", "9" * 5000, "one"):
        for path, role in FORMS.items():
            if path != "sign-out":
                status = ask(url, f"/console/{path}", {**fields, "number": number}, Cookie=cookie).status
                assert (status == 403) != having.includes(role), (path, status)
                assert status < 500
    assert ask(url, "/console/sign-out", fields, Cookie=cookie).status == 303


@pytest.mark.parametrize("path", FORMS)
def test_a_form_without_the_mark_of_the_session_does_nothing(site: StandaloneStage, path: str) -> None:
    url = site.service.admin_url
    mine, other = sign_in(url, "guest", "guest"), sign_in(url, "guest", "guest")
    theirs = mark_of(ask(url, "/console/", Cookie=other).text)
    fields = {"xid": str(new_xid()), "action": "rollback", "reason": "x", "number": "1", "stage": "do"}
    for mark in ({}, {"mark": ""}, {"mark": "made up"}, {"mark": theirs}):
        assert ask(url, f"/console/{path}", {**fields, **mark}, Cookie=mine).status == 403
    assert ask(url, "/console/", Cookie=mine).status == 200


def test_a_link_from_another_site_finds_the_session(site: StandaloneStage, people: None, browser: Browser) -> None:
    """Browsers do not send the cookie with a link of another site. The page reloads itself, which sends the cookie."""
    carla = browser.visitor(site.service.admin_url).enter("carla", PASSWORDS["carla"])
    elsewhere = site.service.admin_url.replace("127.0.0.1", "localhost")
    carla.page.goto(f"{elsewhere}/healthz")
    carla.page.evaluate("(where) => { location.href = where; }", f"{site.service.admin_url}/console/audit")
    carla.page.get_by_role("heading", name="Audit").wait_for()


@pytest.mark.parametrize(
    "page", ["", "branches", "branches?q=nonsense:x:y", "nothing", "sign-in", "static/console.css", "static/nothing"]
)
def test_every_answer_has_security_headers_for_the_browser(site: StandaloneStage, page: str) -> None:
    cookie = sign_in(site.service.admin_url, "guest", "guest")
    headers = ask(site.service.admin_url, f"/console/{page}", Cookie=cookie if page != "sign-in" else "").headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in policy


def test_pages_are_not_cached_and_files_are(site: StandaloneStage) -> None:
    url = site.service.admin_url
    text = ask(url, "/console/", Cookie=sign_in(url, "guest", "guest"))
    assert text.headers["cache-control"] == "no-store"
    for path in re.findall(r'(?:href|src)="(/console/static/[^"]+)"', text.text):
        answer = ask(url, path)
        assert (answer.status, "immutable" in answer.headers["cache-control"]) == (200, True)
    assert ask(url, "/console/static/console.js?v=old").headers["cache-control"] == "no-cache"
    for path in ("../site.py", "..%2fsite.py", "console.css%00", "%2e%2e/rendering.py"):
        assert ask(url, f"/console/static/{path}").status in {303, 404}


def test_a_wrong_password_delays_only_the_same_user(site: StandaloneStage, people: None) -> None:
    url = site.service.admin_url
    for guess in ("a", "b"):
        assert ask(url, "/console/sign-in", {"name": "guest", "password": guess}).status == 401
    assert sign_in(url, "carla", PASSWORDS["carla"])


@pytest.mark.parametrize("page", ["branch?xid={}", "message?xid={}&position=0", "decide?xid={}&action=commit"])
@pytest.mark.parametrize("xid", [str(Xid(1, b"unknown")), "nonsense", "", "1:zz:", "1:" + "61" * 65 + ":", "\0"])
def test_a_missing_page_is_reported_on_a_page(site: StandaloneStage, page: str, xid: str) -> None:
    url = site.service.admin_url
    where = "/console/" + page.format(urlencode({"": xid})[1:])
    answer = ask(url, where, Cookie=sign_in(url, "guest", "guest"))
    assert answer.status in {400, 404, 422}
    assert answer.headers["content-type"].startswith("text/html")
    assert 'role="alert"' in answer.text
