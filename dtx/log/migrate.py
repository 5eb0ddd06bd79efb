"""Migrations of the log's tables: applied at start, or by hand with ``dtx migrate``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from dtx.log import retention
from dtx.log.api import LogError, LogUnavailable
from dtx.log.connecting import Dsn
from dtx.log.engine import engine
from dtx.log.tables import SCHEMA

_LOCK_KEY: Final = 0x6474_7809
"""Of the advisory lock that lets one migration run at a time in a database: "dtx" and a number."""
_LOCK_SECONDS: Final = 300


def script_location() -> Path:
    """The directory of the migrations: inside the package when installed, beside it in a checkout."""
    package = Path(str(files("dtx")))
    for place in (package / "migrations", package.parent / "migrations"):
        if (place / "env.py").is_file():
            return place
    raise LogError("the migrations are missing from this installation")


def upgrade(url: str, revision: str = "head") -> str | None:
    """Bring the tables to *revision*, and make the journal's next partitions.

    Several processes may do that at once: the first works, the others wait and find it done.

    Returns:
        The revision that the database has then.

    Raises:
        LogUnavailable: no connection, or the database refused.
        LogError: the database is newer than this dtx, or there is no such revision.
    """
    dsn = Dsn(url)
    with _migrating(dsn) as (connection, config):
        command.upgrade(config, revision)
        connection.commit()
        found = _current(connection)
    if found is not None:
        retention.maintain(dsn)
    return found


def downgrade(url: str, revision: str) -> str | None:
    """Take the tables back to *revision*; ``base`` removes them with everything in them.

    Returns:
        The revision that the database has then.

    Raises:
        LogUnavailable, LogError: see :func:`upgrade`.
    """
    with _migrating(Dsn(url)) as (connection, config):
        command.downgrade(config, revision)
        connection.commit()
        return _current(connection)


def current(url: str) -> str | None:
    """The revision that the database has, ``None`` where there are no tables.

    Raises:
        LogUnavailable: no connection.
    """
    dsn = Dsn(url)
    with _explained(dsn), engine(dsn).connect() as connection:
        return _current(connection)


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA}).get_current_revision()


@contextmanager
def _migrating(dsn: Dsn) -> Iterator[tuple[Connection, Config]]:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _explained(dsn), engine(dsn).connect() as connection:
        config.attributes["connection"] = connection
        connection.execute(text(f"SET lock_timeout = '{_LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        connection.commit()
        yield connection, config


@contextmanager
def _explained(dsn: Dsn) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise LogUnavailable(f"{dsn.shown}: {dsn.explain(cause)}{_advice(cause)}") from None
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(f"{dsn.shown}: {dsn.explain(error)}") from None
    except CommandError as error:
        raise LogError(f"the tables in {dsn.shown} cannot be migrated by this dtx: {dsn.explain(error)}") from None


def _advice(cause: BaseException) -> str:
    """What to do about it, where that is clear."""
    match cause:
        case psycopg.errors.InsufficientPrivilege():
            # the tables belong to whoever makes them, and so do the journal's partitions of each day
            return "; dtx needs a user of its own there that may create a schema: grant CREATE on the database to it"
        case psycopg.OperationalError(sqlstate=None):
            return "; start PostgreSQL, or correct the database URL"
        case _:
            return ""
