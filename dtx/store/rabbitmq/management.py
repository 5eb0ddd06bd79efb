"""Requests to RabbitMQ's management API, which shows whether a receipt proves that its unit happened.

The standard library in a thread is enough for a few requests at start and every minute.
"""

import asyncio
import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

_TIMEOUT: Final = 5.0
_MAX_ANSWER: Final = 32 * 1024 * 1024
"""Bytes of one answer: enough for a broker with many queues, and a limit for memory."""
_LIMITING: Final = frozenset({"message-ttl", "max-length", "max-length-bytes", "expires"})
_REFUSING: Final = frozenset({"reject-publish", "reject-publish-dlx"})


@dataclass(frozen=True, slots=True)
class Doubts:
    """Reasons why receipts are not trusted; ``None`` without a reason.

    Args:
        of_all: no receipt proves anything.
        of_publishes: the receipt of a unit that publishes does not prove that it happened in full. One that only
            acknowledges is not concerned.
    """

    of_all: str | None = None
    of_publishes: str | None = None


class ManagementError(Exception):
    """The management API gave no answer. The message has the reason and no secret.

    Args:
        reason: for people.
        status: of the HTTP answer; ``None`` without one.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management API.

    Args:
        url: ``http[s]://host:port``, without credentials.
        user, password: for basic authentication.
        tls: for ``https``.
    """

    url: str
    user: str
    password: str
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_url(cls, url: str, *, user: str, password: str) -> "Management":
        """Read ``http[s]://[user:password@]host:port``; *user* and *password* are defaults for those in *url*."""
        parts = urlsplit(url)
        netloc = parts.hostname or "127.0.0.1"
        if ":" in netloc:
            netloc = f"[{netloc}]"
        port = parts.port or (15671 if parts.scheme == "https" else 15672)
        return cls(
            url=f"{parts.scheme}://{netloc}:{port}{parts.path.rstrip('/')}",
            user=unquote(parts.username) if parts.username else user,
            password=unquote(parts.password) if parts.password else password,
            tls=ssl.create_default_context() if parts.scheme == "https" else None,
        )

    async def get(self, path: str) -> Any:
        """The decoded answer to ``GET /api/…``.

        Raises:
            ManagementError: the API cannot be reached, refuses, or its answer is not JSON.
        """
        return await asyncio.to_thread(self._get, path)

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}/api/{path}")  # noqa: S310 - settings allow http and https only
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        request.add_header("Authorization", f"Basic {token}")
        # No proxy: the credentials are for the broker's host only.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.tls)
        )
        try:
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return json.loads(answer.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                reason = f"the management API at {self.url} answers {error.code} {error.reason}"
                raise ManagementError(reason, error.code) from None
        except (OSError, ValueError, HTTPException) as error:
            raise ManagementError(f"the management API at {self.url} cannot be asked: {error}") from error

    async def has_queue(self, vhost: str, queue: str) -> bool:
        """Whether the broker behind this API has *queue*.

        Raises:
            ManagementError: as :meth:`get`.
        """
        try:
            await self.get(f"queues/{quote(vhost, safe='')}/{quote(queue, safe='')}?columns=name")
        except ManagementError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    async def cluster(self) -> str | None:
        """Why no receipt of this broker proves anything: a partition can lose receipts. ``None`` with a single node.

        Raises:
            ManagementError: as :meth:`get`.
        """
        nodes = await self.get("nodes?columns=name,running")
        return None if len(nodes) == 1 else f"the broker has {len(nodes)} nodes"

    async def _queues(self, vhost: str) -> Any:
        return await self.get(f"queues/{quote(vhost, safe='')}?columns=name,type,arguments,effective_policy_definition")

    async def doubts(self, vhost: str, receipt_queues: list[str]) -> Doubts:
        """Why a receipt in *vhost* does not prove that its unit happened in full.

        RabbitMQ (3.10 to 4.3) answers tx.commit with commit-ok although a quorum queue has refused the message, for
        example while it has no leader. So a unit that may publish to such a queue leaves no receipt.

        Raises:
            ManagementError: as :meth:`get`.
        """
        if (cluster := await self.cluster()) is not None:
            return Doubts(of_all=cluster)
        where = quote(vhost, safe="")
        queues = await self._queues(vhost)
        policies = [*await self.get(f"policies/{where}"), *await self.get(f"operator-policies/{where}")]
        mine = set(receipt_queues)
        refusal = None
        for queue in queues:
            policy, arguments = queue.get("effective_policy_definition") or {}, _arguments(queue)
            if queue["name"] in mine:
                arguments.pop("expires", None)  # set by dtx
                if eaten := sorted(_LIMITING & (policy.keys() | arguments.keys())):
                    reason = f"a policy with {', '.join(eaten)} applies to dtx's own queue {queue['name']}"
                    return Doubts(of_all=reason)
            elif (overflow := arguments.get("overflow", policy.get("overflow"))) in _REFUSING:
                refusal = f"queue {queue['name']!r} refuses messages when it is full (overflow {overflow})"
            elif _is_quorum(queue):
                refusal = refusal or f"queue {queue['name']!r} is a quorum queue, which may refuse a message"
        for policy in policies:
            definition = policy.get("definition") or {}
            if definition.get("overflow") in _REFUSING:
                refusal = f"policy {policy['name']!r} lets queues refuse messages (overflow {definition['overflow']})"
            if _LIMITING & definition.keys() and any(_matches(policy, name) for name in mine):
                return Doubts(of_all=f"policy {policy['name']!r} applies to dtx's own queues")
        return Doubts(of_publishes=refusal)

    async def delivery_limits(self, vhost: str, default: int | None) -> dict[str, int | None]:
        """For each queue of *vhost*, the number of returns after which it drops a message; ``None``: it drops none.

        Args:
            vhost: of the queues.
            default: limit of a quorum queue that has no setting; ``None``: no limit.

        Raises:
            ManagementError: as :meth:`get`.
        """
        found: dict[str, int | None] = {}
        for queue in await self._queues(vhost):
            policy, arguments = queue.get("effective_policy_definition") or {}, _arguments(queue)
            every = [each["delivery-limit"] for each in (policy, arguments) if "delivery-limit" in each]
            limits = [limit for limit in every if limit >= 0]
            drops = _is_quorum(queue) and "dead-letter-exchange" not in policy | arguments
            found[queue["name"]] = (min(limits, default=None) if every else default) if drops else None
        return found


def _arguments(queue: dict[str, Any]) -> dict[str, Any]:
    arguments = queue.get("arguments") or {}
    return {key.removeprefix("x-"): value for key, value in arguments.items()}


def _is_quorum(queue: dict[str, Any]) -> bool:
    return "quorum" in (queue.get("type"), _arguments(queue).get("queue-type"))


def _matches(policy: dict[str, Any], name: str) -> bool:
    if policy.get("apply-to") == "exchanges":
        return False
    try:
        return re.search(policy.get("pattern", ""), name) is not None
    except re.error:
        return True  # Python cannot read the pattern: assume that it matches
