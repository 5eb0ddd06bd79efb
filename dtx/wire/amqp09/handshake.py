"""The opening of a connection: the tables of connection.start and start-ok, and the SASL responses.

Responses contain passwords: no error and no repr shows them.
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
"""The mechanisms that can pass a proxy: they contain the user name, and are not bound to the transport."""
CAPABILITY: Final = b"dtx"
MEMBER: Final = b"dtx_member"
"""The server property that distinguishes several active dtx. Clients join branches only at the member that has them."""

_CAPABILITIES: Final = b"capabilities"
_TRUE: Final = b"\x01"
_TOKEN: Final = re.compile(rb"eyJ[\w-]+\.[\w-]+\.[\w-]*")
"""A JSON Web Token in its compact form (RFC 7519): its first part is a JSON object, in base64url."""


class NotOffered(Exception):
    """start-ok names a mechanism that the server has not offered.

    "the server MUST close the connection without sending any further data" (AMQP 0-9-1, connection.start-ok).

    Args:
        mechanism: the name of the mechanism.
    """

    def __init__(self, mechanism: bytes) -> None:
        super().__init__(mechanism)
        self.mechanism = mechanism

    def __str__(self) -> str:
        return f"mechanism {self.mechanism.decode('ascii', 'replace')!r} was not offered"


def server_properties(texts: Mapping[bytes, bytes], capabilities: Iterable[bytes]) -> bytes:
    """Make the server properties of connection.start: a table without its length.

    Args:
        texts: texts by name, for example ``product``.
        capabilities: the names of the capabilities of the server.
    """
    able = b"".join(tables.entry(name, b"t", _TRUE) for name in capabilities)
    parts = [tables.entry(_CAPABILITIES, b"F", able)]
    parts += (tables.entry(name, b"S", text) for name, text in texts.items())
    return b"".join(parts)


def advertise(payload: bytes, member: bytes = b"") -> ConnectionStart:
    """Return the connection.start of a broker as dtx passes it on.

    The function adds ``dtx: true`` to ``capabilities`` in the server's properties, and keeps all other entries. It
    removes all mechanisms but those of :data:`PASSED`.

    Args:
        payload: the method of the broker.
        member: the id of this dtx among several active ones; it is added to the server's properties.

    Raises:
        WireError: 502 if *payload* is malformed, 540 if the broker offers none of those mechanisms.
    """
    start = ConnectionStart.decode(payload)
    mechanisms = [name for name in start.mechanisms.split() if name in PASSED]
    if not mechanisms:
        raise WireError(HardCode.NOT_IMPLEMENTED, "the broker offers neither PLAIN nor AMQPLAIN; dtx passes no other")
    properties = tables.entries(start.server_properties)
    inner = next((entry.value for entry in properties if entry.key == _CAPABILITIES and entry.kind == b"F"), b"")
    kept = [entry.raw for entry in tables.entries(inner) if entry.key != CAPABILITY]
    capabilities = b"".join((*kept, tables.entry(CAPABILITY, b"t", _TRUE)))
    parts = [entry.raw for entry in properties if entry.key not in (_CAPABILITIES, MEMBER)]
    parts.append(tables.entry(_CAPABILITIES, b"F", capabilities))
    if member:
        parts.append(tables.entry(MEMBER, b"S", member))
    return replace(start, server_properties=b"".join(parts), mechanisms=b" ".join(mechanisms))


def version(start: ConnectionStart) -> tuple[int, ...]:
    """Return the version in the server's properties, for example (4, 0, 5); empty if there is none with numbers.

    Raises:
        WireError: 502, the properties are malformed.
    """
    found = next((entry.value for entry in tables.entries(start.server_properties) if entry.key == b"version"), b"")
    return tuple(int(part) for part in re.findall(rb"\d+", found)[:3])


def capabilities(properties: bytes) -> frozenset[bytes]:
    """Return the names of the true capabilities in *properties* of a server or client, a table without its length.

    Raises:
        WireError: 502 if the table is malformed.
    """
    for entry in tables.entries(properties):
        if entry.key == _CAPABILITIES and entry.kind == b"F":
            inside = tables.entries(entry.value)
            return frozenset(inner.key for inner in inside if inner.kind == b"t" and inner.value != b"\x00")
    return frozenset()


def user_name(mechanism: bytes, response: bytes) -> str | None:
    """Return the user name in a SASL response, read exactly as the broker reads it.

    Returns:
        ``None`` if the broker alone decides on the name. This is so for a malformed response, for an empty or repeated
        name, and for a name that is no UTF-8. Also for any name with a JSON Web Token as the password. The broker takes
        the name from the token, so the other name proves nothing.
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
    """The user name and the password in a SASL response. The repr hides the password."""

    user: bytes
    password: bytes = field(repr=False)


def credentials(mechanism: bytes, response: bytes) -> Credentials | None:
    """Return the user name and the password in a SASL response.

    Returns:
        ``None`` if the response is malformed, or its name is empty or repeated.

    Raises:
        NotOffered: *mechanism* is none of :data:`PASSED`.
    """
    if mechanism == PLAIN:
        found = _plain(response)
    elif mechanism == AMQPLAIN:
        found = _amqplain(response)
    else:
        raise NotOffered(mechanism)
    return Credentials(*found) if found[0] else None


def _plain(response: bytes) -> tuple[bytes, bytes]:
    """Read NUL, name, NUL, password (RFC 4616). Brokers refuse an authorization identity, so it must be empty."""
    parts = response.split(b"\x00")
    return (parts[1], parts[2]) if len(parts) == 3 and not parts[0] else (b"", b"")


def _amqplain(response: bytes) -> tuple[bytes, bytes]:
    """Read a table without its length, with ``LOGIN`` and ``PASSWORD``."""
    try:
        entries = tables.entries(response)
    except WireError:
        return b"", b""
    names = [entry for entry in entries if entry.key == b"LOGIN"]
    if len(names) != 1 or names[0].kind != b"S":
        return b"", b""
    return names[0].value, next((entry.value for entry in entries if entry.key == b"PASSWORD"), b"")


def plain(user: bytes, password: bytes) -> bytes:
    """Make the response of mechanism PLAIN."""
    return b"\x00" + user + b"\x00" + password
