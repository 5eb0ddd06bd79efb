"""A headless Chromium, and people in front of it. Playwright drives the one that is there, and downloads none."""

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
# a sandbox of Chromium's own needs rights that root in a container does not have; pages here are all ours
_WORDS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
Scheme = Literal["light", "dark"]


@functools.cache
def find_chromium() -> Path:
    """The program. Installs Debian's package where there is none and this is root on Debian.

    Ends the test run with one sentence where nothing works: tests that need a browser are never skipped.
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
    """Somebody in front of a browser window.

    Args:
        page: the window.
        url: where the service's API is.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        """What the browser's console says, but for statuses that are no success: scripts that fail, what is refused."""
        self.strangers: list[str] = []
        """Requests to anywhere else."""
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
        """Nothing failed in the browser, and nothing was asked of anybody else."""
        assert (self.complaints, self.strangers) == ([], [])

    def open(self, page: str = "") -> Response:
        """Look at one of the pages: its address behind ``/console/``."""
        answer = self.page.goto(f"{self.url}/console/{page}")
        assert answer is not None
        self.seen.append(self.page.content())
        return answer

    def open_branch(self, xid: Xid, vhost: str = "/") -> Response:
        """Look at a branch."""
        return self.open(f"branch?xid={quote(str(xid), safe='')}&vhost={quote(vhost, safe='')}")

    def sign_in(self, name: str, password: str) -> None:
        """On the page that is there."""
        self.page.get_by_label("User").fill(name)
        self.page.get_by_label("Password or token").fill(password)
        self.page.get_by_role("button", name="Sign in").click()

    def enter(self, name: str, password: str, page: str = "") -> Self:
        """Sign in on the way to a page."""
        self.open(page)
        self.sign_in(name, password)
        self.page.get_by_role("button", name="Sign out").wait_for()
        self.seen.append(self.page.content())
        return self

    def text(self) -> str:
        """What is to be read in the main part of the page."""
        self.seen.append(self.page.content())
        return self.page.locator("main").inner_text()

    def follow(self, name: str, role: Literal["link", "button"] = "link") -> None:
        """Press what leads to another page; returns when that is there."""
        with self.page.expect_navigation():
            self.page.get_by_role(role, name=name).first.click()
        self.seen.append(self.page.content())

    def choose(self, order: str) -> None:
        """Press the button of an order, which opens its dialogue."""
        self.page.get_by_role("link", name=order).click()
        self.page.locator("dialog[open] #reason").wait_for()

    def dry_run(self, reason: str) -> str:
        """What the dialogue says would happen."""
        self.page.locator("dialog #reason").fill(reason)
        self.page.get_by_role("button", name="Dry run").click()
        self.page.locator("dialog .danger").wait_for()
        self.seen.append(self.page.content())
        return self.page.locator("dialog").inner_text()

    def confirm(self) -> None:
        """Do what the dry run has said; returns when the answer is there."""
        self.page.evaluate("() => document.querySelectorAll('main .note.good').forEach((note) => note.remove())")
        self.page.locator("dialog .danger").click()
        self.page.locator("main .note.good, dialog [role=alert]").first.wait_for()
        self.seen.append(self.page.content())

    def shoot(self, path: Path) -> None:
        """A picture of the whole page; of the window where a dialogue is open."""
        self.page.screenshot(path=path, full_page=self.page.locator("dialog[open]").count() == 0)


class Browser:
    """A Chromium. Use as a context manager; every window is somebody else's, without anything in common."""

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
        """A window of its own.

        Args:
            url: where the service's API is.
            width: of the window.
            height: likewise.
            scheme: light or dark.
            scripts: whether the browser runs any.
            permissions: of the pages.
            trusting: whether any certificate will do.
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
