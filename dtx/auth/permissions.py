"""Patterns of permissions, as in RabbitMQ ("Access Control in RabbitMQ": configure, write and read by regular
expression).

A pattern is *searched* in the bytes of a name, anywhere unless it has ``^`` or ``$``; the empty pattern is ``^$``.
The default exchange counts as ``amq.default``. RabbitMQ uses PCRE. The package ``regex`` is most similar to it, and has
a time limit for a match, which Python's own ``re`` lacks. Without it, a client could choose a name that stops the whole
service for years, with a pattern such as ``(a|aa)+$``. A match that exceeds the limit counts as none, as in RabbitMQ.
"""

import warnings
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from dtx.telemetry import get_logger

MATCH_SECONDS: Final = 0.02
"""Seconds for one match; normal ones take microseconds."""
MAX_PATTERN: Final = 4096
"""Characters of a pattern: hundreds of names with ``|`` between them."""
_PATTERNS: Final = 1024
"""Compiled patterns that are kept; a service has few."""
_ANSWERS: Final = 16_384
"""Results that are kept, each for a name and a pattern: about 5 MB with long names."""
_LONGEST_NAME: Final = 255
_PRINTABLE: Final = frozenset(range(0x21, 0x7F))
_PROBES: Final = frozenset(b"a0 ")

# regex reads {e<=1} as "with at most one error"; PCRE reads such a brace as itself. So such patterns are refused.
_STRANGE_BRACE: Final = regex.compile(r"(?:^|[^\\])(?:\\\\)*\{(?!\d+(?:,\d*)?\})")
_VARIABLE: Final = regex.compile(r"\{(?:username|vhost)\}")
# \g{1} is a reference to a group in PCRE, but one letter g in regex.
_STRANGE_REFERENCE: Final = regex.compile(r"(?:^|[^\\])(?:\\\\)*\\g")

log: Final = get_logger()


class Permission(StrEnum):
    """A permission on an exchange or a queue."""

    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


class Patterns(NamedTuple):
    """The permissions of an account in one virtual host, each a pattern of names.

    Args:
        configure: declare and delete exchanges and queues.
        write: publish to exchanges, bind queues.
        read: consume from and purge queues, bind to exchanges.
    """

    configure: str
    write: str
    read: str


class TopicPatterns(NamedTuple):
    """The routing keys with which an account may use one topic exchange. Without topic permissions, all are allowed.

    ``{username}`` and ``{vhost}`` in a pattern are replaced by the names, as literal text. (In RabbitMQ the names
    become part of the pattern: a user ``.*`` matches all names.)

    Args:
        write: publish.
        read: bind and unbind.
    """

    write: str
    read: str


class BadPattern(ValueError):
    """A pattern cannot be used. The message has the reason."""


def allows(patterns: Patterns, permission: Permission, name: bytes) -> bool:
    """Whether *patterns* give *permission* on the exchange or queue *name*."""
    pattern: str = getattr(patterns, permission)
    return _matches(pattern, name or b"amq.default")


@lru_cache(_PATTERNS)
def expand(patterns: TopicPatterns, user: str, vhost: str) -> TopicPatterns:
    """*patterns* with the names instead of ``{username}`` and ``{vhost}``."""
    names = {"{username}": regex.escape(user), "{vhost}": regex.escape(vhost)}
    return TopicPatterns(*(_VARIABLE.sub(lambda found: names[found[0]], pattern) for pattern in patterns))


def allows_topic(patterns: TopicPatterns, permission: Permission, key: bytes) -> bool:
    """Whether the expanded *patterns* give *permission* (write or read) for the routing key *key*."""
    pattern: str = getattr(patterns, permission)
    return _matches(pattern, key)


def _matches(pattern: str, name: bytes) -> bool:
    try:
        return _search(pattern, name)
    except TimeoutError:
        log.warning("a pattern of a permission took too long and counts as no match", pattern=pattern, name=name)
    except BadPattern as error:
        log.warning("a pattern of a permission is wrong and matches nothing", pattern=pattern, reason=str(error))
    return False


def check_pattern(pattern: str) -> None:
    """Check *pattern* before it is stored.

    Raises:
        BadPattern: it is not a regular expression, has another meaning in RabbitMQ, or its match can take too long for
            some names.
    """
    compiled = _compile(pattern)
    for character in sorted(_PROBES | (set(pattern.encode()) & _PRINTABLE)):
        for end in (b"", b"\x00"):
            try:
                compiled.search(bytes([character]) * (_LONGEST_NAME - 1) + end, timeout=MATCH_SECONDS)
            except TimeoutError:
                raise BadPattern(
                    "matching it can take too long: do not repeat a group with several ways to match, such as (a|aa)+"
                ) from None


@lru_cache(_ANSWERS)
def _search(pattern: str, name: bytes) -> bool:
    return _compile(pattern).search(name, timeout=MATCH_SECONDS) is not None


@lru_cache(_PATTERNS)
def _compile(pattern: str) -> "regex.Pattern[bytes]":
    if len(pattern) > MAX_PATTERN:
        raise BadPattern(f"it is longer than {MAX_PATTERN} characters")
    if _STRANGE_BRACE.search(pattern):
        raise BadPattern("a { that begins no number of repetitions must be written \\{")
    if _STRANGE_REFERENCE.search(pattern):
        raise BadPattern("\\g is not supported")
    try:
        with warnings.catch_warnings():
            # regex warns of syntax, such as [ in a set, that future versions will read differently, as PCRE does
            warnings.simplefilter("error")
            return regex.compile(pattern.encode() or b"^$")
    except (regex.error, Warning, RecursionError, OverflowError, ValueError) as error:
        raise BadPattern(f"it is not a regular expression: {error}") from None
