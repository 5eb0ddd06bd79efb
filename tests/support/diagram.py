"""The transition table as a picture (SVG) and as a table of answers."""

from math import inf
from typing import Final

from dtx.xa.answers import answers
from dtx.xa.model import REQUESTS, Operation, State, Vote
from dtx.xa.table import LOGGED, TRANSITIONS

_GUARDS: Final[dict[frozenset[Vote], str]] = {
    frozenset(Vote) - {Vote.ASSOCIATED}: "last channel",
    frozenset({Vote.NOTHING}): "nothing",
    frozenset({Vote.PUBLISHED}): "published only",
    frozenset({Vote.CONSUMED}): "consumed only",
    frozenset({Vote.PUBLISHED, Vote.BOTH}): "published",
    frozenset({Vote.CONSUMED, Vote.BOTH}): "consumed",
    frozenset({Vote.NOTHING, Vote.PUBLISHED}): "nothing consumed",
    frozenset({Vote.NOTHING, Vote.CONSUMED}): "nothing published",
    frozenset({Vote.NOTHING, Vote.LOCAL}): "nothing or local",
    frozenset({Vote.PUBLISHED, Vote.LOCAL}): "published only or local",
    frozenset({Vote.NOTHING, Vote.PUBLISHED, Vote.LOCAL}): "nothing consumed or local",
    frozenset({Vote.NOTHING, Vote.CONSUMED, Vote.LOCAL}): "nothing published or local",
}
_PLACES: Final = {
    State.UNKNOWN: (500, 20),
    State.ACTIVE: (500, 100),
    State.TIMED_OUT: (110, 170),
    State.ROLLBACK_ONLY: (890, 170),
    State.IDLE: (500, 240),
    State.TAKING_ONE_PHASE: (300, 400),
    State.TAKING: (740, 400),
    State.COMMITTING: (110, 600),
    State.PREPARED: (500, 600),
    State.ROLLING_BACK: (890, 600),
    State.HEURISTIC_COMMITTING: (110, 800),
    State.HEURISTIC_ROLLING_BACK: (890, 800),
    State.HEURISTIC: (500, 860),
}
"""The middle of each box."""
_BENDS: Final = {
    (State.ACTIVE, State.IDLE): (-60, 0),
    (State.IDLE, State.ACTIVE): (60, 0),
    (State.IDLE, State.COMMITTING): (-190, -110),
}
"""How far the middle of an arrow is from the straight line, where it is not on it."""
_ENDS: Final = {
    State.TIMED_OUT: (0, -70, 0, -110),
    State.ROLLBACK_ONLY: (0, -70, 0, -110),
    State.IDLE: (180, 50, 250, 60),
    State.TAKING_ONE_PHASE: (-130, 0, -130, 36),
    State.TAKING: (130, 0, 130, 20),
    State.PREPARED: (-110, -50, -130, -100),
    State.COMMITTING: (-60, 60, -65, 80),
    State.ROLLING_BACK: (60, 60, 65, 80),
    State.HEURISTIC: (0, 60, 0, 80),
}
"""From the middle of a box to the end of a branch, and to the label of that arrow."""
_LABEL_AT: Final = {(State.TAKING_ONE_PHASE, State.ROLLING_BACK): 0.7}
"""The part of an arrow that is before its label; 0.4 where it says nothing else."""
_BOX: Final = (85, 17)
_DOT: Final = (7, 7)


def arrows() -> dict[tuple[State, State], list[str]]:
    """For each pair of states the operations that lead from the first to the second, with what they depend on."""
    found: dict[tuple[State, State], list[str]] = {}
    for (state, operation), targets in _by_operation().items():
        for target, votes in targets.items():
            if target is not state:
                guard = f" [{_GUARDS[frozenset(votes)]}]" if len(targets) > 1 else ""
                found.setdefault((state, target), []).append(f"{operation}{guard}")
    return found


def state_diagram() -> str:
    """The elements of the picture: one arrow for each pair of states, labelled with its operations."""
    lines, labels = [], []
    for (start, to), operations in arrows().items():
        (x, y), (ex, ey), (bx, by) = _PLACES[start], _PLACES[to], _BENDS.get((start, to), (0, 0))
        dx, dy, label_x, label_y = _ENDS.get(start, (0, 0, 0, 0))
        if to is State.UNKNOWN:
            ex, ey = x + dx, y + dy
            lines.append(f'<circle class="end" cx="{ex}" cy="{ey}" r="{_DOT[0]}"/>')
        cx, cy = (x + ex) / 2 + 2 * bx, (y + ey) / 2 + 2 * by
        (ax, ay), (zx, zy) = _edge(start, x, y, cx, cy), _edge(to, ex, ey, cx, cy)
        lines.append(f'<path d="M{ax:.0f} {ay:.0f}Q{cx:.0f} {cy:.0f} {zx:.0f} {zy:.0f}"/>')
        t = _LABEL_AT.get((start, to), 0.4)
        on_arrow = [(1 - t) ** 2 * a + 2 * t * (1 - t) * c + t * t * z for a, c, z in ((ax, cx, zx), (ay, cy, zy))]
        place = (x + label_x, y + label_y) if to is State.UNKNOWN else on_arrow
        labels += _label(place[0], place[1], operations)
    return "\n".join([*lines, *map(_box, State), *labels])


def _edge(state: State, x: float, y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Where the line from *x*, *y*, the middle of a box, to another point leaves the box."""
    half = _DOT if state is State.UNKNOWN else _BOX
    way = (to_x - x, to_y - y)
    share = min(size / abs(step) if step else inf for size, step in zip(half, way, strict=True))
    return x + way[0] * share, y + way[1] * share


def _box(state: State) -> str:
    (x, y), (half, height) = _PLACES[state], _BOX
    if state is State.UNKNOWN:
        return f'<circle cx="{x}" cy="{y}" r="{_DOT[0]}"/>'
    rectangle = f'<rect x="{x - half}" y="{y - height}" width="{2 * half}" height="{2 * height}" rx="6"/>'
    kind = "logged" if state in LOGGED else "open"
    return f'<g class="{kind}">{rectangle}<text x="{x}" y="{y + 5}">{state}</text></g>'


def _label(x: float, y: float, operations: list[str]) -> list[str]:
    words = "\n".join(operations).replace(" [", "\n[").split("\n")
    top = y + 5 - 7 * (len(words) - 1)
    return [f'<text x="{x:.0f}" y="{top + 14 * number:.0f}">{word}</text>' for number, word in enumerate(words)]


def answers_table() -> str:
    """The final answer to every request in every state, as a table in markdown."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for operation in REQUESTS:
        cells = tuple(", ".join(answers(state, operation)) for state in State)
        rows.setdefault(cells, []).append(operation)
    lines = [("", *State), ("---",) * (len(State) + 1)]
    lines += [(", ".join(operations), *cells) for cells, operations in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_operation() -> dict[tuple[State, Operation], dict[State, list[Vote]]]:
    found: dict[tuple[State, Operation], dict[State, list[Vote]]] = {}
    for (state, operation, vote), rule in TRANSITIONS.items():
        found.setdefault((state, operation), {}).setdefault(rule.to, []).append(vote)
    return found
