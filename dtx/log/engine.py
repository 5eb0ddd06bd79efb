"""Connections by SQLAlchemy, for what is asked now and then."""

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from dtx.log.dsn import Dsn


def engine(dsn: Dsn) -> Engine:
    """A SQLAlchemy engine that keeps no connection open. It connects as libpq reads the URL, sockets and all."""
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(dsn.conninfo, connect_timeout=10),
        poolclass=NullPool,
        hide_parameters=True,
    )
