"""A cluster of three nodes that die, hang and are cut off, one at a time, while branches run: nothing is lost."""

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.cluster.world import PARTIAL, ClusterSoak, longest_gap
from tests.evidence.soak.report import table
from tests.support import network
from tests.support.rabbitmq_install import OPTION, chosen, is_there

_LOGS = "DTX_TEST_LOGS"
"""A directory that gets a copy of all logs."""
LONGEST = 15.0
"""The longest time without a commit after a fault that leaves a majority of nodes, in seconds."""
_ROUND = 75.0
"""Seconds between two counts."""


def test_the_longest_time_without_a_commit_is_found() -> None:
    """Times before and after the fault do not count."""
    assert longest_gap([1.0, 2.0, 2.5, 6.0, 9.0], 2.0, 7.0) == 3.5
    assert longest_gap([1.0, 9.0], 2.0, 7.0) == 5.0


# pika does not close the socket of a connection that is refused or cut during the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_nothing_is_lost_while_nodes_of_a_cluster_fail(
    minutes: float, caplog: pytest.LogCaptureFixture, figures: Callable[..., None]
) -> None:
    """Guarantee: "No fault loses a committed message or a rolled-back consumption"; repeats are counted."""
    version = chosen() if OPTION in os.environ else "4"
    if not network.is_possible():
        pytest.skip("only root, with iproute2, can cut nodes of a cluster off from each other")
    if not is_there(version):
        pytest.skip(f"there is no RabbitMQ {version}: make rabbitmq4")
    caplog.set_level(logging.CRITICAL, "pika")  # it logs each lost connection with many lines
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    logs = Path(os.environ[_LOGS]) if _LOGS in os.environ else None
    soak = ClusterSoak(version, seed, print, logs=logs)
    report = soak.run(max(_ROUND, minutes * 60), each=_ROUND, broker_deaths=lambda _: True)
    gaps = soak.nemesis.gaps
    print(table(report))
    print("\n".join(f"{seconds:6.1f} s without a commit: {name}" for name, seconds in gaps.items()))
    counts = {
        "transfers": report.committed,
        "rolled back": report.rolled_back,
        "faults": report.nemesis.total(),
        "lost": len(report.lost),
        "wrong": len(report.wrong),
        "lost by RabbitMQ without dtx": soak.nemesis.lost_without_dtx,
        "copies left in queues": report.copies_left,
        "copies seen by consumers through dtx": report.copies_delivered,
        "of these the copy that was consumed before": report.same_copies,
        "longest seconds without a commit": round(max(gaps.values()), 1),
    }
    figures(**counts)
    figures(**{f"seconds without a commit, {name}": round(seconds, 1) for name, seconds in sorted(gaps.items())})
    assert report.bad == []
    assert report.committed > 0
    assert max(seconds for name, seconds in gaps.items() if name != PARTIAL) < LONGEST
