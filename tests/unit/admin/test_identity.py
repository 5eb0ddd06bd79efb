"""Refused sign-ins are recorded in the audit log, with a limit so that attempts cannot fill it."""

import json
from http import HTTPStatus
from typing import Any

import pytest

from dtx.admin.identity import MOST_ADDRESSES, MOST_REFUSALS, Authenticator
from dtx.admin.problems import Problem
from dtx.log.api import LogUnavailable


class Trail:
    """An audit log in memory.

    Args:
        away: whether the database is unavailable.
    """

    def __init__(self, *, away: bool = False) -> None:
        self.lines: list[dict[str, str]] = []
        self._away = away

    def find_token(self, secret: str) -> None:
        """No token exists."""

    def begin(self, **line: str) -> int:
        if self._away:
            raise LogUnavailable("the database is away")
        self.lines.append(line)
        return len(self.lines) - 1

    def finish(self, number: int, result: str) -> None:
        self.lines[number]["result"] = result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [600.0]
    monkeypatch.setattr("dtx.admin.identity.time.monotonic", lambda: now[0])
    return now


async def refused(gate: Authenticator, address: str) -> None:
    with pytest.raises(Problem) as raised:
        await gate.by_token("dtx_made-up", address)
    assert raised.value.status is HTTPStatus.UNAUTHORIZED


async def test_refusals_beyond_the_limits_are_counted(clock: list[float]) -> None:
    trail: Any = Trail()
    gate = Authenticator(None, trail)  # type: ignore[arg-type]  # no user is asked for
    for _ in range(MOST_REFUSALS + 5):
        await refused(gate, "10.0.0.1")
    assert [line["address"] for line in trail.lines] == ["10.0.0.1"] * MOST_REFUSALS
    assert {line["result"] for line in trail.lines} == {"401: no such token, or it has expired"}
    for number in range(MOST_ADDRESSES + 3):
        await refused(gate, f"10.1.0.{number}")
    assert len(trail.lines) == MOST_REFUSALS + MOST_ADDRESSES - 1
    assert json.loads(trail.lines[MOST_REFUSALS]["detail"]) == {"left_out_before": 5}
    clock[0] += 60
    await refused(gate, "10.0.0.1")
    assert json.loads(trail.lines[-1]["detail"]) == {"left_out_before": 4}


@pytest.mark.usefixtures("clock")
async def test_a_trail_that_is_away_changes_no_answer() -> None:
    trail: Any = Trail(away=True)
    await refused(Authenticator(None, trail), "10.0.0.1")  # type: ignore[arg-type]
    assert trail.lines == []
