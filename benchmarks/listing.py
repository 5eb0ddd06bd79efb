"""Pages of branches in doubt, as operators list them: the time of each kind of filter among very many branches.

    python -m benchmarks.listing --branches 100000

Half of the branches have their messages in a broker, half in the database itself. Each query runs ten times, as the API
runs it: with a new connection.
"""

import argparse
import time
from uuid import UUID

import psycopg

from benchmarks.support.report import Table, machine, percentile
from dtx.log.pages import BRANCH_CURSORS, BranchFilter, Cursor, Sort, branch_page, gtrid_pattern
from dtx.log.reader import LogReader
from dtx.log.records import LogState
from tests.support.postgres import PostgresServer

RM = "dtx"
ROUNDS = 10
FILL = """
INSERT INTO dtx.queue (id, rm, vhost, name, auto_delete, arguments, delivered)
SELECT n, 'dtx', '/', convert_to('queue-' || n, 'UTF8'), false, '', 0 FROM generate_series(1, 100) n;
INSERT INTO dtx.branch (id, rm, vhost, format_id, gtrid, bqual, state, owner, version, timeout, started_at, prepared_at,
    one_phase, publishes, consumes, bytes, stuck, published, consumed, exchange_marks)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'dtx', '/', n % 7, convert_to('order-' || lpad(n::text, 8, '0'), 'UTF8'), 'b',
    CASE WHEN n % 50 = 0 THEN 'committing' ELSE 'prepared' END, 'user-' || n % 20, 1, 60,
    now() - make_interval(secs => {branches} - n), now(), false, 1, 1, 1024,
    CASE WHEN n % 500 = 0 THEN '404 NOT_FOUND' END,
    CASE WHEN n % 2 = 0 THEN int8send(n % 100 + 1) || int8send(n) END,
    CASE WHEN n % 2 = 0 THEN int8send(n % 100 + 1) || int8send(n + {branches}) END,
    CASE WHEN n % 2 = 0 THEN substr(sha256(convert_to('exchange-' || n % 100, 'UTF8')), 1, 4) END
FROM generate_series(1, {branches}) n;
INSERT INTO dtx.work (branch_id, position, rm, kind, exchange, routing_key, queue, flags, properties, body, unit)
SELECT lpad(to_hex(n), 32, '0')::uuid, p, 'dtx', CASE p WHEN 0 THEN 'publish' ELSE 'consume' END,
    convert_to('exchange-' || n % 100, 'UTF8'), 'key', CASE p WHEN 1 THEN convert_to('queue-' || n % 100, 'UTF8') END,
    0, '', decode(repeat('61', 1024), 'hex'), CASE p WHEN 1 THEN 1 END
FROM generate_series(1, {branches}, 2) n, generate_series(0, 1) p;
INSERT INTO dtx.message (queue, position, rm, exchange, routing_key, flags, properties, body)
SELECT n % 100 + 1, n + q * {branches}, 'dtx', convert_to('exchange-' || n % 100, 'UTF8'), 'key', 1, '',
    decode(repeat('61', 1024), 'hex')
FROM generate_series(2, {branches}, 2) n, generate_series(0, 1) q;
ANALYZE dtx.branch;
"""


def questions(branches: int) -> dict[str, tuple[BranchFilter, Cursor | None, Sort]]:
    """Return the queries of operators, by name."""
    return {
        "first page": (BranchFilter(rm=RM), None, Sort.STARTED),
        "page in the middle": (
            BranchFilter(rm=RM),
            Cursor(BRANCH_CURSORS[Sort.STARTED], (UUID(int=branches // 2),)),
            Sort.STARTED,
        ),
        "last page": (
            BranchFilter(rm=RM),
            Cursor(BRANCH_CURSORS[Sort.STARTED], (UUID(int=branches - 50),)),
            Sort.STARTED,
        ),
        "state": (BranchFilter(rm=RM, states=(LogState.COMMITTING,)), None, Sort.STARTED),
        "stuck": (BranchFilter(rm=RM, stuck=True), None, Sort.STARTED),
        "owner": (BranchFilter(rm=RM, owner="user-7"), None, Sort.STARTED),
        "owner nobody has": (BranchFilter(rm=RM, owner="nobody"), None, Sort.STARTED),
        "format id": (BranchFilter(rm=RM, format_id=3), None, Sort.STARTED),
        "older than": (BranchFilter(rm=RM, older_than=branches - 100), None, Sort.STARTED),
        "gtrid": (BranchFilter(rm=RM, gtrid=gtrid_pattern(f"order-{branches - 1:08}")), None, Sort.STARTED),
        "gtrid order-0000*": (BranchFilter(rm=RM, gtrid=gtrid_pattern("order-0000*")), None, Sort.STARTED),
        "gtrid *7": (BranchFilter(rm=RM, gtrid=gtrid_pattern("*77777")), None, Sort.STARTED),
        "queue": (BranchFilter(rm=RM, queue=b"queue-7"), None, Sort.STARTED),
        "queue nobody has": (BranchFilter(rm=RM, queue=b"nothing"), None, Sort.STARTED),
        "exchange": (BranchFilter(rm=RM, exchange=b"exchange-7"), None, Sort.STARTED),
        "exchange nobody has": (BranchFilter(rm=RM, exchange=b"nothing"), None, Sort.STARTED),
        "by size": (BranchFilter(rm=RM), None, Sort.BYTES),
        "by owner": (BranchFilter(rm=RM), None, Sort.OWNER),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--branches", type=int, default=100_000)
    branches = parser.parse_args().branches
    print(f"{branches} branches in doubt, pages of 100; {machine()}\n")
    with PostgresServer() as server:
        url = server.create_migrated_database()
        with psycopg.connect(url) as connection:
            connection.execute(FILL.format(branches=branches))
        table = Table(("asked for", 22), ("found", "median ms", "worst ms"))
        for name, (wanted, after, by) in questions(branches).items():
            seconds = []
            found = 0
            for _ in range(ROUNDS):
                began = time.perf_counter()
                with LogReader(url) as log:
                    found = len(branch_page(log, wanted, after=after, limit=100, by=by))
                seconds.append(time.perf_counter() - began)
            table.row(name, (str(found), f"{percentile(seconds, 50) * 1e3:.1f}", f"{max(seconds) * 1e3:.1f}"))


if __name__ == "__main__":
    main()
