"""Settings with a grammar of their own: policies and quotas.

A policy completes branches in doubt without an operator. A quota limits the resources of one user or virtual host.
There are none by default.
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
"""Seconds; a faster policy could decide before the transaction manager does."""
_T = TypeVar("_T")


class QuotaResource(StrEnum):
    """A resource that a quota limits."""

    BRANCHES = "branches"
    IN_DOUBT = "in-doubt"
    BYTES = "bytes"
    CONNECTIONS = "connections"
    CHANNELS = "channels"


QUOTA_LIMITS: Final = " ".join(f"{name}={'SIZE' if name is QuotaResource.BYTES else 'N'}" for name in QuotaResource)
"""The syntax of limits."""
_QUOTA_FORMAT: Final = f"user=NAME|vhost=NAME {QUOTA_LIMITS}"


def _each(value: object, kind: type[_T], parse: Callable[[str], _T]) -> tuple[_T, ...]:
    """Parse texts, or one text with semicolons. Parsed values are returned as they are."""
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
    """A rule that completes branches heuristically that have been prepared for a long time.

    Args:
        name: recorded in journal and audit log.
        action: the decision.
        formats: format ids of the branches that it applies to.
        vhost: virtual host of these branches.
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
    """Policies from texts, or from one text with semicolons.

    Raises:
        ValueError: one of them is invalid, two have the same name, or two apply to the same branches.
    """
    found = _each(value, Policy, _policy)
    if len({policy.name for policy in found}) < len(found):
        raise ValueError("two policies have the same name")
    targets = [(policy.vhost, number) for policy in found for number in policy.formats]
    for vhost, number in targets:
        if targets.count((vhost, number)) > 1:
            raise ValueError(f"two policies apply to branches of format id {number} in virtual host {vhost}")
    return found


def _policy(text: str) -> Policy:
    try:
        name, action, *rest = shlex.split(text)
        given = dict(word.split("=", 1) for word in rest)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a policy: {_POLICY_FORMAT}") from None
    if not _POLICY_NAME.fullmatch(name) or action not in {"rollback", "commit"} or len(given) < len(rest):
        raise ValueError(f"{text.strip()!r} is not a policy: {_POLICY_FORMAT}")
    if given.keys() != {"format", "vhost", "after"}:
        raise ValueError(f"policy {name} needs format, vhost and after, and nothing else: {_POLICY_FORMAT}")
    numbers = given["format"].split(",")
    if not all(number.isascii() and number.isdigit() and int(number) < 1 << 32 for number in numbers):
        raise ValueError(f"policy {name}: {given['format']!r} is not a list of format ids")
    after = parse_duration(given["after"])
    if after < _LEAST:
        raise ValueError(f"policy {name}: after={given['after']} is less than one second")
    return Policy(
        name=name,
        action=cast('Literal["rollback", "commit"]', action),
        formats=frozenset(map(int, numbers)),
        vhost=given["vhost"],
        after=after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one user or virtual host.

    Args:
        scope: ``user`` or ``vhost``.
        name: of the user or virtual host; ``*`` for each that has no quota of its own.
        limits: pairs of a value of :class:`QuotaResource` and its limit.
    """

    scope: str
    name: str
    limits: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return " ".join([shlex.quote(f"{self.scope}={self.name}"), *(f"{name}={most}" for name, most in self.limits)])


def parse_quotas(value: object) -> tuple[Quota, ...]:
    """Quotas from texts, or from one text with semicolons.

    Raises:
        ValueError: one of them is invalid, or two are for the same name.
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
        raise ValueError(f"{text.strip()!r} is not a quota: {_QUOTA_FORMAT}") from None
    if scope not in {"user", "vhost"} or not name or not limits or len(limits) < len(rest):
        raise ValueError(f"{text.strip()!r} is not a quota: {_QUOTA_FORMAT}")
    if not limits.keys() <= set(QuotaResource):
        raise ValueError(f"the quota of {scope} {name} has an unknown resource: {_QUOTA_FORMAT}")
    return Quota(scope=scope, name=name, limits=tuple(limits.items()))
