"""Clients of the operators' API: the interface, and the one over HTTP. :mod:`dtx.cli.local_api` has another."""

import getpass
import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote, urlencode

from dtx.cli.errors import CommandError, Exit

if TYPE_CHECKING:
    import httpx

_PATIENCE: Final = 90.0
"""Timeout in seconds: an order is answered within 30 s, even if the broker does not answer."""
_COUNT: Final = "x-dtx-messages"
"""Header with the number of messages of an export."""
HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class RequestRefused(CommandError):
    """The API refuses a request.

    Args:
        status: HTTP status.
        sentence: the reason that the API gave.
        cause: the code that the API gave, a value of :class:`~dtx.xa.codes.RefusalCause`; ``None`` if none.
    """

    def __init__(self, status: int, sentence: str, cause: str | None = None) -> None:
        super().__init__(Exit.FAILED, sentence)
        self.status = status
        self.cause = cause


class Api(ABC):
    """The operators' API, a context manager. Each request raises ``RequestRefused`` if the API refuses it."""

    patience: float = _PATIENCE
    """Seconds to wait for an answer."""
    away: str | None = None
    """Within :meth:`orders` of an API in this process: the reason why the broker cannot be used."""

    @abstractmethod
    def _ask(self, method: str, target: str, body: object) -> Any:
        """Send a request and return the parsed answer; ``None`` if it is empty."""

    @abstractmethod
    def export(
        self, xid: str, sink: Callable[[bytes], None], *, vhost: str, archived: bool, positions: tuple[int, ...]
    ) -> int:
        """Pass the messages of a branch to *sink* piece by piece, in the format of :mod:`dtx.admin.routes_read`.

        Returns:
            The number of messages that the API announced.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def require_tables(self) -> None:
        """Raise CommandError if the tables have another version than this dtx needs."""

    def orders(self) -> AbstractContextManager[Any]:
        """A context in which the API takes orders: here, always."""
        return nullcontext()

    def get(self, path: str, **query: object) -> Any:
        """The answer to GET *path*."""
        return self._ask("GET", address(path, query), None)

    def post(self, path: str, body: object, **query: object) -> Any:
        """The answer to POST *path*."""
        return self._ask("POST", address(path, query), body)

    def put(self, path: str, body: object) -> None:
        """Make the object at *path*."""
        self._ask("PUT", path, body)

    def delete(self, path: str, **query: object) -> None:
        """Remove *path*."""
        self._ask("DELETE", address(path, query), None)

    def pages(self, path: str, name: str, **query: object) -> Iterator[dict[str, Any]]:
        """All items that the list at *path* has under *name*, page by page."""
        cursor = None
        while True:
            page = self.get(path, **query, cursor=cursor)
            yield from page[name]
            cursor = page["cursor"]
            if cursor is None:
                return


class Remote(Api):
    """An API over HTTP.

    Args:
        base: address of the API.
        token: called once, for the first request; returns the token.
        ca: TLS context for https.
        hint: appended to the error if the API does not answer.
    """

    def __init__(self, base: str, token: Callable[[], str], *, ca: ssl.SSLContext, hint: str = "") -> None:
        import httpx

        self._base = base
        self._token = token
        self._hint = hint
        self._known: str | None = None
        # The token goes only to the given address: no proxy, no redirection. Each connection serves one request: the
        # server closes connections that are idle while the user answers a question.
        self._client = httpx.Client(
            auth=self._authorize,
            headers=HEADERS,
            verify=ca,
            timeout=_PATIENCE,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def _authorize(self, request: "httpx.Request") -> "httpx.Request":
        if self._known is None:
            self._known = self._token()
        request.headers["Authorization"] = f"Bearer {self._known}"
        return request

    def close(self) -> None:
        """Close the HTTP client."""
        self._client.close()

    def require_tables(self) -> None:
        """Nothing to check: the service keeps its tables up to date."""

    def _ask(self, method: str, target: str, body: object) -> Any:
        with self._answering():
            content = encoded(body)
            return parsed(self._client.request(method, self._base + target, content=content, timeout=self.patience))

    def export(
        self, xid: str, sink: Callable[[bytes], None], *, vhost: str, archived: bool, positions: tuple[int, ...]
    ) -> int:
        """Pass the messages of a branch to *sink*, as :meth:`Api.export` does."""
        query: dict[str, object] = {"vhost": vhost, "archived": archived or None, "position": positions or None}
        target = self._base + address(branch_path(xid, "export"), query)
        with self._answering(), self._client.stream("GET", target) as response:
            accept(response)
            for piece in response.iter_bytes():
                sink(piece)
            return int(response.headers.get(_COUNT, 0))

    @contextmanager
    def _answering(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except BrokenPipeError:
            raise  # the reader of stdout has closed it
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise CommandError(Exit.FAILED, f"the API at {self._base} does not answer: {reason}{self._hint}") from None


def encoded(body: object) -> bytes | None:
    """*body* as JSON; ``None`` for none."""
    return None if body is None else json.dumps(body).encode()


def accept(response: "httpx.Response") -> None:
    """Raise ``RequestRefused`` unless the status is a success.

    Its reason is the detail of the problem document, or the reason of RabbitMQ's management API.
    """
    if response.is_success:
        return
    try:
        problem = json.loads(response.read())
        sentence = str(problem["detail"] if "detail" in problem else problem["reason"])
        cause = problem.get("code")
    except (ValueError, KeyError, TypeError):
        sentence, cause = f"the API answered {response.status_code} {response.reason_phrase}", None
    raise RequestRefused(response.status_code, sentence, cause)


def parsed(response: "httpx.Response") -> Any:
    """The JSON value of an answer; ``None`` if it is empty.

    Raises:
        RequestRefused: the answer is an error.
        ValueError: it is no JSON.
    """
    accept(response)
    return response.json() if response.content else None


def address(path: str, query: dict[str, object]) -> str:
    """*path* with the query, without parameters that are ``None``; a list becomes one parameter for each item."""
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def branch_path(xid: str, rest: str = "") -> str:
    """The path of a branch, or of an action or list below it."""
    return f"/dtx/v1/branches/{quote(xid, safe='')}" + (f"/{rest}" if rest else "")


def user_name() -> str:
    """The name of the operating system's user, for journal and audit log."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        return "unknown"
