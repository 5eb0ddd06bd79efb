"""Patterns of permissions follow RabbitMQ's rules ("Access Control in RabbitMQ"). None can block the service."""

import time

import pytest

from dtx.auth import permissions
from dtx.auth.permissions import (
    MATCH_SECONDS,
    MAX_PATTERN,
    BadPattern,
    Patterns,
    Permission,
    allows,
    check_pattern,
)

ENDLESS = ("^(a|aa)+$", "(b|b)*$", r"^(\d|\d\d)+$", r"(\w|\w\w|-)*$")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings that are logged."""
    said: list[str] = []

    class Log:
        def warning(self, event: str, **_: object) -> None:
            said.append(event)

    monkeypatch.setattr(permissions, "log", Log())
    return said


def may(pattern: str, name: bytes) -> bool:
    return allows(Patterns(configure="", write=pattern, read=""), Permission.WRITE, name)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (".*", b"anything \xff\x00", True),
        ("", b"a", False),
        ("^$", b"a", False),
        ("orders", b"my.orders.1", True),
        ("^orders$", b"orders", True),
        ("^orders$", b"my.orders", False),
        ("^(amq\\.gen.*|amq\\.default)$", b"amq.gen-x", True),
        ("^(?!amq\\.).*", b"amq.topic", False),
        ("^(?!amq\\.).*", b"x", True),
        ("^[[:alpha:]]+$", b"abc", True),
        ("^[[:alpha:]]+$", b":al", False),
        ("(?i)^ORDERS$", b"orders", True),
        ("^ä+$", "ää".encode(), False),
        ("^\\w$", b"\xe4", False),
        ("^a{2,3}$", b"aaa", True),
    ],
)
def test_a_pattern_is_searched_in_the_bytes_of_names(pattern: str, name: bytes, expected: bool) -> None:
    assert may(pattern, name) is expected


@pytest.mark.parametrize(
    ("pattern", "expected"), [(".*", True), ("^amq\\.default$", True), ("", False), ("^$", False), ("^x", False)]
)
def test_the_default_exchange_is_judged_as_amq_default(pattern: str, expected: bool) -> None:
    """RabbitMQ: "the default exchange ... is referred to as amq.default"."""
    assert may(pattern, b"") is expected


def test_each_permission_has_its_own_pattern() -> None:
    patterns = Patterns(configure="^c", write="^w", read="^r")
    allowed = {name: [word for word in Permission if allows(patterns, word, name)] for name in (b"c", b"w", b"r")}
    assert allowed == {b"c": [Permission.CONFIGURE], b"w": [Permission.WRITE], b"r": [Permission.READ]}


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_can_match_endlessly_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern, match="can take too long"):
        check_pattern(pattern)


def test_a_match_that_takes_too_long_is_no_match(warnings: list[str]) -> None:
    """As in RabbitMQ at PCRE's match limit. A pattern that was inserted by hand does not block the service."""
    began = time.process_time()
    assert not may("^(a|aa)+$", b"a" * 254 + b"!")
    assert time.process_time() - began < MATCH_SECONDS * 50
    assert warnings == ["a pattern of a permission took too long and counts as no match"]
    assert may("^(a|aa)+$", b"aaa")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not a regular expression"),
        ("*", "not a regular expression"),
        ("[", "not a regular expression"),
        ("a{e<=1}", "must be written"),
        ("a{,3}", "must be written"),
        ("\\\\{x", "must be written"),
        ("a" * (MAX_PATTERN + 1), "longer than"),
    ],
)
def test_an_invalid_pattern_is_refused_and_allows_nothing(pattern: str, words: str, warnings: list[str]) -> None:
    with pytest.raises(BadPattern, match=words):
        check_pattern(pattern)
    assert not may(pattern, b"a")
    assert warnings == ["a pattern of a permission is wrong and matches nothing"]


@pytest.mark.parametrize("pattern", ["", ".*", "^(a|b|c)$", "a\\{b", "^(?!amq\\.).*", "a{3}", "(.*)(.*)(.*)x", "é"])
def test_ordinary_patterns_are_taken(pattern: str) -> None:
    check_pattern(pattern)
