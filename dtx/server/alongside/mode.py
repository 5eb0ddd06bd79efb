"""Putting alongside mode together: a broker behind dtx has the messages."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from dtx.config import Settings, broker_vhost
from dtx.log.postgres import TransactionLog
from dtx.manager import Limits, TransactionManager
from dtx.server.alongside.amqp10.nodes import BrokerNodes
from dtx.server.alongside.session import ProxySession
from dtx.server.amqp10.connection import Amqp10Connection as Connection10
from dtx.server.amqp10.connection import Amqp10Limits as Limits10
from dtx.server.amqp10.nodes import Home
from dtx.server.limits import SessionLimits
from dtx.server.listener import AcceptedConnection, NewSession
from dtx.store.rabbitmq.identity import BrokerIdentity, NameTaken
from dtx.store.rabbitmq.management import Management
from dtx.store.rabbitmq.phase_two import Lane, LaneSettings
from dtx.store.rabbitmq.service import Broker, BrokerLoginRefused, ServiceConnection
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09.frames import Protocol

_log = get_logger(part="broker")


class BrokerUnusable(Exception):
    """The broker is not there, or does not let dtx in; the message says what to do."""


class BrokerAway(BrokerUnusable):
    """Nobody answers there."""


def broker_of(settings: Settings) -> Broker:
    """The broker that *settings* name, with dtx's own credentials."""
    assert settings.broker is not None, "without a broker it is the standalone mode"
    return Broker.from_url(
        settings.broker.get_secret_value(), ca=settings.broker_ca, heartbeat=settings.upstream_heartbeat
    )


def vhost_of(settings: Settings) -> str:
    """The virtual host that the broker's URL names: the broker is tried there."""
    assert settings.broker is not None, "without a broker it is the standalone mode"
    return broker_vhost(settings.broker.get_secret_value())


async def require_broker(broker: Broker, vhost: str = "/") -> None:
    """Try the broker once, before anything else is started.

    Raises:
        BrokerAway: it is not there.
        BrokerUnusable: it does not take dtx's credentials.
    """
    connection = ServiceConnection(broker, "dtx start-up check")
    try:
        await connection.login(vhost)
    except BrokerLoginRefused as error:
        if "NOT_ALLOWED" not in str(error):  # a vhost that is not ours is no reason not to start
            raise BrokerUnusable(f"{str(error).removesuffix('.')}; check user and password in --broker") from None
    except ssl.SSLError as error:
        raise BrokerUnusable(_why_no_tls(broker, error)) from None
    except (OSError, UpstreamLost) as error:
        raise BrokerAway(_why_away(broker, error)) from None
    connection.close()


def _why_no_tls(broker: Broker, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {broker} is not trusted ({error.verify_message}): "
            "name the authority that signed it with --broker-ca, and the broker by a name that is in it"
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return (
        f"{broker} speaks no TLS that dtx understands ({reason}): is that its port for TLS? Without TLS it is amqp://"
    )


def _why_away(broker: Broker, error: OSError | UpstreamLost) -> str:
    reason = getattr(error, "strerror", None)
    if isinstance(error, UpstreamLost):
        return (
            f"what answers at {broker} is no broker of AMQP 0-9-1 that is ready ({error}): "
            "correct host and port in --broker, take amqps:// for a port that speaks TLS, or wait until it has started"
        )
    return (
        f"no broker answers at {broker} ({reason.lower() if reason else str(error) or 'timed out'}): start one, for "
        "example with 'docker run -p 127.0.0.1:5672:5672 rabbitmq' or 'apt-get install rabbitmq-server', "
        "name another with --broker (make run: BROKER=amqp://user:password@host:5672/), "
        "or leave it out: then dtx is the broker itself"
    )


async def open_alongside(
    settings: Settings, broker: Broker, log: TransactionLog, limits: Limits, metrics: Metrics, stack: AsyncExitStack
) -> tuple[TransactionManager, NewSession, Callable[[], Mapping[str, Lane]]]:
    """The manager, its branches loaded, what makes the session of a client, and what tells the lanes.

    Args:
        settings: of the service.
        broker: it answers.
        log: open.
        limits: of the manager.
        metrics: numbers.
        stack: closes what was opened, in the opposite order.

    Raises:
        LogError: the log cannot be read.
        BrokerUnusable: another log uses the name of this resource manager.
    """
    identity = BrokerIdentity(rm=settings.rm, log=log.id, instance=log.instance)
    await _claim_name(broker, identity, vhost_of(settings))
    loaded = asyncio.Event()  # until then nobody knows which receipts of a predecessor are needed
    store = RabbitStore(
        broker,
        _lane_settings(
            settings, broker, identity, lambda: loaded.is_set() and log.lease_valid, lambda: manager.is_empty, metrics
        ),
    )
    stack.push_async_callback(store.close)
    manager = TransactionManager(log, store, limits, metrics)
    stack.push_async_callback(manager.close)
    await manager.start()
    loaded.set()
    limits_10 = Limits10.of(settings)
    session_limits = SessionLimits.of(settings)

    def nodes(home: Home) -> BrokerNodes:
        return BrokerNodes(store, metrics, settings.max_kept_bytes, home)

    def new_session(connection: AcceptedConnection, header: bytes) -> ProxySession | Connection10 | None:
        if header in (Protocol.AMQP_0_9_1.value, Protocol.AMQP_0_9.value):
            return ProxySession(manager, store, metrics, session_limits, connection, header)
        if header == Protocol.AMQP_1_0_TLS.value:
            return None
        return Connection10(manager, limits_10, nodes, connection, header)

    return manager, new_session, lambda: store.lanes


async def _claim_name(broker: Broker, identity: BrokerIdentity, vhost: str) -> None:
    """Refuse to start where another log has the name; lanes do the same in virtual hosts that are used later.

    Raises:
        BrokerUnusable: it has.
    """
    connection = ServiceConnection(broker, "dtx start-up check")
    try:
        await connection.login(vhost)
        await identity.claim(vhost, await OwnChannel(connection).open())
    except NameTaken as error:
        raise BrokerUnusable(str(error)) from None
    except (OSError, BrokerLoginRefused, UpstreamLost, UpstreamChannelClosed) as error:
        _log.info("the name cannot be claimed yet", broker=str(broker), vhost=vhost, reason=str(error))
    finally:
        connection.close()


def _lane_settings(
    settings: Settings,
    broker: Broker,
    identity: BrokerIdentity,
    active: Callable[[], bool],
    finished: Callable[[], bool],
    metrics: Metrics,
) -> LaneSettings:
    url = settings.management_url
    return LaneSettings(
        identity=identity,
        channels=settings.lanes,
        deadline=settings.unit_deadline,
        replay=settings.replay,
        active=active,
        finished=finished,
        found=lambda outcome: metrics.unit_findings[outcome].inc(),
        management=None if url is None else Management.from_url(url, user=broker.user, password=broker.password),
    )
