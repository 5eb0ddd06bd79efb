"""Alarms of standalone mode: clients that publish wait for the disk, or for memory."""

from types import SimpleNamespace
from typing import Any

import pytest

from dtx.admin.rabbitmq_metrics import BrokerTotals, families
from dtx.admin.rabbitmq_rows import View
from dtx.store.work import Budget


@pytest.mark.parametrize(
    ("low", "used", "expected"),
    [(False, 10, []), (True, 10, ["disk"]), (False, 11, ["memory"]), (True, 11, ["disk", "memory"])],
)
def test_each_raised_alarm_is_named(low: bool, used: int, expected: list[str]) -> None:
    budget = Budget(10)
    budget.charge(used)
    nothing: Any = None
    active: Any = SimpleNamespace(manager=SimpleNamespace(disk=SimpleNamespace(raised=low), budget=budget))
    view = View(who=nothing, context=nothing, active=active, broker=nothing, users=nothing)
    assert view.alarms() == expected
    found = {
        family.name: [sample.value for sample in family.samples] for family in families(BrokerTotals(alarms=expected))
    }
    assert found["rabbitmq_alarms_free_disk_space_watermark"] == [low]
    assert found["rabbitmq_alarms_memory_used_watermark"] == [used > 10]
    assert found["rabbitmq_disk_space_available_bytes"] == [], "it is not known"
