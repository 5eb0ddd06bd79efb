"""Reads branches in doubt of participants: dtx, PostgreSQL (``pg_prepared_xacts``), MySQL and MariaDB (``XA RECOVER``).

This process reads them without Spark, since the lists are short. An identifier that is not an xid is kept unchanged and
counted.
"""

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dtx.pipeline.fleet import Participant
from dtx.pipeline.quarantine import Quarantined, sample
from dtx.pipeline.source.batch_reader import read_table
from dtx.pipeline.source.columns import SOURCE, TABLES, arrow_schema, spark_schema
from dtx.pipeline.source.options import parse
from dtx.pipeline.source.server import AT_ONCE, SourceError, Waits, connected, reachable, sentence, without_name
from dtx.pipeline.verdicts import SourceKind
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

OBSERVATIONS: Final = spark_schema(
    source="string", kind="string", rm="string", vhost="string", format_id="bigint", gtrid="binary", bqual="binary",
    branch_id="string", state="string", owner="string", since="timestamp", observed_at="timestamp",
)  # fmt: skip
"""Columns of branches that are in doubt now.

``format_id`` is null if the identifier is not an xid; ``gtrid`` then has the whole identifier. ``branch_id`` is the id
that dtx gave the branch: another use of the same xid has another id. ``vhost`` is the virtual host of dtx or the
database of PostgreSQL. ``vhost``, ``owner`` and ``since`` are null where a participant does not report them.
"""
_BRANCH: Final = StructType(
    [
        TABLES["branch"].schema[name]
        for name in (
            "id", "rm", "vhost", "format_id", "gtrid", "bqual", "state", "outcome", "owner", "prepared_at", SOURCE,
        )
    ]
)  # fmt: skip
_GID: Final = re.compile(r"(-?\d{1,10})_([A-Za-z0-9+/]*={0,2})_([A-Za-z0-9+/]*={0,2})", re.ASCII)
_HEX: Final = re.compile(r"0[xX]([0-9A-Fa-f]*)", re.ASCII)
# Python cannot hold a time of infinity, which only a manual change of the catalog can write
_PREPARED = (
    "SELECT convert_to(gid, 'UTF8'), CASE WHEN isfinite(prepared) THEN prepared END, owner::text, database::text "
    # the view covers the whole server, and another of its databases may be a participant too
    "FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared, gid"
)
# the default exchange has no name: its routing key is the queue
_WORK: Final = """
SELECT rm, kind, CASE WHEN kind = 'consume' THEN queue WHEN length(exchange) = 0 THEN routing_key
    ELSE exchange || ' / '::bytea || routing_key END, count(*) FROM dtx.work GROUP BY 1, 2, 3
"""
_Row = tuple[bytes, Xid | None, dict[str, Any]]
"""An identifier, its xid, and further columns of :data:`OBSERVATIONS`."""
_SYNTAX: Final = 1064
_NO_PRIVILEGE: Final = (1227, 1401)
_PORT: Final = 3306
_PARAMETERS: Final = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key")
"""Parameters of a URL. With ``ssl_ca`` the connection is encrypted, and the server proves that it is the host."""
__all__ = ["OBSERVATIONS", "observe", "waiting"]


def from_gid(gid: str) -> Xid | None:
    """Return the xid in an identifier of PostgreSQL's ``PREPARE TRANSACTION``, ``None`` if it has none.

    psycopg, pgjdbc and :mod:`dtx.client.tm` write ``format_base64(gtrid)_base64(bqual)``; Java's format ids are signed.
    """
    match = _GID.fullmatch(gid)
    if match is None:
        return None
    try:
        return _xid(int(match[1]), base64.b64decode(match[2], validate=True), base64.b64decode(match[3], validate=True))
    except ValueError:
        return None


def from_recover(format_id: int, gtrid_length: int, bqual_length: int, data: bytes) -> Xid | None:
    """Return the xid of a row of ``XA RECOVER``: *data* is gtrid and bqual, as bytes or, converted, as 0x…"""
    total = gtrid_length + bqual_length
    if len(data) != total:
        match = _HEX.fullmatch(data.decode("latin-1"))
        if match is None or len(match[1]) != 2 * total:
            return None
        data = bytes.fromhex(match[1])
    return _xid(format_id, data[:gtrid_length], data[gtrid_length:])


def _xid(format_id: int, gtrid: bytes, bqual: bytes) -> Xid | None:
    if format_id < 0:
        format_id += 1 << 32
    try:
        return Xid(format_id, gtrid, bqual)
    except XaError:
        return None


def look(participant: Participant, waits: Waits) -> tuple[list[dict[str, Any]], list[Quarantined]]:
    """Return the prepared transactions of another database, and records of what is no xid or could not be read."""
    is_mysql = participant.kind is SourceKind.MYSQL
    item = "XA RECOVER" if is_mysql else "pg_prepared_xacts"
    try:
        rows = _recovered(participant, waits) if is_mysql else _prepared(participant, waits)
    except SourceError as error:
        reason = without_name(participant.name, error)
        return [], [Quarantined(source=participant.name, item=item, reason=reason, count=None)]
    alike = {
        "source": participant.name,
        "kind": str(participant.kind),
        "rm": participant.name,
        "state": "prepared",
        "observed_at": datetime.now(UTC),
    }
    found, raw = [], []
    for data, xid, columns in rows:
        key: dict[str, Any] = {"gtrid": data, "bqual": b""}
        if xid is None:
            raw.append(data)
        else:
            key = {"format_id": xid.format_id, "gtrid": xid.gtrid, "bqual": xid.bqual}
        found.append(alike | key | columns)
    if not raw:
        return found, []
    reason = "identifiers that are not xids are kept unchanged and match no decision"
    return found, [
        Quarantined(source=participant.name, item=item, reason=reason, count=len(raw), sample=sample(raw[0]))
    ]


def _prepared(participant: Participant, waits: Waits) -> list[_Row]:
    with connected(participant.name, participant.url, waits) as server:
        return [
            (
                bytes(gid),
                from_gid(bytes(gid).decode("utf-8", "surrogateescape")),
                {"vhost": database, "owner": owner, "since": prepared},
            )
            for gid, prepared, owner, database in server.rows(_PREPARED)
        ]


def _recovered(participant: Participant, waits: Waits) -> list[_Row]:
    """Read MySQL or MariaDB, which report neither time nor user."""
    try:
        rows = _recover(participant.url, waits)
    except (pymysql.MySQLError, OSError, RuntimeError, SourceError) as error:  # RuntimeError: a login lacks a package
        code = error.args[0] if error.args else None
        advice = "; the user needs XA_RECOVER_ADMIN there" if code in _NO_PRIVILEGE else ""
        text = str(error.args[1]) if isinstance(error, pymysql.MySQLError) and len(error.args) > 1 else str(error)
        raise SourceError(sentence(Exception(text)) + advice) from None
    return [(row[3], from_recover(*row), {}) for row in rows]


def connection_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of ``pymysql.connect``."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORT
    except ValueError:
        raise SourceError("the url is not one like mysql://user:password@host:3306") from None
    if parts.scheme not in {"mysql", "mariadb"}:
        raise SourceError("the url does not start with mysql:// or mariadb://")
    found: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": port,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    for name, values in parse_qs(parts.query, keep_blank_values=True).items():
        if name not in _PARAMETERS:
            raise SourceError(f"the url has a parameter {name!r}: there are {', '.join(_PARAMETERS)}")
        found[name] = values[-1]
    if "ssl_ca" in found:
        found |= {"ssl_verify_cert": True, "ssl_verify_identity": True}
    return found


def _recover(url: str, waits: Waits) -> list[tuple[int, int, int, bytes]]:
    connection = pymysql.connect(
        **connection_arguments(url),
        connect_timeout=waits.connect,
        read_timeout=waits.stall,
        write_timeout=waits.stall,
        use_unicode=False,
    )
    with closing(connection), connection.cursor() as cursor:
        # no conversion: xids are bytes, not text in a character set
        cursor.execute("SET character_set_results = NULL")
        try:
            cursor.execute("XA RECOVER CONVERT XID")
        except pymysql.ProgrammingError as error:
            if error.args[0] != _SYNTAX:
                raise
            cursor.execute("XA RECOVER")  # MariaDB has no CONVERT XID, and converts nothing
        return [(int(row[0]), int(row[1]), int(row[2]), row[3]) for row in cursor.fetchall()]


def observe(
    spark: SparkSession, sources: Mapping[str, str], participants: Sequence[Participant], *, waits: Waits = Waits()
) -> tuple[DataFrame, list[Quarantined]]:
    """Return every branch in doubt, as :data:`OBSERVATIONS`, and the participants that could not be read.

    *sources* has the URL of each database of dtx by its configured name; *participants* are the others.
    """
    there, wrong = reachable(sources, waits=waits)
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for seen, quarantined in pool.map(lambda one: look(one, waits), participants):
            found += seen
            wrong += quarantined
    observed = pa.Table.from_pylist(found, schema=arrow_schema(OBSERVATIONS))
    return spark.createDataFrame(pa.concat_tables([observed, *map(_own, there.items())]), OBSERVATIONS), wrong


def _own(source: tuple[str, str]) -> pa.Table:
    """Return the branches in doubt of a dtx, read by this process since they are few."""
    name, url = source
    branches = read_table(parse({"url": url, "name": name, "table": "branch"}), _BRANCH)
    state = pc.if_else(
        pc.equal(branches["state"], "heuristic"), pc.binary_join_element_wise("heuristic", branches["outcome"], "-"),
        branches["state"],
    )  # fmt: skip
    alike = {column: branches[column] for column in ("source", "rm", "vhost", "format_id", "gtrid", "bqual", "owner")}
    columns = alike | {
        "kind": pa.repeat(str(SourceKind.DTX), len(branches)),
        "branch_id": branches["id"],
        "state": state,
        "since": branches["prepared_at"],
        "observed_at": pa.repeat(pa.scalar(datetime.now(UTC), pa.timestamp("us", tz="UTC")), len(branches)),
    }
    schema = arrow_schema(OBSERVATIONS)
    return pa.table([columns[column].cast(schema.field(column).type) for column in schema.names], schema=schema)


def waiting(sources: Mapping[str, str], waits: Waits = Waits()) -> list[tuple[str, str, str, int]]:
    """Count messages in open branches: resource manager, publish or consume, destination or queue, number of messages.

    *sources* has the URL of each database of dtx by its configured name; a database that fails is left out.
    """

    def look(source: tuple[str, str]) -> list[tuple[Any, ...]]:
        try:
            with connected(*source, waits) as server:
                return server.rows(_WORK)
        except SourceError:
            return []

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = [row for rows in pool.map(look, sources.items()) for row in rows]
    counted: Counter[tuple[str, str, str]] = Counter()
    for rm, kind, place, count in rows:
        try:
            text = bytes(place).decode()
        except UnicodeDecodeError:
            text = bytes(place).hex()
        counted[rm, kind, text] += count
    return sorted(((*key, count) for key, count in counted.items()), key=lambda row: (-row[3], *row[:3]))
