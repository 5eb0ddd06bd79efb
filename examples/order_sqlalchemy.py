"""The same with SQLAlchemy: the ORM works on the connection that takes part in the transaction.

    python examples/order_sqlalchemy.py postgresql+psycopg://… amqp://guest:guest@127.0.0.1:5673/ tm.db

The engine's only connection is the one that the transaction manager enlists; a session flushes into it, and never
commits by itself.
"""

import sys
from typing import Any

import pika
import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from dtx.client.tm import DtxResource, Pep249Resource, Transaction, TransactionManager

PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Base(DeclarativeBase):
    """Of all tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def session_of(tx: Transaction, resource: str) -> Session:
    """A session on the connection of *resource* that takes part in *tx*."""
    connection: Any = tx.enlist(resource)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connection,
        poolclass=StaticPool,
        pool_reset_on_return=None,
        use_native_hstore=False,  # it would begin a transaction of its own to look hstore up
    )
    for end in ("do_commit", "do_rollback", "do_close"):
        setattr(engine.dialect, end, lambda _connection: None)  # how it ends is for the transaction manager to say
    return Session(engine)


def place_order(tm: TransactionManager, item: str) -> int:
    """Store an order and tell the warehouse; its number."""
    with tm.transaction() as tx:
        with session_of(tx, "orders") as session:
            order = Order(item=item)
            session.add(order)
            session.flush()
            number = order.id
        tx.enlist("queue").basic_publish("", "shipping", str(number).encode(), PERSISTENT)
    return number


def main(database_url: str, amqp_url: str, log: str) -> None:
    """Make table and queue, and place an order."""
    engine = create_engine(database_url)
    Base.metadata.create_all(engine)
    engine.dispose()
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    connection.channel().queue_declare("shipping", durable=True)
    connection.close()
    plain = database_url.replace("postgresql+psycopg://", "postgresql://")
    resources = [DtxResource("queue", amqp_url), Pep249Resource("orders", lambda: psycopg.connect(plain))]
    with TransactionManager(node="shop-1", log=log, resources=resources) as tm:
        print(f"order {place_order(tm, 'tea')} is placed, and on its way to the warehouse")


if __name__ == "__main__":
    main(*sys.argv[1:])
