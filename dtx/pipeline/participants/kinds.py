"""Who else takes part in distributed transactions, and what is said of a branch in doubt."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType


class ParticipantKind(StrEnum):
    """What a participant is."""

    DTX = "dtx"
    POSTGRESQL = "postgresql"
    MYSQL = "mysql"
    """MySQL and MariaDB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """Somebody who may have branches in doubt.

    Args:
        kind: what it is.
        name: its configured name; of a database also the name of the resource manager.
        url: ``postgresql://…``, ``mysql://user:password@host:3306`` or ``mariadb://…`` (``?unix_socket=/path``; for TLS
            ``?ssl_ca=/path`` and, where the server wants them, ``&ssl_cert=…&ssl_key=…``).
    """

    kind: ParticipantKind
    name: str
    url: str


class Observation(NamedTuple):
    """A branch that is in doubt now.

    Args:
        source, kind: who says so.
        rm: name of the resource manager.
        vhost: of dtx; of PostgreSQL the database.
        format_id: ``None`` where what the database has is no xid; then *gtrid* is all of it.
        state: ``prepared``; of dtx also what it is on its way to.
        owner: user whose branch it is, ``None`` where the database does not say.
        since: when it was prepared, ``None`` where the database does not say.
    """

    source: str
    kind: str
    rm: str
    vhost: str | None
    format_id: int | None
    gtrid: bytes
    bqual: bytes
    state: str
    owner: str | None
    since: datetime | None
    observed_at: datetime


OBSERVATIONS: Final = StructType(
    [
        StructField("source", StringType()),
        StructField("kind", StringType()),
        StructField("rm", StringType()),
        StructField("vhost", StringType()),
        StructField("format_id", LongType()),
        StructField("gtrid", BinaryType()),
        StructField("bqual", BinaryType()),
        StructField("state", StringType()),
        StructField("owner", StringType()),
        StructField("since", TimestampType()),
        StructField("observed_at", TimestampType()),
    ]
)
