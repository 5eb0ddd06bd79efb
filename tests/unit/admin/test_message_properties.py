"""Field tables and properties from JSON."""

import json
from typing import Any

import pytest

from dtx.admin.message_properties import flat, properties_from_json, table_from_json, table_to_json
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.tables import MAX_DEPTH, MAX_ENTRIES


def nested(depth: int) -> dict[str, Any]:
    """A table with arrays and tables in each other."""
    found: Any = 1
    for level in range(depth):
        found = [found] if level % 2 else {"a": found}
    return {"a": found}


@pytest.mark.parametrize(
    "table", [nested(MAX_DEPTH), {str(each): each for each in range(MAX_ENTRIES)}, {"a": [1] * (MAX_ENTRIES - 1)}]
)
def test_the_largest_tables_can_be_read_again(table: dict[str, Any]) -> None:
    assert table_to_json(table_from_json(table)) == table


@pytest.mark.parametrize(
    "table",
    [
        nested(MAX_DEPTH + 1),
        nested(100_000),
        {str(each): each for each in range(MAX_ENTRIES + 1)},
        {"a": [1] * MAX_ENTRIES},
    ],
)
def test_a_larger_table_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="field table has over 4096 values or 64 levels"):
        table_from_json(table)


def test_the_reason_for_a_deep_value_is_short() -> None:
    with pytest.raises(WireError, match="does not fit the property type") as refused:
        properties_from_json({"type": nested(100_000)})
    assert len(json.dumps(refused.value.reason)) < 120


def test_tables_for_people_are_flat_and_short() -> None:
    table = {"a": {"b": [1, {"c": None}]}, "long": "x" * 5000, "d": True}
    found = flat(table)
    assert found == [("a.b[0]", "1"), ("a.b[1].c", "None"), ("long", "x" * 1000 + "…"), ("d", "True")]
    assert flat(table, 2) == [*found[:2], ("…", "there are more: the API has all")]
    assert flat(table, 4) == found
    assert flat({"name": "value"}, longest=2) == [("na…", "va…")]
