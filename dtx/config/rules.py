"""Settings with a grammar of their own: policies and quotas. There is none of either unless it is set.

A policy decides about branches in doubt without anybody being asked. A quota bounds what one user, or one virtual host,
may hold.
"""

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeVar, cast

from dtx.config.values import parse_duration, parse_size

_POLICY_NAME: Final = re.compile(r"[a-z0-9._-]{1,32}")
_POLICY_FORMAT: Final = "NAME rollback|commit format=ID[,ID] vhost=NAME after=DURATION"
_LEAST: Final = 1.0
"""Seconds; a policy that is faster than a transaction manager decides against it."""
_T = TypeVar("_T")


class QuotaResource(StrEnum):
    """What a quota bounds."""

    BRANCHES = "branches"
    IN_DOUBT = "in-doubt"
    BYTES = "bytes"
    CONNECTIONS = "connections"
    CHANNELS = "channels"


QUOTA_LIMITS: Final = " ".join(f"{name}={'SIZE' if name is QuotaResource.BYTES else 'N'}" for name in QuotaResource)
"""How limits are written."""
_QUOTA_FORMAT: Final = f"user=NAME|vhost=NAME {QUOTA_LIMITS}"


def _each(value: object, kind: type[_T], parse: Callable[[str], _T]) -> tuple[_T, ...]:
    """From texts, from one with semicolons between them, or from what has been parsed already."""
    pieces = [value] if isinstance(value, str | kind) else list(cast("Iterable[object]", value))
    found: list[_T] = []
    for piece in pieces:
        if isinstance(piece, kind):
            found.append(piece)
        else:
            found += [parse(text) for text in str(piece).split(";") if text.strip()]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Completes prepared branches heuristically that have been so for long.

    Args:
        name: stands in journal and trail.
        action: what is decided.
        formats: format ids of the branches that are meant.
        vhost: the virtual host that is meant.
        after: seconds since the vote.
    """

    name: str
    action: Literal["rollback", "commit"]
    formats: frozenset[int]
    vhost: str
    after: float

    def __str__(self) -> str:
        formats = ",".join(map(str, sorted(self.formats)))
        return f"{self.name} {self.action} format={formats} vhost={shlex.quote(self.vhost)} after={self.after:g}s"


def parse_policies(value: object) -> tuple[Policy, ...]:
    """Policies from texts, or from one with semicolons between them.

    Raises:
        ValueError: one of them is none, two have one name, or two mean the same branches.
    """
    found = _each(value, Policy, _policy)
    if len({policy.name for policy in found}) < len(found):
        raise ValueError("two policies have one name")
    meant = [(policy.vhost, number) for policy in found for number in policy.formats]
    for vhost, number in meant:
        if meant.count((vhost, number)) > 1:
            raise ValueError(f"two policies mean the branches of format id {number} in virtual host {vhost}")
    return found


def _policy(text: str) -> Policy:
    try:
        name, action, *rest = shlex.split(text)
        given = dict(word.split("=", 1) for word in rest)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is no policy: {_POLICY_FORMAT}") from None
    if not _POLICY_NAME.fullmatch(name) or action not in {"rollback", "commit"} or len(given) < len(rest):
        raise ValueError(f"{text.strip()!r} is no policy: {_POLICY_FORMAT}")
    if given.keys() != {"format", "vhost", "after"}:
        raise ValueError(f"policy {name} needs format, vhost and after, and nothing else: {_POLICY_FORMAT}")
    numbers = given["format"].split(",")
    if not all(number.isascii() and number.isdigit() and int(number) < 1 << 32 for number in numbers):
        raise ValueError(f"policy {name}: {given['format']!r} are no format ids")
    after = parse_duration(given["after"])
    if after < _LEAST:
        raise ValueError(f"policy {name}: {given['after']} is sooner than any transaction manager comes back")
    return Policy(
        name=name,
        action=cast('Literal["rollback", "commit"]', action),
        formats=frozenset(map(int, numbers)),
        vhost=given["vhost"],
        after=after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Bounds one user or virtual host.

    Args:
        scope: ``user`` or ``vhost``.
        name: which one; ``*`` for each that has no quota of its own.
        limits: by name of :class:`QuotaResource`, those that there are.
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
    found = _each(value, Quota, _quota)
    names = [(quota.scope, quota.name) for quota in found]
    for scope, name in names:
        if names.count((scope, name)) > 1:
            raise ValueError(f"two quotas are for {scope} {name}")
    return found


def _quota(text: str) -> Quota:
    try:
        words = shlex.split(text)
        (scope, name), *rest = [word.split("=", 1) for word in words]
        limits = {resource: parse_size(most) for resource, most in rest}
    except ValueError:
        raise ValueError(f"{text.strip()!r} is no quota: {_QUOTA_FORMAT}") from None
    if scope not in {"user", "vhost"} or not name or not limits or len(limits) < len(rest):
        raise ValueError(f"{text.strip()!r} is no quota: {_QUOTA_FORMAT}")
    if not limits.keys() <= set(QuotaResource):
        raise ValueError(f"the quota of {scope} {name} is for something unknown: {_QUOTA_FORMAT}")
    return Quota(scope=scope, name=name, limits=tuple(limits.items()))
