"""Spans of XA calls: one for each call, in the trace of the branch's messages. Without tracing, nothing is loaded."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dtx.config.values import ConfigError
from dtx.manager import BranchManager, Limits, Requester
from dtx.server.coordination import CoordinationHandler
from dtx.server.demarcation import DemarcationHandler
from dtx.store.work import HeldPublish
from dtx.telemetry import Metrics, traces
from dtx.telemetry.traces import MOST_LINKS, Traces
from dtx.wire.amqp09 import methods, properties, tables
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid
from tests.support.memory_log import MemoryDatabase, MemoryLog
from tests.unit.manager.test_local import Ledger

WHO = Requester("guest", "/")
XID = Xid(1, b"gtrid", b"bqual")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass(frozen=True)
class Channel:
    """The part of a channel that spans use."""

    place: tuple[int, int] = (7, 3)


class Traced:
    """A channel of a dtx with tracing."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        metrics = Metrics()
        metrics.traces = self.traces = Traces(provider)
        self.manager = BranchManager(MemoryLog("rm", MemoryDatabase()), Ledger(), Limits(), metrics)
        self.demarcation = DemarcationHandler(self.manager, metrics, 3, Channel())
        self.coordination = CoordinationHandler(self.manager, metrics, 3, 7)

    def publish(self, *, traceparent: bytes | None = None, kind: bytes = b"S") -> None:
        """Publish a message in the branch."""
        entry = self.demarcation.branch
        assert entry is not None
        assert entry.work is not None
        raw = properties.build({})
        if traceparent is not None:
            raw = properties.set_header(raw, b"traceparent", traceparent, kind)
        entry.work.add_publish(HeldPublish(b"", b"q", False, raw, b"body", queues=(7,)))

    async def ask(
        self,
        call: methods.DtxPrepare | methods.DtxCommit | methods.DtxRollback | methods.DtxForget | methods.DtxRecover,
    ) -> None:
        """Make a call of dtx-coordination, and wait for its answer."""
        answered = asyncio.Event()
        self.coordination.run(call, WHO, 131072, lambda _: answered.set())
        async with asyncio.timeout(30):
            await answered.wait()

    @property
    def spans(self) -> list[ReadableSpan]:
        """The ended spans, in the order of their end."""
        return list(self.exporter.get_finished_spans())


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    found = Traced()
    await found.manager.log.open()
    await found.manager.start()
    yield found
    await found.manager.close()
    await found.manager.log.close()


def parent(number: int = 1) -> bytes:
    return f"00-{TRACE}-{number:016x}-01".encode()


async def test_a_branch_has_a_span_for_each_call(traced: Traced) -> None:
    traced.demarcation.run(methods.DtxStart(xid=XID, join=False, resume=False), WHO)
    traced.publish(traceparent=parent())
    traced.publish()
    traced.publish(traceparent=parent(2))
    traced.demarcation.run(methods.DtxEnd(xid=XID, fail=False, suspend=False), WHO)
    await traced.ask(methods.DtxPrepare(xid=XID))
    await traced.ask(methods.DtxCommit(xid=XID, one_phase=False))
    assert [span.name for span in traced.spans] == ["dtx.start", "dtx.end", "dtx.prepare", "dtx.commit"]
    start, *others = traced.spans
    assert start.parent is None
    for span in others:
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == f"{span.context.trace_id:032x}" == TRACE
        assert span.parent.span_id == 1
        assert [link.context.span_id for link in span.links] == [2]
    for span in traced.spans:
        said = dict(span.attributes or {})
        assert said.pop("dtx.branch") == dict(others[0].attributes or {})["dtx.branch"]
        assert said == {
            "dtx.xid": str(XID), "dtx.vhost": "/", "dtx.user": "guest", "dtx.connection": 7, "dtx.channel": 3,
            "dtx.answer": "xa-ok",
        }  # fmt: skip
        assert span.status.status_code is StatusCode.UNSET
    assert not traced.traces._branches, "a branch that has ended is not remembered"


async def test_a_refusal_is_an_error_with_its_code_and_reason(traced: Traced) -> None:
    with pytest.raises(XaError):
        traced.demarcation.run(methods.DtxStart(xid=XID, join=True, resume=False), WHO)
    await traced.ask(methods.DtxCommit(xid=XID, one_phase=False))
    for span in traced.spans:
        assert dict(span.attributes or {})["dtx.answer"] == "404"
        assert span.status.status_code is StatusCode.ERROR
        assert "unknown xid" in (span.status.description or "")


async def test_recover_has_a_span_though_it_is_about_no_branch(traced: Traced) -> None:
    await traced.ask(methods.DtxRecover(startscan=True, endscan=True))
    (span,) = traced.spans
    assert span.name == "dtx.recover"
    assert "dtx.xid" not in dict(span.attributes or {})


@pytest.mark.parametrize(
    ("header", "kind"),
    [(b"nonsense", b"S"), (b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"S"), (b"\xff" * 100_000, b"S"),
     (b"", b"S"), (tables.entry(b"a", b"S", b"b"), b"F")],
)  # fmt: skip
async def test_an_invalid_trace_header_starts_a_new_trace(traced: Traced, header: bytes, kind: bytes) -> None:
    traced.demarcation.run(methods.DtxStart(xid=XID, join=False, resume=False), WHO)
    traced.publish(traceparent=header, kind=kind)
    traced.demarcation.run(methods.DtxEnd(xid=XID, fail=False, suspend=False), WHO)
    assert [span.parent for span in traced.spans] == [None, None]


async def test_a_branch_of_many_traces_links_to_some(traced: Traced) -> None:
    traced.demarcation.run(methods.DtxStart(xid=XID, join=False, resume=False), WHO)
    for number in range(1, 500):
        traced.publish(traceparent=parent(number))
    traced.demarcation.run(methods.DtxEnd(xid=XID, fail=False, suspend=False), WHO)
    assert len(traced.spans[1].links) == MOST_LINKS


@pytest.mark.parametrize("before", ["", "sys.modules['opentelemetry.sdk'] = None; "])
def test_without_traces_opentelemetry_is_not_loaded_and_not_needed(before: str) -> None:
    """Libraries may import its API where it is installed. The SDK, which makes and sends spans, is not loaded."""
    code = f"import sys; {before}import dtx.server.service; sys.exit(bool(sys.modules.get('opentelemetry.sdk')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_traces_without_opentelemetry_name_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'dtx\[otel\]'"):
        traces.open_traces("dtx")
