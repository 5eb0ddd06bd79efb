"""An order and a message in one transaction, with SQLAlchemy.

    python examples/order_sqlalchemy.py postgresql+psycopg://… amqp://guest:guest@127.0.0.1:5673/ tm.db

The session uses the connection that takes part in the transaction, and never commits by itself.
"""

import sys

import pika
import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dtx.client.tm import DtxResource, Pep249Resource, TransactionManager
from dtx.client.tm.sqlalchemy import session

PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Base(DeclarativeBase):
    """The base of all tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def place_order(tm: TransactionManager, item: str) -> int:
    """Store an order and send a message to the warehouse. Return the number of the order."""
    with tm.transaction() as tx:
        with session(tx, "orders") as orders:
            order = Order(item=item)
            orders.add(order)
            orders.flush()
            number = order.id
        tx.enlist("queue").basic_publish("", "shipping", str(number).encode(), PERSISTENT)
    return number


def main(database_url: str, amqp_url: str, log: str) -> None:
    """Create table and queue, and place an order."""
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
