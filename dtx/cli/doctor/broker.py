"""Checks of the broker: whether it is reachable and supported, and whether dtx's user may do what phase two needs.

The management API shows alarms, and whether receipts are trusted. The service uses the same function for that, so
``dtx doctor`` and ``--replay auto`` cannot disagree.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Coroutine, Generator, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

import pika
from pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelClosedByBroker,
    ConnectionBlockedTimeout,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from dtx.cli.database import database_url
from dtx.cli.doctor import DoctorCheck, failed, ok, warning
from dtx.config import Settings, broker_vhost, redact
from dtx.config.values import single_hosts
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LogError
from dtx.log.reader import LogReader
from dtx.store.rabbitmq.delivery_limit import default_limit
from dtx.store.rabbitmq.identity import BrokerIdentity, name_taken, owner_exchange, owner_mark, receipt_queues
from dtx.store.rabbitmq.management import Management, ManagementError

_Answer = TypeVar("_Answer")

_CONSEQUENCE = (
    "after a crash, --replay auto repeats units whose outcome is unknown: no message is lost, and second copies are "
    "kept from consumers that read through dtx"
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


def check_management(settings: Settings, vhost: str, connection: Any) -> Generator[DoctorCheck, None, bool]:
    """Alarms of the broker, and whether receipts on *vhost* are trusted, as the service user sees it.

    Returns:
        Whether the management API belongs to the broker of *connection*.
    """
    management = management_of(settings)
    try:
        overview = ask(management, "overview")
    except ManagementError as error:
        yield warning(
            "broker.management",
            f"{error}: run 'rabbitmq-plugins enable rabbitmq_management' at the broker, give user {management.user} "
            f"the tag monitoring, or name the address with --management; until then, {_CONSEQUENCE}",
        )
        return False
    name = overview.get("cluster_name")
    if _is_of_another_broker(management, vhost, connection):
        yield warning(
            "broker.management",
            f"the management API at {management.url} ({name}) belongs to another broker: it does not list the queues "
            f"of this one; name the right address with --management; until then, {_CONSEQUENCE}",
        )
        return False
    yield ok("broker.management", f"the management API at {management.url} answers ({name})")
    yield from _alarms(management)
    yield from _hanging_nodes(management)
    yield from _delivery_limits(management, vhost, _numbers(connection))
    sample = BrokerIdentity(rm=settings.rm, log=uuid4(), instance=uuid4())
    names = [name.decode() for name in receipt_queues(sample.stem)]
    try:
        doubts = _answer(management.doubts(vhost, names))
    except ManagementError as error:
        yield warning(
            "broker.receipts",
            f"{error}: give user {management.user} the tags monitoring and policymaker; until then, {_CONSEQUENCE}",
        )
        return True
    if (reason := doubts.of_all or doubts.of_publishes) is None:
        yield ok(
            "broker.receipts",
            "receipts are trusted: the broker is one node, and no queue or policy affects them",
        )
    else:
        hint = "; let its pattern leave out names that begin with 'dtx.'" if "dtx's own" in reason else ""
        yield warning("broker.receipts", f"{reason}, so {_CONSEQUENCE}{hint}")
    return True


def _is_of_another_broker(management: Management, vhost: str, connection: Any) -> bool:
    """Whether the API does not list a queue that is declared in the broker of *connection*."""
    queue = f"dtx.doctor.{uuid4().hex}"
    try:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
    except ChannelClosedByBroker:
        return False  # a permission is missing: another check reports it
    try:
        return not _answer(management.has_queue(vhost, queue))
    except ManagementError:
        return False  # the user may not list queues: the next check reports it
    finally:
        channel.queue_delete(queue)
        channel.close()


def _alarms(management: Management) -> Iterator[DoctorCheck]:
    try:
        ask(management, "health/checks/alarms")
    except ManagementError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            yield warning(
                "broker.alarms",
                "the broker blocks publishers because of an alarm for memory or disk space, so commits wait: "
                "'rabbitmqctl list_alarms' names it; free memory or disk space",
            )


def _hanging_nodes(management: Management) -> Iterator[DoctorCheck]:
    try:
        nodes = ask(management, "nodes?columns=name,net_ticktime")
    except ManagementError:
        return  # the check of the receipts asks the same, and reports it
    times = [node.get("net_ticktime") for node in nodes]
    longest = max((time for time in times if isinstance(time, int)), default=0)
    if len(nodes) > 1 and longest > _MOST_TICK_SECONDS:
        yield warning(
            "broker.net-ticktime",
            f"if one of the {len(nodes)} nodes hangs, commits may stop for {longest * 5 // 4} s: "
            "set 'net_ticktime = 10' in rabbitmq.conf of all nodes",
        )


def _delivery_limits(management: Management, vhost: str, version: tuple[int, ...]) -> Iterator[DoctorCheck]:
    try:
        limits = _answer(management.delivery_limits(vhost, default_limit(version)))
    except (ManagementError, LookupError, TypeError, AttributeError):
        return  # the check of the receipts asks the same, and reports it
    dropping = {name: limit for name, limit in limits.items() if limit is not None}
    if not dropping:
        return
    shown = ", ".join(f"{name!r} after {limit}" for name, limit in sorted(dropping.items())[:3])
    counted = "" if version >= (4, 3) else "each rollback before prepare and "
    yield warning(
        "broker.delivery-limit",
        f"{len(dropping)} quorum queue(s) drop a message after a number of returns ({shown}); {counted}each end of the "
        "consumer's channel is one: give these queues a dead-letter exchange, or the policy delivery-limit -1",
    )


_OLDEST: Final = (3, 10)
_TESTED: Final = ((3, 10), (4, 0))
"""Versions that the project's tests run."""
_BROKEN: Final = ("4.2.6", "4.3.0")
_TIMEOUT_SECONDS: Final = 5.0
_MOST_TICK_SECONDS: Final = 15
"""RabbitMQ takes a node for dead when it has been silent for up to 1.25 times net_ticktime, by default 60 seconds."""
_NOT_EQUIVALENT: Final = 406
_PREDECLARED: Final = ("amq.direct", "amq.fanout", "amq.topic", "amq.headers")
_MAX_EXCHANGES: Final = 500


def check_broker(settings: Settings) -> Iterator[DoctorCheck]:
    """The checks as the service user, on the vhost of the broker URL. Queues that they declare are deleted."""
    assert settings.broker is not None, "without a broker, check_standalone is used"
    # pika logs what it raises as well.
    logging.getLogger("pika").setLevel(logging.CRITICAL + 1)
    connection: pika.BlockingConnection | None = None
    urls = single_hosts(settings.broker.get_secret_value())
    user, vhost = unquote(urlsplit(urls[0]).username or "guest"), broker_vhost(urls[0])
    for url in urls:
        parts = urlsplit(url)
        where = f"{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"
        try:
            found = pika.BlockingConnection(_parameters(settings, url))
        except (AMQPError, OSError, ValueError) as error:
            yield failed("broker.reachable", _why_unreachable(error, where, user, vhost))
            continue
        yield ok("broker.reachable", f"the broker at {where} accepts user {user} on vhost {vhost}")
        if connection is None:
            connection = found
        else:
            found.close()
    if connection is None:
        return
    try:
        yield from _version(connection)
        known = yield from check_management(settings, vhost, connection)
        # The checks that publish come last, because they hang on a broker that blocks publishers.
        yield from _name(connection, settings, vhost)
        yield from _permissions(connection, user, vhost)
        yield from _exchanges(connection, user, vhost, management_of(settings) if known else None)
    except ConnectionBlockedTimeout:
        yield failed(
            "broker.blocked", "the broker blocks publishers, so commits wait: free memory or disk space on its machine"
        )
    except AMQPError as error:
        yield failed("broker.connection", f"the broker closed the connection during the checks: {redact(repr(error))}")
    finally:
        with suppress(AMQPError):
            connection.close()


def _parameters(settings: Settings, url: str) -> pika.URLParameters:
    parameters = pika.URLParameters(url)
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = _TIMEOUT_SECONDS
    parameters.connection_attempts = 1
    if urlsplit(url).scheme == "amqps":
        context = ssl.create_default_context(cafile=settings.broker_ca)
        parameters.ssl_options = pika.SSLOptions(context, parameters.host)
    return parameters


def _why_unreachable(error: BaseException, where: str, user: str, vhost: str) -> str:
    match error:
        case ProbableAuthenticationError():
            return f"the broker at {where} refuses user {user}: correct the name and password in the broker URL"
        case ProbableAccessDeniedError() if "not found" in str(error):
            return f"there is no vhost {vhost}: run 'rabbitmqctl add_vhost {vhost}', or correct the broker URL"
        case ProbableAccessDeniedError():
            return (
                f"user {user} may not use vhost {vhost}: run 'rabbitmqctl set_permissions -p {vhost} {user} .* .* .*'"
            )
        case ssl.SSLError():
            return f"TLS with {where} failed ({error.reason}): name the authority of its certificate with --broker-ca"
        case AMQPConnectionError() if error.args and isinstance(error.args[0], BaseException):
            return _why_unreachable(error.args[0], where, user, vhost)
    reason = redact(str(getattr(error, "exception", None) or error) or type(error).__name__)
    return f"no broker answers at {where} ({reason}): start it, or correct the broker URL"


def _properties(connection: Any) -> dict[str, Any]:
    return connection._impl.server_properties or {}  # noqa: SLF001


def _numbers(connection: Any) -> tuple[int, ...]:
    """Major and minor number of the broker's version; empty if it gives none."""
    return tuple(int(part) for part in re.findall(r"\d+", _text(_properties(connection).get("version", "")))[:2])


def _version(connection: Any) -> Iterator[DoctorCheck]:
    product, version = (_text(_properties(connection).get(key, "")) for key in ("product", "version"))
    numbers = _numbers(connection)
    if product != "RabbitMQ":
        yield warning(
            "broker.version", f"the broker gives {product or 'nothing'} as its product: dtx is tested with RabbitMQ"
        )
    elif not numbers or numbers < _OLDEST:
        yield failed("broker.version", f"RabbitMQ {version} is too old: dtx needs 3.10 or newer")
    elif version in _BROKEN:
        yield warning(
            "broker.version",
            f"RabbitMQ {version} refuses passive declarations without the configure permission: upgrade, or give users "
            "that permission on their queues",
        )
    elif numbers not in _TESTED:
        tested = " and ".join(".".join(map(str, each)) for each in _TESTED)
        yield warning(
            "broker.version", f"RabbitMQ {version} is not one of the versions that dtx is tested with: {tested}"
        )
    else:
        yield ok("broker.version", f"RabbitMQ {version}")


def _name(connection: Any, settings: Settings, vhost: str) -> Iterator[DoctorCheck]:
    """Whether another log uses the name of this resource manager here. Nothing new is declared."""
    try:
        with LogReader(database_url(settings)) as reader:
            mine = {lease.log for lease in reader.leases() if lease.rm == settings.rm}
    except (LogError, EmbeddedPostgresError):
        return  # the checks of the database have reported it
    name = owner_exchange(settings.rm)
    try:
        connection.channel().exchange_declare(name, passive=True)
        for log in mine or {uuid4()}:
            mark = {"alternate-exchange": owner_mark(log)}
            connection.channel().exchange_declare(name, "fanout", durable=True, internal=True, arguments=mark)
    except ChannelClosedByBroker as error:
        if error.reply_code == _NOT_EQUIVALENT:
            yield failed("broker.name", name_taken(settings.rm, vhost))
        return  # 404: no dtx has used this name here
    yield ok("broker.name", f"resource manager {settings.rm} of vhost {vhost} belongs to this log")


def _permissions(connection: Any, user: str, vhost: str) -> Iterator[DoctorCheck]:
    fix = f"run 'rabbitmqctl set_permissions -p {vhost} {user} .* .* .*'"
    if refusal := _own_queue(connection):
        yield failed(
            "broker.permissions", f"user {user} cannot declare queues, publish to them and read them ({refusal}): {fix}"
        )
    else:
        yield ok(
            "broker.permissions", f"user {user} can declare queues, publish to them and read them on vhost {vhost}"
        )
    if refusal := _refused(connection, "", f"dtx.doctor.{uuid4().hex}", pika.BasicProperties()):
        yield failed("broker.put-back", f"user {user} cannot publish to the default exchange ({refusal}): {fix}")
    other = pika.BasicProperties(user_id=f"not-{user}"[:255])
    if refusal := _refused(connection, "", f"dtx.doctor.{uuid4().hex}", other):
        yield warning(
            "broker.impersonator",
            f"user {user} has no tag 'impersonator', so messages with a user-id cannot be committed ({refusal}): "
            f"run 'rabbitmqctl set_user_tags {user} impersonator monitoring' (and repeat its present tags)",
        )
    else:
        yield ok("broker.impersonator", f"user {user} may publish messages with the user-id of other users")


def _exchanges(connection: Any, user: str, vhost: str, management: Management | None) -> Iterator[DoctorCheck]:
    names: list[str] = list(_PREDECLARED)
    if management is not None:
        with suppress(ManagementError):
            found = ask(management, f"exchanges/{quote(vhost, safe='')}?columns=name,internal")
            names = [item["name"] for item in found if item["name"] and not item.get("internal")][:_MAX_EXCHANGES]
    refused = [
        name for name in names if _refused(connection, name, f"dtx.doctor.{uuid4().hex}", pika.BasicProperties())
    ]
    if refused:
        shown = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        yield warning(
            "broker.exchanges",
            f"user {user} may not publish to {shown}: branches that publish there cannot be committed; "
            f"run 'rabbitmqctl set_permissions -p {vhost} {user} .* .* .*'",
        )
    else:
        yield ok("broker.exchanges", f"user {user} may publish to each of the {len(names)} exchanges that were tried")


def _own_queue(connection: Any) -> str | None:
    name, body = f"dtx.doctor.{uuid4().hex}", b"receipt"
    try:
        channel = connection.channel()
        channel.queue_declare(name, exclusive=True, auto_delete=True)
        channel.basic_publish("", name, body)
        received = channel.basic_get(name, auto_ack=True)[2]
        channel.queue_delete(name)
        channel.close()
    except ChannelClosedByBroker as error:
        return f"{error.reply_code} {error.reply_text}"
    return None if received == body else "the message did not arrive"


def _refused(connection: Any, exchange: str, key: str, properties: Any) -> str | None:
    """The error of the broker for this publish, made in a transaction that is rolled back; ``None`` if it accepts."""
    try:
        channel = connection.channel()
        channel.tx_select()
        channel.basic_publish(exchange, key, b"", properties)
        channel.tx_rollback()
        channel.close()
    except ChannelClosedByBroker as error:
        return f"{error.reply_code} {error.reply_text}"
    return None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
