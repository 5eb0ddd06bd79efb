"""Repeated recovery: in the background of a program, with threads and with asyncio, and as a command."""

import asyncio
import json
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import psycopg

from dtx.client.tm.asynchronous import AsyncDtxResource, AsyncPep249Resource, AsyncTransactionManager
from dtx.client.tm.steps import CommitPoint
from tests.support.processes import wait_until
from tests.support.tm import ALL, World, left_at


def orphaned(world: World) -> None:
    """Leave four prepared, undecided branches; their manager has ended and q1 is killed."""
    with world.manager() as tm:
        left_at(tm, CommitPoint.VOTED)
    assert len(world.in_doubt()) == len(ALL)
    world.services["q1"].kill9()


def test_recovery_continues_in_the_background_until_a_resource_returns(world: World) -> None:
    orphaned(world)
    with world.manager(recover_every=0.05) as tm:
        wait_until(lambda: tm.metrics.unreachable.labels("n")._value.get() == 1, what="a round without q1")
        assert world.rows("db1") == set()
        world.services["q1"].start()
        wait_until(lambda: world.in_doubt() == [], what="the recovery of all four")


async def test_recovery_goes_on_in_the_background_with_asyncio(world: World) -> None:
    orphaned(world)
    resources: list[Any] = [
        AsyncPep249Resource(name, partial(psycopg.AsyncConnection.connect, url))
        for name, url in world.databases.items()
    ]
    resources += [AsyncDtxResource(name, service.url()) for name, service in world.services.items()]
    async with AsyncTransactionManager(
        node="n", log=world.log, resources=resources, interval=0.0, recover_every=0.05
    ) as tm:
        async with asyncio.timeout(60):
            while tm.metrics.unreachable.labels("n")._value.get() != 1:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(world.services["q1"].start)
            while await asyncio.to_thread(world.in_doubt):
                await asyncio.sleep(0.02)


def test_a_watching_command_continues_until_it_is_stopped(world: World) -> None:
    orphaned(world)
    words = ["--node", "n", "--log", str(world.log), "--interval", "0s", "--watch", "--every", "100ms", "--json"]
    for resource in (*world.databases.items(), *((name, each.url()) for name, each in world.services.items())):
        words += ["--resource", "=".join(resource)]
    with subprocess.Popen([sys.executable, "-m", "dtx", "tm", "recover", *words], stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        try:
            first = json.loads(watching.stdout.readline())
            assert list(first["unreachable"]) == ["q1"]
            assert len(first["rolled_back"]) == len(ALL) - 1
            world.services["q1"].start()
            told = (json.loads(line) for line in watching.stdout)
            last = next(report for report in told if not report["unreachable"])
            assert len(last["rolled_back"]) == 1
            watching.send_signal(signal.SIGTERM)
            watching.stdout.read()
            assert watching.wait(60) == 0
        finally:
            watching.kill()
    assert world.in_doubt() == []
