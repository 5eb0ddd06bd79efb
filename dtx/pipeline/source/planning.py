"""How a table is divided among tasks: the journal by time, the others by place.

Ranges of ``at`` hold whatever partition of the journal a line is in: one that is moved meanwhile from the default
partition into that of its day is still read once. What each range has to show is said by a snapshot's numbers, which
are the same for all and need nobody to hold a transaction open. The other tables change in place: rows of one moment
are read by several tasks only where somebody holds an exported snapshot, else by one.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from pyspark.sql.datasource import InputPartition

from dtx.log import tables
from dtx.pipeline.source.columns import Readable
from dtx.pipeline.source.options import Options
from dtx.pipeline.source.server import Server
from dtx.pipeline.source.snapshot import shown

_BLOCK: Final = 8_192
_ROWS_OF_A_BLOCK: Final = 35
"""Lines of the journal, where PostgreSQL has not counted them yet."""
_SAMPLED: Final = 300
"""Blocks of a sample: about 10,000 lines, from which a few dozen ranges come out even."""
_SAMPLED_FOR_EACH: Final = 30
_MOST_RANGES: Final = 10_000
"""Of one database: each is a task, and a statement."""
_BYTES: Final = 256 * 1024 * 1024
"""Of one range of a table with bodies in it, about."""
_BOUNDS: Final = re.compile(r"FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)")

_LEAVES: Final = """
SELECT c.oid::bigint, pg_get_expr(c.relpartbound, c.oid), pg_relation_size(c.oid), c.reltuples::float8, c.relpages
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'dtx.journal'::regclass
"""
_SIZE: Final = """
SELECT pg_relation_size(oid), pg_table_size(oid), reltuples::float8, relpages FROM pg_class
WHERE oid = 'dtx.{table}'::regclass
"""


class Part(InputPartition):
    """What one task reads.

    Args:
        source: the configured name of the database.
        conditions: SQL, all of which hold for its rows.
        exported: the snapshot to be seen.
        shown: the range, for people.
    """

    def __init__(self, source: str, conditions: tuple[str, ...], *, exported: str | None = None, shown: str) -> None:
        super().__init__(None)
        self.source = source
        self.conditions = conditions
        self.exported = exported
        self.shown = shown


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition of the journal.

    Args:
        oid: of the table.
        bounds: of ``at``, as PostgreSQL writes times; ``None`` of the default partition.
        size: bytes.
        rows: estimated.
    """

    oid: int
    bounds: tuple[str, str] | None
    size: int
    rows: float


def plan(server: Server, options: Options) -> list[Part]:
    """What is read of one database, now.

    Args:
        server: the database.
        options: how.

    Raises:
        SourceError: the database does not answer, or has no journal that can be read.
    """
    server.identity()
    pushed = options.conditions
    moment = options.moments.get(server.name)
    if options.table.name != tables.journal.name:
        exported = None if moment is None else moment.exported
        places = _places(server, options) if exported is not None else [()]
        return [
            Part(server.name, (*place, *pushed), exported=exported, shown=" and ".join(place) or "all of it")
            for place in places
        ]
    snapshot = moment.snapshot if moment is not None and moment.snapshot is not None else server.snapshot()
    return [
        Part(server.name, (*range_, shown(snapshot), *pushed), shown=" and ".join(range_) or "all of it")
        for range_ in times(cuts(server, options))
    ]


def times(points: list[str]) -> list[tuple[str, ...]]:
    """Conditions of the ranges between *points* in time: together they hold for every line, each line in one."""
    edges = [None, *points, None]
    return [
        (
            *(() if low is None else (f"at >= '{low}'::timestamptz",)),
            *(() if high is None else (f"at < '{high}'::timestamptz",)),
        )
        for low, high in pairwise(edges)
    ]


def cuts(server: Server, options: Options) -> list[str]:
    """Points in time that divide the journal evenly, in order, as PostgreSQL writes them."""
    leaves = [_leaf(*row) for row in server.rows(_LEAVES)]
    total = sum(leaf.rows for leaf in leaves)
    wanted = options.partitions or math.ceil(total / options.rows)
    wanted = min(wanted, _MOST_RANGES)
    if wanted <= 1 or total <= 0:
        return []
    target = total / wanted
    points: list[str] = []
    since = 0.0
    for leaf in sorted(leaves, key=lambda leaf: leaf.bounds or ("", "")):
        pieces = round(leaf.rows / target)
        if leaf.bounds is not None and leaf.rows and since and since + leaf.rows > target:
            points.append(leaf.bounds[0])
            since = 0.0
        if pieces > 1:
            points += _within(server, leaf, pieces)
        since += leaf.rows
    return _ordered(server, points)


def _leaf(oid: int, bounds: str, size: int, rows: float, pages: int) -> Leaf:
    match = _BOUNDS.fullmatch(bounds)
    return Leaf(oid, None if match is None else (match[1], match[2]), size, _rows(size, rows, pages))


def _rows(size: int, rows: float, pages: int) -> float:
    """PostgreSQL's own count is of some time ago: what a block had then, times the blocks of now."""
    return size / _BLOCK * (rows / pages if rows > 0 and pages > 0 else _ROWS_OF_A_BLOCK)


def _within(server: Server, leaf: Leaf, pieces: int) -> list[str]:
    sampled = max(_SAMPLED, _SAMPLED_FOR_EACH * pieces)
    percent = min(100.0, 100.0 * sampled * _BLOCK / max(leaf.size, _BLOCK))
    fractions = ",".join(f"{number / pieces:.6f}" for number in range(1, pieces))
    of_it = f"tableoid = {leaf.oid}"
    if leaf.bounds is not None:
        of_it += f" AND at >= '{leaf.bounds[0]}'::timestamptz AND at < '{leaf.bounds[1]}'::timestamptz"
    found = server.rows(
        f"SELECT percentile_disc(ARRAY[{fractions}]::float8[]) WITHIN GROUP (ORDER BY at)::text[] "
        f"FROM dtx.journal TABLESAMPLE SYSTEM ({percent:.6f}) WHERE {of_it}"
    )[0][0]
    return [point for point in found or () if point is not None]


def _ordered(server: Server, points: list[str]) -> list[str]:
    if not points:
        return []
    listed = ",".join(f"'{point}'::timestamptz" for point in points)
    rows = server.rows(
        f"SELECT cut::text FROM (SELECT DISTINCT unnest(ARRAY[{listed}]) AS cut) AS cuts ORDER BY cuts.cut"
    )
    return [text for (text,) in rows]


def _places(server: Server, options: Options) -> list[tuple[str, ...]]:
    """Ranges of blocks; the last one is open, for blocks that came after the snapshot hold nothing that it shows."""
    size, with_bodies, rows, pages = server.rows(_SIZE.format(table=options.table.name))[0]
    by_size = max(_rows(size, rows, pages) / options.rows, with_bodies / _BYTES)
    blocks = size // _BLOCK
    count = max(1, min(options.partitions or math.ceil(by_size), blocks, _MOST_RANGES))
    edges = [blocks * number // count for number in range(count)]
    return [
        (f"ctid >= '({low},0)'::tid", *(() if high is None else (f"ctid < '({high},0)'::tid",)))
        for low, high in pairwise([*edges, None])
    ]


def statement(table: Readable, names: list[str], conditions: tuple[str, ...]) -> str:
    """The SQL that reads a part."""
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {table.sent(names)} FROM dtx.{table.name}{where}"
