"""A client of the operators' HTTP API that uses only the standard library."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from dtx.client import Xid


@dataclass(frozen=True, slots=True)
class Answered:
    """An HTTP answer.

    Args:
        status: the HTTP status.
        body: the parsed body if it is JSON, else bytes.
        headers: by lower-case name.
    """

    status: int
    body: Any
    headers: dict[str, str]


@dataclass(slots=True)
class Operator:
    """A client of the API.

    Args:
        url: the URL of the API.
        user, password: credentials of a user, or
        token: a token.
    """

    url: str
    user: str = "guest"
    password: str = "guest"
    token: str | None = None
    ca: ssl.SSLContext | None = field(default=None, repr=False)

    def ask(
        self, method: str, path: str, body: object = None, *, headers: dict[str, str] | None = None, **query: object
    ) -> Answered:
        """Send one request; ``None`` values of the query are omitted."""
        given = {key: str(value) for key, value in query.items() if value is not None}
        address = f"{self.url}{path}" + (f"?{urlencode(given)}" if given else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {**self._headers(body), **(headers or {})}, method=method)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.ca)
        )
        try:
            with opener.open(request, timeout=60) as answer:
                return _answered(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return _answered(error.code, error.read(), dict(error.headers))

    def _headers(self, body: object) -> dict[str, str]:
        if self.token is not None:
            said = f"Bearer {self.token}"
        else:
            said = "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        found = {"Authorization": said} if self.user or self.token else {}
        return found if body is None else {**found, "Content-Type": "application/json"}

    def get(self, path: str, **query: object) -> Any:
        """The body of a GET request, which must succeed."""
        answer = self.ask("GET", path, headers=None, **query)
        assert answer.status == 200, answer
        return answer.body

    def order(
        self, action: str, xid: Xid, *, vhost: str = "/", reason: str = "the site is lost", **more: object
    ) -> Answered:
        """An order about one branch."""
        body = {"reason": reason, **more}
        return self.ask("POST", f"/dtx/v1/branches/{quote(str(xid), safe='')}/{action}", body, vhost=vhost)

    def branch(self, xid: Xid, vhost: str = "/") -> Any:
        """One branch with its messages and journal."""
        return self.get(f"/dtx/v1/branches/{quote(str(xid), safe='')}", vhost=vhost)


def _answered(status: int, data: bytes, headers: dict[str, str]) -> Answered:
    lower = {name.lower(): value for name, value in headers.items()}
    return Answered(status, json.loads(data) if data and "json" in lower.get("content-type", "") else data, lower)
