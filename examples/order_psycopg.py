"""An order in a table and a message in a queue, in one transaction.

    python examples/order_psycopg.py postgresql://… amqp://guest:guest@127.0.0.1:5673/ tm.db

PostgreSQL needs max_prepared_transactions > 0. You can kill the program at any moment and start it again: recovery in
the background completes its open transactions.
"""

import sys
from functools import partial
from typing import Any

import pika
import psycopg

from dtx.client.tm import DtxResource, Pep249Resource, TransactionManager

PERSISTENT = pika.BasicProperties(delivery_mode=2)


def place_order(tm: TransactionManager, item: str) -> int:
    """Store an order and send a message to the warehouse. Return the number of the order."""
    with tm.transaction() as tx:
        database: Any = tx.enlist("orders")
        (number,) = database.execute("INSERT INTO orders (item) VALUES (%s) RETURNING id", (item,)).fetchone()
        tx.enlist("queue").basic_publish("", "shipping", str(number).encode(), PERSISTENT)
    return int(number)


def main(database_url: str, amqp_url: str, log: str) -> None:
    """Create table and queue, and place an order."""
    with psycopg.connect(database_url) as database:
        database.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)")
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    connection.channel().queue_declare("shipping", durable=True)
    connection.close()
    resources = [DtxResource("queue", amqp_url), Pep249Resource("orders", partial(psycopg.connect, database_url))]
    with TransactionManager(node="shop-1", log=log, resources=resources) as tm:
        print(f"order {place_order(tm, 'tea')} is placed, and on its way to the warehouse")


if __name__ == "__main__":
    main(*sys.argv[1:])
