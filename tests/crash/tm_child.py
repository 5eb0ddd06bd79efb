"""A program with a transaction manager that dies at one of its points: ``python -m tests.crash.tm_child JSON``.

It does transactions over all resources until it dies or has done its share, and prints a line for each that it heard
the outcome of.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from dtx.client.tm import DtxResource, Pep249Resource, RolledBack, TransactionManager, points
from tests.support.tm import write


def resources(where: dict[str, str]) -> list[Any]:
    """One for each URL."""
    return [
        Pep249Resource(name, partial(psycopg.connect, url)) if name.startswith("db") else DtxResource(name, url)
        for name, url in where.items()
    ]


def arm(point: int, number: int) -> None:
    """Die when *point* is reached for the *number*-th time."""
    seen = 0

    def reached(here: points.Point) -> None:
        nonlocal seen
        seen += here == point
        if here == point and seen == number:
            os._exit(points.DIED)

    points.arm(reached)


def main() -> None:
    """See the module."""
    order = json.loads(sys.argv[1])
    tm = TransactionManager(
        node="n", log=Path(order["log"]), resources=resources(order["resources"]), interval=0.0, recover_every=None
    )
    if "point" in order:
        arm(order["point"], order["number"])
    if order.get("recover"):
        tm.recover()
    names = order.get("alone") or list(order["resources"])

    def work(id_: str) -> None:
        say(f"begun {id_}")
        try:
            with tm.transaction() as tx:
                write(tx, id_, *names)
                if order.get("fail"):
                    raise RolledBack("as ordered")
        except RolledBack:
            say(f"rolled-back {id_}")
        else:
            say(f"committed {id_}")

    with ThreadPoolExecutor(order.get("threads", 1)) as pool:
        list(pool.map(work, order.get("ids", ())))
    tm.close()


def say(line: str) -> None:
    """One line in one piece."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
