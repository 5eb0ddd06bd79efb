"""The transition table as a mermaid state diagram and as a table of answers."""

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


def state_diagram() -> str:
    """The table as a mermaid ``stateDiagram-v2``: one arrow for each pair of states, labelled with its operations."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, operation), targets in _by_operation().items():
        for target, votes in targets.items():
            if target is not state:
                guard = f" [{_GUARDS[frozenset(votes)]}]" if len(targets) > 1 else ""
                arrows.setdefault((state, target), []).append(f"{operation}{guard}")
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state}" as {_id(state)}' for state in State if state is not State.UNKNOWN]
    lines += [f"    {_id(start)} --> {_id(to)} : {', '.join(labels)}" for (start, to), labels in arrows.items()]
    lines += [
        "    classDef logged fill:#2f4858,color:#ffffff",
        f"    class {','.join(_id(state) for state in State if state in LOGGED)} logged",
    ]
    return "\n".join(lines)


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


def _id(state: State) -> str:
    return "[*]" if state is State.UNKNOWN else state.replace("-", "_")
