"""Queues in transactions of the package ``transaction``, in many threads that do not disturb each other."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transaction
from prometheus_client import CollectorRegistry

from dtx.client.tm import TransactionManager
from dtx.client.zope import join
from dtx.xa.codes import XaFlag

THREADS = 4
TRANSACTIONS = 100
OTHERS = 300
"""Transactions that are open during the test."""


class Session:
    """A session on which every call succeeds."""

    handle = SimpleNamespace()

    def prepare(self, _xid: object) -> XaFlag:
        return XaFlag.RDONLY

    def __getattr__(self, name: str) -> Any:
        if name in ("start", "end", "rollback"):
            return lambda *_: None
        raise AttributeError(name)


class Resource:
    """A resource that always has a session."""

    name = "queue"

    def started(self, _xid: object) -> Session:
        return Session()

    def release(self, _session: Session) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
def test_transactions_of_other_threads_do_not_make_one_fail(tmp_path: Path) -> None:
    """``tpc_finish`` "should never fail": the application would treat committed work as undone."""
    failed: list[BaseException] = []
    options: dict[str, Any] = {"node": "n", "log": tmp_path / "tm.db", "recover_every": None}
    with TransactionManager(resources=[Resource()], registry=CollectorRegistry(), **options) as tm:

        def work() -> None:
            try:
                for _ in range(TRANSACTIONS):
                    with transaction.manager:
                        join(tm, "queue")
            except BaseException as error:  # noqa: BLE001 - shown by the assertion
                failed.append(error)

        others = [transaction.TransactionManager() for _ in range(OTHERS)]
        for other in others:
            join(tm, "queue", other)
        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in others:
            other.abort()
    assert failed == []
