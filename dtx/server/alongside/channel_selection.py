"""dtx-demarcation.select: makes a selected channel of one that passes through."""

import asyncio
from typing import Final

from dtx.server.alongside.channel import ChannelOwner, Drain, ProxyChannel, ProxyPhase
from dtx.server.alongside.lock import declare_lock
from dtx.server.alongside.selected_channel import SelectedChannel
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamLost
from dtx.store.rabbitmq.validation import Validator
from dtx.wire.amqp09.codec import ChannelMode
from dtx.xa.codes import ReplyCode, XaError

_LANE_PATIENCE: Final = 5.0
"""Seconds that a select waits for the lane of its vhost."""


class ChannelSelection:
    """What one connection needs for its selected channels; made at the first select.

    Args:
        session: the connection.
    """

    def __init__(self, session: ChannelOwner) -> None:
        self._session = session
        self._preparation: asyncio.Task[Validator] | None = None

    async def select(self, channel: ProxyChannel) -> SelectedChannel | None:
        """Give *channel* what a selected channel has.

        Returns:
            The selected channel; ``None`` when the client has closed the channel meanwhile.

        Raises:
            XaError: 403 without a user name or the permissions that receipts need; 406 when the channel is in another
                mode, consumes, or has unsettled deliveries; 506 when no upstream channel is free; 541 when the lane
                does not work.
        """
        session = self._session
        _check(channel, session.user)
        await session.store.lane(session.who.vhost).ready(_LANE_PATIENCE)
        try:
            validator = await self._prepare()
            if not self._is_current(channel):
                return None
            taking = ConsumeChannel(
                session.upstream,
                channel.upstream_number,
                session.limits.max_kept_bytes,
                session.budget,
                channel.last_queue,
                session,
            )
            taking.owner = channel  # until select-ok it passes on what came before
            await taking.start_tx()
            publishing = await OwnChannel(session.upstream).open()
        except UpstreamLost as error:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"select failed: {error}") from error
        if not self._is_current(channel):
            Drain(session, publishing.number)
            if taking.gone is None:  # else the client's close is under way
                taking.detach()
            return None
        return SelectedChannel(channel, taking, publishing.number, validator)

    def _is_current(self, channel: ProxyChannel) -> bool:
        """Whether the client has not closed *channel*, nor left, since it asked."""
        return channel.phase is ProxyPhase.OPEN and self._session.channels.get(channel.number) is channel

    async def _prepare(self) -> Validator:
        task = self._preparation
        if task is None or (task.done() and task.exception() is not None):
            task = self._preparation = asyncio.create_task(self._declare_lock())
        return await asyncio.shield(task)

    async def _declare_lock(self) -> Validator:
        """The lock, the side channel, and the proof that receipts will work."""
        session = self._session
        side = await declare_lock(session.upstream, session.store, session.who, "select")
        return Validator(session.upstream, side.engine)


def _check(channel: ProxyChannel, user: str | None) -> None:
    if user is None:
        raise XaError(
            ReplyCode.ACCESS_REFUSED,
            "select needs a user name that can be relied on, and this connection's login tells none (it is a token?)",
        )
    if channel.mode is not ChannelMode.PLAIN:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"select on a channel in {channel.mode.value} mode")
    if channel.tally is not None and (why := channel.tally.open) is not None:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"select on a channel {why}")
