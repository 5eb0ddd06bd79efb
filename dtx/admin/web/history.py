"""The series of the overview: the last ten minutes, hour and eight hours, in memory.

A reading is made every six seconds. Each window keeps at most 100 points, and a point of a longer window is computed
from the readings of its time: the mean of rates, the highest of others, the lowest of free space. So the memory of
dtx for them is fixed. A window has a gap where a number was not known, for example while this dtx stood by.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, log10
from statistics import fmean
from typing import Final

from dtx.admin.safe_text import human_duration, human_size

READING_SECONDS: Final = 6.0
POINTS: Final = 100
"""Points of a window."""
WINDOWS: Final = {"10m": 600.0, "1h": 3600.0, "8h": 8 * 3600.0}
"""Seconds of each window, by its name in addresses."""
WINDOW_TEXTS: Final = {"10m": "10 minutes", "1h": "1 hour", "8h": "8 hours"}
WIDTH, HEIGHT = 360, 100
"""Size of a chart, in its own units."""
Reading = Mapping[str, float | None]


def _rate_text(value: float) -> str:
    return f"{value:,.0f}/s".replace(",", " ") if value >= 100 else f"{value:.3g}/s"


def _count_text(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 10 else f"{value:.3g}"


def _seconds_text(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _bytes_text(value: float) -> str:
    return human_size(round(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One line of a chart.

    Args:
        name: of its number in readings.
        label: text for its number.
        fold: the number of a longer time, from its readings.
    """

    name: str
    label: str
    fold: Callable[[Sequence[float]], float] = max


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of the overview.

    Args:
        title: with the unit.
        lines: at most two.
        text: the text for a number.
        binary: whether the scale ends at a power of two.
        standalone: whether only standalone mode has it.
    """

    title: str
    lines: tuple[ChartLine, ...]
    text: Callable[[float], str]
    binary: bool = False
    standalone: bool = False


CHARTS: Final = (
    Chart(
        title="Branches completed per second",
        lines=(ChartLine(name="branches", label="", fold=fmean),),
        text=_rate_text,
    ),
    Chart(title="Branches in doubt", lines=(ChartLine(name="in_doubt", label=""),), text=_count_text),
    Chart(
        title="Messages in queues",
        lines=(ChartLine(name="ready", label="ready"), ChartLine(name="unacked", label="unacknowledged")),
        text=_count_text,
        standalone=True,
    ),
    Chart(
        title="Messages per second",
        lines=(
            ChartLine(name="published", label="published", fold=fmean),
            ChartLine(name="delivered", label="delivered", fold=fmean),
        ),
        text=_rate_text,
        standalone=True,
    ),
    Chart(title="Free disk space", lines=(ChartLine(name="disk", label="", fold=min),), text=_bytes_text, binary=True),
    Chart(title="Memory of dtx", lines=(ChartLine(name="memory", label=""),), text=_bytes_text, binary=True),
    Chart(title="Delay of the event loop, longest", lines=(ChartLine(name="lag", label=""),), text=_seconds_text),
)
_FOLDS: Final = {line.name: line.fold for chart in CHARTS for line in chart.lines}
"""By name, in the order of the values of a point."""


class Window:
    """The points of one window.

    Args:
        seconds: its length.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds: Final = seconds
        self._step = seconds / POINTS
        self._points: deque[tuple[float, tuple[float | None, ...]]] = deque(maxlen=POINTS)
        self._begun: float | None = None
        self._readings: list[tuple[float | None, ...]] = []

    def add(self, at: float, values: tuple[float | None, ...]) -> None:
        """Add a reading, in the order of :data:`_FOLDS`."""
        if self._begun is None or at - self._begun >= self._step - READING_SECONDS / 2:  # readings come a little late
            if self._begun is not None:
                self._points.append((self._begun, self._folded()))
            self._begun, self._readings = at, []
        self._readings.append(values)

    def _folded(self) -> tuple[float | None, ...]:
        columns = zip(*self._readings, strict=True)
        known = ([value for value in column if value is not None] for column in columns)
        return tuple(fold(column) if column else None for fold, column in zip(_FOLDS.values(), known, strict=True))

    def points(self) -> list[tuple[float, dict[str, float | None]]]:
        """Times and numbers, oldest first; the last point is not complete yet."""
        last = [] if self._begun is None else [(self._begun, self._folded())]
        return [(at, dict(zip(_FOLDS, values, strict=True))) for at, values in (*self._points, *last)]


class History:
    """The readings of all windows."""

    def __init__(self) -> None:
        self.windows: Final = {name: Window(seconds) for name, seconds in WINDOWS.items()}

    def add(self, at: float, reading: Reading) -> None:
        """Add a reading.

        Args:
            at: seconds of a monotonic clock.
            reading: numbers by name; ``None`` or no value where one is not known.
        """
        values = tuple(reading.get(name) for name in _FOLDS)
        for window in self.windows.values():
            window.add(at, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLine:
    """A line, for the template.

    Args:
        label: text for its number; empty if it is the only one.
        now: text of the latest number.
        extreme: text with the highest number, or with the lowest of free space; empty if there is none.
        pieces: points for SVG, one text for each piece without a gap.
    """

    label: str
    now: str
    extreme: str
    pieces: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChart:
    """A chart, for the template.

    Args:
        title: with the unit.
        top: text of the upper end of the scale, which begins at 0.
        middle: text of its middle.
        lines: the lines.
    """

    title: str
    top: str
    middle: str
    lines: list[DrawnLine]


def draw(window: Window, now: float, *, standalone: bool) -> list[DrawnChart]:
    """The charts of a window.

    Args:
        window: its points.
        now: seconds of the monotonic clock.
        standalone: whether dtx is in standalone mode.
    """
    points = [point for point in window.points() if now - point[0] <= window.seconds]
    return [_drawn(chart, points, window, now) for chart in CHARTS if standalone or not chart.standalone]


def _drawn(
    chart: Chart, points: Sequence[tuple[float, Mapping[str, float | None]]], window: Window, now: float
) -> DrawnChart:
    known = [value for _, values in points for line in chart.lines if (value := values[line.name]) is not None]
    top = scale_end(max(known, default=0.0), binary=chart.binary)
    lines: list[DrawnLine] = []
    for line in chart.lines:
        pieces: list[list[str]] = [[]]
        for at, values in points:
            value = values[line.name]
            if value is None:
                pieces.append([])
            else:
                left = WIDTH * (1 - (now - at) / window.seconds)
                pieces[-1].append(f"{left:.1f},{HEIGHT * (1 - value / top):.1f}")
        of_line = [value for _, values in points if (value := values[line.name]) is not None]
        latest = points[-1][1][line.name] if points else None
        lines.append(
            DrawnLine(
                label=line.label,
                now="not known" if latest is None else chart.text(latest),
                extreme=_extreme(chart, line, of_line),
                pieces=[" ".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece],
            )
        )
    scale = [chart.text(value) if known else "" for value in (top, top / 2)]
    return DrawnChart(title=chart.title, top=scale[0], middle=scale[1], lines=lines)


def _extreme(chart: Chart, line: ChartLine, values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"at least {chart.text(min(values))}" if line.fold is min else f"at most {chart.text(max(values))}"


def scale_end(most: float, *, binary: bool = False) -> float:
    """The upper end of a scale that shows *most*: 1, 2 or 5 times a power of ten, or a power of two."""
    if most <= 0:
        return 1.0
    if binary:
        return float(2 ** ceil(round(log2(most), 9)))
    unit = 10.0 ** ceil(log10(most) - 1)
    return float(next(step * unit for step in (1, 2, 5, 10) if step * unit >= most * (1 - 1e-9)))


def ago(window: Window) -> tuple[str, str]:
    """The texts of the beginning and the middle of the time axis."""
    return f"{human_duration(window.seconds)} ago", f"{human_duration(window.seconds / 2)} ago"
