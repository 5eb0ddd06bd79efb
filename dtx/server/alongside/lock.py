"""The lock of a client's connection to the broker, and the check that its receipts will work."""

from dtx import failpoint
from dtx.failpoint import Point
from dtx.manager import Requester
from dtx.store.rabbitmq import identity, messages
from dtx.store.rabbitmq.store import RabbitStore
from dtx.store.rabbitmq.upstream import OwnChannel, Upstream, UpstreamChannelClosed, words
from dtx.wire.amqp09 import methods, properties
from dtx.xa.codes import ReplyCode, XaError


async def declare_lock(upstream: Upstream, store: RabbitStore, who: Requester, what: str) -> OwnChannel:
    """Declare the lock of *upstream*; from now on, branches can consume on it.

    Args:
        upstream: the client's connection to the broker.
        store: has the commit connection of the virtual host.
        who: user name from the login, and virtual host.
        what: the operation that needs the lock, for the error text.

    Returns:
        A channel in tx mode.

    Raises:
        XaError: 403, the user lacks the permissions that receipts need, or the login belongs to another user; 506, no
            upstream channel is free.
        UpstreamLost: the connection is lost.
    """
    receipts = store.commit_connection(who.vhost).receipts
    lock = store.settings.identity.new_lock()
    keeper, side = await OwnChannel(upstream).open(), await OwnChannel(upstream).open(methods.TxSelect())
    failpoint.at(Point.LOCK_BEFORE)
    try:
        # A lock ends with the last channel that holds it. This one does nothing else, so it ends with the connection.
        await keeper.declare(identity.declare_lock(lock))
        await keeper.send_raw(identity.hold_lock(keeper.number, lock), methods.BasicConsumeOk)
        failpoint.at(Point.LOCK_AFTER)
        # With the user-id, the broker checks that the user name from the login is the authenticated user.
        raw = properties.build({properties.Property.USER_ID: who.user.encode()})
        probe = messages.probe(side.number, b"", receipts.queues[0], 0, raw)
        await side.send_raw(probe, methods.TxRollbackOk)
    except UpstreamChannelClosed as closed:
        for channel in (keeper, side):
            await channel.close()
        raise XaError(
            ReplyCode.ACCESS_REFUSED,
            f"{what} needs the permissions to configure and read 'dtx.lock.*' and to write 'amq.default': "
            f"{words(closed.close)}",
        ) from closed
    upstream.lock = lock
    return side
