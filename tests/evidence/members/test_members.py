"""Three members behind a balancer die, stall and restart; transaction managers end branches at other members."""

import logging
import os
import secrets
from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest

from tests.evidence.members.world import FENCED, ROLLING, MembersSoak
from tests.evidence.soak.report import table

_ROUND = 45.0
"""Seconds between two counts."""
_LOGS = "DTX_TEST_LOGS"
"""A directory that keeps the logs of all members."""

# pika does not close the socket of a connection that is refused or cut during the handshake.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def run(seconds: float, figures: Callable[..., None], name: str, *harm: str) -> MembersSoak:
    """Run a soak without deaths of RabbitMQ, note its figures, and check that no guarantee was broken."""
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # it logs each lost connection with many lines
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    logs = Path(os.environ[_LOGS]) / name if _LOGS in os.environ else None
    soak = MembersSoak(seed, print, harm, logs=logs)
    report = soak.run(ceil(seconds / _ROUND) * _ROUND, each=_ROUND, broker_deaths=lambda _: False)
    print(table(report))
    values = {
        "transfers": report.committed,
        "rolled back": report.rolled_back,
        **report.nemesis,
        "lost": len(report.lost),
        "repeated": len(report.repeated),
        "wrong": len(report.wrong),
        "commits delayed": report.counts["commit delayed"],
        "commits failed": report.counts["commit failed"],
        "longest seconds without a commit": round(soak.nemesis.longest_gap, 1),
    }
    figures(**{f"{name}: {what}": value for what, value in values.items()})
    assert report.bad == []
    assert report.committed > 0
    return soak


def test_any_member_ends_any_branch_while_members_fail(minutes: float, figures: Callable[..., None]) -> None:
    """Guarantees: "exactly once when dtx dies", "never 404 in doubt"; a stalled member is fenced."""
    report = run(minutes * 45, figures, "faults").report
    assert report.nemesis[FENCED] > 0
    assert report.exits[5] > 0


def test_a_rolling_restart_of_all_members_fails_no_commit(minutes: float, figures: Callable[..., None]) -> None:
    """A commit that has no answer is repeated for up to ten seconds: it may be late, and does not fail."""
    report = run(minutes * 15, figures, "rolling", ROLLING).report
    assert report.nemesis[ROLLING] > 0
    assert report.counts["commit failed"] == 0
