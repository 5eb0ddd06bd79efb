"""Whether receipts can be trusted.

A receipt proves that its unit happened only if nothing but dtx removes receipts, and no queue may refuse a part of a
unit. Only the management API of this broker shows that. Acknowledgements are not refused: their receipts prove it even
where queues may refuse messages.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from dtx.store.rabbitmq.management import Doubts, Management, ManagementError
from dtx.store.rabbitmq.receipts import Receipts
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods

_log = get_logger(part="commit connection")

Replay = Literal["auto", "receipts", "always"]

_PAUSES: Final = (0.5, 2.0)
"""Seconds between attempts to ask the management API while receipts are trusted. Without them, an API that is busy for
a moment would make dtx apply a unit again."""


class Trust:
    """Whether a commit connection trusts its receipts.

    Args:
        vhost: of the commit connection.
        replay: the setting ``--replay``.
        management: the API; ``None`` when there is none.
        receipts: those of the commit connection.
        control: returns the commit connection's channel for requests; ``None`` while it is not connected.
        nodes: that ``--broker`` names.
    """

    def __init__(
        self,
        vhost: str,
        replay: Replay,
        management: Management | None,
        receipts: Receipts,
        control: Callable[[], OwnChannel | None],
        nodes: int,
    ) -> None:
        self.doubts = Doubts(of_all="receipts have not been judged yet")
        """Why receipts are not trusted."""
        self._vhost: Final = vhost
        self._replay: Final = replay
        self._management: Final = management
        self._receipts: Final = receipts
        self._control: Final = control
        self._nodes: Final = nodes
        self._cluster: str | None = None
        self._refreshing = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._recognised = ""
        """The lock by which the management API last proved to belong to this broker."""

    async def refresh(self, *, since: float | None = None, seconds: float | None = None) -> None:
        """Update :attr:`doubts`, unless an update began at *since* or later.

        Args:
            since: a time of the event loop in seconds; ``None`` means now.
            seconds: how long the management API may take. Without an answer receipts are not trusted, and the next call
                asks again.

        Raises:
            UpstreamLost: the commit connection's connection is gone.
        """
        loop = asyncio.get_running_loop()
        since = loop.time() if since is None else since
        async with self._refreshing:
            if self._refreshed_at < since:
                began, before = loop.time(), self.doubts
                try:
                    async with asyncio.timeout(seconds):
                        self.doubts = await self._ask()
                    self._refreshed_at = began
                except TimeoutError:
                    self._refreshed_at = float("-inf")
                    late = f"the management API gave no answer within {seconds} seconds"
                    self.doubts = Doubts(of_all=self._cluster if self._replay == "receipts" else late)
                self._report(before)

    def _report(self, before: Doubts) -> None:
        if self.doubts == before:
            return
        if (reason := self.doubts.of_all) is not None:
            _log.warning("receipts are not trusted", vhost=self._vhost, reason=reason)
        elif (reason := self.doubts.of_publishes) is not None:
            _log.info("receipts are not trusted for units that publish", vhost=self._vhost, reason=reason)

    async def _ask(self) -> Doubts:
        if self._nodes > 1:
            return Doubts(of_all="--broker names several nodes")
        match self._replay:
            case "always":
                return Doubts(of_all="replay is set to always")
            case "receipts":
                return Doubts(of_all=await self._ask_cluster())
            case "auto":
                return await self._ask_management()

    async def _ask_cluster(self) -> str | None:
        """Trust receipts without proof, except in a cluster, as far as the management API shows one."""
        if self._management is not None:
            with suppress(ManagementError):  # the last answer remains valid
                self._cluster = await self._management.cluster()
        return self._cluster

    async def _ask_management(self) -> Doubts:
        management = self._management
        if management is None:
            return Doubts(of_all="no management API is configured")
        pauses = iter(_PAUSES if self.doubts.of_all is None else ())
        while True:
            try:
                if await self._is_of_another_broker(management):
                    reason = f"the management API at {management.url} belongs to another broker"
                    return Doubts(of_all=f"{reason}: it does not see dtx's connection")
                return await management.doubts(self._vhost, [queue.decode() for queue in self._receipts.watched])
            except ManagementError as error:
                pause = next(pauses, None)
                if pause is None:
                    return Doubts(of_all=str(error))
                await asyncio.sleep(pause)
            except (LookupError, TypeError, AttributeError) as error:
                what = f"{type(error).__name__} {error}"
                return Doubts(of_all=f"the answer of the management API was not understood: {what}")

    async def recognised_management(self) -> Management:
        """The management API, after a check that it belongs to this broker.

        Raises:
            ManagementError: there is none, it gives no answer, it belongs to another broker, or the connection is down.
        """
        management = self._management
        if management is None:
            raise ManagementError("none is configured")
        control = self._control()
        lock = "" if control is None else control.upstream.lock
        try:
            if not lock or lock != self._recognised:
                if await self._is_of_another_broker(management):
                    raise ManagementError(f"the one at {management.url} is another broker's")
                self._recognised = lock
        except UpstreamLost as error:
            raise ManagementError("the broker is not reachable") from error
        return management

    async def _is_of_another_broker(self, management: Management) -> bool:
        """Whether the API does not show the lock of this commit connection, while the broker has it.

        Names of nodes and clusters are no proof: machines made from one image share them.

        Raises:
            ManagementError: the API gives no answer.
            UpstreamLost: the commit connection's connection is gone, or its lock.
        """
        control = self._control()
        if control is None:
            raise UpstreamLost("the commit connection is not connected")
        lock = control.upstream.lock
        if await management.has_queue(self._vhost, lock):
            return False
        try:
            await control.declare(methods.QueueDeclare(lock.encode(), passive=True))
        except UpstreamChannelClosed as closed:
            # Without the lock, a successor would conclude that no unit of this connection can happen any more.
            control.upstream.abort(f"its lock is gone: {closed}")
            raise UpstreamLost("the lock of the commit connection is gone") from closed
        return True
