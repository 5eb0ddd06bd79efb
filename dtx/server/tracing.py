"""Spans of XA calls, and the traces that the messages of a branch belong to. Unused while traces are off."""

from itertools import islice
from typing import Final

from dtx.manager import Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.work import HeldWork
from dtx.telemetry.traces import HEADERS, MOST_LINKS, Traces
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid

_LAST: Final = frozenset({Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK, Operation.FORGET})
"""For most branches, a successful call of these is the last one."""
_WANTED: Final = {name.encode(): name for name in HEADERS}
_LONGEST: Final = 1024
"""Bytes read of a header; tracestate has 512 at most."""
_MOST_READ: Final = 4 * MOST_LINKS
"""Messages of a branch whose headers are read; traces of later messages are ignored."""


class Span:
    """The span of one XA call.

    Args:
        traces: makes the span.
        operation: name of the call, for example ``prepare``.
        xid: of the branch, if the call names one.
        who: the client.
        place: numbers of connection and channel.
        entry: the branch, if the manager knows it.
    """

    __slots__ = ("_call", "_last", "_traces", "entry")

    def __init__(
        self,
        traces: Traces,
        operation: str,
        xid: Xid | None,
        who: Requester,
        place: tuple[int, int],
        entry: BranchRuntime | None,
    ) -> None:
        attributes: dict[str, str | int] = {
            "dtx.vhost": who.vhost,
            "dtx.user": who.user,
            "dtx.connection": place[0],
            "dtx.channel": place[1],
        }
        if xid is not None:
            attributes["dtx.xid"] = str(xid)
        if entry is not None and entry.work is not None:
            traces.read(entry.id, _headers(entry.work))
        self.entry = entry
        self._traces = traces
        self._last = operation in _LAST
        self._call = traces.begin(operation, None if entry is None else entry.id, attributes)

    def end(self, answer: XaFlag | XaError) -> None:
        """End the span; forget the traces of the branch after a successful last call."""
        if self.entry is not None:
            self._call.set("dtx.branch", str(self.entry.id))
        if isinstance(answer, XaError):
            self._call.end(str(answer.code.value), answer.reason)
            return
        self._call.end(answer.wire_name)
        if self._last and self.entry is not None:
            self._traces.forget(self.entry.id)


def _headers(work: HeldWork) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for item in islice(work.items, _MOST_READ):
        if b"traceparent" not in item.properties:
            continue
        try:
            entries = properties.read(item.properties).headers
        except WireError:
            continue
        context = {_WANTED[header.key]: _text(header.value) for header in entries if header.key in _WANTED}
        if context:
            found.append(context)
    return found


def _text(value: bytes) -> str:
    return value[:_LONGEST].decode("ascii", "replace")
