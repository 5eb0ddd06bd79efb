"""The API of a running dtx, over HTTP."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from dtx.cli.errors import CommandError, Exit

COUNT: Final = "x-dtx-messages"
"""Header that says how many messages an export has."""
_PATIENCE: Final = 90.0
"""Seconds: an order is answered within half a minute, even where the broker does not."""
_CHUNK: Final = 256 * 1024


class Refused(CommandError):
    """The API does not do what it was asked for.

    Args:
        status: of HTTP.
        sentence: what it said.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(Exit.FAILED, sentence)
        self.status = status


class _Stay(HTTPRedirectHandler):
    """The token goes to the address that was given, and nowhere else."""

    def redirect_request(self, *_: object) -> None:
        return None


class Remote:
    """Asks an API.

    Args:
        base: its address.
        token: asked for once, when the first request is made.
        ca: whom to trust, for https.
        hint: what to say where nobody answers.
    """

    def __init__(
        self, base: str, token: Callable[[], str], *, ca: ssl.SSLContext | None = None, hint: str = ""
    ) -> None:
        self._base = base
        self._token = token
        self._hint = hint
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ca), _Stay())
        self._known: str | None = None

    def get(self, path: str, **query: object) -> Any:
        """What the API answers, parsed.

        Raises:
            Refused: it says no.
            CommandError: nobody answers.
        """
        with self._asked("GET", path, query, None) as answer:
            return json.load(answer)

    def post(self, path: str, body: object, **query: object) -> Any:
        """The same for an order."""
        with self._asked("POST", path, query, body) as answer:
            return json.load(answer)

    def delete(self, path: str, **query: object) -> None:
        """Have something removed."""
        with self._asked("DELETE", path, query, None):
            pass

    def require_tables(self) -> None:
        """They are the service's business."""

    def download(self, path: str, sink: Callable[[bytes], None], **query: object) -> int:
        """Give *sink* the answer piece by piece.

        Returns:
            How many messages it was said to have.
        """
        with self._asked("GET", path, query, None) as answer:
            while piece := answer.read(_CHUNK):
                sink(piece)
            return int(answer.headers.get(COUNT, 0))

    @contextmanager
    def orders(self) -> Iterator["Remote"]:
        """It takes orders whenever it is asked."""
        yield self

    @contextmanager
    def _asked(self, method: str, path: str, query: dict[str, object], body: object) -> Iterator[HTTPResponse]:
        if self._known is None:
            self._known = self._token()
        headers = {"Authorization": f"Bearer {self._known}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + address(path, query), data, headers, method=method)  # noqa: S310 - http(s), see --api
        try:
            with self._opener.open(request, timeout=_PATIENCE) as answer:
                yield answer
        except BrokenPipeError:
            raise  # whoever reads what is downloaded has enough
        except HTTPError as error:
            with error:
                raise Refused(error.code, said(error.code, error.reason, error.read())) from None
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            raise CommandError(
                Exit.FAILED,
                f"the API at {self._base} does not answer: {reason or type(error).__name__}{self._hint}",
            ) from None


def address(path: str, query: dict[str, object]) -> str:
    """*path* with what of the query is not ``None``; lists are repeated."""
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def said(status: int, phrase: str, body: bytes) -> str:
    """The words of a problem."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the API answered {status} {phrase}"
