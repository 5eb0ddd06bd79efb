"""An endpoint that stores an order and sends a message, with asyncio.

    DATABASE=postgresql://… AMQP=amqp://guest:guest@127.0.0.1:5673/ TM_LOG=tm.db uvicorn examples.order_fastapi:app

Each worker process makes its own transaction manager in its lifespan; all have the same node and log.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aio_pika
import psycopg
from fastapi import FastAPI, HTTPException, Request

from dtx.client.tm import OutcomeUnknown, RolledBack
from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncPep249Resource, AsyncTransactionManager


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Create table, queue and transaction manager."""
    database_url, amqp_url = os.environ["DATABASE"], os.environ["AMQP"]
    async with await psycopg.AsyncConnection.connect(database_url) as database:
        await database.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)")
    async with await aio_pika.connect(amqp_url) as connection:
        await (await connection.channel()).declare_queue("shipping", durable=True)
    resources = [
        AsyncDtxResource("queue", amqp_url),
        AsyncPep249Resource("orders", partial(psycopg.AsyncConnection.connect, database_url)),
    ]
    async with AsyncTransactionManager(node="shop-1", log=os.environ["TM_LOG"], resources=resources) as tm:
        app.state.tm = tm
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{item}", status_code=201)
async def place_order(request: Request, item: str) -> dict[str, int]:
    """Store an order and tell the warehouse."""
    tm: AsyncTransactionManager = request.app.state.tm
    try:
        async with tm.transaction() as tx:
            database = await tx.enlist("orders")
            cursor = await database.execute("INSERT INTO orders (item) VALUES (%s) RETURNING id", (item,))
            (number,) = await cursor.fetchone()
            channel = await tx.enlist("queue")
            message = aio_pika.Message(str(number).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "shipping")
    except RolledBack as error:
        raise HTTPException(503, "the order was rolled back, try again") from error
    except OutcomeUnknown as error:
        raise HTTPException(500, f"the outcome of {error.gtrid.decode()} is not known, do not repeat it") from error
    return {"order": number}
