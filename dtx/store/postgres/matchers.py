"""Matches messages with the bindings of one exchange: one class for each type of exchange.

A matcher has bindings and their destinations, and returns the destinations of the bindings that a message matches. A
destination may come more than once, by several bindings. The caller takes each destination once.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, StrEnum
from typing import Final, Generic, Protocol, TypeVar, assert_never

from dtx.log.changes import BindingRow
from dtx.store.postgres.arguments import Value, first_of_each, text, value
from dtx.wire.amqp09.tables import Entry
from dtx.xa.codes import ReplyCode, XaError

D = TypeVar("D")

X_MATCH: Final = b"x-match"
_SOME_WORDS: Final = b"#"
_ONE_WORD: Final = b"*"


class ExchangeType(StrEnum):
    """The types of exchanges (AMQP 0-9-1, 3.1.3)."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


class Matcher(Protocol[D]):
    """The bindings of one exchange."""

    def add(self, binding: BindingRow, destination: D) -> None:
        """Add *binding*, which is new, to *destination*."""

    def remove(self, binding: BindingRow) -> None:
        """Remove *binding*, which must exist."""

    def match(self, keys: Sequence[bytes], headers: bytes) -> Iterable[D]:
        """The destinations of a message.

        Args:
            keys: its routing keys: that of the publish, then those of CC and BCC.
            headers: its headers table, without the length.

        Raises:
            WireError: 502 when the type reads headers, and they are malformed.
        """


class Direct(Generic[D]):
    """Matches bindings with the routing key of the message (AMQP 0-9-1, 3.1.3.1)."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, dict[BindingRow, D]] = {}

    def add(self, binding: BindingRow, destination: D) -> None:
        """See Matcher."""
        self._by_key.setdefault(binding.routing_key, {})[binding] = destination

    def remove(self, binding: BindingRow) -> None:
        """See Matcher."""
        bound = self._by_key[binding.routing_key]
        del bound[binding]
        if not bound:
            del self._by_key[binding.routing_key]

    def match(self, keys: Sequence[bytes], headers: bytes) -> Iterable[D]:  # noqa: ARG002
        """See Matcher."""
        return [destination for key in keys for destination in self._by_key.get(key, {}).values()]


class Fanout(Generic[D]):
    """Matches all bindings: "passed to the message queue unconditionally" (AMQP 0-9-1, 3.1.3.2)."""

    def __init__(self) -> None:
        self._bound: dict[BindingRow, D] = {}

    def add(self, binding: BindingRow, destination: D) -> None:
        """See Matcher."""
        self._bound[binding] = destination

    def remove(self, binding: BindingRow) -> None:
        """See Matcher."""
        del self._bound[binding]

    def match(self, keys: Sequence[bytes], headers: bytes) -> Iterable[D]:  # noqa: ARG002
        """See Matcher."""
        return self._bound.values()


class _Node(Generic[D]):
    """A node in the trie of patterns: the bindings whose pattern ends here, and the nodes of further words."""

    __slots__ = ("bound", "some", "words")

    def __init__(self, some: bool = False) -> None:
        self.words: dict[bytes, _Node[D]] = {}
        self.bound: dict[BindingRow, D] = {}
        self.some = some
        """Whether its word is ``#``, so that any further word leads here again."""


def _words(key: bytes) -> list[bytes]:
    """The words of a key or pattern. An empty key has none, as in RabbitMQ: ``*`` does not match it."""
    return key.split(b".") if key else []


class Topic(Generic[D]):
    """Matches patterns: ``*`` matches a single word, ``#`` matches zero or more words (AMQP 0-9-1, 3.1.3.3).

    The patterns are a trie. For each word of a key, the set of nodes that match so far is computed. So a match costs at
    most words times nodes, whatever the number of ``#`` in a pattern.
    """

    def __init__(self) -> None:
        self._root: _Node[D] = _Node()

    def add(self, binding: BindingRow, destination: D) -> None:
        """See Matcher."""
        node = self._root
        for word in _words(binding.routing_key):
            following = node.words.get(word)
            if following is None:
                following = node.words[word] = _Node(word == _SOME_WORDS)
            node = following
        node.bound[binding] = destination

    def remove(self, binding: BindingRow) -> None:
        """See Matcher."""
        path = [(b"", self._root)]
        for word in _words(binding.routing_key):
            path.append((word, path[-1][1].words[word]))
        del path[-1][1].bound[binding]
        while len(path) > 1:
            word, node = path.pop()
            if node.bound or node.words:
                return
            del path[-1][1].words[word]

    def match(self, keys: Sequence[bytes], headers: bytes) -> Iterator[D]:  # noqa: ARG002
        """See Matcher."""
        for key in keys:
            at = self._with_none([self._root])
            for word in _words(key):
                at = self._after(at, word)
                if not at:
                    break
            for node in at:
                yield from node.bound.values()

    def _with_none(self, nodes: Iterable[_Node[D]]) -> dict[_Node[D], None]:
        """*nodes*, and the nodes that follow them when a ``#`` matches no word."""
        reached = dict.fromkeys(nodes)
        waiting = list(reached)
        while waiting:
            following = waiting.pop().words.get(_SOME_WORDS)
            if following is not None and following not in reached:
                reached[following] = None
                waiting.append(following)
        return reached

    def _after(self, nodes: Iterable[_Node[D]], word: bytes) -> dict[_Node[D], None]:
        """The nodes after *word*."""
        reached: list[_Node[D]] = []
        for node in nodes:
            if node.some:
                reached.append(node)
            following = node.words.get(_ONE_WORD)
            if following is not None:
                reached.append(following)
            if word not in (_ONE_WORD, _SOME_WORDS) and (following := node.words.get(word)) is not None:
                reached.append(following)
        return self._with_none(reached)


class _Take(Enum):
    """Values of x-match."""

    ALL = b"all"
    ANY = b"any"
    ALL_WITH_X = b"all-with-x"
    ANY_WITH_X = b"any-with-x"


def _take(entry: Entry | None) -> _Take:
    """The value of x-match; ``all`` without one.

    Raises:
        XaError: 406 for anything but the four words.
    """
    if entry is None:
        return _Take.ALL
    if entry.kind == b"S":
        try:
            return _Take(entry.value)
        except ValueError:
            pass
    raise XaError(
        ReplyCode.PRECONDITION_FAILED,
        f"invalid x-match '{text(entry.value)}' in a binding; expected all, any, all-with-x, or any-with-x",
    )


class _Wanted:
    """The arguments of a binding of a headers exchange."""

    __slots__ = ("_any", "_values")

    def __init__(self, arguments: bytes) -> None:
        found = first_of_each(arguments)
        take = _take(found.pop(X_MATCH, None))
        self._any = take is _Take.ANY or take is _Take.ANY_WITH_X
        with_x = take is _Take.ALL_WITH_X or take is _Take.ANY_WITH_X
        self._values: dict[bytes, Value | None] = {
            # "if the value is void, a match is made on the presence of the header" (AMQP 0-9-1, 3.1.3.4)
            key: None if entry.kind == b"V" else value(entry)
            for key, entry in found.items()
            if with_x or not key.startswith(b"x-")
        }

    def accepts(self, headers: dict[bytes, Value]) -> bool:
        """Whether a message with these headers matches."""
        for key, wanted in self._values.items():
            found = headers.get(key)
            if (found is not None and (wanted is None or wanted == found)) is self._any:
                return self._any
        return not self._any


class Headers(Generic[D]):
    """Matches the headers of a message with the arguments of bindings, and no keys (AMQP 0-9-1, 3.1.3.4)."""

    def __init__(self) -> None:
        self._bound: dict[BindingRow, tuple[_Wanted, D]] = {}

    def add(self, binding: BindingRow, destination: D) -> None:
        """See Matcher. Raises XaError 406 for an unknown x-match."""
        self._bound[binding] = _Wanted(binding.arguments), destination

    def remove(self, binding: BindingRow) -> None:
        """See Matcher."""
        del self._bound[binding]

    def match(self, keys: Sequence[bytes], headers: bytes) -> Iterable[D]:  # noqa: ARG002
        """See Matcher."""
        found = {key: value(entry) for key, entry in first_of_each(headers).items()} if headers else {}
        return [destination for wanted, destination in self._bound.values() if wanted.accepts(found)]


def matcher(kind: ExchangeType) -> Matcher[D]:
    """An empty matcher for an exchange of that type."""
    match kind:
        case ExchangeType.DIRECT:
            return Direct()
        case ExchangeType.FANOUT:
            return Fanout()
        case ExchangeType.TOPIC:
            return Topic()
        case ExchangeType.HEADERS:
            return Headers()
        case _:
            assert_never(kind)
