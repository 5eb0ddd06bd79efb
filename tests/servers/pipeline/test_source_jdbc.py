"""The journal by Spark's own JDBC source: the lines of ``format("dtx")``, with PostgreSQL's driver."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.source import register, where
from dtx.pipeline.source.options import parse
from dtx.pipeline.source.server import SourceError
from tests.support.debian import install
from tests.support.jdbc import connection, journal_by_jdbc
from tests.support.journal import write
from tests.support.processes import free_port
from tests.support.proxy import Proxy

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
DRIVER = Path("/usr/share/java/postgresql.jar")


@pytest.mark.parametrize(
    ("url", "jdbc"),
    [
        ("postgresql://h/d", "jdbc:postgresql://h:5432/d"),
        ("postgresql://[::1]:77/a%20b%2Fc%3Fssl=off", "jdbc:postgresql://[::1]:77/a%20b%2Fc%3Fssl%3Doff"),
    ],
)
def test_an_address_of_jdbc_is_that_of_the_url(url: str, jdbc: str) -> None:
    """What stands in a name does not become a parameter."""
    assert connection("a", url, parse({"url": url}))[0] == jdbc


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    """A session with the driver."""
    if not DRIVER.exists():
        install("libpostgresql-jdbc-java", "JDBC driver of PostgreSQL")
    if not DRIVER.exists():
        pytest.skip(f"no JDBC driver at {DRIVER}: apt-get install libpostgresql-jdbc-java")
    spark.sql(f"ADD JAR '{DRIVER}'")
    register(spark)
    return spark


@pytest.fixture
def by_tcp(database: str) -> Iterator[str]:
    """The same for who speaks no Unix sockets."""
    facts = conninfo_to_dict(database)
    with Proxy(str(facts["host"]), int(facts["port"] or 0)) as tcp:
        yield f"postgresql://{facts['user']}:{facts['password']}@127.0.0.1:{tcp.port}/{facts['dbname']}"


def lines(frame: DataFrame) -> list[tuple[object, ...]]:
    """All of them, with all that they say."""
    return sorted(tuple(row) for row in frame.collect())


def test_jdbc_reads_the_lines_that_the_source_reads(session: SparkSession, database: str, by_tcp: str) -> None:
    with psycopg.connect(database) as connection:
        for day in range(3):
            write(connection, day * 1_000 + 1, day * 1_000 + 1_000, datetime.now(UTC) - timedelta(days=day))
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("ANALYZE dtx.journal")
    theirs = journal_by_jdbc(session, url=by_tcp, name="bank", partitions=4)
    ours = session.read.format("dtx").options(url=database, name="bank", partitions=4).load()
    assert theirs.schema.simpleString() == ours.schema.simpleString()
    assert len(lines(ours)) == 3_000
    assert lines(theirs) == lines(ours)


def test_jdbc_sees_one_moment_and_the_filters_of_the_source(session: SparkSession, database: str, by_tcp: str) -> None:
    with psycopg.connect(database) as connection:
        write(connection, 1, 30)
    some = where(("rm", "=", "rm1"), ("reason", "is not null"))
    found = journal_by_jdbc(session, url=by_tcp, filters=some)
    everything = journal_by_jdbc(session, url=by_tcp)
    with psycopg.connect(database) as connection:
        write(connection, 31, 60)
    assert sorted(row["publishes"] for row in found.collect()) == [4, 10, 16, 22, 28]
    assert everything.count() == 30


def test_what_jdbc_cannot_read_is_named_without_its_password(session: SparkSession, database: str) -> None:
    with pytest.raises(SourceError, match="JDBC does not know Unix sockets"):
        journal_by_jdbc(session, url="postgresql:///dtx?host=/run/nowhere", name="bank-a")
    with pytest.raises(SourceError, match="only the journal is read by JDBC, not branch"):
        journal_by_jdbc(session, url=database, table="branch")
    gone = f"postgresql://dtx:hunter2@127.0.0.1:{free_port()}/dtx"
    with pytest.raises(SourceError, match="bank-a: ") as caught:
        journal_by_jdbc(session, url=gone, name="bank-a", connectTimeout=2)
    assert "hunter2" not in str(caught.value)
