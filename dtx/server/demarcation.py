"""The class dtx-demarcation: the associations between a selected channel and branches."""

from collections.abc import Callable, Iterator
from typing import Final, cast

from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.server import tracing
from dtx.server.failpoints import around_reply
from dtx.telemetry import Metrics
from dtx.telemetry.traces import Traces
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import packer
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Association, ChannelId, Operation, end_operation, start_operation
from dtx.xa.xid import Xid

_start_ok: Final = packer(methods.DtxStartOk)
_end_ok: Final = packer(methods.DtxEndOk)
_OK: Final = XaFlag.OK


class DemarcationHandler:
    """The associations of one channel.

    Args:
        manager: the transaction manager.
        metrics: counts the calls.
        number: channel number.
        channel: identifies the channel to the manager.
    """

    __slots__ = ("_branches", "_channel", "_flag", "_manager", "_metrics", "_number", "branch")

    def __init__(self, manager: BranchManager, metrics: Metrics, number: int, channel: ChannelId) -> None:
        self._manager = manager
        self._metrics = metrics
        self._number = number
        self._channel = channel
        self._flag = XaFlag.OK
        """The flag of the last answer."""
        self.branch: BranchRuntime | None = None
        """The branch that the channel is associated with; work on the channel belongs to it."""
        self._branches: dict[Xid, BranchRuntime] = {}
        """Branches that the channel is associated or suspended with."""

    @property
    def associations(self) -> Iterator[tuple[BranchRuntime, Association]]:
        """Branches that the channel is associated or suspended with, for operators."""
        found = ((entry, entry.branch.association(self._channel)) for entry in list(self._branches.values()))
        return ((entry, how) for entry, how in found if how is not Association.NONE)

    def associated_branch(self, xid: Xid) -> BranchRuntime | None:
        """The branch *xid*, if the channel is associated or suspended with it."""
        return self._branches.get(xid)

    def run(self, call: methods.DtxStart | methods.DtxEnd, who: Requester, *, is_new: bool = False) -> bytes | None:
        """Run dtx-demarcation.start or end.

        Args:
            call: the client's method.
            who: the client.
            is_new: see :meth:`BranchManager.demarcate`.

        Returns:
            The answering frame; ``None`` while another operation runs on the branch (then use :meth:`run_later`).

        Raises:
            XaError: 503, start on an associated channel; all others as :meth:`BranchManager.demarcate`.
        """
        if self._metrics.traces is not None:
            return self._run_traced(self._metrics.traces, call, who, is_new)
        return self._run(call, who, is_new)

    def _run_traced(
        self, traces: Traces, call: methods.DtxStart | methods.DtxEnd, who: Requester, is_new: bool
    ) -> bytes | None:
        operation = "start" if isinstance(call, methods.DtxStart) else "end"
        place = cast("tuple[int, int]", getattr(self._channel, "place", (0, self._number)))
        span = tracing.Span(traces, operation, call.xid, who, place, self._manager.known(who.vhost, call.xid))
        try:
            frame = self._run(call, who, is_new)
        except XaError as error:
            span.end(error)
            raise
        if frame is not None:
            span.entry = self._manager.known(who.vhost, call.xid)
            span.end(self._flag)
        return frame

    def _run(self, call: methods.DtxStart | methods.DtxEnd, who: Requester, is_new: bool) -> bytes | None:
        operation = self._operation(call)
        result = self._manager.demarcate(who, call.xid, operation, self._channel, is_new=is_new)
        if result is None:
            return None
        flag, entry = result
        self._flag = flag
        starting = isinstance(call, methods.DtxStart)
        if starting and flag is _OK:
            self.branch = self._branches[call.xid] = entry
        else:
            if self.branch is entry:
                self.branch = None
            if operation is not Operation.SUSPEND or flag is not _OK:
                self._branches.pop(call.xid, None)
        self._metrics.operation_done("start" if starting else "end", flag.wire_name, 0.0)
        return around_reply((_start_ok if starting else _end_ok)(self._number, flag))

    def _operation(self, call: methods.DtxStart | methods.DtxEnd) -> Operation:
        if isinstance(call, methods.DtxStart):
            operation = start_operation(join=call.join, resume=call.resume)
            if self.branch is not None:
                raise XaError(
                    ReplyCode.COMMAND_INVALID,
                    f"start on a channel that is associated with xid {self.branch.xid} (xid {call.xid})",
                )
            return operation
        return end_operation(fail=call.fail, suspend=call.suspend)

    async def run_later(
        self, call: methods.DtxStart | methods.DtxEnd, who: Requester, is_open: Callable[[], bool]
    ) -> bytes:
        """As :meth:`run`, after the other operations on the branch.

        Returns:
            The answering frame; empty if the channel was closed meanwhile.

        Raises:
            XaError: as :meth:`run`, or 541 after the time limit.
        """
        operation = self._operation(call)
        while is_open():
            is_new = await self._manager.settle(who, call.xid, operation)
            if not is_open():
                break
            frame = self.run(call, who, is_new=is_new)
            if frame is not None:
                return frame
        return b""

    def lose(self) -> None:
        """End all associations, because the channel is closed; idle branches stay."""
        branches = list(self._branches.values())
        self._branches.clear()
        self.branch = None
        self._manager.channel_lost(self._channel, branches)
