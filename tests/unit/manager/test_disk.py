"""The disk alarm: which publishers wait for space, and until when."""

from pathlib import Path

from structlog.testing import capture_logs

from dtx.manager.limits import DiskAlarm


def test_publishers_wait_until_there_is_disk_space() -> None:
    alarm = DiskAlarm(Path("/"), 100)
    went_on: list[str] = []
    raised = []
    for alarm.free in (100, 99):
        alarm.check()
        raised.append(alarm.raised)
    assert raised == [False, True]
    one, gone = lambda: went_on.append("one"), lambda: went_on.append("gone")

    def breaks() -> None:
        raise RuntimeError("a mistake of ours")

    for go_on in (breaks, one, one, gone):
        alarm.wait(go_on)
    alarm.leave(gone)
    alarm.check()
    assert went_on == []
    alarm.free = 100
    alarm.check()
    assert (alarm.raised, went_on) == (False, ["one"])
    alarm.check()
    assert went_on == ["one"]


def test_the_alarm_is_logged_once_while_it_lasts() -> None:
    alarm = DiskAlarm(Path("/"), 100)
    with capture_logs() as logged:
        for alarm.free in (100, 99, 98, 100, 101):
            alarm.check()
    assert [line["event"] for line in logged] == [
        "low on disk, clients that publish wait",
        "there is room on the disk again",
    ]


def test_a_database_that_has_no_space_raises_the_alarm_anywhere() -> None:
    """For a PostgreSQL on another machine, its error is the only sign."""
    full = True
    alarm = DiskAlarm(None, 100, lambda: full)
    alarm.check()
    assert (alarm.raised, alarm.free, alarm.limit) == (True, None, 0)
    full = False
    alarm.check()
    assert not alarm.raised
