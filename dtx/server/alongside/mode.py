"""Start of alongside mode: a broker behind dtx has the messages."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final

from dtx.config import Settings, broker_vhost
from dtx.log.membership import Membership
from dtx.log.postgres import PostgresTransactionLog
from dtx.manager import BranchManager, Limits
from dtx.server.alongside.amqp10.nodes import BrokerNodes
from dtx.server.alongside.session import ProxySession
from dtx.server.amqp10.connection import Amqp10Connection as Connection10
from dtx.server.amqp10.connection import Amqp10Limits as Limits10
from dtx.server.amqp10.nodes import Home
from dtx.server.limits import SessionLimits
from dtx.server.listener import AcceptedConnection, NewSession
from dtx.server.members.copies import MemberCopies
from dtx.server.members.forwarding import Forwarding
from dtx.server.members.server import PeerServer, PeerSession
from dtx.store.rabbitmq.commit_connection import CommitSettings
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.rabbitmq.identity import BrokerIdentity, NameTaken
from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.store.rabbitmq.service import Broker, BrokerLoginRefused, ServiceConnection
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09.frames import Protocol

_log = get_logger(part="broker")
_TAKINGS: Final = 2.0
"""Seconds that a start waits for the outcome of units which the predecessor was about to take messages with."""


class BrokerUnusable(Exception):
    """The broker does not answer, or refuses dtx. The message has the remedy."""


class BrokerAway(BrokerUnusable):
    """No broker answers at the address."""


def broker_of(settings: Settings) -> Broker:
    """The broker of the setting ``broker``, with the credentials of dtx."""
    assert settings.broker is not None, "without a broker it is the standalone mode"
    return Broker.from_url(
        settings.broker.get_secret_value(), ca=settings.broker_ca, heartbeat=settings.upstream_heartbeat
    )


def vhost_of(settings: Settings) -> str:
    """The virtual host in the URL of the setting ``broker``: the start-up check uses it."""
    assert settings.broker is not None, "without a broker it is the standalone mode"
    return broker_vhost(settings.broker.get_secret_value())


async def require_broker(broker: Broker, vhost: str = "/") -> None:
    """Log in to the broker once, before the other parts start. A refusal of *vhost* alone is no error.

    Raises:
        BrokerAway: no broker answers.
        BrokerUnusable: the broker refuses the credentials, or TLS fails.
    """
    connection = ServiceConnection(broker, "dtx start-up check")
    try:
        await connection.login(vhost)
    except BrokerLoginRefused as error:
        if "NOT_ALLOWED" not in str(error):  # clients may use other virtual hosts
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
            "set --broker-ca to the authority that signed it, and use a host name that is in the certificate"
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return f"TLS handshake with {broker} failed ({reason}): use the TLS port of the broker, or amqp:// for no TLS"


def _why_away(broker: Broker, error: OSError | UpstreamLost) -> str:
    reason = getattr(error, "strerror", None)
    if isinstance(error, UpstreamLost):
        return (
            f"the server at {broker} is not an AMQP 0-9-1 broker that is ready ({error}): "
            "correct host and port in --broker, use amqps:// for a TLS port, or wait until the broker has started"
        )
    return (
        f"no broker answers at {broker} ({reason.lower() if reason else str(error) or 'timed out'}): start one, for "
        "example with 'docker run -p 127.0.0.1:5672:5672 rabbitmq' or 'apt-get install rabbitmq-server', "
        "correct --broker (make run: BROKER=amqp://user:password@host:5672/), "
        "or omit it to run dtx without a broker"
    )


async def open_alongside(
    settings: Settings,
    broker: Broker,
    log: PostgresTransactionLog,
    limits: Limits,
    metrics: Metrics,
    stack: AsyncExitStack,
) -> tuple[BranchManager, NewSession, RabbitStore]:
    """Open the mode.

    Args:
        settings: of the service.
        broker: with the credentials of dtx.
        log: open.
        limits: of the manager.
        metrics: of the service.
        stack: closes the opened parts in reverse order.

    Returns:
        The manager with its branches loaded, the factory of client sessions, and the store.

    Raises:
        LogError: the log cannot be read.
        BrokerUnusable: another log uses the name of this resource manager.
    """
    identity = BrokerIdentity(rm=settings.rm, log=log.id, instance=log.instance)
    await _claim_name(broker, identity, vhost_of(settings))
    management = _management_of(settings, broker)
    if settings.replay == "auto":
        await _warn_without(management)
    loaded = asyncio.Event()  # before that, dtx does not know which receipts of its predecessor it needs
    membership = log.membership
    copies = CopyRegister(
        log.write,
        (lambda: log.lease_valid) if membership is None else (lambda: membership.is_current),
        enabled=settings.duplicates == "suppress",
        window=settings.duplicate_window,
        replayed=metrics.messages_replayed.inc,
        suppressed=metrics.copies_suppressed.inc,
    )
    copies.load(await log.load_copies())
    store = RabbitStore(
        broker,
        _commit_settings(
            settings,
            management,
            identity,
            copies,
            lambda: loaded.is_set() and log.lease_valid,
            lambda: manager.is_empty,
            metrics,
        ),
    )
    stack.push_async_callback(store.close)
    manager = BranchManager(log, store, limits, metrics)
    stack.push_async_callback(manager.close)
    peers = None if membership is None else _join(settings, manager, copies, membership, metrics, stack)
    await manager.start()
    loaded.set()
    await manager.takings_decided(_TAKINGS)
    if membership is not None:

        async def adopted() -> None:
            if not membership.is_current:  # otherwise the others have told it all, and this is only a look for branches
                copies.load(await log.load_copies())
            await manager.take_over()

        membership.watch(adopted, lambda: len(manager))
        stack.push_async_callback(membership.unwatch)
    limits_10 = Limits10.of(settings)
    session_limits = SessionLimits.of(settings)

    def nodes(home: Home) -> BrokerNodes:
        return BrokerNodes(store, metrics, settings.max_kept_bytes, home)

    def new_session(connection: AcceptedConnection, header: bytes) -> ProxySession | Connection10 | PeerSession | None:
        if header in (Protocol.AMQP_0_9_1.value, Protocol.AMQP_0_9.value):
            return ProxySession(manager, store, metrics, session_limits, connection, header)
        if header == Protocol.DTX_MEMBER.value:
            return None if peers is None else peers.session(connection)
        if header == Protocol.AMQP_1_0_TLS.value:
            return None
        return Connection10(manager, limits_10, nodes, connection, header)

    return manager, new_session, store


def _join(
    settings: Settings,
    manager: BranchManager,
    copies: CopyRegister,
    membership: Membership,
    metrics: Metrics,
    stack: AsyncExitStack,
) -> PeerServer:
    """Let other members forward their requests here, and take over from them when they are gone."""
    tls = ssl.create_default_context(cafile=settings.member_ca or settings.tls_ca)
    if settings.tls_cert is not None:
        tls.load_cert_chain(settings.tls_cert, settings.tls_key)
    forwarding = Forwarding(manager, membership, tls, metrics)
    metrics.members.set_function(lambda: 1 + sum(not (other.expired or other.dead) for other in membership.others))
    peers = PeerServer(
        membership.holder,
        lambda: membership.secrets,
        forwarding.handle,
        handshake_timeout=settings.handshake_timeout,
    )
    stack.push_async_callback(peers.close)
    stack.push_async_callback(forwarding.close)
    manager.others = forwarding
    copies.members = shared = MemberCopies(manager.log, copies, forwarding)
    shared.is_ready = lambda: manager.is_decided and not membership.is_adopting
    forwarding.on_copies = shared.handle
    return peers


async def _claim_name(broker: Broker, identity: BrokerIdentity, vhost: str) -> None:
    """Refuse to start if another log uses the name; a commit connection repeats the check in its virtual host.

    Raises:
        BrokerUnusable: another log uses the name.
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


def _management_of(settings: Settings, broker: Broker) -> Management | None:
    url = settings.management_url
    return None if url is None else Management.from_url(url, user=broker.user, password=broker.password)


async def _warn_without(management: Management | None) -> None:
    """Warn at the start, and not only after a crash, that a crash may repeat messages."""
    reason = "no management API is configured (--management)"
    if management is not None:
        try:
            await management.cluster()
        except (ManagementError, LookupError, TypeError, AttributeError) as error:
            reason = str(error)
        else:
            return
    remedy = "run 'rabbitmq-plugins enable rabbitmq_management' at the broker, then 'dtx doctor'"
    effect = "no message is lost, and consumers that read through dtx get each once"
    _log.warning("units may be repeated after a crash", reason=reason, effect=effect, remedy=remedy)


def _commit_settings(
    settings: Settings,
    management: Management | None,
    identity: BrokerIdentity,
    copies: CopyRegister,
    active: Callable[[], bool],
    finished: Callable[[], bool],
    metrics: Metrics,
) -> CommitSettings:
    return CommitSettings(
        identity=identity,
        channels=settings.commit_channels,
        deadline=settings.unit_deadline,
        max_message_bytes=settings.max_message_bytes,
        replay=settings.replay,
        active=active,
        finished=finished,
        found=lambda outcome: metrics.unit_findings[outcome].inc(),
        management=management,
        copies=copies,
    )
