"""Writes many lines of the journal directly to the database."""

from datetime import datetime
from typing import Final

import psycopg

_LINES: Final = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, reason, one_phase,
    publishes, consumes, bytes, started_at, prepared_at)
SELECT gen_random_uuid(), %(at)s::timestamptz + i * interval '1 second', 'rm' || i %% 3, 'prepared', gen_random_uuid(),
    '/', 4294967295, int4send(i), '\\x'::bytea, 'guest', 'Zoë', CASE WHEN i %% 2 = 0 THEN 'äöü \\ ''' END, false, i, 0,
    1 << 20, now(), now()
FROM generate_series(%(first)s::int, %(last)s::int) i
"""


def write(connection: psycopg.Connection, first: int, last: int, at: datetime | str = "now") -> None:
    """Write lines of the journal, with *first* to *last* as gtrid and number of publishes."""
    connection.execute(_LINES, {"first": first, "last": last, "at": at})
