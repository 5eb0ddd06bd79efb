"""The plots as SVG with the colours of the page, in its light and dark theme.

Matplotlib draws with placeholder colours, which are then replaced by variables of the page's CSS.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, Final
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import date2num
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dtx.pipeline.verdicts import Verdict

GROUPS: Final[dict[str, tuple[str, tuple[Verdict, ...]]]] = {
    "went wrong": (
        "bad",
        (Verdict.MIXED, Verdict.AGAINST_DECISION, Verdict.HEURISTIC_DAMAGE, Verdict.HAZARD, Verdict.FORGOTTEN_EARLY),
    ),
    "open": ("warn", (Verdict.UNFINISHED, Verdict.ORPHAN, Verdict.IN_DOUBT, Verdict.NOT_ARCHIVED)),
    "unexpected": ("special", (Verdict.XID_REUSED, Verdict.OWNER_MISMATCH)),
}
"""Three groups of verdicts that need attention, each with its colour."""

_COLOURS: Final = {
    name: f"#0102{number:02x}"
    for number, name in enumerate(("text", "muted", "line", "accent", "good", "warn", "bad", "special", "card"))
}
_WIDTH: Final = 6.4
"""Width in inches of 72 points; the page scales it."""
_MOST_DAYS: Final = 120
"""Limit of bars that can be told apart."""
_MOST_TICKS: Final = 9
_MOST_NAMES: Final = 15
_LABEL: Final = 32
"""Limit of the width of a name on an axis, in Latin letters."""
_STYLE: Final = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _COLOURS["text"],
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}


def days(rows: Sequence[tuple[date | None, str, int]]) -> str:
    """Plot the transactions that need attention, by day of their last event and by :data:`GROUPS`."""
    return _bars_by_day(
        "Transactions that need attention, by day",
        rows,
        {name: (colour, [str(verdict) for verdict in verdicts]) for name, (colour, verdicts) in GROUPS.items()},
    )


def endings(rows: Sequence[tuple[date | None, str, int]]) -> str:
    """Plot the transactions that ended in the same way everywhere, by day of their last event."""
    return _bars_by_day(
        "Transactions that ended the same way everywhere, by day",
        rows,
        {"committed": ("good", [str(Verdict.COMMITTED)]), "rolled back": ("accent", [str(Verdict.ROLLED_BACK)])},
    )


def ages(rows: Sequence[tuple[str, str, int]], labels: Sequence[str]) -> str:
    """Plot the open transactions by age."""
    sums = {label: sum(count for age, _, count in rows if age == label) for label in labels}
    return _across("How long open transactions have been open", sums, lambda number: "warn" if number < 3 else "bad")


def latency(rows: Sequence[tuple[str, int, float, float, float]]) -> str:
    """Plot the seconds from prepare to commit: three dots for each resource manager, on a logarithmic scale."""
    shown = list(reversed(rows[:_MOST_NAMES]))

    def draw(axes: Any) -> None:
        least = 1e-4
        for number, (_, _, *points) in enumerate(shown):
            x = [max(least, point) for point in points]
            axes.plot(x, [number] * 3, color=_COLOURS["line"], linewidth=2, zorder=1)
            for value, colour in zip(x, ("good", "warn", "bad"), strict=True):
                axes.scatter([value], [number], color=_COLOURS[colour], s=42, zorder=2)
        axes.set_xscale("log")
        low = min(max(least, row[2]) for row in shown)
        high = max(max(least, row[4]) for row in shown)
        axes.set_xlim(low / 2, high * 2)
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(shown)), [_short(row[0]) for row in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.grid(visible=False, axis="y")
        for colour, name in (("good", "50th percentile"), ("warn", "95th percentile"), ("bad", "99th percentile")):
            axes.scatter([], [], color=_COLOURS[colour], label=name)
        _legend(axes, 3)

    return _drawn("From prepare to commit", draw, height=1.2 + 0.34 * len(shown))


def names(title: str, rows: Mapping[str, int], colour: str = "accent") -> str:
    """Plot the first names of *rows* with their numbers."""
    return _across(title, dict(list(rows.items())[:_MOST_NAMES]), lambda _: colour)


def seconds(value: float) -> str:
    """Return a time span as text, with a suitable unit."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def _bars_by_day(
    title: str, rows: Sequence[tuple[date | None, str, int]], groups: Mapping[str, tuple[str, Sequence[str]]]
) -> str:
    wanted = {verdict for _, verdicts in groups.values() for verdict in verdicts}
    # transactions without a time are only in the tables
    there = [day for day, verdict, _ in rows if verdict in wanted and day is not None]
    if not there:
        return ""
    last = max(there)
    first = max(min(there), last - timedelta(days=_MOST_DAYS - 1))
    span = [first + timedelta(days=number) for number in range((last - first).days + 1)]

    def draw(axes: Any) -> None:
        floor = [0] * len(span)
        for name, (colour, verdicts) in groups.items():
            counted = dict.fromkeys(span, 0)
            for day, verdict, count in rows:
                if day is not None and day in counted and verdict in verdicts:
                    counted[day] += count
            heights = list(counted.values())
            axes.bar(
                [float(date2num(day)) for day in span],
                heights,
                bottom=floor,
                width=0.8,
                color=_COLOURS[colour],
                label=name,
            )
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        ticks = span[:: -(-len(span) // _MOST_TICKS)]
        axes.set_xticks([float(date2num(day)) for day in ticks], [f"{day.day} {day:%b}" for day in ticks])
        room = max(0.7, 2 - len(span) / 2)
        axes.set_xlim(float(date2num(first)) - room, float(date2num(last)) + room)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(visible=False, axis="x")
        _legend(axes, len(groups))

    return _drawn(title, draw, height=2.7)


def _across(title: str, rows: Mapping[str, int], colour: Callable[[int], str]) -> str:
    """Plot horizontal bars, the first one on top, each with its number."""
    if not any(rows.values()):
        return ""

    def draw(axes: Any) -> None:
        most = max(rows.values())
        for number, count in enumerate(rows.values()):
            axes.barh(number, count, height=0.66, color=_COLOURS[colour(number)])
            axes.text(count + most * 0.01, number, f" {count:,}", va="center", color=_COLOURS["text"])
        axes.set_yticks(range(len(rows)), [_short(name) for name in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, most * 1.15)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)

    return _drawn(title, draw, height=0.5 + 0.32 * len(rows))


def _short(name: str) -> str:
    """Return *name* on one line, cut to the width of :data:`_LABEL` Latin letters."""
    text = " ".join(name.split())
    if len(text) + _wide(text) <= _LABEL:
        return text
    text = text[: _LABEL - 1]
    while len(text) + _wide(text) >= _LABEL:
        text = text[:-1]
    return f"{text}…"


def _wide(text: str) -> int:
    """Return the number of letters of double width."""
    return sum(east_asian_width(letter) in "WF" for letter in text)


def _legend(axes: Any, columns: int) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1, borderaxespad=0.2)


def _drawn(title: str, draw: Callable[[Any], None], *, height: float) -> str:
    # names may contain a dollar sign, which starts a formula in Matplotlib
    style = {**_STYLE, "text.parse_math": False, "svg.hashsalt": title}
    with mpl.rc_context(style), warnings.catch_warnings():
        # the browser draws the text with its own fonts; Matplotlib only measures it
        warnings.filterwarnings("ignore", "Glyph .* missing from font|Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        output = io.StringIO()
        canvas.print_svg(output, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(output.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """Return the SVG element alone, with a name for screen readers and the page's colours."""
    body = svg[svg.index("<svg") :]
    for name, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    # ids must be unique on the page
    prefix = re.sub(r"\W+", "-", title.lower())
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}-', body).replace("url(#", f"url(#{prefix}-")
    body = re.sub(r' width="[^"]*"', "", re.sub(r' height="[^"]*"', "", body, count=1), count=1)
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(title, {chr(34): "&quot;"})}"', 1)
