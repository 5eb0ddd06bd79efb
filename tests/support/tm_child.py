"""A program with a transaction manager that dies at one of its points: ``python -m tests.support.tm_child JSON``.

It runs transactions over all resources until it dies or has run all of them. It prints a line when a transaction begins
and when it ends. The id gives the kind of a transaction: ``undone-…`` is rolled back by the program, ``db1-…`` uses
only that resource, all others use all resources.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aio_pika
import psycopg

from dtx.client.tm import DtxResource, OutcomeUnknown, Pep249Resource, RolledBack, TransactionManager, steps
from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncPep249Resource, AsyncTransactionManager
from tests.support.tm import write

UNDONE = "undone"
DIED_AT = 100
"""Exit status of a program that died at point 0; others are above."""


def resources(where: dict[str, str]) -> list[Any]:
    """A resource for each URL."""
    return [
        Pep249Resource(name, partial(psycopg.connect, url)) if name.startswith("db") else DtxResource(name, url)
        for name, url in where.items()
    ]


def arm(fates: list[list[int]]) -> None:
    """Die when a point is reached for the n-th time; *fates* are pairs of point and n."""
    seen = Counter[int]()

    def reached(here: steps.CommitPoint) -> None:
        seen[here] += 1
        if [int(here), seen[here]] in fates:
            os._exit(DIED_AT + here)

    steps.arm(reached)


def main() -> None:
    """Run the transactions of the order in the first argument."""
    order = json.loads(sys.argv[1])
    if order.get("asyncio"):
        asyncio.run(main_async(order))
        return
    tm = TransactionManager(
        node="n", log=order["log"], resources=resources(order["resources"]), interval=0.0, recover_every=None
    )
    arm(order.get("fates", []))
    if order.get("recover"):
        tm.recover()
    names = list(order["resources"])

    def work(id_: str) -> None:
        say(f"begun {id_}")
        kind = id_.partition("-")[0]
        try:
            with tm.transaction() as tx:
                write(tx, id_, *([kind] if kind in names else names))
                if kind == UNDONE:
                    raise RolledBack("as ordered")
        except RolledBack:
            say(f"rolled-back {id_}")
        except OutcomeUnknown:
            say(f"unknown {id_}")
        else:
            say(f"committed {id_}")

    with ThreadPoolExecutor(order.get("threads", 1)) as pool:
        list(pool.map(work, order.get("ids", ())))
    tm.close()


async def main_async(order: dict[str, Any]) -> None:
    """As :func:`main` with asyncio: all transactions run at once."""
    urls: dict[str, str] = order["resources"]
    found: list[Any] = [
        AsyncPep249Resource(name, partial(psycopg.AsyncConnection.connect, url))
        if name.startswith("db")
        else AsyncDtxResource(name, url)
        for name, url in urls.items()
    ]
    tm = AsyncTransactionManager(node="n", log=order["log"], resources=found, interval=0.0, recover_every=None)
    arm(order.get("fates", []))
    if order.get("recover"):
        await tm.recover()

    async def work(id_: str) -> None:
        async with tm.transaction() as tx:
            for name in urls:
                handle = await tx.enlist(name)
                if name.startswith("db"):
                    await handle.execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
                else:
                    await handle.default_exchange.publish(aio_pika.Message(id_.encode(), delivery_mode=2), "q")

    await asyncio.gather(*map(work, order.get("ids", ())))
    await tm.close()


def say(line: str) -> None:
    """Print a line in one write."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
