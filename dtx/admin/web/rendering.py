"""Pages from templates: all values are escaped, and pages load nothing from other sites."""

import asyncio
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

from dtx.admin.message_properties import flat
from dtx.admin.safe_text import cut, human_duration, human_size, safe
from dtx.auth.roles import TAGS, OperatorRole
from dtx.log.pages import MOST_COUNTED
from dtx.xa.xid import Xid

PAGES: Final = "/console"
"""The path of the pages within the API's server. Their answers have their own headers."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    # With no-referrer, browsers would not send the origin of forms.
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
"""Longest part of an xid, in hexadecimal digits, that lists show whole; and longest name that is not wrapped."""
_MOST_OF_PRODUCT: Final = 100
"""Characters of each text in which a client describes itself: clients send it before they log in."""


@cache
def static_content(name: str) -> bytes:
    """The contents of a file of :data:`STATIC`."""
    return resources.files("dtx.admin.web").joinpath("static", name).read_bytes()


@cache
def static_version(name: str) -> str:
    """The version of a file, for its address, so that browsers may cache it for ever."""
    return hashlib.sha256(static_content(name)).hexdigest()[:16]


def address(page: str, /, **query: object) -> str:
    """The address of a page. Empty values of the query are left out; a list becomes one parameter for each item."""
    given = {key: value for key, value in query.items() if value not in (None, "", [], ())}
    return f"{PAGES}/{page}" + (f"?{urlencode(given, doseq=True)}" if given else "")


def _when(at: datetime | None) -> Markup:
    if at is None:
        return escape(_NOTHING)
    iso = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    seen = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}">{}&nbsp;UTC</time>').format(iso, seen.replace(" ", "\N{NO-BREAK SPACE}"))


def _ago(at: datetime | None) -> str:
    """The age of *at* in whole seconds, because the page itself is a fraction of a second old."""
    return _NOTHING if at is None else human_duration(max(0, round((datetime.now(UTC) - at).total_seconds())))


def _duration(seconds: float | None) -> str:
    return _NOTHING if seconds is None else human_duration(max(0.0, seconds))


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _number(value: int) -> Markup:
    # Markup, because _finalize would escape the narrow space.
    return Markup("{}").format(f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"))


def _rate(per_second: float) -> str:
    """Two digits below ten, else a whole number; small rates are not shown as zero."""
    return f"{per_second:.2g}" if 0 < per_second < 9.95 else _number(round(per_second))


def _short(xid: str) -> str:
    """An xid for lists, without the middle of long parts."""
    return ":".join(part if len(part) <= _LONG else f"{part[:16]}…{part[-8:]}" for part in xid.split(":"))


def _readable(xid: str) -> str | None:
    return Xid.parse(xid).readable


def _name(text: str) -> object:
    """A name that clients chose: a long one is wrapped anywhere, a short one never."""
    return Markup('<span class="long">{}</span>').format(safe(text)) if len(text) > _LONG else text


def _finalize(value: object) -> object:
    """Escape control characters and bidirectional marks, which may be in names that clients chose."""
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
        when=_when,
        ago=_ago,
        duration=_duration,
        round_seconds=lambda seconds: _duration(None if seconds is None else round(seconds)),
        latency=_latency,
        size=human_size,
        short=_short,
        readable=_readable,
        name=_name,
        cut=lambda value: cut(str(value), _MOST_OF_PRODUCT),
        number=_number,
        rate=_rate,
        flat=flat,
        typed=escape,  # for fields that are sent back: _finalize would change them
    )
    found.globals.update(
        address=address,
        static=lambda name: f"{PAGES}/static/{name}?v={static_version(name)}",
        OperatorRole=OperatorRole,
        MOST_COUNTED=MOST_COUNTED,
        TAGS=TAGS,
    )
    return found


_environment_of_pages: Final = _environment()


@cache
def _compile() -> None:
    for name in _environment_of_pages.list_templates():
        _environment_of_pages.get_template(name)


async def load_templates() -> None:
    """Compile all templates before the first page. That takes up to 60 ms for one, so the event loop does not do it."""
    if not _compile.cache_info().currsize:
        await asyncio.to_thread(_compile)


def render(template: str, context: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    """The response with a page.

    Args:
        template: file name of the template.
        context: values for the template.
        status: of the answer.
    """
    return HTMLResponse(_environment_of_pages.get_template(template).render(context), status.value, HEADERS)


def redirect_to(where: str) -> Response:
    """A redirect to *where*, which the browser follows with GET."""
    return RedirectResponse(where, HTTPStatus.SEE_OTHER, HEADERS)
