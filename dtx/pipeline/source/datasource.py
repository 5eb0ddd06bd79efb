"""The entrance: what Spark asks for when somebody writes ``format("dtx")``."""

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from dtx.log import tables
from dtx.pipeline.source.batch import BatchReader
from dtx.pipeline.source.columns import chosen
from dtx.pipeline.source.errors import SourceError
from dtx.pipeline.source.options import Options, parse
from dtx.pipeline.source.stream import StreamReader


class DtxDataSource(DataSource):
    """Tables of dtx in PostgreSQL.

    Options (names in any case):

    ====================  =============================================================================================
    ``url``, ``name``     one database, and what it is called (default ``dtx``)
    ``sources``           several: a JSON object of name and URL
    ``table``             ``journal`` (default), ``branch``, ``work``, ``heuristic_outcome``; or as ``load(table)``
    ``partitions``        tasks for each database; default by size, ``rowsPerPartition`` (1,000,000) each
    ``filters``           what the databases leave out: from :func:`where`; ``filter()`` of a DataFrame works in Spark
    ``snapshots``         one moment for several reads: from :func:`hold`, or :func:`moments` for the journal
    ``connectTimeout``    seconds until a connection stands (10)
    ``statementTimeout``  seconds for one task's statement (1800; 0: for ever)
    ``stallTimeout``      seconds without a row until a database counts as away (120)
    ``retries``           how often a task asks again before its first row (3)
    ====================  =============================================================================================

    Streams, of the journal alone:

    ====================  =============================================================================================
    ``maxRowsPerBatch``   rows of one micro-batch and database, about (default: all there is)
    ``unavailable``       ``fail`` (default), or ``wait``: a database that is away keeps its place, the others go on
    ``pollInterval``      seconds between two looks at a database that had nothing new (1)
    ``sweepInterval``     seconds between two looks at days that are over, where clocks that are wrong write (3600)
    ``startingOffsets``   ``earliest`` (default) or ``latest``
    ``timeline``          ``same`` (default), or ``any``: go on after a fail-over that may have lost commits
    ====================  =============================================================================================

    Columns are chosen by schema: ``.schema("rm string, gtrid binary")`` reads these two, and no other is sent.
    """

    @classmethod
    def name(cls) -> str:
        """``dtx``."""
        return "dtx"

    def schema(self) -> StructType:
        """All columns of the table, and the source."""
        return self._parsed().table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        options = self._parsed()
        chosen(options.table, schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For ``spark.readStream``: the journal.

        Raises:
            SourceError: another table, whose rows change in place, so nothing says what is new.
        """
        options = self._parsed()
        if options.table.name != tables.journal.name:
            raise SourceError(f"only the journal can be streamed: rows of {options.table.name} change in place")
        chosen(options.table, schema)
        return StreamReader(options, schema)

    def _parsed(self) -> Options:
        return parse(self.options)
