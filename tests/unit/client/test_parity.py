"""The adapters for asyncio have the names, parameters and defaults of the blocking one."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import dtx.client
from dtx.client import aio, tm
from dtx.client.tm import asynchronous


def interface(of: type[Any]) -> Iterator[tuple[str, list[tuple[str, Any, Any]]]]:
    """Public methods of a class with the name, kind and default of each parameter."""
    for name, member in inspect.getmembers(of, inspect.isfunction):
        if not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            yield name, [(each.name, each.kind, each.default) for each in parameters]


PAIRS = [
    (dtx.client.XAResource, aio.AioXAResource),
    (dtx.client.Coordinator, aio.AioCoordinator),
    (dtx.client.XAResource, dtx.client.AsyncXAResource),
    (dtx.client.Coordinator, dtx.client.AsyncCoordinator),
    (tm.TransactionManager, asynchronous.AsyncTransactionManager),
    (tm.Transaction, asynchronous.AsyncTransaction),
    (tm.Resource, asynchronous.AsyncResource),
    (tm.DtxResource, asynchronous.AsyncDtxResource),
    (tm.Pep249Resource, asynchronous.AsyncPep249Resource),
]


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda of: f"{of.__module__}.{of.__name__}")
def test_both_have_the_same_methods(blocking: type[Any], awaited: type[Any]) -> None:
    assert dict(interface(blocking)) == dict(interface(awaited))


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda of: f"{of.__module__}.{of.__name__}")
def test_both_are_made_with_the_same_options(blocking: type[Any], awaited: type[Any]) -> None:
    options = [
        [(each.name, each.default) for each in inspect.signature(of).parameters.values() if each.name != "self"]
        for of in (blocking, awaited)
    ]
    assert options[0] == options[1]
