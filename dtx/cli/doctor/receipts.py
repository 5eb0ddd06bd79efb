"""What the management API says: alarms, and whether a receipt proves what it seems to prove.

The verdict is that of the service itself, so that ``dtx doctor`` and ``--replay auto`` cannot disagree.
"""

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from http import HTTPStatus
from typing import Any, TypeVar
from uuid import uuid4

from pika.exceptions import ChannelClosedByBroker

from dtx.cli.doctor.model import Check, ok, warning
from dtx.config import Settings
from dtx.store.rabbitmq.identity import Identity, receipt_queues
from dtx.store.rabbitmq.management import Management, ManagementError

_Answer = TypeVar("_Answer")

_CONSEQUENCE = (
    "after a crash, --replay auto repeats units whose outcome is unknown (messages may be doubled, none is lost)"
)


def management_of(settings: Settings) -> Management:
    """The management API that the settings name or imply."""
    return Management.from_url(settings.management_url or "", user="guest", password="guest")  # noqa: S106 - the default


def ask(management: Management, path: str) -> Any:
    """The decoded answer to ``GET /api/<path>``.

    Raises:
        ManagementError: it cannot be reached, refuses, or answers no JSON.
    """
    return _answer(management.get(path))


def _answer(question: Coroutine[Any, Any, _Answer]) -> _Answer:
    return asyncio.run(question)


def check_management(settings: Settings, vhost: str, connection: Any) -> Generator[Check, None, bool]:
    """Alarms of the broker, and trust in receipts on *vhost*, as the service user sees them.

    Returns:
        Whether the management API is that of the broker of *connection*.
    """
    management = management_of(settings)
    try:
        overview = ask(management, "overview")
    except ManagementError as error:
        yield warning(
            "broker.management",
            f"{error}: enable the plugin rabbitmq_management, give user {management.user} the tag monitoring, or name "
            f"the address with --management; until then, {_CONSEQUENCE}",
        )
        return False
    name = overview.get("cluster_name")
    if _is_of_another_broker(management, vhost, connection):
        yield warning(
            "broker.management",
            f"the management API at {management.url} ({name}) is another broker's: it does not see what is in this "
            f"one; name the right address with --management; until then, {_CONSEQUENCE}",
        )
        return False
    yield ok("broker.management", f"the management API at {management.url} answers ({name})")
    yield from _alarms(management)
    sample = Identity(rm=settings.rm, log=uuid4(), instance=uuid4())
    names = [name.decode() for name in receipt_queues(sample.stem)]
    try:
        distrust = _answer(management.distrust(vhost, names))
    except ManagementError as error:
        yield warning(
            "broker.receipts",
            f"{error}: give user {management.user} the tags monitoring and policymaker; until then, {_CONSEQUENCE}",
        )
        return True
    if distrust is None:
        yield ok(
            "broker.receipts",
            "receipts prove what happened: the broker is one node, and no queue and policy interferes",
        )
    else:
        hint = "; let its pattern leave out names that begin with 'dtx.'" if "dtx's own" in distrust else ""
        yield warning("broker.receipts", f"{distrust}, so {_CONSEQUENCE}{hint}")
    return True


def _is_of_another_broker(management: Management, vhost: str, connection: Any) -> bool:
    """Whether the API does not see a queue that is made in the broker of *connection*."""
    queue = f"dtx.doctor.{uuid4().hex}"
    try:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
    except ChannelClosedByBroker:
        return False  # a permission is missing, which is a finding of its own
    try:
        return not _answer(management.has_queue(vhost, queue))
    except ManagementError:
        return False  # it may not be asked for queues: the next question says so
    finally:
        channel.queue_delete(queue)
        channel.close()


def _alarms(management: Management) -> Iterator[Check]:
    try:
        ask(management, "health/checks/alarms")
    except ManagementError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            yield warning(
                "broker.alarms",
                "an alarm for memory or disk space makes the broker block publishers, so commits wait: "
                "'rabbitmqctl list_alarms' names it; free memory or disk space",
            )
