"""The class dtx-coordination, for any channel: it needs no select, and no branch of the channel's own.

One call at a time runs on a channel; what its client sends behind it waits. The call itself is the manager's: it goes
on when the channel is gone.
"""

import time
from collections.abc import Awaitable, Callable
from typing import assert_never

from dtx.manager import TransactionManager, Who
from dtx.manager.scan import Scan
from dtx.server import tracing
from dtx.server.failpoints import replying
from dtx.telemetry import Metrics, get_logger
from dtx.wire.amqp09 import answers, calls
from dtx.wire.amqp09.calls import DtxMethod
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid

_log = get_logger(part="channel")

Finish = Callable[[bytes | XaError], None]
"""Called once, with the frame that answers or the reason of the channel's end."""
Call = (
    calls.Prepare
    | calls.Commit
    | calls.Rollback
    | calls.Forget
    | calls.GetTimeout
    | calls.SetTimeout
    | calls.Recover
)  # fmt: skip
"""The methods of the class."""


class Coordination:
    """Runs the calls of one channel.

    Args:
        manager: asked for everything.
        metrics: numbers.
        number: of the channel.
        connection: its id, for the log.
    """

    def __init__(self, manager: TransactionManager, metrics: Metrics, number: int, connection: int) -> None:
        self._manager = manager
        self._metrics = metrics
        self._number = number
        self._connection = connection
        self._scan: Scan | None = None

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open."""
        return self._scan if self._scan is not None and self._scan.is_open else None

    def run(self, call: Call, who: Who, frame_max: int, finish: Finish) -> None:
        """Run *call* for *who*; *finish* is called once, later or before this returns.

        Args:
            call: what the client asks for.
            who: the client.
            frame_max: octets that an answer may have.
            finish: gets the answer.
        """
        match call:
            case calls.Prepare(xid=xid):
                self._decide(xid, Operation.PREPARE, DtxMethod.PREPARE_OK, who, finish)
            case calls.Commit(xid=xid, one_phase=one_phase):
                operation = Operation.ONE_PHASE if one_phase else Operation.COMMIT
                self._decide(xid, operation, DtxMethod.COMMIT_OK, who, finish)
            case calls.Rollback(xid=xid):
                self._decide(xid, Operation.ROLLBACK, DtxMethod.ROLLBACK_OK, who, finish)
            case calls.Forget(xid=xid):
                self._decide(xid, Operation.FORGET, DtxMethod.FORGET_OK, who, finish)
            case calls.GetTimeout(xid=xid):
                finish = self._traced(Operation.GET_TIMEOUT, xid, who, finish)
                self._manager.spawn(self._finish_after(self._get_timeout(xid, who), finish))
            case calls.SetTimeout(xid=xid, timeout=timeout):
                finish = self._traced(Operation.SET_TIMEOUT, xid, who, finish)
                self._manager.spawn(self._finish_after(self._set_timeout(xid, timeout, who), finish))
            case calls.Recover():
                finish = self._traced("recover", None, who, finish)
                self._manager.spawn(self._finish_after(self._recover(call, who, frame_max), finish))
            case _:
                assert_never(call)

    def let_go(self) -> None:
        """The channel is closed: an open scan, which may be long, goes at once, and not with the next garbage."""
        self._scan = None

    def _span(self, operation: str, xid: Xid | None, who: Who) -> tracing.Span | None:
        traces = self._metrics.traces
        if traces is None:
            return None
        entry = None if xid is None else self._manager.known(who.vhost, xid)
        return tracing.Span(traces, operation, xid, who, (self._connection, self._number), entry)

    def _traced(self, operation: str, xid: Xid | None, who: Who, finish: Finish) -> Finish:
        span = self._span(operation, xid, who)
        if span is None:
            return finish

        def traced(answer: bytes | XaError) -> None:
            finish(answer)
            span.end(answer if isinstance(answer, XaError) else XaFlag.OK)

        return traced

    def _decide(self, xid: Xid, operation: Operation, ok: DtxMethod, who: Who, finish: Finish) -> None:
        started = time.monotonic()
        answered = False
        span = self._span(operation, xid, who)

        def reply(answer: XaFlag | XaError) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if isinstance(answer, XaError):
                finish(replying(answer))
                said = str(answer.code.value)
            else:
                empty = operation is Operation.FORGET
                frame = answers.empty_ok(self._number, ok) if empty else answers.flags_ok(self._number, ok, answer)
                finish(replying(frame))
                said = answer.wire_name
            self._metrics.operation_done(operation, said, time.monotonic() - started)
            if span is not None:
                span.end(answer)

        self._manager.ask(who, xid, operation, reply)

    async def _finish_after(self, work: Awaitable[bytes], finish: Finish) -> None:
        try:
            frame = await work
        except XaError as error:
            finish(replying(error))
        except Exception:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("call failed", connection=self._connection)
            finish(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))
        else:
            finish(replying(frame))

    async def _get_timeout(self, xid: Xid, who: Who) -> bytes:
        return answers.get_timeout_ok(self._number, await self._manager.get_timeout(who, xid))

    async def _set_timeout(self, xid: Xid, timeout: int, who: Who) -> bytes:
        await self._manager.set_timeout(who, xid, timeout)
        return answers.empty_ok(self._number, DtxMethod.SET_TIMEOUT_OK)

    async def _recover(self, call: calls.Recover, who: Who, frame_max: int) -> bytes:
        scan = self._scan = self._scan or Scan()
        if call.startscan:
            scan.begin(await self._manager.in_doubt(who, scan.after if call.endscan else None))
        batch = scan.next(lambda xids, position: answers.split_recover(xids, frame_max, position), end=call.endscan)
        return answers.recover_ok(self._number, batch)
