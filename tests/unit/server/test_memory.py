"""When dtx collects the garbage that closed connections leave."""

import asyncio
import gc
import platform
import subprocess
import sys
import weakref

import pytest

from dtx.server import memory
from dtx.server.memory import Leftovers


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LATER", 0.0)


class Part:
    """An object in a reference cycle."""

    def __init__(self) -> None:
        self.other = self


class Clock:
    """A clock that the test sets. Each collection takes *takes* seconds."""

    def __init__(self, *, takes: float = 0.0) -> None:
        self.now = 1000.0
        self.takes = takes
        self.looks = 0

    def __call__(self) -> float:
        return self.now

    def look(self) -> None:
        self.looks += 1
        self.now += self.takes


async def turn() -> None:
    """Let due callbacks run."""
    for _ in range(3):
        await asyncio.sleep(0.001)


async def test_memory_of_ended_connections_is_freed_while_idle() -> None:
    left = [Part() for _ in range(300)]
    seen = [weakref.ref(part) for part in left]
    gc.collect()  # they are in the oldest generation, as for long connections
    gc.disable()
    try:
        leftovers = Leftovers(lambda: 0)
        while left:
            left.pop()
            leftovers.add()
        assert all(part() is not None for part in seen)
        await turn()
        assert all(part() is None for part in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize(("live", "enough"), [(0, 300), (1199, 300), (4000, 1000), (12_000, 3000)])
async def test_few_objects_cause_no_wait(live: int, enough: int) -> None:
    clock = Clock()
    leftovers = Leftovers(lambda: live, collect=clock.look, clock=clock, worked=clock)
    for _ in range(enough - 1):
        leftovers.add()
    await turn()
    assert clock.looks == 0
    leftovers.add()
    await turn()
    assert clock.looks == 1


async def test_a_fleet_that_leaves_at_once_costs_one_look() -> None:
    clock = Clock()
    leftovers = Leftovers(lambda: 0, collect=clock.look, clock=clock, worked=clock)
    for _ in range(5000):
        leftovers.add()
    await turn()
    assert clock.looks == 1


async def test_looks_take_a_fiftieth_of_all_time_at_most() -> None:
    """The longer a collection takes, the rarer it is."""
    clock = Clock(takes=0.25)
    leftovers = Leftovers(lambda: 0, collect=clock.look, clock=clock, worked=clock)
    waits: list[float] = []

    def later(wait: float, _: object) -> asyncio.TimerHandle:
        waits.append(wait)
        return asyncio.get_running_loop().call_at(0, leftovers._run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", later, raising=False)
        for _ in range(300):
            leftovers.add()
        patch.undo()
        await turn()
        patch.setattr(asyncio.get_running_loop(), "call_later", later, raising=False)
        for _ in range(300):
            leftovers.add()
    assert waits == [0.0, 12.5]
    leftovers.close()


async def test_a_stop_cancels_due_collections() -> None:
    clock = Clock()
    leftovers = Leftovers(lambda: 0, collect=clock.look, clock=clock, worked=clock)
    for _ in range(300):
        leftovers.add()
    leftovers.close()
    leftovers.close()
    await turn()
    assert clock.looks == 0


_LOGINS = """
import asyncio
from pathlib import Path
from dtx.server import memory
from dtx.auth.passwords import Verifier, hash_password

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4

async def log_in() -> None:
    memory.give_back_large_blocks()
    stored = hash_password(b"right")
    verifier = Verifier()
    before = resident()
    for number in range(4):
        names = (b"%d-%d" % (number, other) for other in range(2))
        await asyncio.gather(*(verifier.verify(name, b"right", stored, source=str(name)) for name in names))
    print(resident() - before)

asyncio.run(log_in())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep their own rules")
def test_memory_for_verifying_passwords_is_given_back() -> None:
    """19 MiB for each thread that verifies passwords."""
    done = subprocess.run([sys.executable, "-c", _LOGINS], check=True, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 4096, "KiB"


def test_garbage_collection_is_sliced_to_keep_waits_short() -> None:
    """40,000 took 36 ms when other work filled the caches, and nothing may hold the event loop for more than 50 ms."""
    code = """
import gc
from dtx.server.memory import loading

with loading():
    pass
seen = []

def look(phase, info):
    if phase == "start":
        seen.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

gc.callbacks.append(look)
kept = [[] for _ in range(200_000)]
print(len(seen), max(seen))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    looks, most = map(int, done.stdout.split())
    assert looks >= 10
    assert most < 22_000
