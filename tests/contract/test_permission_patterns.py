"""A pattern gives the same permission in dtx as in RabbitMQ; the tests read queues that do not exist."""

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from dtx.auth.permissions import BadPattern, Patterns, Permission, allows, check_pattern
from tests.support.rabbitmq import RabbitNode

NAMES = (
    "",
    "orders",
    "my.orders.1",
    "ORDERS",
    "amq.topic",
    "a",
    "aa",
    "ä",
    "x{y",
    "line\n",
    "tab\t",
    ":al",
    "[x]",
    "a-b",
)
PATTERNS = (
    ".*", "", "^$", "orders", "^orders$", "^(?!amq\\.).*", "^[[:alpha:]]+$", "(?i)^orders$", "^a{2}$", "x\\{y",
    "^line$", "^.{2}$", "ä", "^(orders|a)$", "\\s", "^[^a-z]", "\\bmy\\b", "[a\\]]", "a|x", "^a++$", "(?#note)a",
    "^(?:a)\\Z", "\\x61", "^amq\\.default$", "[-a]b", "\\Aa", "(a)\\1", "(?<n>a)(?P=n)", "a(?i)B", "^\\h", "\\R",
    "\\d*+-", "[a&&b]", "[[:^alpha:]]",
)  # fmt: skip
READ_OTHERWISE = ("(?<n>a)\\g{1}", "a{,3}", "\\Qx{\\E", "x{e}")


def readable(rabbitmq: RabbitNode, user: str, name: str) -> bool:
    """Whether *user* may read *name*: 403 means no; 404 means yes, but the queue does not exist."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url(user))) as connection:
        channel = connection.channel()
        if not name:
            channel.basic_publish("", "no-such-queue", b"")
        with pytest.raises(ChannelClosedByBroker) as caught:
            # a passive declaration needs no permission: it only waits for the result of the publish
            channel.basic_get(name) if name else channel.queue_declare("no-such-queue", passive=True)
        assert caught.value.reply_code in {403, 404}
        return bool(caught.value.reply_code == 404)


def test_patterns_mean_the_same_as_in_rabbitmq(rabbitmq: RabbitNode) -> None:
    """RabbitMQ, "Access Control": patterns are PCRE patterns, searched in the name."""
    differences = []
    rabbitmq.add_user("pattern")
    try:
        for pattern in PATTERNS:
            rabbitmq.set_permissions("pattern", configure="", write=pattern, read=pattern)
            patterns = Patterns(configure="", write=pattern, read=pattern)
            check_pattern(pattern)
            for name in NAMES:
                ours = allows(patterns, Permission.READ, name.encode())
                if ours != readable(rabbitmq, "pattern", name):
                    differences.append((pattern, name, ours))
    finally:
        rabbitmq.delete_user("pattern")
    assert differences == []


@pytest.mark.parametrize("pattern", READ_OTHERWISE)
def test_an_ambiguous_pattern_is_refused_before_it_is_stored(pattern: str) -> None:
    with pytest.raises(BadPattern, match=r"must be written|is not (known|supported)"):
        check_pattern(pattern)
