"""The XA switch for C, under a C program: work, outcomes and recovery in both modes."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from dtx.client import Xid
from tests.interop.c.programs import (
    XA_OK,
    Driver,
)
from tests.support.service import DtxService


def a_xid() -> Xid:
    """Binary, as long as it may be, with NULs in it."""
    return Xid(0xFFFFFFFE, b"\0" + secrets.token_bytes(63), secrets.token_bytes(63) + b"\0")


@pytest.fixture(scope="module")
def driver(service: DtxService) -> Iterator[Driver]:
    """A program whose threads a and b have opened the service."""
    with Driver() as running:
        for thread in ("a", "b"):
            running.open(thread, service.url())
        yield running


def test_a_branch_is_committed_in_two_phases(driver: Driver, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    driver.published("a", xid, queue, "two")
    assert driver.call("a", "prepare", xid) == XA_OK
    assert bodies() == []
    assert driver.recovered("b") == [str(xid)]
    assert driver.call("b", "commit", xid) == XA_OK
    assert bodies() == ["two"]
    assert driver.recovered("b") == []
