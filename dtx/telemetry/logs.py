"""Structured logs: one event a line, on stderr, JSON for programs or text for people.

Frequent fields have fixed names: ``xid``, ``vhost``, ``connection``, ``channel``, ``user``, ``branch``. Message bodies
are never logged. Passwords are removed from every text, including tracebacks and log records of libraries.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Final, Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from dtx.config.values import redact

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

SECRET_KEYS: Final = frozenset(
    {"authorization", "body", "content", "passwd", "password", "response", "secret", "token"}
)
"""Fields that are always dropped: credentials, SASL responses, message bodies."""
_FIRST: Final = ("at", "level", "event")
_MANY_LINES: Final = frozenset({"exception", "stack"})
_LIMITED: Final = frozenset({"warning", "error", "exception", "critical"})
REPEATS: Final = 10
"""How often the same line is written in :data:`REPEAT_SECONDS`."""
REPEAT_SECONDS: Final = 60.0
_MOST_LINES: Final = 1000
"""Lines that are compared for repetition."""
_MAX_TEXT: Final = 16 * 1024
"""Characters of one field: enough for a traceback, but a very long text must not fill the disk."""


def get_logger(**fields: object) -> FilteringBoundLogger:
    """A logger that adds *fields* to each of its events. Make it once and keep it."""
    return cast("FilteringBoundLogger", structlog.get_logger(**fields))


def configure(
    level: Level = "info", form: Format = "auto", stream: TextIO | None = None, *, process: int | None = None
) -> None:
    """Configure logging. Call it once, at the start of the process.

    Args:
        level: lowest level that is logged; events below it cost almost nothing.
        form: ``auto`` is text if *stream* is a terminal, else JSON.
        stream: output; ``None`` for stderr.
        process: number of this process, a field of each line; ``None`` without other processes.
    """
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        safe_fields,
    ]
    if process is not None:
        shared.insert(0, lambda _logger, _method, event: {**event, "process": process})
    limited: list[Processor] = [*shared, Repeats()]
    # Tracebacks are text already, so safe_fields has removed passwords from them.
    render: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), timestamp_key="at")
        if console
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    structlog.configure(
        processors=[*limited, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_: _Lines(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *shared, render],
        )
    )
    # Libraries log from warning on: events of pika and asyncio at info would outnumber those of dtx.
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    logging.raiseExceptions = False


def safe_fields(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: drop secret fields, and make every other value printable and free of passwords."""
    ordered = {key: event[key] for key in _FIRST if key in event}
    ordered |= {key: value for key, value in event.items() if key not in SECRET_KEYS}
    return {key: _plain(value, keep="\n" if key in _MANY_LINES else "") for key, value in ordered.items()}


def _plain(value: object, *, keep: str = "") -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case bytes() | bytearray() | memoryview():
            return _printable(redact(bytes(value[:_MAX_TEXT]).decode("ascii", "backslashreplace")), keep)
        case Mapping():
            return {_printable(str(key)): _plain(item) for key, item in value.items() if str(key) not in SECRET_KEYS}
        case list() | tuple() | set() | frozenset() if type(value).__str__ is object.__str__:  # it has no text form
            return [_plain(item) for item in value]
        case _:
            return _printable(redact(str(value)[:_MAX_TEXT]), keep)


def _printable(text: str, keep: str = "") -> str:
    """*text* with control characters escaped: a name that a client chose must not control the reader's terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


class Repeats:
    """A processor of structlog that limits identical warnings and errors, so that they do not fill the disk.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, int]] = {}

    def __call__(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """*event*, with ``left_out``, the number of identical events that were dropped before it, if there are any.

        Raises:
            structlog.DropEvent: it was written :data:`REPEATS` times in the last :data:`REPEAT_SECONDS`.
        """
        if method not in _LIMITED:
            return event
        line = repr(sorted((key, value) for key, value in event.items() if key != "at"))
        now = self._clock()
        since, count = self._known.pop(line, (now, 0))
        left_out = max(0, count - REPEATS)
        if now - since >= REPEAT_SECONDS:
            # A line that never stops is written once in that time.
            since, count = now, REPEATS - 1 if left_out else 0
        else:
            left_out = 0
        if len(self._known) >= _MOST_LINES:
            del self._known[next(iter(self._known))]
        self._known[line] = since, count + 1
        if count >= REPEATS:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event


class _Lines:
    """Writes each event as one line. Errors of the stream are ignored: they must not stop the service."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = msg = _write
