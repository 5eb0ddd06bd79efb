"""Each form of the console is used with the keyboard alone: it is reached with Tab, filled, and sent.

The form of verdicts is in ``test_reconciliation``, that of an undelivered message in ``test_pages``.
"""

import contextlib
from collections.abc import Iterator

import pika
import pytest
from playwright.sync_api import expect

from dtx.admin.web.account_pages import CHANGES
from dtx.admin.web.topology_pages import TOPOLOGY_CHANGES
from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.auth.users import AccountEditor
from tests.servers.admin.web.test_pages import prepared
from tests.support.browser import Browser, Visitor
from tests.support.crash import StandaloneStage
from tests.support.operator import Operator

Steps = tuple[tuple[str, str], ...]
SEND = ("dialog .primary", "Enter")
REMOVE = ("dialog .danger", "Space")
SEARCH = ("main form .primary", "Enter")
REASON = ("#reason", "a reason")
FORMS: dict[str, tuple[str, Steps, str]] = {
    "sign-out": ("", ((".who form button", "Enter"), ("#name", "guest"), ("#password", "guest"), SEARCH), "Lease"),
    "make-user": (
        "users",
        (
            ("#add", "Enter"), ("#field-name", "kim"), ("#field-password", "p"), ("#field-repeat", "p"),
            ("dialog [value=operator]", "Space"), SEND,
        ),
        "User kim is added",
    ),
    "set-password": (
        "user?name=nina",
        (("#password", "Enter"), ("#field-password", "q"), ("#field-repeat", "q"), SEND),
        "The password of user nina is changed",
    ),
    "set-tags": (
        "user?name=nina", (("#tags", "Enter"), ("dialog [value=operator]", "Space"), SEND), "tags of user nina"
    ),
    "remove-user": ("user?name=nina", (("#remove", "Enter"), REMOVE), "User nina is removed"),
    "grant": (
        "user?name=nina",
        (("#grant", "Enter"), ("#field-vhost", "spare"), ("#field-write", "x"), SEND),
        "permissions of user nina in virtual host spare are set",
    ),
    "revoke": ("user?name=nina", (("#revoke-1", "Enter"), REMOVE), "User nina has no permissions"),
    "grant-topic": (
        "user?name=nina",
        (("#topic", "Enter"), ("#field-vhost", "/"), ("#field-exchange", "events"), ("#field-read", "x"), SEND),
        "topic permissions of user nina at exchange events",
    ),
    "revoke-topic": ("user?name=nina", (("#untopic-1", "Enter"), REMOVE), "may use every routing key"),
    "make-vhost": ("vhosts", (("#add", "Enter"), ("#field-name", "plant"), SEND), "Virtual host plant is added"),
    "remove-vhost": ("vhosts", (("main [id^=remove]:not(#remove-1)", "Enter"), REMOVE), "is removed"),
    "make-token": (
        "tokens",
        (("#add", "Enter"), ("#field-name", "probe"), ("#field-role", "op"), ("#field-lifetime", "1d"), SEND),
        "The token is added, with the role operator",
    ),
    "revoke-token": ("tokens", (("#remove-1", "Enter"), REMOVE), "is removed"),
    "declare-queue": (
        "queues",
        (
            ("#declare", "Enter"), ("#field-name", "news"), ("#field-type", "quorum"),
            ("#field-arguments", '{"x-delivery-limit": 3}'), SEND,
        ),
        "Queue news is declared",
    ),
    "purge-queue": ("queue?name=orders", (("#do-purge", "Enter"), REMOVE), "The ready messages of queue orders"),
    "delete-queue": (
        "queue?name=orders", (("#do-delete", "Enter"), ("[name=if_unused]", "Space"), REMOVE), "Queue orders is deleted"
    ),
    "declare-exchange": (
        "exchanges",
        (("#declare", "Enter"), ("#field-name", "logs"), ("#field-type", "topic"), ("[name=internal]", "Space"), SEND),
        "Exchange logs is declared",
    ),
    "delete-exchange": ("exchange?name=events", (("#do-delete", "Enter"), REMOVE), "Exchange events is deleted"),
    "bind": (
        "bindings",
        (
            ("#do-bind", "Enter"), ("#field-source", "events"), ("#field-kind", "an"),
            ("#field-destination", "amq.fanout"), ("#field-routing_key", "a.*"), SEND,
        ),
        "Exchange events is bound to exchange amq.fanout",
    ),
    "unbind": ("queue?name=orders", (("main [id^=unbind]", "Enter"), REMOVE), "The binding from exchange events"),
    "queue/messages": (
        "queue?name=orders", (("#do-messages", "Enter"), ("#count", "5"), SEARCH), "1 message of 1 ready"
    ),
    "publish": (
        "queue?name=orders",
        (("#do-publish", "Enter"), ("#payload", "hello"), ("[name=persistent]", "Space"), SEARCH),
        "The message is published",
    ),
    "connection/close": (
        "connections",
        (("main [id^=connection-]", "Enter"), ("#do-close", "Enter"), REASON, REMOVE),
        "is closed",
    ),
    "decide": (
        "branches?q=keys",
        (("main [id^=xid-]", "Enter"), ("#do-commit", "Enter"), REASON, ("dialog .primary", "Space"), REMOVE),
        "xa-heurcom",
    ),
    "bulk": (
        "branches?q=keys",
        (
            ("#tick-all", "Space"), ("form[action$=bulk] .bar button", "Enter"), ("#action", "commit"), REASON, SEARCH,
            ("main .danger", "Enter"),
        ),
        "1 of 1 done",
    ),
    "branches": ("branches", (("#q", "keys"), ("#narrow summary", "Space"), ("#owner", "guest"), SEARCH), "1 branch"),
    "queues": ("queues", (("#name", "ord"), ("#vhost", "/"), SEARCH), "1 queue of"),
    "exchanges": ("exchanges", (("#name", "even"), SEARCH), "1 exchange of"),
    "bindings": ("bindings", (("#destination", "orders"), ("#kind", "a q"), SEARCH), "2 bindings"),
    "consumers": ("consumers", (("#queue", "orders"), SEARCH), "No consumers."),
    "connections": ("connections", (("#user", "none"), SEARCH), "No connection matches."),
    "outcomes": ("outcomes", (("#xid", "1:61:"), ("#event", "committed"), SEARCH), "No branch matches."),
    "archive": ("archive", (("#xid", "1:61:"), SEARCH), "No message matches."),
    "audit": ("audit", (("#action", "none"), SEARCH), "No entry matches."),
    "users": ("users", (("#q", "nin"), SEARCH), "1 user"),
    "permissions": ("permissions", (("#user", "nina"), SEARCH), "1 permission"),
    "quotas": ("quotas", (("#scope", "virtual"), SEARCH), "virtual host"),
}  # fmt: skip
"""By the change, address or page of a form: the first page, the keys, and a text of the page afterwards."""


@pytest.fixture
def guest(site: StandaloneStage, browser: Browser) -> Iterator[Visitor]:
    """The administrator, with an object for each form."""
    editor = AccountEditor(site.database, "dtx")
    accounts = editor.read()
    for name in {"kim", "nina"} & accounts.users.keys():
        editor.remove_user(name)
    for name in accounts.vhosts - {"/"}:
        editor.remove_vhost(name)
    editor.add_vhost("spare")
    editor.add_user("nina", b"n", [])
    editor.grant("nina", "/", configure="", write="", read="")
    editor.grant_topic("nina", "/", "amq.topic", write="", read="")
    tokens = OperatorLog(site.database, "dtx")
    for token in tokens.tokens():
        tokens.revoke_token(token.name)
    tokens.make_token("t", OperatorRole.VIEWER, "guest")
    boss = Operator(site.service.admin_url)
    for path in ("queues/%2F/orders", "queues/%2F/news", "exchanges/%2F/events", "exchanges/%2F/logs"):
        boss.ask("DELETE", f"/api/{path}")
    site.declare("orders")
    site.fill("orders", b"1")
    boss.ask("PUT", "/api/exchanges/%2F/events", {"type": "topic"})
    boss.ask("POST", "/api/bindings/%2F/e/events/q/orders", {"routing_key": "order.*"})
    visitor = browser.visitor(site.service.admin_url).enter("guest", "guest")
    with contextlib.suppress(pika.exceptions.AMQPError), site.connected():
        yield visitor


def test_every_change_has_a_case() -> None:
    assert FORMS.keys() >= CHANGES.keys() | TOPOLOGY_CHANGES.keys()


@pytest.mark.parametrize("form", FORMS)
def test_each_form_works_with_the_keyboard_alone(site: StandaloneStage, guest: Visitor, form: str) -> None:
    page, steps, effect = FORMS[form]
    if "keys" in repr((page, steps)):
        for xid in site.states():
            Operator(site.service.admin_url).ask("POST", f"/dtx/v1/branches/{xid}/rollback", {"reason": "x"})
            Operator(site.service.admin_url).ask("POST", f"/dtx/v1/branches/{xid}/forget", {"reason": "x"})
        prepared(site, b"keys")
    guest.open(page)
    guest.press_keys(*steps)
    expect(guest.page.locator("dialog[open] .note.good, main").last).to_contain_text(effect)
    guest.require_peace()
