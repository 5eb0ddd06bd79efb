"""Prepared transactions of MySQL and MariaDB: ``XA RECOVER``."""

from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import pymysql

from dtx.pipeline.participants.kinds import Observation, Participant
from dtx.pipeline.participants.postgresql import unparsed
from dtx.pipeline.participants.xids import from_recover
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source.errors import SourceError, sentence
from dtx.pipeline.source.options import Waits

_SYNTAX: Final = 1064
_NO_PRIVILEGE: Final = (1227, 1401)
_PORT: Final = 3306
_PARAMETERS: Final = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key")
"""Of a URL. With ``ssl_ca`` the connection is encrypted, and who is there has to prove that it is that host."""


def look(participant: Participant, waits: Waits) -> tuple[list[Observation], list[Quarantined]]:
    """What is prepared there; neither server says since when, or whose it is."""
    try:
        rows = _recover(participant.url, waits)
    except (pymysql.MySQLError, OSError, RuntimeError, SourceError) as error:  # RuntimeError: a login lacks a package
        code = error.args[0] if error.args else None
        advice = "; the user needs XA_RECOVER_ADMIN there" if code in _NO_PRIVILEGE else ""
        text = str(error.args[1]) if isinstance(error, pymysql.MySQLError) and len(error.args) > 1 else str(error)
        reason = sentence(Exception(text)) + advice
        return [], [Quarantined(source=participant.name, item="XA RECOVER", reason=reason, count=None)]
    now = datetime.now(UTC)
    found, raw = [], []
    for format_id, gtrid_length, bqual_length, data in rows:
        xid = from_recover(format_id, gtrid_length, bqual_length, data)
        if xid is None:
            raw.append(data)
        found.append(
            Observation(
                source=participant.name,
                kind=participant.kind.value,
                rm=participant.name,
                vhost=None,
                format_id=None if xid is None else xid.format_id,
                gtrid=data if xid is None else xid.gtrid,
                bqual=b"" if xid is None else xid.bqual,
                state="prepared",
                owner=None,
                since=None,
                observed_at=now,
            )
        )
    return found, unparsed(participant, "XA RECOVER", raw)


def connection_arguments(url: str) -> dict[str, Any]:
    """How PyMySQL connects.

    Raises:
        SourceError: it is not a URL like ``mysql://user:password@host:3306``.
    """
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
    try:
        with connection.cursor() as cursor:
            # octets as they are: xids are no text in any character set
            cursor.execute("SET character_set_results = NULL")
            try:
                cursor.execute("XA RECOVER CONVERT XID")
            except pymysql.ProgrammingError as error:
                if error.args[0] != _SYNTAX:
                    raise
                cursor.execute("XA RECOVER")  # MariaDB has no CONVERT XID, and converts nothing
            return [(int(row[0]), int(row[1]), int(row[2]), _octets(row[3])) for row in cursor.fetchall()]
    finally:
        connection.close()


def _octets(data: bytes | str) -> bytes:
    return data if isinstance(data, bytes) else data.encode("latin-1")
