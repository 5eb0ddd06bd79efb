"""The class dtx-coordination. It works on every channel, without select and without an association.

One call at a time runs on a channel; later frames of the channel wait. The manager runs the call, so it continues after
the channel is closed.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final, assert_never

from dtx.manager import BranchManager, Requester
from dtx.manager.scan import Scan
from dtx.server import tracing
from dtx.server.failpoints import around_reply
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import methods, recovery
from dtx.wire.amqp09.codec import packer
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid

_log = get_logger(part="channel")

_prepare_ok: Final = packer(methods.DtxPrepareOk)
_commit_ok: Final = packer(methods.DtxCommitOk)
_rollback_ok: Final = packer(methods.DtxRollbackOk)

Finish = Callable[[bytes | XaError], None]
"""Called once, with the answering frame or the error that closes the channel."""


def _forget_ok(number: int, _: XaFlag) -> bytes:
    return methods.DtxForgetOk().frame(number)


class CoordinationHandler:
    """Runs the dtx-coordination calls of one channel.

    Args:
        manager: runs the calls.
        metrics: counts the calls.
        number: channel number.
        connection: connection id, for the log.
    """

    def __init__(self, manager: BranchManager, metrics: Metrics, number: int, connection: int) -> None:
        self._manager = manager
        self._metrics = metrics
        self._number = number
        self._connection = connection
        self._scan: Scan | None = None

    @property
    def scan(self) -> Scan | None:
        """The open recovery scan, or ``None``."""
        return self._scan if self._scan is not None and self._scan.is_open else None

    def run(self, call: methods.CoordinationCall, who: Requester, frame_max: int, finish: Finish) -> None:
        """Run *call* for *who*.

        Args:
            call: the client's method.
            who: the client.
            frame_max: maximum size of the answering frame in bytes.
            finish: gets the answer, once, before or after this method returns.
        """
        match call:
            case methods.DtxPrepare(xid=xid):
                self._decide(xid, Operation.PREPARE, _prepare_ok, who, finish)
            case methods.DtxCommit(xid=xid, one_phase=one_phase):
                operation = Operation.ONE_PHASE if one_phase else Operation.COMMIT
                self._decide(xid, operation, _commit_ok, who, finish)
            case methods.DtxRollback(xid=xid):
                self._decide(xid, Operation.ROLLBACK, _rollback_ok, who, finish)
            case methods.DtxForget(xid=xid):
                self._decide(xid, Operation.FORGET, _forget_ok, who, finish)
            case methods.DtxGetTimeout(xid=xid):
                finish = self._traced(Operation.GET_TIMEOUT, xid, who, finish)
                self._manager.spawn(self._finish_after(self._get_timeout(xid, who), finish))
            case methods.DtxSetTimeout(xid=xid, timeout=timeout):
                finish = self._traced(Operation.SET_TIMEOUT, xid, who, finish)
                self._manager.spawn(self._finish_after(self._set_timeout(xid, timeout, who), finish))
            case methods.DtxRecover():
                finish = self._traced("recover", None, who, finish)
                self._manager.spawn(self._finish_after(self._recover(call, who, frame_max), finish))
            case _:
                assert_never(call)

    def shut_down(self) -> None:
        """Free the open scan when the channel closes: a long scan must not wait for the garbage collector."""
        self._scan = None

    def _span(self, operation: str, xid: Xid | None, who: Requester) -> tracing.Span | None:
        traces = self._metrics.traces
        if traces is None:
            return None
        entry = None if xid is None else self._manager.known(who.vhost, xid)
        return tracing.Span(traces, operation, xid, who, (self._connection, self._number), entry)

    def _traced(self, operation: str, xid: Xid | None, who: Requester, finish: Finish) -> Finish:
        span = self._span(operation, xid, who)
        if span is None:
            return finish

        def traced(answer: bytes | XaError) -> None:
            finish(answer)
            span.end(answer if isinstance(answer, XaError) else XaFlag.OK)

        return traced

    def _decide(
        self, xid: Xid, operation: Operation, ok: Callable[[int, XaFlag], bytes], who: Requester, finish: Finish
    ) -> None:
        started = time.monotonic()
        answered = False
        span = None if self._metrics.traces is None else self._span(operation, xid, who)

        def reply(answer: XaFlag | XaError) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if isinstance(answer, XaError):
                finish(around_reply(answer))
                result = str(answer.code.value)
            else:
                finish(around_reply(ok(self._number, answer)))
                result = answer.wire_name
            self._metrics.operation_done(operation, result, time.monotonic() - started)
            if span is not None:
                span.end(answer)

        self._manager.ask(who, xid, operation, reply)

    async def _finish_after(self, work: Awaitable[bytes], finish: Finish) -> None:
        try:
            frame = await work
        except XaError as error:
            finish(around_reply(error))
        except Exception:  # noqa: BLE001 - logged; the client gets "internal error" only
            _log.exception("call failed", connection=self._connection)
            finish(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
        else:
            finish(around_reply(frame))

    async def _get_timeout(self, xid: Xid, who: Requester) -> bytes:
        return methods.DtxGetTimeoutOk(await self._manager.get_timeout(who, xid)).frame(self._number)

    async def _set_timeout(self, xid: Xid, timeout: int, who: Requester) -> bytes:
        await self._manager.set_timeout(who, xid, timeout)
        return methods.DtxSetTimeoutOk().frame(self._number)

    async def _recover(self, call: methods.DtxRecover, who: Requester, frame_max: int) -> bytes:
        scan = self._scan = self._scan or Scan()
        if call.startscan:
            scan.begin(await self._manager.in_doubt(who, scan.after if call.endscan else None))
        batch = scan.next(
            lambda xids, position: recovery.split_recover(xids, frame_max, position), end=call.endscan != 0
        )
        return recovery.recover_ok(self._number, batch)
