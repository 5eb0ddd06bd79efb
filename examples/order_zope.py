"""An order and a message in one transaction of the package ``transaction``, as in Zope and Pyramid.

    python examples/order_zope.py postgresql+psycopg://… amqp://guest:guest@127.0.0.1:5673/ tm.db

In Pyramid, ``request.tm`` of pyramid_tm takes the place of ``transaction.manager``: pass it to ``join`` and to
``register``.
"""

import sys

import pika
import transaction
import zope.sqlalchemy
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from dtx.client.tm import DtxResource, TransactionManager
from dtx.client.zope import join

PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Base(DeclarativeBase):
    """The base of all tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


def place_order(tm: TransactionManager, sessions: "sessionmaker[Session]", item: str) -> int:
    """Store an order and send a message to the warehouse. Return the number of the order."""
    with transaction.manager:
        orders = sessions()
        order = Order(item=item)
        orders.add(order)
        orders.flush()
        number = order.id
        join(tm, "queue").basic_publish("", "shipping", str(number).encode(), PERSISTENT)
    return number


def main(database_url: str, amqp_url: str, log: str) -> None:
    """Create table and queue, and place an order."""
    engine = create_engine(database_url)
    Base.metadata.create_all(engine)
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    connection.channel().queue_declare("shipping", durable=True)
    connection.close()
    sessions = sessionmaker(engine, twophase=True)  # the session then votes, and needs max_prepared_transactions
    zope.sqlalchemy.register(sessions)
    with TransactionManager(node="web-1", log=log, resources=[DtxResource("queue", amqp_url)]) as tm:
        print(f"order {place_order(tm, sessions, 'tea')} is placed, and on its way to the warehouse")
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
