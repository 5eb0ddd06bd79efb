"""Every page of the console opens in a browser. The servers tier tests the actions on the pages."""

import secrets

from dtx.auth.users import AccountEditor
from tests.support.browser import Browser
from tests.support.service import DtxService

PAGES = ("", "branches", "outcomes", "archive", "connections", "audit", "bulk?state=prepared", "reconciliation")


def test_every_page_opens_without_errors(standalone_service: DtxService, browser: Browser) -> None:
    assert standalone_service.database is not None
    name = f"carla-{secrets.token_hex(4)}"
    AccountEditor(standalone_service.database, "dtx").add_user(name, b"many-4-carla", ["administrator"])
    visitor = browser.visitor(standalone_service.admin_url).enter(name, "many-4-carla")
    for page in PAGES:
        answer = visitor.open(page)
        assert answer.status == 200, page
        assert visitor.page.get_by_role("button", name="Sign out").is_visible()
    visitor.require_peace()
