"""Headers that dtx sets on messages that it publishes for a branch."""

from uuid import uuid4

import pika

from dtx.log.records import WorkRow
from dtx.store.rabbitmq import messages
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.frames import FrameSplitter
from tests.support.branches import a_consume, a_publish


def headers(message: bytes) -> dict[str, object]:
    """The headers of a message."""
    buffer, (_, (_, _, start, end), *_) = FrameSplitter(0).feed(message)
    view = properties.read(buffer[start + 7 + 12 : end - 1])
    table = b"".join(entry.raw for entry in view.headers)
    return pika.data.decode_table(len(table).to_bytes(4, "big") + table, 0)[0] or {}


def copied() -> bytes:
    """Properties that an application has copied from a message that dtx delivered."""
    ours = (b"x-dtx-id", b"x-dtx-put-back", b"x-dtx-redelivered", b"x-dtx-original-exchange", b"x-dtx-later")
    entries = [tables.entry(key, b"S", b"theirs") for key in (*ours, b"x-own")]
    return properties.build({properties.Property.HEADERS: b"".join(entries)})


def test_marks_that_an_application_has_copied_are_removed_at_commit() -> None:
    """They belong to the message that they were copied from: "the commit connection removes every x-dtx-* header"."""
    branch, work = uuid4(), a_publish(properties=copied())
    assert headers(*messages.commit_frames(1, 4096, branch, [work])) == {
        "x-own": "theirs",
        "x-dtx-id": messages.message_id(branch, 0).decode(),
    }


def test_a_message_put_back_keeps_its_marks() -> None:
    work: WorkRow = a_consume(properties=copied())
    found = headers(*messages.put_back_frames(1, 4096, uuid4(), [work]))
    assert found["x-dtx-id"] == found["x-dtx-original-exchange"] == "theirs"
    assert found["x-dtx-put-back"] != "theirs"


def test_an_invented_death_history_is_harmless() -> None:
    """Counts of any type and size come back as they are, or not at all."""

    def death(queue: bytes, kind: bytes, count: bytes, at: int = 2) -> bytes:
        table = tables.entry(b"queue", b"S", queue) + tables.entry(b"reason", b"S", b"rejected")
        table += tables.entry(b"time", b"T", at.to_bytes(8, "big")) + tables.entry(b"count", kind, count)
        return b"F" + tables.put_long(table)

    most, least = (1 << 63).to_bytes(8, "big", signed=False), (1).to_bytes(8, "big")
    made = [death(b"a", b"l", b"\x7f" + b"\xff" * 7), death(b"b", b"l", most), death(b"c", b"S", b"9" * 300), b"t\1"]
    entries = [
        tables.entry(b"x-death", b"A", b"".join(made)),
        tables.entry(b"x-dtx-death", b"A", death(b"a", b"l", least, at=1)),
    ]
    raw = properties.build({properties.Property.HEADERS: b"".join(entries)})
    found = headers(*messages.put_back_frames(1, 4096, uuid4(), [a_consume(properties=raw)]))["x-dtx-death"]
    assert isinstance(found, list)
    assert [(each["queue"], each["count"]) for each in found] == [("a", (1 << 63) - 1), ("b", 0)]


def test_a_death_history_too_large_for_a_frame_is_omitted() -> None:
    """The broker would end the connection of all commits."""
    table = b"".join(tables.entry(key, b"S", b"q") for key in (b"queue", b"reason", b"time"))
    table += tables.entry(b"count", b"l", (1).to_bytes(8, "big")) + tables.entry(b"more", b"S", b"m" * 1600)
    raw = properties.build({properties.Property.HEADERS: tables.entry(b"x-death", b"A", b"F" + tables.put_long(table))})
    for frame_max, there in ((4096, False), (8192, True)):
        (message,) = messages.put_back_frames(1, frame_max, uuid4(), [a_consume(properties=raw)])
        assert ("x-dtx-death" in headers(message)) is there
        _, frames = FrameSplitter(0).feed(message)
        assert all(end - start <= frame_max for _, _, start, end in frames)
