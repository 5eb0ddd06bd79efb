"""Connections by SQLAlchemy, for what is asked now and then."""

from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from dtx.log.connecting import Dsn, connect_now


def engine(dsn: Dsn) -> Engine:
    """A SQLAlchemy engine that keeps no connection open. It connects as libpq reads the URL, sockets and all."""
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: connected(dsn),
        poolclass=NullPool,
        hide_parameters=True,
    )


def connected(dsn: Dsn, *, autocommit: bool = False) -> psycopg.Connection[Any]:
    """A connection that gives times the form that psycopg reads, whatever the default is.

    Raises:
        psycopg.Error, OSError: no connection.
    """
    connection = connect_now(dsn, autocommit=True)
    try:
        connection.execute("SET DateStyle = 'ISO'")
        connection.autocommit = autocommit
    except BaseException:
        connection.close()
        raise
    return connection
