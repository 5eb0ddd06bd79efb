"""Pages from templates: everything is escaped, and nothing is fetched from anywhere else."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, RedirectResponse, Response

from dtx.admin.safe_text import human_duration, human_size, safe
from dtx.auth.roles import TAGS, OperatorRole
from dtx.xa.xid import Xid

PAGES: Final = "/console"
"""Where the pages are, within the API's server. They bring their own headers."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    # with no-referrer, browsers would not tell the origin of forms either
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
STATIC: Final = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_NOTHING: Final = "\N{EN DASH}"
_LONG: Final = 28
"""Hexadecimal digits of a part of an xid that lists show whole."""


@cache
def static_content(name: str) -> bytes:
    """What a file of :data:`STATIC` has in it."""
    return resources.files("dtx.admin.web").joinpath("static", name).read_bytes()


@cache
def static_version(name: str) -> str:
    """Of a file, to be part of its address: it may be kept for ever."""
    return hashlib.sha256(static_content(name)).hexdigest()[:16]


def address(page: str, **query: object) -> str:
    """Where a page is. What is ``None`` or empty in the query is left out; a list is as many of the same name."""
    given = {key: value for key, value in query.items() if value not in (None, "", [], ())}
    return f"{PAGES}/{page}" + (f"?{urlencode(given, doseq=True)}" if given else "")


def _when(at: datetime | None) -> Markup:
    if at is None:
        return escape(_NOTHING)
    iso = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    seen = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}">{}&nbsp;UTC</time>').format(iso, seen.replace(" ", "\N{NO-BREAK SPACE}"))


def _ago(at: datetime | None) -> str:
    """In whole seconds: the page has been under way for a part of one."""
    return _NOTHING if at is None else human_duration(max(0, round((datetime.now(UTC) - at).total_seconds())))


def _duration(seconds: float | None) -> str:
    return _NOTHING if seconds is None else human_duration(max(0.0, seconds))


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _short(xid: str) -> str:
    """An xid for lists: what is long has its middle left out."""
    return ":".join(part if len(part) <= _LONG else f"{part[:16]}…{part[-8:]}" for part in xid.split(":"))


def _readable(xid: str) -> str | None:
    return Xid.parse(xid).readable


def _finalize(value: object) -> object:
    """What clients have named never reaches a page as control characters or marks that turn text around."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("dtx.admin.web"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters.update(
        when=_when, ago=_ago, duration=_duration, latency=_latency, size=human_size, short=_short, readable=_readable
    )
    # marked as ready for the page: its narrow space would be shown as what it is escaped with
    found.filters["number"] = lambda value: Markup("{}").format(f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"))
    found.globals.update(
        address=address,
        static=lambda name: f"{PAGES}/static/{name}?v={static_version(name)}",
        OperatorRole=OperatorRole,
        TAGS=TAGS,
    )
    return found


_environment_of_pages: Final = _environment()


def render(template: str, context: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A page.

    Args:
        template: its file's name.
        context: what it shows.
        status: of the answer.
    """
    return HTMLResponse(_environment_of_pages.get_template(template).render(context), status.value, HEADERS)


def go_to(where: str) -> Response:
    """The browser is to look elsewhere, with a GET."""
    return RedirectResponse(where, HTTPStatus.SEE_OTHER, HEADERS)
