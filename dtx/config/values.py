"""Parsers for values of settings: sizes, durations, addresses, URLs; and the redaction of secrets."""

import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from pydantic import SecretStr

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
DAY: Final = 86400
_SIZE_UNITS: Final = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 1000, "mb": 1000**2, "gb": 1000**3}
_TIME_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": float(DAY)}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
RM_NAME: Final = re.compile(r"[a-z0-9._-]{1,64}")
_URL_WITH_USER: Final = re.compile(r"([a-z][a-z0-9+.-]*://)([^\s\"'<>]*)@", re.IGNORECASE)
_PASSWORD_FIELD: Final = re.compile(
    r"\b(\w*password|passwd|secret)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'\"]+)", re.IGNORECASE
)


class ConfigError(Exception):
    """A setting is missing, unknown or invalid. The message is one sentence for people, without secrets."""


class Address(NamedTuple):
    """A TCP address to listen on; port 0 lets the system choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def redact(text: str) -> str:
    """*text* with every password in a URL or a connection string replaced by ``***``.

    It hides too much rather than too little: a password in a URL ends at the last ``@``, because passwords are often
    not percent-encoded.
    """
    return _PASSWORD_FIELD.sub(r"\1\2***", _URL_WITH_USER.sub(_without_password, text))


def _without_password(match: re.Match[str]) -> str:
    user, colon, _ = match[2].partition(":")
    return f"{match[1]}{user}{':***' if colon else ''}@"


def parse_size(value: object) -> int:
    """A number of bytes from ``65536``, ``"64KiB"``, ``"2 MiB"`` or ``"1GB"``.

    Raises:
        ValueError: it is not a size, or not a whole number of bytes.
    """
    number = _quantity(value, _SIZE_UNITS, "a size, for example 65536 or 64MiB")
    if number != int(number):
        raise ValueError(f"{value} is not a whole number of bytes")
    return int(number)


def parse_duration(value: object) -> float:
    """Seconds from ``10``, ``0.5``, ``"10s"``, ``"500ms"``, ``"5m"``, ``"1h"`` or ``"90d"``.

    Raises:
        ValueError: it is not a duration.
    """
    return _quantity(value, _TIME_UNITS, "a duration, for example 10s, 5m or 2h (a bare number is in seconds)")


def _quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return value
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value.strip())) and match[2].lower() in units:
        return float(match[1]) * units[match[2].lower()]
    raise ValueError(f"{value!r} is not {expected}")


def parse_listen(value: object) -> tuple[Address, ...]:
    """Addresses from ``"127.0.0.1:5673,[::1]:5673"`` or from a sequence of them.

    Raises:
        ValueError: one of them is not ``host:port`` or ``[ipv6]:port``.
    """
    return tuple(_address(part) for part in split_list(value))


def _address(part: object) -> Address:
    if isinstance(part, Address):
        return part
    text = str(part)
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is not host:port, for example 127.0.0.1:5673 or [::1]:5673")
    return Address(host[1:-1] if bracketed else host, int(port))


def split_list(value: object) -> tuple[object, ...]:
    """The elements of a comma separated text, a sequence, or a sequence of such texts."""
    if isinstance(value, str):
        return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
    if isinstance(value, Address) or not isinstance(value, Iterable):
        return (value,)
    return tuple(
        part for element in value for part in (split_list(element) if isinstance(element, str) else (element,))
    )


def url_of(schemes: tuple[str, ...], example: str, *, hosts: bool = False) -> "Callable[[object], SecretStr]":
    """A parser for URLs with one of *schemes*. It raises ValueError with *example*, never with the URL.

    Args:
        schemes: those that are allowed.
        example: of a URL.
        hosts: whether the URL may name several hosts.
    """
    from pydantic import SecretStr

    def check(value: object) -> SecretStr:
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        try:
            each = [urlsplit(one) for one in (single_hosts(text) if hosts else (text,))]
            _ = [one.port for one in each]
            parts = next((one for one in each if not one.hostname), each[0])
        except ValueError:
            parts = None
        if parts is None or "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("not a URL; percent-encode special characters in user name, password and path")
        if parts.scheme not in schemes:
            raise ValueError(f"the URL must begin with {' or '.join(f'{name}://' for name in schemes)}, as {example}")
        if not parts.hostname and not parts.scheme.startswith("postgres"):
            raise ValueError(f"the URL names no host, expected {example}")
        return SecretStr(text)

    return check


def single_hosts(url: str) -> list[str]:
    """*url* once for each of the hosts that it names: ``amqp://user:password@one:5672,two:5672/``."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]


def broker_vhost(url: str) -> str:
    """The vhost of an AMQP URL: the decoded path without its first slash, or ``/`` without a path.

    As in most clients, ``amqp://host/`` means ``/`` too (RabbitMQ URI specification, "vhost").
    """
    return unquote(urlsplit(url).path.removeprefix("/")) or "/"
