"""The same ranges of the same tables through Spark's own JDBC source, for sites that have its driver anyway.

The session needs ``org.postgresql:postgresql`` (``spark.jars`` or ``spark.jars.packages``). The program plans, so it
has to reach the databases, too; only the journal is read, since nobody can hand an exported snapshot to JDBC.
"""

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import functions as sf

from dtx.log import tables
from dtx.pipeline.source.columns import SOURCE
from dtx.pipeline.source.options import Options, parse
from dtx.pipeline.source.reading import Part, plan
from dtx.pipeline.source.server import SourceError, connected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FETCH: int = 10_000
"""Rows that the driver holds at a time; by default it holds all."""


def journal_by_jdbc(spark: "SparkSession", **given: Any) -> "DataFrame":
    """The journal, as ``format("dtx")`` has it.

    Args:
        spark: a session with the driver.
        given: options as of ``format("dtx")``: url or sources, partitions, filters, snapshots, times.

    Raises:
        SourceError: a database is away, or is only reached by a Unix socket, which JDBC does not know.
    """
    options = parse({name: str(value) for name, value in given.items()})
    if options.table.name != tables.journal.name:
        raise SourceError(f"only the journal is read by JDBC, not {options.table.name}")
    frames = [_of(spark, options, name) for name in options.sources if options.wants(name)]
    if not frames:
        return spark.createDataFrame([], options.table.schema)
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _of(spark: "SparkSession", options: Options, name: str) -> "DataFrame":
    url, properties = connection(name, options.sources[name], options)
    with connected(name, options.sources[name], options.waits) as server:
        parts: list[Part] = plan(server, options)
    columns = options.table.select(list(options.table.columns))
    # what a range shows is said of the table's own columns, so it stands inside of what JDBC selects from
    whole = None
    for part in parts:
        inner = f"(SELECT {columns} FROM dtx.journal WHERE {' AND '.join(part.conditions)}) AS part"
        frame = spark.read.jdbc(url, inner, properties=properties)
        whole = frame if whole is None else whole.unionByName(frame)
    assert whole is not None
    return whole.withColumn(SOURCE, sf.lit(name))


def connection(name: str, url: str, options: Options) -> tuple[str, dict[str, str]]:
    """URL and properties for JDBC; the password stays out of the URL, which Spark shows.

    Raises:
        SourceError: the database is reached by a Unix socket.
    """
    parts = conninfo_to_dict(url)
    host = str(parts.get("host") or "localhost")
    if host.startswith(("/", "@")):
        raise SourceError(f"{name}: JDBC does not know Unix sockets: name the database by host and port")
    session = f"statement_timeout={options.waits.statement * 1000} -c default_transaction_read_only=on -c timezone=UTC"
    properties = {
        "driver": "org.postgresql.Driver",
        "user": str(parts.get("user") or ""),
        "password": str(parts.get("password") or ""),
        "fetchsize": str(_FETCH),
        "connectTimeout": str(options.waits.connect),
        "socketTimeout": str(options.waits.stall),
        "options": f"-c {session}",
        "ApplicationName": "dtx pipeline",
        **({"sslmode": str(parts["sslmode"])} if parts.get("sslmode") else {}),
    }
    place = f"[{host}]" if ":" in host else host
    database = quote(str(parts.get("dbname") or ""), safe="")
    return f"jdbc:postgresql://{place}:{parts.get('port') or 5432}/{database}", properties
