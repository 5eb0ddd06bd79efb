"""An export gives all messages of a branch, or an error."""

from collections.abc import Iterator
from itertools import chain

import pytest

from dtx.log.api import LogError
from dtx.log.reader import Export, LogReader
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_completion, a_consume, a_publish, an_insert

MANY = 40
"""More messages than are read at a time."""


def bodies(export: Export) -> Iterator[bytes]:
    return (b"".join(body) for _, body in export)


async def test_small_and_large_bodies_come_whole_and_in_order(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    record = a_branch(publishes=MANY)
    sent = [b"%d" % number for number in range(MANY)]
    sent[3], sent[35], sent[36] = b"", bytes(range(256)) * 10_000, b"x" * 65_537
    await log.write(an_insert(record, *(a_publish(number, body=body) for number, body in enumerate(sent))))
    with LogReader(migrated_postgres_url) as reader:
        export = Export(reader, "rm", record.vhost, record.xid)
        assert (export.count, list(bodies(export))) == (MANY, sent)
        some = Export(reader, "rm", record.vhost, record.xid, positions=(35, 3))
        assert (some.count, list(bodies(some))) == (2, [b"", sent[35]])
        assert Export(reader, "another", record.vhost, record.xid).branches == ()
        assert Export(reader, "rm", "another", record.xid).branches == ()
        xid = record.xid
        for other in (
            xid._replace(format_id=xid.format_id + 1), xid._replace(gtrid=xid.gtrid + b"x"),
            xid._replace(bqual=xid.bqual + b"x"),
        ):  # fmt: skip
            assert Export(reader, "rm", record.vhost, other).branches == ()


async def test_properties_of_a_message_precede_its_body(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    record = a_branch(publishes=1, consumes=1)
    await log.write(an_insert(record, a_publish(0), a_consume(1)))
    with LogReader(migrated_postgres_url) as reader:
        first, second = (piece for piece, _ in Export(reader, "rm", record.vhost, record.xid))
    assert (first.exchange, first.routing_key, first.queue, first.fate) == (b"orders", b"key\x00\xff", None, None)
    assert (second.queue, second.fate, second.size) == (b"incoming\xfe", None, 5)


@pytest.mark.parametrize("large", [False, True], ids=["between two looks", "within a large body"])
async def test_a_branch_that_ends_during_an_export_is_an_error(
    open_log: OpenLog, migrated_postgres_url: str, large: bool
) -> None:
    log = await open_log()
    record = a_branch(publishes=MANY)
    body = b"x" * 3_000_000 if large else b"x"
    await log.write(an_insert(record, *(a_publish(number, body=body) for number in range(2 if large else MANY))))
    with LogReader(migrated_postgres_url) as reader:
        pieces = iter(Export(reader, "rm", record.vhost, record.xid))
        _, chunks = next(pieces)
        next(chunks)
        await log.write(a_completion(record))
        with pytest.raises(LogError, match="has ended while its messages were read"):
            list(chain(chunks, pieces))
