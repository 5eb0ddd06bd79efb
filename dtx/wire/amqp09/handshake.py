"""The opening of a connection: what the tables of connection.start and start-ok say, and the SASL responses.

Responses hold passwords: they appear in no error and in no repr.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import ConnectionStart

PLAIN: Final = b"PLAIN"
AMQPLAIN: Final = b"AMQPLAIN"
PASSED: Final = (PLAIN, AMQPLAIN)
"""The mechanisms that can pass a proxy: they tell the user's name, and are not bound to the transport."""
CAPABILITY: Final = b"dtx"

_CAPABILITIES: Final = b"capabilities"
_TRUE: Final = b"\x01"
_TOKEN: Final = re.compile(rb"eyJ[\w-]+\.[\w-]+\.[\w-]*")
"""A JSON Web Token in its compact form (RFC 7519): its first part is a JSON object, in base64url."""


class NotOffered(Exception):
    """start-ok names a mechanism that the server has not offered.

    Such a client hears nothing: "the server MUST close the connection without sending any further data" (AMQP 0-9-1,
    connection.start-ok).

    Args:
        mechanism: its name.
    """

    def __init__(self, mechanism: bytes) -> None:
        super().__init__(mechanism)
        self.mechanism = mechanism

    def __str__(self) -> str:
        return f"mechanism {self.mechanism.decode('ascii', 'replace')!r} was not offered"


def server_properties(texts: Mapping[bytes, bytes], capabilities: Iterable[bytes]) -> bytes:
    """What a server says about itself in connection.start: a table without its length.

    Args:
        texts: by name, for example ``product``.
        capabilities: what it can do; all are true.
    """
    able = b"".join(tables.entry(name, b"t", _TRUE) for name in capabilities)
    parts = [tables.entry(_CAPABILITIES, b"F", able)]
    parts += (tables.entry(name, b"S", text) for name, text in texts.items())
    return b"".join(parts)


def advertise(payload: bytes) -> ConnectionStart:
    """A broker's connection.start as dtx passes it on.

    Adds ``dtx: true`` to ``capabilities`` among the server's properties, keeping everything else, and offers only the
    mechanisms of :data:`PASSED`.

    Raises:
        WireError: 502 when *payload* is malformed, 540 when the broker offers none of those mechanisms.
    """
    start = ConnectionStart.decode(payload)
    mechanisms = [name for name in start.mechanisms.split() if name in PASSED]
    if not mechanisms:
        raise WireError(HardCode.NOT_IMPLEMENTED, "the broker offers neither PLAIN nor AMQPLAIN, nothing else can pass")
    properties = tables.entries(start.server_properties)
    inner = next((entry.value for entry in properties if entry.key == _CAPABILITIES and entry.kind == b"F"), b"")
    kept = [entry.raw for entry in tables.entries(inner) if entry.key != CAPABILITY]
    capabilities = b"".join((*kept, tables.entry(CAPABILITY, b"t", _TRUE)))
    parts = [entry.raw for entry in properties if entry.key != _CAPABILITIES]
    parts.append(tables.entry(_CAPABILITIES, b"F", capabilities))
    return replace(start, server_properties=b"".join(parts), mechanisms=b" ".join(mechanisms))


def capabilities(properties: bytes) -> frozenset[bytes]:
    """Names of the capabilities that *properties* (server's or client's, a table without its length) claim.

    Raises:
        WireError: 502 when the table is malformed.
    """
    for entry in tables.entries(properties):
        if entry.key == _CAPABILITIES and entry.kind == b"F":
            inside = tables.entries(entry.value)
            return frozenset(inner.key for inner in inside if inner.kind == b"t" and inner.value != b"\x00")
    return frozenset()


def user_name(mechanism: bytes, response: bytes) -> str | None:
    """Who a SASL response authenticates as, read exactly as the broker reads it.

    Returns:
        ``None`` when it does not say, for example with an empty name beside a token, a name that is no UTF-8, or a
        response that is malformed or says it twice: then the broker decides, and dtx knows nobody. The same for any
        name beside a token (a JSON Web Token): the broker takes the name from the token, so the other one is hearsay.
    """
    if mechanism == PLAIN:
        name, password = _plain(response)
    elif mechanism == AMQPLAIN:
        name, password = _amqplain(response)
    else:
        return None
    if not name or _TOKEN.fullmatch(password):
        return None
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a SASL response says.

    Args:
        user: name.
        password: never shown.
    """

    user: bytes
    password: bytes = field(repr=False)


def credentials(mechanism: bytes, response: bytes) -> Credentials | None:
    """User and password in a SASL response.

    Returns:
        ``None`` when the response is malformed, names nobody, or says it twice.

    Raises:
        NotOffered: a mechanism other than those of :data:`PASSED`.
    """
    if mechanism == PLAIN:
        found = _plain(response)
    elif mechanism == AMQPLAIN:
        found = _amqplain(response)
    else:
        raise NotOffered(mechanism)
    return Credentials(*found) if found[0] else None


def _plain(response: bytes) -> tuple[bytes, bytes]:
    """RFC 4616 without an authorization identity, which brokers refuse: NUL, name, NUL, password."""
    parts = response.split(b"\x00")
    return (parts[1], parts[2]) if len(parts) == 3 and not parts[0] else (b"", b"")


def _amqplain(response: bytes) -> tuple[bytes, bytes]:
    """A table without its length, with ``LOGIN`` and ``PASSWORD``."""
    try:
        entries = tables.entries(response)
    except WireError:
        return b"", b""
    names = [entry for entry in entries if entry.key == b"LOGIN"]
    if len(names) != 1 or names[0].kind != b"S":
        return b"", b""
    return names[0].value, next((entry.value for entry in entries if entry.key == b"PASSWORD"), b"")


def plain(user: bytes, password: bytes) -> bytes:
    """The response of mechanism PLAIN."""
    return b"\x00" + user + b"\x00" + password
