"""The pages of standalone mode's broker, in a browser."""

import contextlib
import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import quote, urlencode

import pika
import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from playwright.sync_api import Locator, expect

from dtx.auth.users import AccountEditor
from tests.servers.admin.web.test_account_pages import send
from tests.servers.admin.web.test_login import OBJECTS, ask, mark_of, sign_in
from tests.support.browser import Browser, Visitor
from tests.support.crash import Stage, StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN
from tests.support.tour import Tour


@pytest.fixture(autouse=True)
def virtual_host(site: StandaloneStage) -> Iterator[None]:
    """Every test has the queues that it makes, and no others."""
    yield
    boss = Operator(site.service.admin_url)
    for queue in boss.get("/api/queues"):
        boss.ask("DELETE", f"/api/queues/%2F/{quote(queue['name'])}")


@pytest.fixture
def guest(site: StandaloneStage, browser: Browser) -> Visitor:
    """The administrator with all permissions."""
    return browser.visitor(site.service.admin_url).enter("guest", "guest")


@contextlib.contextmanager
def channel_of(site: StandaloneStage) -> Iterator[BlockingChannel]:
    with site.connected() as connection:
        yield connection.channel()


def names(visitor: Visitor) -> list[str]:
    """The names of the listed rows."""
    return [text.strip() for text in visitor.page.locator("#live-list tbody th").all_inner_texts()]


def audited(site: StandaloneStage, action: str) -> list[tuple[str, str, str]]:
    """User, subject and result of an action in the audit log, the latest first."""
    found = Operator(site.service.admin_url).get("/dtx/v1/audit", action=action)
    return [(line["actor"], line["subject"], line["result"]) for line in found["lines"]]


def test_queues_are_listed_sorted_and_filtered(site: StandaloneStage, guest: Visitor) -> None:
    with channel_of(site) as channel:
        for number in range(52):
            channel.queue_declare(f"queue-{number:02}", durable=True)
        for number in range(3):
            channel.basic_publish("", "queue-30", b"%d" % number)
        channel.basic_publish("", "queue-51", b"x")
        guest.open("queues")
        expect(guest.page.locator("caption")).to_have_text("52 queues, page 1 of 2")
        assert names(guest) == [f"queue-{number:02}" for number in range(50)]
        guest.follow("Next page")
        assert names(guest) == ["queue-50", "queue-51"]
        guest.page.get_by_role("columnheader", name="Ready", exact=True).get_by_role("link").click()
        expect(guest.page.locator("th[aria-sort=descending]")).to_contain_text("Ready")
        assert names(guest)[:2] == ["queue-30", "queue-51"]
        guest.page.get_by_label("Name contains").fill("UE-3")
        guest.follow("Search", "button")
        expect(guest.page.locator("caption")).to_have_text("10 queues of 52")
        assert names(guest)[0] == "queue-30"
        for _ in range(60):
            channel.basic_publish("", "queue-31", b"y")
        row = guest.page.locator("tr", has_text="queue-31")
        expect(row.locator("td[data-label=Ready]")).to_have_text("60")
        expect(row.locator("td[data-label='Published/s']")).not_to_have_text("0", timeout=20_000)
        guest.page.get_by_role("columnheader", name="Published/s").get_by_role("link").click()
        expect(guest.page.locator("th[aria-sort=descending]")).to_contain_text("Published/s")
    assert guest.open("queues?page=999").ok
    assert names(guest) == ["queue-50", "queue-51"], "the list has become shorter: its last page"
    assert guest.open("queues?sort=weight").status == 422
    assert guest.open("queues?vhost=nowhere").status == 404
    guest.open("queues?name=no+such+queue")
    assert "No queue matches." in guest.text()
    guest.require_peace()


def test_messages_are_published_and_shown(site: StandaloneStage, guest: Visitor) -> None:
    """The audit log has each view of messages; they stay in the queue."""
    site.declare("orders")
    guest.open("queue?name=orders")
    guest.follow("Publish a message…")
    assert guest.page.get_by_label("Routing key").input_value() == "orders"
    guest.page.get_by_label("Body").fill("<b>first</b>\nsecond")
    guest.page.get_by_label("Properties").fill('{"headers": {"tries": 2}')
    guest.follow("Publish message", "button")
    expect(guest.page.get_by_role("alert")).to_contain_text("properties: no JSON")
    assert site.count("orders") == 0
    guest.page.get_by_label("Properties").fill('{"headers": {"tries": 2}}')
    guest.follow("Publish message", "button")
    expect(guest.page.locator(".note.good")).to_contain_text("The message is published")
    guest.follow("Show messages…")
    guest.page.get_by_label("Number of messages").fill("5")
    guest.follow("Show messages", "button")
    said = guest.text()
    assert "1 message of 1 ready" in said
    assert "headers.tries" in said
    assert guest.page.locator("pre.body").inner_text() == "<b>first</b>\\nsecond"
    assert audited(site, "get")[0] == ("guest", "/ orders", "1 messages")
    ((body, properties, redelivered),) = site.take("orders")
    assert (body, properties.delivery_mode, properties.headers) == (b"<b>first</b>\nsecond", 2, {"tries": 2})
    assert redelivered
    guest.open("publish?routing_key=nowhere")
    guest.follow("Publish message", "button")
    expect(guest.page.get_by_role("alert")).to_contain_text("No queue has taken the message")
    guest.require_peace()


def test_a_queue_is_purged_and_deleted_after_a_confirmation(site: StandaloneStage, guest: Visitor) -> None:
    site.declare("orders")
    site.fill("orders", b"1", b"2")
    guest.open("queue?name=orders")
    for answer, left in (("Cancel", 2), ("Purge queue", 0)):
        guest.page.get_by_role("link", name="Purge…").click()
        dialog = guest.page.locator("dialog[open]")
        expect(dialog).to_contain_text(f"Ready messages that are lost: {max(left, 2)}")
        dialog.get_by_role("link" if answer == "Cancel" else "button", name=answer).click()
        if not left:
            expect(guest.page.locator("main .note.good")).to_contain_text(
                "The ready messages of queue orders are removed"
            )
        site.wait_for_count("orders", left)
    site.fill("orders", b"3")
    guest.page.get_by_role("link", name="Delete queue…").click()
    dialog = guest.page.locator("dialog[open]")
    expect(dialog).to_contain_text("Messages that are lost: 1 ready")
    dialog.get_by_label("Only if it has no ready messages").check()
    dialog.get_by_role("button", name="Delete queue").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not empty")
    assert dialog.get_by_label("Only if it has no ready messages").is_checked()
    dialog.get_by_label("Only if it has no ready messages").uncheck()
    dialog.get_by_role("button", name="Delete queue").click()
    expect(guest.page.locator("main .note.good")).to_contain_text("Queue orders is deleted")
    assert guest.open("queue?name=orders").status == 404
    assert [result for _, _, result in audited(site, "purge-queue")] == ["done"]
    assert [result[:3] for _, _, result in audited(site, "delete-queue")[:2]] == ["don", "412"]
    guest.require_peace()


def test_a_change_needs_the_permissions_of_the_user(tour: Tour, site: StandaloneStage) -> None:
    """An operator's tag permits the action, and the permissions of the user its queues, as for a client."""
    site.declare("orders")
    AccountEditor(site.database, "dtx").grant("olga", "/", configure="", write="", read="other")
    olga = tour.visitor("olga", "queue?name=orders")
    olga.follow("Show messages…")
    olga.follow("Show messages", "button")
    expect(olga.page.get_by_role("alert")).to_contain_text("access to queue 'orders' in vhost '/' refused")
    olga.open("queue?name=orders")
    olga.page.get_by_role("link", name="Delete queue…").click()
    olga.page.locator("dialog .danger").click()
    expect(olga.page.locator("dialog [role=alert]")).to_contain_text("403")
    assert audited(site, "delete-queue")[0][2].startswith("403")
    vera = tour.visitor("vera", "queue?name=orders")
    assert "Messages and changes need the role operator." in vera.text()
    assert vera.page.get_by_role("link", name="Purge…").count() == 0


def test_a_viewer_changes_nothing_with_a_form(tour: Tour, site: StandaloneStage) -> None:
    site.declare("orders")
    site.fill("orders", b"1")
    url = site.service.admin_url
    boss = Operator(url)
    boss.ask("POST", "/api/bindings/%2F/e/amq.topic/q/orders", {})
    cookie = sign_in(url, "vera", "look-4-vera")
    mark = mark_of(ask(url, "/console/", Cookie=cookie).text)
    fields = {"mark": mark, "count": "1", "routing_key": "orders", "payload": "x"}
    for action, place in OBJECTS.items():
        fields["type"] = "topic" if action == "declare-exchange" else "classic"
        assert ask(url, f"/console/topology?action={action}&vhost=/&{place}", fields, Cookie=cookie).status == 403
    for path in ("queue/messages?name=orders", "publish"):
        assert ask(url, f"/console/{path}", fields, Cookie=cookie).status == 403
    assert site.count("orders") == 1
    assert [row["name"] for row in boss.get("/api/queues")] == ["orders"]
    assert len(boss.get("/api/queues/%2F/orders/bindings")) == 2
    assert not [row for row in boss.get("/api/exchanges") if row["name"] == "new"]
    assert [audited(site, action)[0][0] for action in (*OBJECTS, "get", "publish")] == ["vera"] * 9


def test_a_form_changes_exactly_the_named_queue(site: StandaloneStage) -> None:
    """The name with a bidirectional mark, and not the name that people see."""
    url = site.service.admin_url
    for name in ("a\u202eb", "a\\u202eb"):
        site.declare(name)
        site.fill(name, b"1")
    cookie = sign_in(url, "guest", "guest")
    query = urlencode({"action": "purge-queue", "vhost": "/", "name": "a\u202eb"})
    page = ask(url, f"/console/topology?{query}", Cookie=cookie).text
    (target,) = map(unescape, re.findall(r'action="(/console/topology[^"]*)"', page))
    fields = {"mark": mark_of(page)}
    assert ask(url, target.replace("%2F", "+%2F"), fields, Cookie=cookie).status == 404
    assert ask(url, target, fields, Cookie=cookie).status == 303
    assert [site.count(name) for name in ("a\u202eb", "a\\u202eb")] == [0, 1]


def test_names_with_line_ends_are_sent_exactly(postgres: PostgresServer, browser: Browser) -> None:
    """Browsers change line ends in fields. Only an earlier version of dtx could declare such a queue."""
    with StandaloneStage(postgres, options=ADMIN) as stage:
        stage.declare("a-b")
        stage.fill("a-b", b"1")
        stage.service.stop()
        with psycopg.connect(stage.database) as connection:
            connection.execute("UPDATE dtx.queue SET name = %s", [b"a\nb"])
        stage.service.start()
        guest = browser.visitor(stage.service.admin_url).enter("guest", "guest", "queues")
        guest.follow("a\\nb")
        guest.follow("Publish a message…")
        expect(guest.page.get_by_role("alert")).to_contain_text("a routing key with line ends: use the API")
        guest.page.go_back()
        guest.follow("Show messages…")
        guest.follow("Show messages", "button")
        assert "1 message of 1 ready" in guest.text()
        guest.page.go_back()
        guest.open("queue?name=a%0Ab")
        guest.page.get_by_role("link", name="Delete queue…").click()
        guest.page.locator("dialog .danger").click()
        expect(guest.page.locator("main .note.good")).to_contain_text("Queue a\\nb is deleted")
        assert stage.queues() == []


def test_objects_are_declared_bound_and_deleted(site: StandaloneStage, guest: Visitor) -> None:
    """A refusal is shown in the form, which keeps the fields. The audit log has each change."""
    boss = Operator(site.service.admin_url)
    guest.open("queues")
    dialog = open_form(guest, "Declare queue…")
    dialog.get_by_label("Name").fill("orders")
    dialog.get_by_label("Type").select_option("quorum")
    dialog.get_by_label("Durable").uncheck()
    dialog.get_by_label("Arguments").fill('{"x-delivery-limit": 5')
    assert "422: arguments: no JSON" in send(guest)
    dialog.get_by_label("Arguments").fill('{"x-delivery-limit": 5}')
    assert "412: invalid property 'non-durable' for queue 'orders'" in send(guest)
    assert dialog.get_by_label("Arguments").input_value() == '{"x-delivery-limit": 5}'
    dialog.get_by_label("Durable").check()
    assert send(guest) == "Queue orders is declared."
    row = boss.get("/api/queues/%2F/orders")
    assert (row["type"], row["durable"], row["auto_delete"]) == ("quorum", True, False)
    assert row["arguments"] == {"x-queue-type": "quorum", "x-delivery-limit": 5}
    guest.open("exchanges")
    dialog = open_form(guest, "Declare exchange…")
    dialog.get_by_label("Name").fill("events")
    dialog.get_by_label("Type").select_option("topic")
    assert send(guest) == "Exchange events is declared."
    dialog = open_form(guest, "Add binding…")
    dialog.get_by_label("Name").fill("nothing")
    dialog.get_by_label("Routing key").fill("order.*")
    dialog.get_by_label("Arguments").fill('{"n": 1}')
    assert "404: no queue 'nothing' in vhost '/'" in send(guest)
    dialog.get_by_label("Name").fill("orders")
    assert send(guest) == "Exchange events is bound to queue orders."
    assert guest.page.locator("h1").inner_text() == "events"
    guest.follow("orders")
    dialog = open_form(guest, "Remove binding order.* to orders")
    assert "n: 1" in dialog.inner_text()
    assert send(guest) == "The binding from exchange events to queue orders is removed."
    assert guest.page.locator("h1").inner_text() == "orders"
    assert len(boss.get("/api/queues/%2F/orders/bindings")) == 1
    guest.open("exchange?name=events")
    open_form(guest, "Delete exchange…")
    assert send(guest) == "Exchange events is deleted."
    assert guest.open("exchange?name=events").status == 404
    assert guest.open("exchange?name=amq.topic").ok
    assert guest.page.get_by_role("link", name="Delete exchange…").count() == 0
    for action in ("declare-queue", "declare-exchange", "bind", "unbind", "delete-exchange"):
        assert audited(site, action)[0][2] == "done"
    guest.require_peace()


def open_form(visitor: Visitor, link: str) -> Locator:
    """Open the dialogue of a form."""
    visitor.page.get_by_role("link", name=link).click()
    dialog = visitor.page.locator("dialog[open]")
    dialog.wait_for()
    return dialog


def test_exchanges_show_their_bindings(site: StandaloneStage, guest: Visitor) -> None:
    with channel_of(site) as channel:
        channel.exchange_declare("events", "topic", durable=True, arguments={"alternate-exchange": "amq.fanout"})
        channel.queue_declare("orders")
        for number in range(25):
            channel.queue_bind("orders", "events", f"key.{number:02}")
        channel.exchange_bind("events", "amq.direct", "all", arguments={"why": "test"})
        channel.basic_consume("orders", lambda *_: None, consumer_tag="reader")
        guest.open("exchanges")
        guest.follow("events")
        assert "alternate-exchange" in guest.text()
        expect(guest.page.locator("#live-source caption")).to_contain_text("25 bindings")
        expect(guest.page.locator("#live-destination")).to_contain_text("why: test")
        guest.follow("All bindings from this exchange")
        assert names(guest) == [f"key.{number:02}" for number in range(25)]
        guest.page.get_by_role("columnheader", name="Routing key").get_by_role("link").click()
        guest.page.get_by_role("columnheader", name="Routing key").get_by_role("link").click()
        expect(guest.page.locator("th[aria-sort=descending]")).to_contain_text("Routing key")
        assert names(guest)[0] == "key.24"
        guest.open("bindings?source=events&destination=orders&vhost=/")
        assert len(names(guest)) == 25
        guest.open("bindings?destination=events&kind=exchange")
        assert names(guest) == ["all"]
        guest.open("queue?name=orders")
        expect(guest.page.locator("#live-bindings caption")).to_contain_text("26 bindings")
        expect(guest.page.locator("#live-consumers")).to_contain_text("reader")
        guest.open("consumers?queue=orders")
        assert names(guest) == ["reader"]
        guest.follow("127.0.0.1")
        expect(guest.page.locator("#live-clients tbody tr")).to_have_count(1)
        channel.exchange_delete("events")
    guest.require_peace()


def test_connections_show_product_and_heartbeat(site: StandaloneStage, guest: Visitor) -> None:
    asked = pika.URLParameters(f"{site.service.url()}?heartbeat=77")
    asked.client_properties = {"connection_name": "billing worker"}
    with contextlib.closing(pika.BlockingConnection(asked)) as connection, site.connected():
        connection.channel().basic_qos(prefetch_count=9)
        guest.open("connections")
        expect(guest.page.locator("#live-clients caption")).to_have_text("2 connections")
        row = guest.page.locator("#live-clients tbody tr", has_text="billing worker")
        expect(row).to_contain_text("Pika Python Client Library")
        expect(row.locator("td[data-label=Heartbeat]")).to_have_text("77s")
        guest.page.get_by_role("columnheader", name="Heartbeat").get_by_role("link").click()
        expect(guest.page.locator("th[aria-sort]")).to_contain_text("Heartbeat")
        expect(guest.page.locator("#live-clients tbody tr").first).to_contain_text("billing worker")
        with guest.page.expect_navigation():
            row.get_by_role("link").first.click()
        assert "billing worker" in guest.text()
        expect(guest.page.locator("#live-channels td[data-label=Prefetch]")).to_have_text("9")
    guest.require_peace()


def test_alongside_a_broker_its_own_management_shows_queues(
    shared_rabbitmq: RabbitNode, postgres: PostgresServer, browser: Browser
) -> None:
    """Alongside, RabbitMQ's management has these pages: dtx's paths answer 404 with a sentence that says so."""
    with Stage(shared_rabbitmq, postgres, options=ADMIN) as stage:
        tour = Tour(stage, browser)
        tour.populate()
        vera = tour.visitor("vera", "connections")
        assert "Product" not in vera.text()
        assert vera.page.get_by_role("link", name="Queues").count() == 0
        for page in ("queues", "queue?name=x", "exchanges", "bindings", "consumers", "publish", "topology?action=bind"):
            assert vera.open(page).status == 404
            assert "use the management API of RabbitMQ" in vera.text()
