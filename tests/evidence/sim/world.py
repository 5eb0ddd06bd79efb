"""The environment of the simulation: clocks and random bytes from the seed, and replacements for dtx's servers."""

import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any, Final, NoReturn
from unittest.mock import patch

import structlog

from dtx.auth.accounts import Account, Accounts
from dtx.auth.permissions import Patterns
from dtx.auth.users import Snapshot, User
from dtx.log import lease, membership, writer
from dtx.manager import branch_runtime
from dtx.server import connection
from dtx.server.alongside import mode as alongside_mode
from dtx.server.members import server as members_server
from dtx.server.standalone import mode as standalone_mode
from tests.evidence.sim import database as sim_database
from tests.evidence.sim.broker import SimBroker, SimManagement
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.scheduler import BEGINNING, SimLoop, current

_EVERYTHING: Final = Patterns(configure=".*", write=".*", read=".*")
_GUEST: Final = User(name="guest", password_hash="", tags=frozenset(), grants={"/": _EVERYTHING})


class _SimAccounts(Accounts):
    """Accounts that let every user in: real logins are verified in threads, which the simulation does not have."""

    def __init__(self, url: str, rm: str) -> None:
        self.users = Snapshot()
        self._listeners = []

    async def open(self) -> None:
        """Load the only user."""
        self.users = Snapshot(version=1, vhosts=frozenset({"/"}), users={"guest": _GUEST})

    async def close(self) -> None:
        """Have no effect."""

    async def watch(self) -> None:
        """Have no effect: there are no changes."""

    async def authenticate(self, user: bytes, password: bytes, *, loopback: bool, peer: str = "") -> Account:
        """Accept any login."""
        return Account(self, user.decode())


@contextmanager
def simulated(
    loop: SimLoop, database: SimDatabase, broker: SimBroker, note: Callable[[str, Mapping[str, Any]], NoReturn]
) -> Iterator[None]:
    """Give dtx the time and random bytes of *loop*, and the simulated servers, during the block.

    Args:
        loop: the scheduler.
        database: replaces PostgreSQL.
        broker: replaces RabbitMQ.
        note: gets each log event, and its level.
    """
    random: Random = loop.random

    class OneManagement:
        @staticmethod
        def from_url(url: str, *, user: str, password: str) -> SimManagement:
            made = SimManagement(url=url, user=user, password=password)
            object.__setattr__(made, "broker", broker)
            return made

    def wall() -> float:
        return BEGINNING + loop.now + current().skew

    random_octets = random.randbytes
    numbers = count(1)
    changes: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: loop.now),
        (time, "perf_counter", lambda: loop.now),
        (time, "time", wall),
        (time, "time_ns", lambda: int(wall() * 1e9)),
        (os, "urandom", random_octets),
        (lease, "clock", lambda: loop.now),
        (lease, "this_process", lambda: current().name),
        (lease, "is_dead", lambda _: False),  # as if the other process were on another machine
        (membership, "clock", lambda: loop.now),
        (membership, "is_dead", lambda _: False),
        (ssl, "create_default_context", lambda **_: None),  # members connect without TLS
        (branch_runtime, "_entropy", branch_runtime._random_octets(10)),
        (writer, "urandom", random_octets),
        (writer, "bind_group", sim_database.bind_group),
        (writer, "_ENOUGH", 1),  # few clients seldom make larger groups, and two groups must be in progress at a time
        (writer, "_LEADS", 1),
        (writer, "PipelineSession", sim_database.connector(database)),
        (writer, "raise_epoch", sim_database.raise_epoch),
        (writer, "was_applied", sim_database.was_applied),
        *((module, "connection_numbers", numbers) for module in (connection, members_server)),
        (alongside_mode, "Management", OneManagement),
        (standalone_mode, "Accounts", _SimAccounts),
    ]
    configured = structlog.get_config()
    structlog.configure(
        processors=[lambda _, level, event: note(level, event)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    patches = [patch.object(where, name, new) for where, name, new in changes]
    try:
        for change in patches:
            change.start()
        yield
    finally:
        loop.cancel_attempt()
        for change in reversed(patches):
            change.stop()
        structlog.configure(**configured)
