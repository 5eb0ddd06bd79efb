"""The clock of a dtx jumps: the lease uses the database's clock, time-outs use a monotonic clock."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from dtx.client import XA_RBTIMEOUT, XaFlag, XAResource
from tests.support.client import new_xid
from tests.support.service import DtxService
from tests.support.standby_pair import Crowd, Pair

DAY: Final = 86_400
WRONG_CLOCK: Final = str(Path(__file__).parents[2] / "support" / "wall_clock")


@pytest.fixture
def pair(pair_with: Callable[..., Pair]) -> Pair:
    """Each dtx has its own clock."""
    return pair_with(env={"PYTHONPATH": WRONG_CLOCK})


def set_clock(service: DtxService, seconds: float) -> None:
    """Set the clock of *service* ahead by *seconds*."""
    new = service.directory / "clock-offset.new"
    new.write_text(str(seconds))
    new.replace(service.directory / "clock-offset")  # atomic: a reader never sees an empty file


def test_clock_jumps_lose_neither_the_lease_nor_a_branch(pair: Pair) -> None:
    epoch = pair.epoch()
    with Crowd(pair) as crowd:
        for seconds in (3600, -3600, 400 * DAY, -400 * DAY, 0):
            set_clock(pair.active, seconds)
            crowd.wait_for(10)
        assert pair.epoch() == epoch
        crowd.settle()
    assert pair.active.running
    assert not pair.standby.ready_line


def test_a_standby_with_a_wrong_clock_waits_correctly(pair: Pair) -> None:
    """The lease runs out by the database's clock."""
    epoch = pair.epoch()
    set_clock(pair.standby, 400 * DAY)
    with Crowd(pair) as crowd:
        crowd.wait_for(40)
        assert pair.epoch() == epoch
        pair.active.kill9()
        pair.succeed()
        crowd.wait_for(20)
        crowd.settle()


def test_a_branch_times_out_by_elapsed_time_not_the_clock(pair: Pair) -> None:
    scene = pair.scene
    with scene.connected() as connection:
        short, long = (XAResource(connection.channel(), timeout=60) for _ in range(2))
        for times, seconds in enumerate((400 * DAY, -400 * DAY), start=1):
            hasty, patient = new_xid(), new_xid()
            for xa, xid, timeout in ((short, hasty, 2), (long, patient, 600)):
                xa.start(xid)
                xa.set_timeout(xid, timeout)
            set_clock(pair.active, seconds)
            scene.wait_for(partial(has_timed_out, pair, times), "a time-out")
            with pytest.raises(XA_RBTIMEOUT):
                short.end(hasty)
            assert long.end(patient) is XaFlag.OK
            assert long.rollback(patient) is XaFlag.OK


def has_timed_out(pair: Pair, times: int) -> bool:
    """Whether *times* branches of the active dtx have timed out."""
    return pair.active.log_path.read_bytes().count(b"branch timed out") == times
