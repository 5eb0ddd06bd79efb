"""A consumer that writes a row for each message, exactly once, even if processes fail.

    python examples/consumer_aio.py postgresql://… amqp://guest:guest@127.0.0.1:5673/ tm.db

The acknowledgement and the row are one transaction. The program ends when the queue is empty.
"""

import asyncio
import sys
from functools import partial

import psycopg

from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncPep249Resource, AsyncTransactionManager


async def ship_one(tm: AsyncTransactionManager) -> bool:
    """Take one message and write its row. Return whether there was a message."""
    async with tm.transaction() as tx:
        channel = await tx.enlist("queue")
        queue = await channel.get_queue("shipping", ensure=False)
        message = await queue.get(no_ack=False, fail=False)
        if message is None:
            return False
        await message.ack()
        database = await tx.enlist("shipments")
        await database.execute("INSERT INTO shipments (number) VALUES (%s)", (int(message.body),))
    return True


async def main(database_url: str, amqp_url: str, log: str) -> None:
    """Create the table, and process the messages of the queue."""
    async with await psycopg.AsyncConnection.connect(database_url) as database:
        await database.execute("CREATE TABLE IF NOT EXISTS shipments (number integer PRIMARY KEY)")
    resources = [
        AsyncDtxResource("queue", amqp_url),
        AsyncPep249Resource("shipments", partial(psycopg.AsyncConnection.connect, database_url)),
    ]
    async with AsyncTransactionManager(node="warehouse-1", log=log, resources=resources) as tm:
        shipped = 0
        while await ship_one(tm):
            shipped += 1
        print(f"{shipped} shipped")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
