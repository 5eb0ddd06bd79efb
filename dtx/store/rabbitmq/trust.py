"""Whether receipts can be believed: a receipt proves that its unit happened only where nothing else can eat receipts,
and where no queue may refuse a part of a unit.

Only the management API tells, and only one that is this broker's own.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.store.rabbitmq.receipts import Receipts
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods

_log = get_logger(part="lane")

Replay = Literal["auto", "receipts", "always"]

_PAUSES: Final = (0.5, 2.0)
"""Seconds between attempts to ask a management API by which receipts were trusted: one that is busy for a moment must
not make dtx apply a unit again."""


class Trust:
    """What a lane thinks of its receipts.

    Args:
        vhost: of the lane.
        replay: what is done with units whose outcome is not known.
        management: the API; ``None`` when there is none.
        receipts: those of the lane.
        control: the lane's channel for questions; ``None`` while it is not connected.
    """

    def __init__(
        self,
        vhost: str,
        replay: Replay,
        management: Management | None,
        receipts: Receipts,
        control: Callable[[], OwnChannel | None],
    ) -> None:
        self.distrust: str | None = "receipts have not been judged yet"
        """Why receipts are not believed; ``None`` when they are."""
        self._vhost: Final = vhost
        self._replay: Final = replay
        self._management: Final = management
        self._receipts: Final = receipts
        self._control: Final = control
        self._cluster: str | None = None
        self._judging = asyncio.Lock()
        self._judged = float("-inf")
        self._recognised = ""
        """The lock by which the management API last showed that it is this broker's."""

    async def judge(self, *, since: float | None = None) -> None:
        """Judge anew, unless that was begun after *since*, a time of the loop (default: now)."""
        loop = asyncio.get_running_loop()
        since = loop.time() if since is None else since
        async with self._judging:
            if self._judged < since:
                began = loop.time()
                await self._judge_now()
                self._judged = began

    async def _judge_now(self) -> None:
        before = self.distrust
        match self._replay:
            case "always":
                self.distrust = "replay is set to always"
            case "receipts":
                self.distrust = await self._ask_cluster()
            case "auto":
                self.distrust = await self._ask_management()
        if self.distrust is not None and self.distrust != before:
            _log.warning("receipts are not trusted", vhost=self._vhost, reason=self.distrust)

    async def _ask_cluster(self) -> str | None:
        """Receipts are believed without proof, but not in a cluster, as far as can be seen."""
        if self._management is not None:
            with suppress(ManagementError):  # what was seen last holds
                self._cluster = await self._management.cluster()
        return self._cluster

    async def _ask_management(self) -> str | None:
        management = self._management
        if management is None:
            return "no management API is configured"
        pauses = iter(_PAUSES if self.distrust is None else ())
        while True:
            try:
                if await self._is_of_another_broker(management):
                    return (
                        f"the management API at {management.url} is another broker's: it does not see dtx's connection"
                    )
                return await management.distrust(self._vhost, [queue.decode() for queue in self._receipts.watched])
            except ManagementError as error:
                pause = next(pauses, None)
                if pause is None:
                    return str(error)
                await asyncio.sleep(pause)
            except (LookupError, TypeError, AttributeError) as error:
                return f"the management API answers something else than was asked: {type(error).__name__} {error}"

    async def recognised_management(self) -> Management:
        """The management API, once it has shown that it is this broker's.

        Raises:
            ManagementError: there is none, it cannot be asked, or it is another broker's.
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
            raise ManagementError("the broker is away") from error
        return management

    async def _is_of_another_broker(self, management: Management) -> bool:
        """Whether the API does not know the lock of this lane, while the broker does.

        Names of nodes and clusters are no proof: machines made from one image share them.

        Raises:
            UpstreamLost: the lane's connection is gone, and its lock with it.
        """
        control = self._control()
        if control is None:
            raise UpstreamLost("the lane is not connected")
        lock = control.upstream.lock
        if await management.has_queue(self._vhost, lock):
            return False
        try:
            await control.declare(methods.QueueDeclare(lock.encode(), passive=True))
        except UpstreamChannelClosed as closed:
            # Without it a successor would believe that nothing of this connection can happen any more.
            control.upstream.abort(f"its lock is gone: {closed}")
            raise UpstreamLost("the lock of the lane is gone") from closed
        return True
