"""The transition table as a mermaid state diagram and as a table of answers."""

from collections.abc import Iterator
from typing import Final

from dtx.xa.codes import XaFlag
from dtx.xa.model import REQUESTS, Answer, Apply, Effect, Operation, PutBack, State, Take, Vote
from dtx.xa.table import LOGGED, TRANSITIONS, Rule, refusal

_DEMARCATIONS: Final = REQUESTS[: REQUESTS.index(Operation.PREPARE)]
_FREE: Final = frozenset(Vote) - {Vote.ASSOCIATED}
_GUARDS: Final[dict[frozenset[Vote], str]] = {
    _FREE: "last channel",
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
_RESULTS: Final[dict[type[Effect], tuple[Operation, ...]]] = {
    Take: (Operation.TAKEN, Operation.NOT_TAKEN, Operation.TAKEN_IN_PART),
    Apply: (Operation.APPLIED,),
    PutBack: (Operation.PUT_BACK,),
}
"""What each effect that takes its time comes back as."""
_MAY_STICK: Final = frozenset({Apply, PutBack})
_STUCK: Final = "541"
_OUTCOME: Final = "heur…"
_ORDER: Final = (*(flag.name.lower() for flag in sorted(XaFlag, reverse=True)), _OUTCOME, _STUCK)


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


def answers(state: State, operation: Operation) -> list[str]:
    """How *operation* can be answered in *state*: flags without their ``xa-``, ``heur…``, reply codes."""
    votes = frozenset(Vote) if operation in _DEMARCATIONS else _FREE
    rules = [(TRANSITIONS[key], key[2]) for key in TRANSITIONS if key[:2] == (state, operation) and key[2] in votes]
    found = {answer for rule, vote in rules for answer in _follow(rule, vote)}
    return sorted(found, key=_ORDER.index) if rules else [str(refusal(state, operation).value)]


def _follow(rule: Rule, vote: Vote) -> Iterator[str]:
    for effect in rule.effects:
        if isinstance(effect, Answer):
            yield effect.flag.name.lower()
            return
        for result in _RESULTS.get(type(effect), ()):
            after = TRANSITIONS.get((rule.to, result, vote))
            if after is not None:
                yield from _follow(after, vote)
        if type(effect) in _MAY_STICK:
            yield _STUCK
    if rule.to is State.HEURISTIC:
        yield _OUTCOME
