"""dtx-demarcation.select: turns a proxied channel into a selected channel."""

import asyncio
from typing import Final

from dtx.server.alongside.channel import ChannelOwner, ClosingChannel, ProxyChannel, ProxyPhase
from dtx.server.alongside.lock import declare_lock
from dtx.server.alongside.selected_channel import SelectedChannel
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamLost
from dtx.store.rabbitmq.validation import Validator
from dtx.wire.amqp09.codec import ChannelMode
from dtx.xa.codes import ReplyCode, XaError

_CONNECTION_PATIENCE: Final = 5.0
"""Seconds that a select waits for the commit connection of its virtual host."""


class ChannelSelection:
    """Selects the channels of one connection; the first select prepares what all of them share.

    Args:
        session: the connection.
    """

    def __init__(self, session: ChannelOwner) -> None:
        self._session = session
        self._preparation: asyncio.Task[Validator] | None = None

    async def select(self, channel: ProxyChannel) -> SelectedChannel | None:
        """Make a selected channel of *channel*.

        Returns:
            The selected channel; ``None`` if the client has closed the channel meanwhile.

        Raises:
            XaError: 403, the login has no user name or lacks the permissions that receipts need. 406, the channel is in
                another mode, has consumers or has unsettled deliveries. 506, no upstream channel is free. 541, the
                commit connection does not work, or the connection to the broker is lost.
        """
        session = self._session
        _check(channel, session.user)
        commits = session.store.commit_connection(session.who.vhost)
        await commits.ready(_CONNECTION_PATIENCE)
        try:
            validator = await self._prepare()
            if not self._is_current(channel):
                return None
            taking = ConsumeChannel(
                session.upstream,
                channel.upstream_number,
                session.limits.max_kept_bytes,
                session.budget,
                channel.queues,
                session,
                copies=session.store.copies,
                vhost=session.who.vhost,
                replacer=commits,
                revokes=commits.revokes,
            )
            taking.owner = channel  # until select-ok, it passes earlier frames on to the client
            await taking.start_tx()
            publishing = await OwnChannel(session.upstream).open()
        except UpstreamLost as error:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"select failed: {error}") from error
        if not self._is_current(channel):
            ClosingChannel(session, publishing.number)
            if taking.end_reason is None:  # otherwise it is being closed for the client
                taking.detach()
            return None
        return SelectedChannel(channel, taking, publishing.number, validator)

    def _is_current(self, channel: ProxyChannel) -> bool:
        """Whether *channel* is still open, and its client is connected."""
        return channel.phase is ProxyPhase.OPEN and self._session.channels.get(channel.number) is channel

    async def _prepare(self) -> Validator:
        task = self._preparation
        if task is None or (task.done() and task.exception() is not None):
            task = self._preparation = asyncio.create_task(self._declare_lock())
        return await asyncio.shield(task)

    async def _declare_lock(self) -> Validator:
        """Declare the lock, check that receipts will work, and open the side channel of the validator."""
        session = self._session
        side = await declare_lock(session.upstream, session.store, session.who, "select")
        return Validator(session.upstream, side.engine)


def _check(channel: ProxyChannel, user: str | None) -> None:
    if user is None:
        raise XaError(
            ReplyCode.ACCESS_REFUSED,
            "select needs a user name, and the login of this connection has none (it may use a token)",
        )
    if channel.mode is not ChannelMode.PLAIN:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"select on a channel in {channel.mode.value} mode")
    if channel.tally is not None and (why := channel.tally.open) is not None:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"select on a channel {why}")
