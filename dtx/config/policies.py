"""Policies: what is decided about branches in doubt without anybody being asked. There is none unless it is set."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, cast

from dtx.config.values import parse_duration

_NAME: Final = re.compile(r"[a-z0-9._-]{1,32}")
_FORMAT: Final = "NAME rollback|commit format=ID[,ID] vhost=NAME after=DURATION"
_LEAST: Final = 1.0
"""Seconds; a policy that is faster than a transaction manager decides against it."""


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
    pieces = [value] if isinstance(value, str | Policy) else list(cast("Iterable[object]", value))
    found: list[Policy] = []
    for piece in pieces:
        if isinstance(piece, Policy):
            found.append(piece)
        else:
            found += [_policy(text) for text in str(piece).split(";") if text.strip()]
    if len({policy.name for policy in found}) < len(found):
        raise ValueError("two policies have one name")
    meant = [(policy.vhost, number) for policy in found for number in policy.formats]
    for vhost, number in meant:
        if meant.count((vhost, number)) > 1:
            raise ValueError(f"two policies mean the branches of format id {number} in virtual host {vhost}")
    return tuple(found)


def _policy(text: str) -> Policy:
    try:
        name, action, *rest = shlex.split(text)
        given = dict(word.split("=", 1) for word in rest)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is no policy: {_FORMAT}") from None
    if not _NAME.fullmatch(name) or action not in {"rollback", "commit"} or len(given) < len(rest):
        raise ValueError(f"{text.strip()!r} is no policy: {_FORMAT}")
    if given.keys() != {"format", "vhost", "after"}:
        raise ValueError(f"policy {name} needs format, vhost and after, and nothing else: {_FORMAT}")
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
