"""Quotas: what one user, or one virtual host, may hold at most. There is none unless it is set."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

from dtx.config.values import parse_size

_FORMAT: Final = "user=NAME|vhost=NAME branches=N in-doubt=N bytes=SIZE connections=N channels=N"
RESOURCES: Final = ("branches", "in-doubt", "bytes", "connections", "channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Bounds one user or virtual host.

    Args:
        scope: ``user`` or ``vhost``.
        name: which one; ``*`` for each that has no quota of its own.
        limits: by name of :data:`RESOURCES`, those that there are.
    """

    scope: str
    name: str
    limits: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return " ".join([shlex.quote(f"{self.scope}={self.name}"), *(f"{name}={most}" for name, most in self.limits)])


def parse_quotas(value: object) -> tuple[Quota, ...]:
    """Quotas from texts, or from one with semicolons between them.

    Raises:
        ValueError: one of them is none, or two are for the same name.
    """
    pieces = [value] if isinstance(value, str | Quota) else list(cast("Iterable[object]", value))
    found: list[Quota] = []
    for piece in pieces:
        if isinstance(piece, Quota):
            found.append(piece)
        else:
            found += [_quota(text) for text in str(piece).split(";") if text.strip()]
    names = [(quota.scope, quota.name) for quota in found]
    for scope, name in names:
        if names.count((scope, name)) > 1:
            raise ValueError(f"two quotas are for {scope} {name}")
    return tuple(found)


def _quota(text: str) -> Quota:
    try:
        words = shlex.split(text)
        (scope, name), *rest = [word.split("=", 1) for word in words]
        limits = {resource: parse_size(most) for resource, most in rest}
    except ValueError:
        raise ValueError(f"{text.strip()!r} is no quota: {_FORMAT}") from None
    if scope not in {"user", "vhost"} or not name or not limits or len(limits) < len(rest):
        raise ValueError(f"{text.strip()!r} is no quota: {_FORMAT}")
    if not limits.keys() <= set(RESOURCES):
        raise ValueError(f"the quota of {scope} {name} is for something unknown: {_FORMAT}")
    return Quota(scope=scope, name=name, limits=tuple(limits.items()))
