"""The series of the overview: bounded windows, folded points and charts."""

import pytest

from dtx.admin.web.history import CHARTS, HEIGHT, POINTS, READING_SECONDS, WIDTH, History, ago, draw, scale_end
from dtx.admin.web.live_updates import Sample, rates_between


def filled(seconds: int, **numbers: float | None) -> History:
    """Readings of that many seconds, each a little late."""
    history = History()
    for number in range(int(seconds / READING_SECONDS)):
        history.add(number * READING_SECONDS * 1.001, numbers)
    return history


def test_each_window_keeps_a_fixed_number_of_points() -> None:
    """A week of readings needs the memory of one window each."""
    history = filled(7 * 86_400, in_doubt=3.0)
    for window in history.windows.values():
        points = window.points()
        assert len(points) == POINTS + 1, "the last one is not complete yet"
        assert points[-1][0] - points[0][0] == pytest.approx(window.seconds, rel=0.02)
        assert len(draw(window, points[-1][0], standalone=False)[1].lines[0].pieces[0].split()) in {POINTS, POINTS + 1}


def test_points_of_a_longer_window_are_folded() -> None:
    """Rates: the mean. In doubt: the highest. Free space: the lowest. Unknown numbers do not count."""
    history = History()
    for second in range(0, 42, 6):
        reading = {"branches": float(second), "in_doubt": float(second), "disk": 100.0 - second}
        history.add(float(second), reading | ({"memory": 7.0} if second == 12 else {}))
    (at, first), _ = history.windows["1h"].points()
    assert at == 0.0
    assert (first["branches"], first["in_doubt"], first["disk"], first["memory"]) == (15.0, 30.0, 70.0, 7.0)
    assert first["lag"] is None
    assert len(history.windows["10m"].points()) == 7


def test_a_line_has_a_gap_where_a_number_is_unknown() -> None:
    history = History()
    for at, number in ((0.0, 1.0), (6.0, 2.0), (12.0, None), (18.0, 4.0)):
        history.add(at, {"in_doubt": number})
    chart = next(chart for chart in draw(history.windows["10m"], 18.0, standalone=False) if "doubt" in chart.title)
    (line,) = chart.lines
    first, second = line.pieces
    assert first == f"{WIDTH * 582 / 600:.1f},{HEIGHT * 0.8:.1f} {WIDTH * 588 / 600:.1f},{HEIGHT * 0.6:.1f}"
    assert second == f"{WIDTH:.1f},{HEIGHT * 0.2:.1f} {WIDTH:.1f},{HEIGHT * 0.2:.1f}", "a point alone is seen, too"
    assert (chart.top, chart.middle, line.now, line.extreme) == ("5", "2.5", "4", "at most 4")


def test_only_standalone_mode_has_series_of_queues() -> None:
    history = filled(10, ready=1.0)
    alongside = {chart.title for chart in draw(history.windows["10m"], 10.0, standalone=False)}
    assert {chart.title for chart in CHARTS} - alongside == {"Messages in queues", "Messages per second"}


def test_a_chart_without_any_number_is_drawn() -> None:
    for chart in draw(History().windows["8h"], 0.0, standalone=True):
        assert {line.now for line in chart.lines} == {"not known"}
        assert not any(line.pieces for line in chart.lines)
        assert (chart.top, chart.middle) == ("", "")


@pytest.mark.parametrize(
    ("most", "binary", "end"),
    [(0.0, False, 1.0), (1.0, False, 1.0), (1.1, False, 2.0), (2.1, False, 5.0), (0.03, False, 0.05), (0.2, False, 0.2),
     (999, False, 1000), (1024.0, True, 1024.0), (1025.0, True, 2048.0)],
)  # fmt: skip
def test_a_scale_ends_at_a_round_number(most: float, binary: bool, end: float) -> None:
    assert scale_end(most, binary=binary) == pytest.approx(end)


def test_rates_are_those_between_two_samples() -> None:
    bounds = {0.001: 5.0, 0.01: 5.0, 0.1: 5.0, float("inf"): 5.0}
    before = Sample(10.0, {"commit": 100.0, "start": 7.0}, {}, bounds, published=3, delivered=None)
    after = Sample(20.0, {"commit": 120.0, "rollback": 10.0}, {}, {**bounds, 0.01: 6.0, 0.1: 8.0, float("inf"): 8.0})
    found = rates_between(before, after)
    assert found == {"branches": 3.0, "published": None, "delivered": None, "lag": 0.1}


def test_every_window_names_its_time_axis() -> None:
    assert [ago(window) for window in History().windows.values()] == [
        ("10m ago", "5m ago"),
        ("1h ago", "30m ago"),
        ("8h ago", "4h ago"),
    ]
