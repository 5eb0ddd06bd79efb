"""A headless Chromium and its users. Playwright drives the installed Chromium and downloads none."""

import functools
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import ConsoleMessage, Page, Request, Response, sync_playwright

from dtx.client import Xid
from tests.support.debian import install

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# Chromium's sandbox needs rights that root in a container does not have; the tests open only pages of dtx
_WORDS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
Scheme = Literal["light", "dark"]
_MOST_TABS = 150
_HIDDEN_FOCUS = """() => {
    const item = document.activeElement, style = getComputedStyle(item), box = item.getBoundingClientRect();
    const seen = style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2
        && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    return item === document.body || seen ? "" : item.outerHTML.slice(0, 200);
}"""
"""The item with the focus, unless its outline is seen."""


@functools.cache
def find_chromium() -> Path:
    """The path of Chromium. Installs the Debian package if it is missing and this is root on Debian.

    Ends the test run with a message if there is none: tests that need a browser are never skipped.
    """
    found = _installed()
    if found is None:
        install("chromium", "Chromium")
        found = _installed()
    if found is None:
        pytest.exit(
            "the tests of the web pages need Chromium: install chromium (Debian: apt install chromium)", returncode=4
        )
    return found


def _installed() -> Path | None:
    return next((Path(found) for name in _PROGRAMS if (found := shutil.which(name))), None)


class Visitor:
    """The user of a browser window.

    Args:
        page: the window.
        url: the URL of the operators' API.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        """Errors and warnings of the browser's console, except failed HTTP statuses."""
        self.strangers: list[str] = []
        """Requests to other servers."""
        self.seen: list[str] = []
        """The text of every answer."""
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._watch)
        page.on("response", self._keep)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def _watch(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.strangers.append(request.url)

    def _keep(self, response: Response) -> None:
        self.seen.append(f"{response.status} {response.url} {response.headers}")

    def require_peace(self) -> None:
        """Check that nothing failed in the browser and that no request went to another server."""
        assert (self.complaints, self.strangers) == ([], [])

    def open(self, page: str = "") -> Response:
        """Open the page at ``/console/`` followed by *page*."""
        answer = self.page.goto(f"{self.url}/console/{page}")
        assert answer is not None
        self.seen.append(self.page.content())
        return answer

    def open_branch(self, xid: Xid, vhost: str = "/") -> Response:
        """Open the page of a branch."""
        return self.open(f"branch?xid={quote(str(xid), safe='')}&vhost={quote(vhost, safe='')}")

    def sign_in(self, name: str, password: str) -> None:
        """Sign in on the current page."""
        self.page.get_by_label("User").fill(name)
        self.page.get_by_label("Password or token").fill(password)
        self.page.get_by_role("button", name="Sign in").click()

    def enter(self, name: str, password: str, page: str = "") -> Self:
        """Open a page and sign in."""
        self.open(page)
        self.sign_in(name, password)
        self.page.get_by_role("button", name="Sign out").wait_for()
        self.seen.append(self.page.content())
        return self

    def text(self) -> str:
        """The text of the main part of the page."""
        self.seen.append(self.page.content())
        return self.page.locator("main").inner_text()

    def follow(self, name: str, role: Literal["link", "button"] = "link") -> None:
        """Click a link or button that opens another page, and wait for the page."""
        with self.page.expect_navigation():
            self.page.get_by_role(role, name=name).first.click()
        self.seen.append(self.page.content())

    def choose(self, order: str) -> None:
        """Click the link of an order, which opens its dialogue."""
        self.page.get_by_role("link", name=order).click()
        self.page.locator("dialog[open] #reason").wait_for()

    def dry_run(self, reason: str) -> str:
        """Do the dry run; return the text of the dialogue."""
        self.page.locator("dialog #reason").fill(reason)
        self.page.get_by_role("button", name="Dry run").click()
        self.page.locator("dialog .danger").wait_for()
        self.seen.append(self.page.content())
        return self.page.locator("dialog").inner_text()

    def confirm(self) -> None:
        """Confirm the order and wait for the answer."""
        self.page.evaluate("() => document.querySelectorAll('main .note.good').forEach((note) => note.remove())")
        self.page.locator("dialog .danger").click()
        self.page.locator("main .note.good, dialog [role=alert]").first.wait_for()
        self.seen.append(self.page.content())

    def press_keys(self, *steps: tuple[str, str]) -> None:
        """Use the page with the keyboard alone. The focus must be visible all the way.

        Args:
            steps: the CSS selector of an item to reach with Tab, and what to do there: ``Enter`` or ``Space`` is
                pressed, any other text is typed.
        """
        self.page.emulate_media(reduced_motion="reduce")  # items that scroll smoothly are outside for a moment
        for selector, keys in steps:
            self.page.locator(selector).first.wait_for()
            for _ in range(_MOST_TABS):
                if self.page.locator(f":is({selector}):focus").count():
                    break
                self.page.keyboard.press("Tab")
                hidden = self.page.evaluate(_HIDDEN_FOCUS)
                assert not hidden, f"the focus is not visible at {hidden}"
            else:
                pytest.fail(f"Tab does not reach {selector}")
            (self.page.keyboard.press if keys in {"Enter", "Space"} else self.page.keyboard.type)(keys)

    def shoot(self, path: Path) -> None:
        """Take a screenshot of the whole page, or of the window if a dialogue is open."""
        self.page.screenshot(path=path, full_page=self.page.locator("dialog[open]").count() == 0)


class Browser:
    """A Chromium. Use as a context manager; every window has its own browser context."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._chromium: Chromium | None = None

    def __enter__(self) -> Self:
        program = find_chromium()
        driver = self._stack.enter_context(sync_playwright())
        self._chromium = driver.chromium.launch(executable_path=program, args=_WORDS)
        self._stack.callback(self._chromium.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def visitor(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Scheme = "light",
        scripts: bool = True,
        permissions: Sequence[str] = (),
        trusting: bool = False,
    ) -> Visitor:
        """Open a window in a new browser context.

        Args:
            url: the URL of the operators' API.
            width: the width of the window in pixels.
            height: the height of the window in pixels.
            scheme: the preferred colour scheme.
            scripts: whether the browser runs scripts.
            permissions: the permissions of the pages.
            trusting: whether any certificate is accepted.
        """
        assert self._chromium is not None, "use the browser as a context manager"
        context = self._chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            java_script_enabled=scripts,
            permissions=list(permissions),
            ignore_https_errors=trusting,
        )
        return Visitor(context.new_page(), url)

    def leave(self) -> None:
        """Close all windows."""
        assert self._chromium is not None
        for context in self._chromium.contexts:
            context.close()
