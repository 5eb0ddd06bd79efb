"""Routing by the four types of exchanges."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres.matchers import ExchangeType, Matcher, Topic, matcher
from dtx.xa.codes import ReplyCode, XaError
from tests.support.rules import HEADERS
from tests.support.topology import VHOST, table


def binding(key: str = "", arguments: bytes = b"", to: str = "q") -> BindingRow:
    return BindingRow(VHOST, b"x", DestinationKind.QUEUE, to.encode(), key.encode(), arguments)


def bound(kind: ExchangeType, *keys: str) -> Matcher[str]:
    """A matcher in which each key leads to the destination of the same name."""
    found: Matcher[str] = matcher(kind)
    for key in keys:
        found.add(binding(key), key)
    return found


def test_a_direct_exchange_compares_the_whole_key() -> None:
    """3.1.3.1: "a message sent with routing key R goes to the queue if K = R"."""
    direct = bound(ExchangeType.DIRECT, "a", "a.b", "*")
    assert list(direct.match([b"a"], b"")) == ["a"]
    assert list(direct.match([b"A"], b"")) == []


def test_a_fanout_exchange_takes_no_notice_of_the_key() -> None:
    """3.1.3.2: "passed to the message queue unconditionally"."""
    assert list(bound(ExchangeType.FANOUT, "a", "b").match([b"z"], b"")) == ["a", "b"]


def as_regex(pattern: str) -> re.Pattern[str]:
    """The reference: words end with a dot, ``#`` is any number of them."""
    words = pattern.split(".") if pattern else []
    return re.compile(
        "".join({"*": r"[^.]*\.", "#": r"(?:[^.]*\.)*"}.get(word, re.escape(word) + r"\.") for word in words)
    )


word = st.sampled_from(["*", "#", "a", "b", "", "ab"])
patterns = st.lists(word, max_size=6).map(".".join)
routing_keys = st.lists(st.sampled_from(["a", "b", "", "ab", "c"]), max_size=6).map(".".join)


@given(st.lists(patterns, max_size=12, unique=True), st.lists(routing_keys, min_size=1, max_size=5), st.data())
def test_a_topic_exchange_matches_as_a_regular_expression_would(
    there: list[str], keys: list[str], data: st.DataObject
) -> None:
    """3.1.3.3: "``*`` matches a single word and ``#`` matches zero or more words"; also after bindings were removed."""
    topic = bound(ExchangeType.TOPIC, *there)
    gone = data.draw(st.sets(st.sampled_from(there))) if there else set()
    for key in gone:
        topic.remove(binding(key))
    left = set(there) - gone
    for key in keys:
        text = "".join(f"{each}." for each in key.split(".")) if key else ""
        assert set(topic.match([key.encode()], b"")) == {each for each in left if as_regex(each).fullmatch(text)}


def test_many_wildcards_cost_no_more_than_words_times_nodes() -> None:
    """A pattern of 128 ``#`` against a key of 128 words: a search that tries all combinations would not end."""
    topic = bound(ExchangeType.TOPIC, ".".join(["#"] * 127 + ["z"]))
    assert not list(topic.match([b".".join([b"a"] * 128)], b""))


def test_a_pattern_that_is_gone_leaves_nothing_in_memory() -> None:
    topic: Topic[str] = Topic()
    topic.add(binding("a.b.c"), "1")
    topic.add(binding("a"), "2")
    topic.remove(binding("a.b.c"))
    assert list(topic._root.words) == [b"a"]
    assert not topic._root.words[b"a"].words
    topic.remove(binding("a"))
    assert not topic._root.words


@pytest.mark.parametrize("kind", ExchangeType)
def test_two_bindings_with_one_key_go_one_by_one(kind: ExchangeType) -> None:
    found: Matcher[str] = matcher(kind)
    one, other = binding("k", to="one"), binding("k", to="other")
    found.add(one, "one")
    found.add(other, "other")
    found.remove(one)
    assert list(found.match([b"k"], b"")) == ["other"]
    found.remove(other)
    assert list(found.match([b"k"], b"")) == []


@pytest.mark.parametrize(("wanted", "headers", "expected"), HEADERS)
def test_a_headers_exchange_compares_values(wanted: dict[str, Any], headers: dict[str, Any], expected: bool) -> None:
    """3.1.3.4: "all the headers must match", "any"; "x-" only where requested; a void requires presence."""
    found: Matcher[str] = matcher(ExchangeType.HEADERS)
    found.add(binding(arguments=table(wanted)), "q")
    assert list(found.match([b"any"], table(headers))) == (["q"] if expected else [])


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [(b"\x01ab\x05", b"\x01aI\x00\x00\x00\x05"), (b"\x01af\x3f\x80\x00\x00", b"\x01aI\x00\x00\x00\x01")],
)
def test_the_width_of_a_number_does_not_matter(wanted: bytes, sent: bytes) -> None:
    found: Matcher[str] = matcher(ExchangeType.HEADERS)
    found.add(binding(arguments=wanted), "q")
    assert list(found.match([b""], sent)) == ["q"]


def test_the_first_of_a_repeated_header_counts() -> None:
    found: Matcher[str] = matcher(ExchangeType.HEADERS)
    found.add(binding(arguments=table({"a": 1})), "q")
    assert list(found.match([b""], table({"a": 1}) + table({"a": 2}))) == ["q"]
    assert list(found.match([b""], table({"a": 2}) + table({"a": 1}))) == []


@pytest.mark.parametrize("word", ["some", 1])
def test_an_unknown_x_match_is_refused(word: object) -> None:
    """RabbitMQ: "Invalid x-match field value …; expected all, any, all-with-x, or any-with-x"."""
    found: Matcher[str] = matcher(ExchangeType.HEADERS)
    with pytest.raises(XaError, match="expected all, any, all-with-x, or any-with-x") as refused:
        found.add(binding(arguments=table({"x-match": word})), "q")
    assert refused.value.code is ReplyCode.PRECONDITION_FAILED
    assert list(found.match([b""], b"")) == []
