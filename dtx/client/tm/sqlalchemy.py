"""Sessions of SQLAlchemy in a transaction: the ORM works on the connection that takes part.

::

    with tm.transaction() as tx:
        with session(tx, "orders") as orders:
            orders.add(Order(item="tea"))
        tx.enlist("queue").basic_publish("", "shipping", b"1")

SQLAlchemy commits and rolls back by itself. Here only the transaction manager may do so. The ``commit`` of a session
therefore only flushes. Its ``rollback`` undoes nothing by itself, but the transaction can no longer commit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from dtx.client.tm.manager import Transaction


@contextmanager
def session(
    tx: Transaction, resource: str, *, dialect: str = "postgresql+psycopg", **options: Any
) -> Iterator[Session]:
    """Make a session on the connection of *resource*, and enlist the resource in *tx*. It is flushed at the end.

    Args:
        tx: an active transaction.
        resource: the name of a :class:`~dtx.client.tm.Pep249Resource`.
        dialect: the dialect of SQLAlchemy for the driver that makes the connections of *resource*.
        options: options of the session.

    Raises:
        Misuse: the transaction is over, or the resource is not registered.
        XAException: the database refuses, or is unreachable.
    """
    engine = _engine(tx.enlist(resource), dialect)
    with engine.connect():  # the dialect queries the version of the server, and then rolls back
        _replace(engine, "do_rollback", lambda _: tx.set_rollback_only(f"a session of {resource} was rolled back"))
    with Session(engine, **options) as made:
        yield made
        made.commit()


def _engine(connection: Any, dialect: str) -> Engine:
    """Return an engine that uses only this connection, and never ends its transaction."""
    # Otherwise psycopg's dialects begin another transaction to look hstore up.
    more = {"use_native_hstore": False} if dialect.startswith("postgresql") else {}
    engine = create_engine(
        f"{dialect}://", creator=lambda: connection, poolclass=StaticPool, pool_reset_on_return=None, **more
    )
    for end in ("do_commit", "do_rollback", "do_close"):
        _replace(engine, end, lambda _: None)
    return engine


def _replace(engine: Engine, method: str, by: Any) -> None:
    setattr(engine.dialect, method, by)
