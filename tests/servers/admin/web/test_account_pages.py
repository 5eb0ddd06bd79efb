"""Pages about users, virtual hosts, permissions, tokens and quotas."""

import json
import re

import pytest
from playwright.sync_api import Locator, expect

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.auth.users import AccountEditor, User
from tests.servers.admin.web.test_login import ask, mark_of, sign_in
from tests.servers.admin.web.test_pages import prepared
from tests.support.browser import Browser, Visitor
from tests.support.crash import StandaloneStage
from tests.support.tour import PASSWORDS, Tour


def dialogue(visitor: Visitor, link: str, **fields: str) -> None:
    """Open the dialogue of a change and fill its fields."""
    visitor.page.get_by_role("link", name=link).first.click()
    visitor.page.locator("dialog[open]").wait_for()
    for name, value in fields.items():
        visitor.page.locator(f"dialog #field-{name}").fill(value)


def tag(visitor: Visitor, name: str) -> Locator:
    """The checkbox of a tag."""
    return visitor.page.locator(f"dialog input[value={name}]")


def send(visitor: Visitor) -> str:
    """Send the form of the dialogue. Returns the notice, or the refusal."""
    visitor.page.evaluate(
        "() => document.querySelectorAll('main .note.good, dialog [role=alert]').forEach((note) => note.remove())"
    )
    visitor.page.locator("dialog button:is(.primary, .danger)").click()
    told = visitor.page.locator("main .note.good, dialog [role=alert]").first
    told.wait_for()
    visitor.seen.append(visitor.page.content())
    return told.inner_text()


def stored(site: StandaloneStage, name: str) -> User | None:
    """A user in the database."""
    return AccountEditor(site.database, "dtx").read().users.get(name)


def test_a_user_is_added_changed_and_removed(tour: Tour, site: StandaloneStage) -> None:
    """Each change is that of the API, with audit log. No page has a password."""
    carla = tour.visitor("carla", "users")
    dialogue(carla, "Add user", name="nina", password="n1na-secret", repeat="n1na-secrets")
    tag(carla, "operator").check()
    assert send(carla) == "422: the two passwords are different"
    assert stored(site, "nina") is None
    carla.page.locator("dialog #field-password").fill("n1na-secret")
    carla.page.locator("dialog #field-repeat").fill("n1na-secret")
    assert "User nina is added." in send(carla)
    dialogue(carla, "Set permissions", configure="", write="^out$")
    assert send(carla) == "The permissions of user nina in virtual host / are set."
    dialogue(carla, "Set topic permissions", exchange="events", read="^a[.]")
    assert "at exchange events" in send(carla)
    dialogue(carla, "Change tags")
    tag(carla, "monitoring").check()
    tag(carla, "operator").uncheck()
    assert "The tags of user nina are changed." in send(carla)
    nina = stored(site, "nina")
    assert nina is not None
    assert nina.tags == {"monitoring"}
    assert nina.grants["/"] == ("", "^out$", ".*")
    assert nina.topics["/", "events"] == (".*", "^a[.]")
    dialogue(carla, "Change topic permissions", write="^b")
    assert carla.page.locator("dialog #field-read").input_value() == "^a[.]"
    send(carla)
    dialogue(carla, "Remove topic permissions")
    assert "every routing key" in send(carla)
    dialogue(carla, "Revoke permissions")
    assert "has no permissions" in send(carla)
    dialogue(carla, "Change password", password="(", repeat="(")
    send(carla)
    dialogue(carla, "Remove user")
    carla.page.locator("dialog [data-dialog-close]").click()
    assert stored(site, "nina") is not None, "Cancel changes nothing"
    dialogue(carla, "Remove user")
    carla.page.locator("dialog #reason").fill("left")
    assert send(carla) == "User nina is removed. Number of its branches in doubt, which stay: 0."
    assert stored(site, "nina") is None
    lines = OperatorLog(site.database, "dtx").audit_lines(subject="nina")
    assert [(line.action, line.actor) for line in reversed(lines)] == [
        (action, "carla")
        for action in (
            "make-user", "grant", "grant-topic", "set-tags", "grant-topic", "revoke-topic", "revoke", "set-password",
            "remove-user",
        )
    ]  # fmt: skip
    assert lines[0].reason == "left"
    assert "n1na" not in json.dumps([line.detail for line in lines])
    assert not [text for text in carla.seen if "n1na" in text]
    carla.require_peace()


def test_a_pattern_that_cannot_be_used_is_reported(tour: Tour, site: StandaloneStage) -> None:
    carla = tour.visitor("carla", "user?name=vera")
    dialogue(carla, "Set permissions", write="(")
    assert send(carla).startswith("409: the pattern '(' of --write cannot be used")
    assert carla.page.locator("dialog #field-write").input_value() == "("
    vera = stored(site, "vera")
    assert vera is not None
    assert not vera.grants


@pytest.mark.parametrize("action", ["make-vhost", "make-token", "remove-user", "make-user"])
def test_a_change_without_the_role_is_refused_and_recorded(site: StandaloneStage, people: None, action: str) -> None:
    """Roles are checked before effects; the audit log has refused attempts, too."""
    url = site.service.admin_url
    cookie = sign_in(url, "olga", PASSWORDS["olga"])
    fields = {"mark": mark_of(ask(url, "/console/", Cookie=cookie).text), "role": "viewer", "reason": "because"}
    before = AccountEditor(site.database, "dtx").read()
    answer = ask(url, f"/console/change?action={action}&name=vera", fields, Cookie=cookie)
    assert answer.status == 403
    assert AccountEditor(site.database, "dtx").read().version == before.version
    if action != "make-user":  # it has no password, so it never becomes a request
        (line,) = OperatorLog(site.database, "dtx").audit_lines(actor="olga", action=action)
        assert line.result is not None
        assert line.result.startswith("403")


def test_a_virtual_host_with_branches_in_doubt_is_kept(tour: Tour, site: StandaloneStage) -> None:
    prepared(site, b"stays")
    carla = tour.visitor("carla", "vhosts")
    dialogue(carla, "Remove /")
    assert send(carla).startswith("409: virtual host '/' still has branches in doubt")
    assert "/" in AccountEditor(site.database, "dtx").read().vhosts


def test_a_new_token_is_shown_once(tour: Tour, site: StandaloneStage) -> None:
    carla = tour.visitor("carla", "tokens")
    dialogue(carla, "Add token", name="prometheus", lifetime="soon")
    carla.page.locator("dialog #field-role").select_option("operator")
    assert send(carla).startswith("422: lifetime:")
    carla.page.locator("dialog #field-lifetime").fill("30d")
    carla.page.locator("dialog .primary").click()
    carla.page.locator("dialog .note.good").wait_for()
    secret = carla.page.locator("dialog pre").inner_text()
    carla.follow("Show tokens")
    row = carla.page.get_by_role("row", name="prometheus")
    assert re.search(r"operator\s+carla", row.inner_text())
    assert secret not in carla.page.content()
    found = OperatorLog(site.database, "dtx").find_token(secret)
    assert found is not None
    assert found.role is OperatorRole.OPERATOR
    assert found.expires_at is not None
    assert found.expires_at - found.made_at == pytest.approx(30 * 86400, abs=60)
    dialogue(carla, "Remove prometheus")
    assert send(carla) == "Token prometheus is removed."
    assert OperatorLog(site.database, "dtx").find_token(secret) is None


def test_changes_work_without_any_script(site: StandaloneStage, people: None, browser: Browser) -> None:
    carla = browser.visitor(site.service.admin_url, scripts=False)
    carla.enter("carla", PASSWORDS["carla"], "vhosts")
    carla.follow("Add virtual host")
    carla.page.get_by_label("Name").fill("without scripts")
    carla.follow("Add virtual host", "button")
    assert "Virtual host without scripts is added" in carla.text()
    carla.follow("Remove without scripts")
    carla.follow("Remove virtual host", "button")
    assert "Virtual host without scripts is removed" in carla.text()


def test_pages_of_users_follow_each_other(tour: Tour, site: StandaloneStage) -> None:
    editor, vera = AccountEditor(site.database, "dtx"), stored(site, "vera")
    assert vera is not None
    for number in range(60):
        editor.put_user(f"many-{number:02}", vera.password_hash, [])
    carla = tour.visitor("carla", "users?q=many-")
    names = carla.page.locator("tbody th")
    expect(carla.page.locator("caption")).to_have_text("60 users, 50 on this page")
    seen = names.all_inner_texts()
    carla.follow("Next page")
    seen += names.all_inner_texts()
    assert seen == [f"many-{number:02}" for number in range(60)]
    for name in seen:
        editor.remove_user(name)


def test_the_usage_of_users_is_shown(tour: Tour, site: StandaloneStage) -> None:
    prepared(site, b"usage")
    vera = tour.visitor("vera", "quotas?scope=user")
    row = vera.page.locator("#live-usage tbody tr")
    assert row.count() == 1
    assert row.inner_text().startswith("guest\tuser\t")
    assert vera.page.get_by_role("link", name="Users").count() == 0, "a viewer has no page of users"
