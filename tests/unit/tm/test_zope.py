"""Queues in transactions of the package ``transaction``, in many threads: no thread is in another's way."""

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
"""Transactions that are under way all the time."""


class Session:
    """It can do everything."""

    handle = SimpleNamespace()

    def prepare(self, _xid: object) -> XaFlag:
        return XaFlag.RDONLY

    def __getattr__(self, name: str) -> Any:
        if name in ("start", "end", "rollback"):
            return lambda *_: None
        raise AttributeError(name)


class Resource:
    """It always has a session."""

    name = "queue"

    def started(self, _xid: object) -> Session:
        return Session()

    def release(self, _session: Session) -> None:
        """Nobody needs it any more."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
def test_transactions_of_other_threads_do_not_make_one_fail(tmp_path: Path) -> None:
    """``tpc_finish`` "should never fail": the application would take for undone what is committed."""
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
