"""Optional traces: a span for each XA call, in the trace that the messages of the branch belong to.

OpenTelemetry is an extra (``dtx[otel]``), and is imported only if traces are switched on. Its own variables configure
the export (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``…).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from dtx.config.values import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

MOST_LINKS: Final = 32
"""Traces that one branch is linked to: a branch may have ten thousand messages, each with its own trace."""
_MOST_BRANCHES: Final = 100_000
"""Branches whose traces are kept; with more, the oldest are dropped."""
HEADERS: Final = ("traceparent", "tracestate")
"""Headers of messages that name their trace (W3C Trace Context)."""


class TracesUnavailable(ConfigError):
    """Traces are switched on, and OpenTelemetry is not installed."""


class TracedCall:
    """The span of one XA call, from its begin to its answer."""

    __slots__ = ("_span",)

    def __init__(self, span: "Span") -> None:
        self._span = span

    def set(self, name: str, value: str) -> None:
        """Set an attribute of the span."""
        self._span.set_attribute(name, value)

    def end(self, answer: str, error: str | None = None) -> None:
        """End the span: the call is answered.

        Args:
            answer: the flag's name, or the reply code.
            error: why the call was refused; ``None`` if it was not.
        """
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("dtx.answer", answer)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Traces:
    """Makes spans.

    Args:
        provider: of OpenTelemetry.
    """

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("dtx")
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._branches: OrderedDict[UUID, tuple[SpanContext, ...]] = OrderedDict()

    def read(self, branch: UUID, messages: Sequence[Mapping[str, str]]) -> None:
        """Note the traces that a branch belongs to.

        Args:
            branch: its id.
            messages: for each of its messages, the headers in :data:`HEADERS`.
        """
        from opentelemetry.trace import get_current_span

        found: dict[tuple[int, int], SpanContext] = {}
        for headers in messages:
            context = get_current_span(self._propagator.extract(headers, context=_empty())).get_span_context()
            if context.is_valid and len(found) <= MOST_LINKS:
                found.setdefault((context.trace_id, context.span_id), context)
        if found:
            self._branches[branch] = tuple(found.values())
            if len(self._branches) > _MOST_BRANCHES:
                self._branches.popitem(last=False)

    def forget(self, branch: UUID) -> None:
        """Forget a branch that has ended."""
        self._branches.pop(branch, None)

    def begin(self, operation: str, branch: UUID | None, attributes: Mapping[str, str | int]) -> TracedCall:
        """Begin the span of a call.

        Its parent is the trace of the branch's first message. It is linked to the traces of the other messages.

        Args:
            operation: the method, for example ``prepare``.
            branch: its id; ``None`` for a call without a branch.
            attributes: of the span.
        """
        from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, set_span_in_context

        contexts = self._branches.get(branch, ()) if branch is not None else ()
        parent = set_span_in_context(NonRecordingSpan(contexts[0]), _empty()) if contexts else _empty()
        links: list[Link] = [Link(context) for context in contexts[1:]]
        span = self._tracer.start_span(
            f"dtx.{operation}", context=parent, kind=SpanKind.SERVER, attributes=dict(attributes), links=links
        )
        return TracedCall(span)

    def close(self) -> None:
        """Send pending spans."""
        shutdown: Callable[[], None] | None = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def _empty() -> Any:
    """A context without a span, because the current span of this task is not the parent."""
    from opentelemetry.context import Context

    return Context()


def open_traces(service: str) -> Traces:
    """Traces that are sent by OTLP over HTTP, configured by OpenTelemetry's variables.

    Args:
        service: its name, unless ``OTEL_SERVICE_NAME`` is set.

    Raises:
        TracesUnavailable: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesUnavailable(f"--traces needs OpenTelemetry: pip install 'dtx[otel]' ({error})") from None
    resource = Resource({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
