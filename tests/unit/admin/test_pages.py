"""How pages format numbers and names, and parse search fields."""

import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib import resources
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from fastapi import Query
from starlette.responses import Response

from dtx.admin.branch_filter import FilterForm
from dtx.admin.forms import AuditQuery
from dtx.admin.problems import Problem
from dtx.admin.rabbitmq_lists import Listed
from dtx.admin.web import broker_pages
from dtx.admin.web.account_pages import CHANGES, _typed
from dtx.admin.web.branch_pages import asked, filter_of
from dtx.admin.web.broker_pages import ListPage, NamedQuery, ObjectQuery, list_page, typed_object
from dtx.admin.web.live_updates import Sample, rates, take
from dtx.admin.web.page_request import Fields, frame, known_keys, local, reads
from dtx.admin.web.rendering import _environment_of_pages, _when, address, render
from dtx.admin.web.topology_pages import TopologyQuery, ask_to_change_topology
from dtx.telemetry import Metrics
from dtx.xa.xid import Xid


def fields(**values: str) -> dict[str, list[str]]:
    """Parsed fields of a search."""
    return asked(Fields(list(values.items())))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ({}, {}),
        ({"q": "  "}, {}),
        ({"q": " order "}, {"gtrid": "*order*"}),
        ({"q": "order-*"}, {"gtrid": "order-*"}),
        ({"q": "hex:6f72"}, {"gtrid": "hex:6f72"}),
        ({"q": "7:6f72:62"}, {"format_id": 7, "gtrid": "hex:6f72"}),
        ({"older": "2h", "stuck": "yes"}, {"older_than": 7200.0, "stuck": True}),
        ({"stuck": "no", "exchange": "(default)"}, {"stuck": False, "exchange": ""}),
        ({"exchange": "e", "queue": "q", "owner": "o"}, {"exchange": "e", "queue": "q", "owner": "o"}),
        ({"mark": "x", "stage": "do"}, {}),
        ({"vhost": " a ", "queue": "b "}, {"vhost": " a ", "queue": "b "}),
    ],
)  # fmt: skip
def test_a_search_means_a_filter_of_the_api(typed: dict[str, str], meant: dict[str, Any]) -> None:
    assert filter_of(fields(**typed)) == FilterForm(**meant)


@pytest.mark.parametrize("typed", [{"q": "7:zz:"}, {"older": "soon"}, {"format_id": "x"}, {"branch": "no id"}])
def test_meaningless_input_is_reported(typed: dict[str, str]) -> None:
    with pytest.raises(Problem) as caught:
        filter_of(fields(**typed))
    assert caught.value.status == 422


@reads("q")
def a_page(
    request: object,
    start: Annotated[int, Query(alias="from", ge=0)] = 0,
    vhost: str = "/",
) -> None:
    """The query of a page, in all forms."""


def another_page(visit: object, query: Annotated[AuditQuery, Query()]) -> None:
    """The query of another page, as a model."""


@pytest.mark.parametrize(
    ("page", "known"),
    [
        (a_page, {"q", "from", "vhost"}),
        (another_page, {"actor", "action", "subject", "since", "until", "limit", "cursor"}),
    ],
)
def test_the_known_query_keys_are_those_of_the_page(page: Callable[..., object], known: set[str]) -> None:
    assert known_keys(page) == known


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("/console/", "/console/"),
        ("/console/branches?q=a%20b&state=x", "/console/branches?q=a%20b&state=x"),
        ("/console/branches?q=ä", "/console/branches?q=%C3%A4"),
        ("", "/console/"),
        ("/console", "/console/"),
        ("//evil", "/console/"),
        ("https://evil/console/", "/console/"),
        ("/console/\\evil", "/console/"),
        ("/console/\n", "/console/"),
    ],
)
def test_the_way_after_signing_in_stays_here(wanted: str, found: str) -> None:
    assert local(wanted) == found


def test_addresses_omit_empty_values_and_escape_others() -> None:
    assert address("branches", q="a b&c", state=["x", "y"], owner="", cursor=None) == (
        "/console/branches?q=a+b%26c&state=x&state=y"
    )


def test_nothing_reaches_a_page_unescaped() -> None:
    context = {**frame(None), "next": '"><script>', "name": "\u202eadmin\0\x1b", "problem": "<b>", "ended": False}
    text = bytes(render("sign-in.html", context).body).decode()
    assert "<script>" not in text.replace('<script src="/console', "")
    assert "&lt;b&gt;" in text
    assert not {"\u202e", "\0", "\x1b"} & set(text)


@pytest.mark.parametrize(
    ("given", "said"), [({}, "No client is connected."), ({"user": "olga"}, "No connection matches.")]
)
def test_an_empty_connection_list_reports_whether_a_search_applied(given: dict[str, str], said: str) -> None:
    found = ListPage(
        where="connections", rows=[], count=0, total=0, page=1, pages=1, given=given, sort="", reverse=False
    )
    context = {**frame(None), "found": found, "connections": [], "branches": [], "scans": [], "missing": []}
    text = bytes(render("connections.html", context).body).decode()
    assert said in text
    assert "did not answer" not in text
    text = bytes(render("connections.html", context | {"missing": ["host:1", "host:2"]}).body).decode()
    assert "did not answer, so their branches are missing: host:1, host:2" in text


def test_rates_are_those_of_the_last_minute() -> None:
    bounds = {0.001: 0.0, 0.01: 0.0, float("inf"): 0.0}
    samples = [
        Sample(0.0, {"commit": 1_000_000.0}, {"commit": bounds}),
        Sample(40.0, {"commit": 1_000_000.0}, {"commit": bounds}),
        Sample(100.0, {"commit": 1_000_120.0}, {"commit": {0.001: 60.0, 0.01: 119.0, float("inf"): 120.0}}),
    ]
    found = {rate.operation: rate for rate in rates(samples)}
    assert (found["commit"].per_second, found["commit"].median, found["commit"].p99) == (2.0, 0.001, 0.01)
    assert (found["prepare"].per_second, found["prepare"].median) == (0.0, None)
    assert {rate.per_second for rate in rates(samples[:1])} == {0.0}
    far_apart = [samples[0], Sample(500.0, {"commit": 1_000_500.0}, {})]
    assert next(rate for rate in rates(far_apart) if rate.operation == "commit").per_second == 1.0


def test_a_value_above_every_bound_counts_as_the_last() -> None:
    samples = [Sample(0.0, {}, {}), Sample(1.0, {"commit": 1.0}, {"commit": {30.0: 0.0, float("inf"): 1.0}})]
    assert next(rate for rate in rates(samples) if rate.operation == "commit").p99 == 30.0


def test_samples_are_those_of_the_metrics() -> None:
    metrics = Metrics()
    for answer in ("xa-ok", "xa-ok", "541"):
        metrics.operation_done("commit", answer, 0.003)
    metrics.loop_lagged(0.02)
    sample = take(metrics, 1.0)
    assert (sample.lag[0.01], sample.lag[0.025]) == (0.0, 1.0)
    assert sample.calls == {"commit": 3.0}
    assert sample.buckets["commit"][0.0025] == 0.0
    assert sample.buckets["commit"][float("inf")] == 3.0


def test_a_time_is_shown_in_utc_and_precise_for_machines() -> None:
    shown = str(_when(datetime(2026, 1, 31, 12, 0, 0, 123_456, tzinfo=UTC)))
    assert shown.startswith('<time datetime="2026-01-31T12:00:00.123Z">2026-01-31')


def test_a_large_number_has_spaces_that_are_seen_as_such() -> None:
    page = _environment_of_pages.from_string("{{ 1234567 | number }}")
    assert page.render() == "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567"


ROWS = [{"name": f"queue {number}", "size": number % 3} for number in range(120)]
LISTED = Listed(ROWS, dict, ("name",))


async def test_a_page_of_a_list_has_rows_and_total() -> None:
    found = await list_page(
        "queues", LISTED, NamedQuery(vhost="/", page=2, sort="size", sort_reverse=True, name="UEUE 1")
    )
    assert (found.count, found.total, found.page, found.pages) == (31, 120, 1, 1)
    assert [row["size"] for row in found.rows] == sorted((row["size"] for row in found.rows), reverse=True)
    assert found.at(1) == "/console/queues?vhost=%2F&name=UEUE+1&sort=size&sort_reverse=yes"
    assert found.by("size", descending=True) == "/console/queues?vhost=%2F&name=UEUE+1&sort=size"
    assert found.by("name", descending=False) == "/console/queues?vhost=%2F&name=UEUE+1&sort=name"


async def test_a_page_after_the_end_shows_the_last_one() -> None:
    found = await list_page("queues", LISTED, NamedQuery(page=99))
    assert (len(found.rows), found.page, found.pages, found.rows[-1]["name"]) == (20, 3, 3, "queue 99")
    assert found.at(2) == "/console/queues?page=2"


async def test_a_list_is_not_sorted_by_a_field_it_lacks() -> None:
    with pytest.raises(Problem, match="the rows have no field 'weight'"):
        await list_page("queues", LISTED, NamedQuery(sort="weight"))


@pytest.mark.parametrize(("text", "found"), [("", {}), ('{"priority": 3}', {"priority": 3})])
def test_typed_properties_are_an_object_of_json(text: str, found: dict[str, int]) -> None:
    assert typed_object("properties", text) == found


@pytest.mark.parametrize(
    ("text", "reason"), [("[1]", "no object of JSON"), ("{", "no JSON"), ("[" * 100_000, "no JSON")]
)
def test_typed_properties_that_are_no_object_are_refused(text: str, reason: str) -> None:
    with pytest.raises(Problem, match=f"properties: {reason}"):
        typed_object("properties", text)


def test_a_field_of_several_lines_keeps_its_line_ends() -> None:
    page = _environment_of_pages.from_string("{{ text | typed }} {{ text }}")
    assert page.render(text="<a>\n\tb") == "&lt;a&gt;\n\tb &lt;a&gt;\\n\\tb"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.0, "0"), (0.02, "0.02"), (2.46, "2.5"), (9.96, "10"), (12345.6, "12\N{NARROW NO-BREAK SPACE}346")],
)
def test_a_rate_has_few_digits_but_is_not_zero(rate: float, shown: str) -> None:
    assert _environment_of_pages.from_string("{{ rate | rate }}").render(rate=rate) == shown


class _Forms(HTMLParser):
    """The last form of a page: the query of its address, and the values of its inputs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, str | None] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self.sent = dict(parse_qsl(urlsplit(given["action"] or "").query))
        elif tag == "input":
            self.sent[str(given["name"])] = given.get("value")


ODD = ' a\u202eb\x1b"<\r\n'
QUEUE = {"name": ODD, "vhost": ODD, "messages_ready": 1, "messages_unacknowledged": 0, "consumers": 0}


def exact_names(page: Response, *names: str) -> None:
    """A name that is escaped for people would be that of another object."""
    text = bytes(page.body).decode()
    sent = _Forms(text).sent
    assert {name: sent[name] for name in names} == dict.fromkeys(names, ODD)
    assert "a\\u202eb" in text, "text for people is escaped"


@pytest.mark.parametrize(
    ("template", "context", "names"),
    [
        ("queue-messages.html", {"queue": QUEUE, "count": "1", "most": 50, "messages": None}, ("vhost", "name")),
        (
            "publish.html",
            {"vhost": ODD, "exchange": ODD, "given": {"routing_key": ODD}, "back": "", "unrouted": False},
            ("vhost", "exchange", "routing_key"),
        ),
        (
            "bulk.html",
            {"fields": {"vhost": [ODD]}, "search": {"vhost": [ODD], "queue": [ODD]}, "chosen": [], "answer": None,
             "action": "commit", "actions": (), "reason": "", "most": 1, "everything": False},
            ("vhost", "queue"),
        ),
        (
            "decide.html",
            {"xid": Xid(1, b"a"), "vhost": ODD, "action": "redirect", "headline": ODD, "branch": None, "message": None,
             "given": {"exchange": ODD}, "forecast": None, "conflict": False},
            ("vhost", "exchange"),
        ),
    ],
)  # fmt: skip
def test_a_form_sends_exact_names(template: str, context: dict[str, Any], names: tuple[str, ...]) -> None:
    exact_names(render(template, {**frame(None), "problem": None, **context}), *names)


async def test_a_form_of_a_change_sends_exact_names() -> None:
    """Browsers change line ends in fields, so the names are in the address."""
    view: Any = SimpleNamespace(
        queue=lambda *_: SimpleNamespace(into=[]), queue_row=lambda _: QUEUE, users=SimpleNamespace(vhosts=[])
    )
    visit: Any = SimpleNamespace(
        who=SimpleNamespace(is_token=False, require=lambda _: None),
        show=lambda template, _, **context: render(template, {**frame(None), **context}),
    )
    query = TopologyQuery(action="purge-queue", vhost=ODD, name=ODD)
    exact_names(await ask_to_change_topology(visit, view, query), "vhost", "name")


def test_all_fields_have_exact_values() -> None:
    found = []
    for file in resources.files("dtx.admin.web").joinpath("templates").iterdir():
        if file.name != "sign-in.html":
            found += re.findall(r' (?:value|data-copy)="\{\{ (.*?) \}\}"', file.read_text("utf-8"))
    assert len(found) > 50
    assert [value for value in found if not value.endswith("| e")] == []


@pytest.mark.parametrize(("action", "name"), [("make-vhost", "name"), ("grant", "vhost"), ("grant-topic", "exchange")])
def test_a_typed_name_keeps_its_blanks(action: str, name: str) -> None:
    assert _typed(CHANGES[action], Fields([(name, " a "), ("reason", " b ")]))[name] == " a "


def test_texts_of_a_client_are_cut() -> None:
    """Clients send them before they log in."""
    page = _environment_of_pages.from_string('{% import "parts.html" as parts %}{{ parts.product(found) }}')
    shown = page.render(found=dict.fromkeys(("product", "version", "connection_name"), "x" * 100_000))
    assert len(shown) < 1000
    assert "x" * 100 + "…" in shown
    assert page.render(found={"product": "a", "version": 1}).strip() == "a 1"


async def test_large_messages_are_shown_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def form(*_: object) -> Fields:
        return Fields([("count", "1")])

    async def messages(view: object, vhost: str, *_: object) -> list[dict[str, Any]]:
        assert vhost == " a"
        headers = {f"{number}": "\n" * 1000 for number in range(50)}
        return [{"payload": "", "payload_bytes": 0, "properties": {"headers": headers}}]

    shown: list[dict[str, Any]] = []

    def show(*_: object, messages: list[dict[str, Any]], **__: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        shown.extend(messages)

    monkeypatch.setattr(broker_pages, "read_form", form)
    monkeypatch.setattr("dtx.admin.routes_rabbitmq_changes.take_messages", messages)
    query = ObjectQuery(vhost=" a", name="q")
    view: Any = SimpleNamespace(queue=lambda *_: None, queue_row=lambda _: {})
    await broker_pages.peek(SimpleNamespace(is_disconnected=None), SimpleNamespace(show=show), view, query)  # type: ignore[arg-type]
    assert {len(text) for _, text in shown[0]["properties"]} == {201}
