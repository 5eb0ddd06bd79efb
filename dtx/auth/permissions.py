"""Patterns of permissions, as RabbitMQ has them ("Access Control in RabbitMQ": configure, write and read by regular
expression).

A pattern is *searched* in the bytes of a name, anywhere unless it has ``^`` or ``$``; the empty pattern is ``^$``.
The default exchange counts as ``amq.default``. RabbitMQ's dialect is PCRE's; the package ``regex`` is nearest to it,
and it can give a match up, which Python's own ``re`` cannot: a pattern such as ``(a|aa)+$`` would stop the whole
service for years over a name that a client has chosen. What was given up is no match, as for RabbitMQ at PCRE's match
limit.
"""

import warnings
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import regex

from dtx.telemetry import get_logger

MATCH_SECONDS: Final = 0.02
"""Processor time of one match; sensible ones take microseconds."""
MAX_PATTERN: Final = 4096
"""Characters of a pattern: hundreds of names with ``|`` between them."""
_PATTERNS: Final = 1024
"""Compiled patterns that are kept; a service has a handful."""
_ANSWERS: Final = 16_384
"""Answers that are kept, for a name and a pattern each: about 5 MB when the names are long."""
_LONGEST_NAME: Final = 255
_PRINTABLE: Final = frozenset(range(0x21, 0x7F))
_PROBES: Final = frozenset(b"a0 ")

# regex reads {e<=1} as "with an error at most"; PCRE reads any such brace as itself. Neither is worth guessing.
_STRANGE_BRACE: Final = regex.compile(r"(?:^|[^\\])(?:\\\\)*\{(?!\d+(?:,\d*)?\})")
_VARIABLE: Final = regex.compile(r"\{(?:username|vhost)\}")
# \g{1} is a reference to a group for PCRE, and twice the letter for regex.
_STRANGE_REFERENCE: Final = regex.compile(r"(?:^|[^\\])(?:\\\\)*\\g")

log: Final = get_logger()


class Permission(StrEnum):
    """What one may be allowed to do with an exchange or a queue."""

    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


class Patterns(NamedTuple):
    """What an account may do in one virtual host.

    Args:
        configure: declare and delete what has such a name.
        write: publish to such exchanges, bind such queues.
        read: consume from and purge such queues, bind to such exchanges.
    """

    configure: str
    write: str
    read: str


class TopicPatterns(NamedTuple):
    """With which routing keys an account may use one topic exchange; where there are none, with all.

    ``{username}`` and ``{vhost}`` in them stand for the names, each character for itself. (RabbitMQ reads names as
    patterns there: to it a user ``.*`` is everybody.)

    Args:
        write: publish.
        read: bind and unbind.
    """

    write: str
    read: str


class BadPattern(ValueError):
    """A pattern that would not work; the message says why, in a few words."""


def allows(patterns: Patterns, permission: Permission, name: bytes) -> bool:
    """Whether *patterns* give *permission* on the exchange or queue *name*."""
    pattern: str = getattr(patterns, permission)
    return _matches(pattern, name or b"amq.default")


@lru_cache(_PATTERNS)
def expand(patterns: TopicPatterns, user: str, vhost: str) -> TopicPatterns:
    """*patterns* with names in the place of ``{username}`` and ``{vhost}``."""
    names = {"{username}": regex.escape(user), "{vhost}": regex.escape(vhost)}
    return TopicPatterns(*(_VARIABLE.sub(lambda found: names[found[0]], pattern) for pattern in patterns))


def allows_topic(patterns: TopicPatterns, permission: Permission, key: bytes) -> bool:
    """Whether *patterns*, expanded, give *permission*, write or read, for the routing key *key*."""
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
    """Try *pattern* before it is stored.

    Raises:
        BadPattern: it is no regular expression, one that RabbitMQ would read otherwise, or one whose match can take
            time that grows out of hand with the length of a name.
    """
    compiled = _compile(pattern)
    for character in sorted(_PROBES | (set(pattern.encode()) & _PRINTABLE)):
        for end in (b"", b"\x00"):
            try:
                compiled.search(bytes([character]) * (_LONGEST_NAME - 1) + end, timeout=MATCH_SECONDS)
            except TimeoutError:
                raise BadPattern(
                    "matching it can take too long: do not repeat what has several ways to match, as (a|aa)+ has"
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
        raise BadPattern("\\g is not known here")
    try:
        with warnings.catch_warnings():
            # what regex warns of, as of a [ in a set, is what it will read otherwise one day, and PCRE does now
            warnings.simplefilter("error")
            return regex.compile(pattern.encode() or b"^$")
    except (regex.error, Warning, RecursionError, OverflowError, ValueError) as error:
        raise BadPattern(f"it is no regular expression: {error}") from None
