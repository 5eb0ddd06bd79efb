"""Asking the operators' API: over HTTP, or another one that answers the same way (:mod:`dtx.cli.local_api`)."""

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
"""Seconds: an order is answered within half a minute, even where the broker does not."""
_COUNT: Final = "x-dtx-messages"
"""Header that says how many messages an export has."""
HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class RequestRefused(CommandError):
    """The API does not do what it was asked for.

    Args:
        status: of HTTP.
        sentence: what it said.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(Exit.FAILED, sentence)
        self.status = status


class Api(ABC):
    """An API. Use as a context manager. Each request raises ``RequestRefused`` if the API refuses it."""

    away: str | None = None
    """Why the broker cannot be used, within :meth:`orders` of an API in this process."""

    @abstractmethod
    def _ask(self, method: str, target: str, body: object) -> Any:
        """The answer, parsed; ``None`` where it is empty."""

    @abstractmethod
    def export(
        self, xid: str, sink: Callable[[bytes], None], *, vhost: str, archived: bool, positions: tuple[int, ...]
    ) -> int:
        """Give *sink* the messages of a branch piece by piece, as :mod:`dtx.admin.routes_read` sends them.

        Returns:
            How many messages it was said to have.
        """

    @abstractmethod
    def close(self) -> None:
        """Ask no more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def require_tables(self) -> None:
        """Raise CommandError where the tables are not those of this dtx."""

    def orders(self) -> AbstractContextManager[Any]:
        """It takes orders whenever it is asked."""
        return nullcontext()

    def get(self, path: str, **query: object) -> Any:
        """What it says about *path*."""
        return self._ask("GET", address(path, query), None)

    def post(self, path: str, body: object, **query: object) -> Any:
        """What it answers to an order."""
        return self._ask("POST", address(path, query), body)

    def delete(self, path: str, **query: object) -> None:
        """Have something removed."""
        self._ask("DELETE", address(path, query), None)

    def pages(self, path: str, name: str, **query: object) -> Iterator[dict[str, Any]]:
        """All that a list has under *name*, one page after the other."""
        cursor = None
        while True:
            page = self.get(path, **query, cursor=cursor)
            yield from page[name]
            cursor = page["cursor"]
            if cursor is None:
                return


class Remote(Api):
    """Asks over HTTP.

    Args:
        base: address of the API.
        token: asked for once, when the first request is made.
        ca: whom to trust, for https.
        hint: what to say where nobody answers.
    """

    def __init__(self, base: str, token: Callable[[], str], *, ca: ssl.SSLContext, hint: str = "") -> None:
        import httpx

        self._base = base
        self._token = token
        self._hint = hint
        self._known: str | None = None
        # The token goes to the address that was given, and nowhere else: no proxy, no redirection. A connection is for
        # one request: the server closes those that wait while somebody thinks.
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
        """Ask no more."""
        self._client.close()

    def require_tables(self) -> None:
        """They are the service's business."""

    def _ask(self, method: str, target: str, body: object) -> Any:
        with self._answering():
            return parsed(self._client.request(method, self._base + target, content=encoded(body)))

    def export(
        self, xid: str, sink: Callable[[bytes], None], *, vhost: str, archived: bool, positions: tuple[int, ...]
    ) -> int:
        """As for every API."""
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
            raise  # whoever reads what is exported has enough
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise CommandError(Exit.FAILED, f"the API at {self._base} does not answer: {reason}{self._hint}") from None


def encoded(body: object) -> bytes | None:
    """*body* as JSON."""
    return None if body is None else json.dumps(body).encode()


def accept(response: "httpx.Response") -> None:
    """Raise ``RequestRefused`` in the words of the problem, unless all is well."""
    if response.is_success:
        return
    try:
        sentence = str(json.loads(response.read())["detail"])
    except (ValueError, KeyError, TypeError):
        sentence = f"the API answered {response.status_code} {response.reason_phrase}"
    raise RequestRefused(response.status_code, sentence)


def parsed(response: "httpx.Response") -> Any:
    """What an answer says, if anything.

    Raises:
        Refused: it is a problem.
        ValueError: it is no JSON.
    """
    accept(response)
    return response.json() if response.content else None


def address(path: str, query: dict[str, object]) -> str:
    """*path* with what of the query is not ``None``; lists are repeated."""
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def branch_path(xid: str, rest: str = "") -> str:
    """Of a branch, or of what the API does with it."""
    return f"/api/branches/{quote(xid, safe='')}" + (f"/{rest}" if rest else "")


def user_name() -> str:
    """Who sits at the terminal, for journal and trail."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an account without a name
        return "somebody"
