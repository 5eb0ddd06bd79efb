"""The operators' API of a running dtx, for the command line."""

import getpass
import json
import secrets
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings
from dtx.log.operator_tables import Role
from dtx.log.operators import OperatorLog

_PATIENCE: Final = 90.0
"""Seconds: an order is answered within half a minute, even where the broker does not."""
_TOKEN_SECONDS: Final = 120.0


def user_name() -> str:
    """Who sits at the terminal, for journal and trail."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        return "somebody"


def address_of(settings: Settings) -> str:
    """Where the API of the dtx with these settings is."""
    (listen,) = settings.admin_listen
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104 - what others bind to
    scheme = "http" if settings.admin_tls_cert is None else "https"
    return f"{scheme}://[{host}]:{listen.port}" if ":" in host else f"{scheme}://{host}:{listen.port}"


@contextmanager
def token_for(settings: Settings, url: str, given: str | None) -> Iterator[str]:
    """The token to ask with: the one that was *given*, or, for whoever can open the database, one of its own.

    Args:
        settings: which resource manager.
        url: of the database.
        given: by the user.
    """
    if given is not None:
        yield given
        return
    log = OperatorLog(url, settings.rm)
    name = f"{user_name()[:40]} at the command line {secrets.token_hex(4)}"
    made = log.make_token(name, Role.OPERATOR, user_name(), seconds=_TOKEN_SECONDS)
    try:
        yield made
    finally:
        log.revoke_token(name)


def post(base: str, token: str, path: str, body: dict[str, Any], *, ca: ssl.SSLContext | None = None) -> Any:
    """Ask, and wait for the answer.

    Args:
        base: address of the API.
        token: of whoever asks.
        path: with its query.
        body: of the order.
        ca: whom to trust, for https.

    Raises:
        CommandError: it was refused, or nobody answers.
    """
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(base + path, json.dumps(body).encode(), headers, method="POST")  # noqa: S310 - http(s) of settings
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ca))
    try:
        with opener.open(request, timeout=_PATIENCE) as answer:
            return json.load(answer)
    except HTTPError as error:
        with error:
            raise CommandError(Exit.FAILED, _said(error)) from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise CommandError(
            Exit.FAILED,
            f"a dtx has the lease, but its API does not answer at {base}: {reason} (--api names another address)",
        ) from None


def _said(error: HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the API answered {error.code} {error.reason}"


def order_path(xid: str, action: str, vhost: str) -> str:
    """Where an order about one branch is posted."""
    return f"/api/branches/{quote(xid, safe='')}/{action}?{urlencode({'vhost': vhost})}"
