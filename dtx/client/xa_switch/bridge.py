"""Converts the arguments of ``entry.c`` for :mod:`dtx.client.xa_switch.switch`, and its results for ``entry.c``.

Only the interpreter that the shared object starts imports this module: ``_dtx_xa_switch`` is in that object.

``entry.c`` initializes each outcome to a failure. The code is written last, so that an exception before it leaves the
failure in place.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any, Final

from dtx.client.errors import XAER_INVAL, XAException
from dtx.client.xa_switch import messages
from dtx.client.xa_switch.interface import DTX_EMPTY, DTX_TRUNCATED, NULL_FORMAT, XA_OK, SwitchCall
from dtx.client.xa_switch.messages import Taken, short, text
from dtx.client.xa_switch.switch import Switch
from dtx.xa.codes import XaError
from dtx.xa.xid import MAX_BQUAL, MAX_GTRID, Xid

ffi: Final[Any] = import_module("_dtx_xa_switch").ffi
SWITCH: Final = Switch()
_STRINGS: Final = (
    *("content_type", "message_id", "correlation_id", "reply_to", "type"),
    *("content_encoding", "app_id", "user_id"),
)
_ACK, _REQUEUE = 0, 1


def _entry(work: Callable[..., int]) -> Callable[..., int]:
    """Make *work* callable from C, with the number of the thread as first and the outcome as last argument."""
    names = list(signature(work).parameters)
    rmid = names.index("rmid") if "rmid" in names else None

    def called(*arguments: Any) -> None:
        *given, outcome = arguments
        try:
            code = work(*given)
        except XAException as error:
            if error.code == XA_OK:  # an exception without a code of its own must not become success
                raise
            _set_reason(outcome, str(error))
            code = error.code
        except BaseException as error:
            if rmid is not None:
                SWITCH.abandon(given[0], given[rmid])
            _set_reason(outcome, f"internal error: {type(error).__name__}, see stderr")
            raise  # cffi prints it
        else:
            _set_reason(outcome, "")
        outcome.code = code

    ffi.def_extern(name=f"dtx_py{work.__name__}")(called)
    return work


def _set_reason(outcome: Any, text: str) -> None:
    room = ffi.sizeof(outcome.reason) - 1
    ffi.memmove(
        outcome.reason, text.replace("\0", " ").encode(errors="replace")[:room].ljust(room + 1, b"\0"), room + 1
    )


def _flags(flags: int) -> int:
    """*flags* as an unsigned number: where a C long has 32 bits, TMASYNC is its sign bit."""
    return flags & 0xFFFFFFFF if flags < 0 else flags


def _text(what: str, pointer: Any) -> bytes:
    if pointer == ffi.NULL:
        raise XAER_INVAL(f"{what} is NULL")
    return bytes(ffi.string(pointer))


def _xid(pointer: Any) -> Xid:
    """Read an xid; gtrid and bqual follow each other in ``data`` (X/Open 4.2).

    Raises:
        XAER_INVAL: it is null, or its lengths are not possible.
    """
    if pointer == ffi.NULL or pointer.formatID == NULL_FORMAT:
        raise XAER_INVAL("the xid is null")
    gtrid, bqual = pointer.gtrid_length, pointer.bqual_length
    if not (1 <= gtrid <= MAX_GTRID and 0 <= bqual <= MAX_BQUAL):
        raise XAER_INVAL(
            f"an xid with a gtrid of {gtrid} and a bqual of {bqual} bytes; 1 to 64 and 0 to 64 are possible"
        )
    data = bytes(ffi.buffer(pointer.data, gtrid + bqual))
    try:
        return Xid(pointer.formatID, data[:gtrid], data[gtrid:])
    except XaError as error:
        raise XAER_INVAL(error.reason) from None


@_entry
def _open(thread: int, info: Any, rmid: int, flags: int) -> int:
    try:
        text = _text("the open string", info).decode()
    except UnicodeDecodeError:
        raise XAER_INVAL("the open string is not UTF-8") from None
    return SWITCH.open(thread, text, rmid, _flags(flags))


@_entry
def _close(thread: int, rmid: int, flags: int) -> int:
    return SWITCH.close(thread, rmid, _flags(flags))


@_entry
def _branch(thread: int, call: int, xid: Any, rmid: int, flags: int) -> int:
    return SWITCH.branch(thread, SwitchCall(call), _xid(xid), rmid, _flags(flags))


@_entry
def _recover(thread: int, xids: Any, count: int, rmid: int, flags: int) -> int:
    if xids == ffi.NULL and count > 0:
        raise XAER_INVAL("xa_recover: no room for xids")
    found = SWITCH.recover(thread, count, rmid, _flags(flags))
    for position, xid in enumerate(found):
        data = xid.gtrid + xid.bqual
        xids[position].formatID = xid.format_id
        xids[position].gtrid_length = len(xid.gtrid)
        xids[position].bqual_length = len(xid.bqual)
        ffi.memmove(xids[position].data, data, len(data))
    return len(found)


@_entry
def _complete(thread: int, rmid: int, flags: int) -> int:
    return SWITCH.complete(thread, rmid, _flags(flags))


@_entry
def _publish(thread: int, exchange: Any, routing_key: Any, body: Any, length: int, properties: Any) -> int:
    where = _short("exchange", exchange), _short("routing key", routing_key)
    if body == ffi.NULL and length > 0:
        raise XAER_INVAL("the body is NULL")
    content = bytes(ffi.buffer(body, length)) if length else b""
    messages.publish(SWITCH.working(thread)[1], *where, content, _properties(properties))
    return XA_OK


def _short(what: str, pointer: Any) -> str:
    return short(what, _text(what, pointer))


def _properties(pointer: Any) -> Any:
    if pointer == ffi.NULL:
        return messages.properties_of({})
    values = {name: getattr(pointer, name) for name in (*_STRINGS, "expiration")}
    given = {name: bytes(ffi.string(value)) for name, value in values.items() if value != ffi.NULL}
    return messages.properties_of(
        given,
        pointer.priority,
        transient=bool(pointer.transient),
        timestamp=pointer.timestamp,
        headers=_headers(pointer),
    )


def _headers(pointer: Any) -> dict[str, str | int]:
    if pointer.headers == ffi.NULL and pointer.header_count > 0:
        raise XAER_INVAL("the headers are NULL")
    found: dict[str, str | int] = {}
    for header in (pointer.headers[position] for position in range(pointer.header_count)):
        name = _short("the name of a header", header.name)
        found[name] = header.number if header.text == ffi.NULL else text(f"header {name}", _text(name, header.text))
    return found


@_entry
def _get(thread: int, queue: Any, buffer: Any, size: int, message: Any) -> int:
    name = _short("queue", queue)
    if message == ffi.NULL or (buffer == ffi.NULL and size > 0):
        raise XAER_INVAL("no room for a message")
    found = messages.get(SWITCH.working(thread)[1], name, size)
    if found is None:
        return DTX_EMPTY
    if isinstance(found, int):
        message.length = found
        return DTX_TRUNCATED
    _fill(message, found)
    ffi.memmove(buffer, found.body, len(found.body))
    return XA_OK


def _fill(message: Any, found: Taken) -> None:
    message.delivery_tag = found.tag
    message.length = len(found.body)
    message.redelivered = found.redelivered
    _copy(message.exchange, found.exchange)
    _copy(message.routing_key, found.routing_key)
    message.timestamp = found.properties.timestamp or 0
    for name in _STRINGS:
        _copy(getattr(message, name), getattr(found.properties, name))


def _copy(field: Any, value: str | bytes | None) -> None:
    octets = value.encode() if isinstance(value, str) else value or b""  # pika returns bytes if they are no UTF-8
    ffi.memmove(field, octets + b"\0", len(octets) + 1)


@_entry
def _header(thread: int, tag: int, name: Any, buffer: Any, size: int) -> int:
    wanted = _short("the name of a header", name)
    value = messages.header(SWITCH.working(thread)[1], tag, wanted)
    if buffer == ffi.NULL and size > 0:
        raise XAER_INVAL("no room for a header")
    if value is None:
        return DTX_EMPTY
    if len(value) >= size:
        return DTX_TRUNCATED
    ffi.memmove(buffer, value + b"\0", len(value) + 1)
    return XA_OK


@_entry
def _settle(thread: int, tag: int, how: int) -> int:
    messages.settle(SWITCH.working(thread)[1], tag, ack=how == _ACK, requeue=how == _REQUEUE)
    return XA_OK


@_entry
def _use(thread: int, used: int) -> int:
    return SWITCH.use(thread, used)


def _silence_pika() -> None:
    """Keep pika's logs about lost connections off stderr, unless ``DTX_XA_LOG`` names a level such as DEBUG."""
    level = os.environ.get("DTX_XA_LOG", "").upper()
    if level in logging.getLevelNamesMapping():
        logging.basicConfig(level=level)
    else:
        logging.getLogger("pika").addHandler(logging.NullHandler())
        logging.getLogger("pika").propagate = False


_silence_pika()
ffi.def_extern(name="dtx_py_gone")(SWITCH.thread_ended)
