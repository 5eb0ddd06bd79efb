"""The transition table as a mermaid state diagram and as a table of answers, for README.

``python -m dtx.xa.diagram`` prints the block that stands in README between two markers; a test keeps the two equal.
"""

import sys
from collections.abc import Iterator
from typing import Final

from dtx.xa.codes import XaFlag
from dtx.xa.model import REQUESTS, Answer, Apply, Effect, Operation, PutBack, State, Take, Vote
from dtx.xa.table import LOGGED, TRANSITIONS, Rule, refusal

BEGIN: Final = "<!-- state-diagram -->"
END: Final = "<!-- /state-diagram -->"
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
_INTRODUCTION: Final = """\
Dark states are in the log. An operation that leaves the state as it is has no arrow: the table below has its answer.
In brackets: what the branch holds (`local`: messages of the standalone mode), or that no other channel is left. Not
asked for by a peer: `taken`, `not-taken` and `taken-in-part` (how taking the consumed messages from the broker ended),
`applied` and `put-back` (phase two is done), `timeout`, `channel-lost`, `doom` (trouble before the vote), `expire`
(nobody asked any more); by operators `heuristic-commit`, `heuristic-rollback`, `discard` and `discard-last` (of
messages that phase two is stuck with)."""
_LEGEND: Final = """\
Flags are written without their `xa-`; `heur…` is the recorded outcome; a number is the reply code of a channel
exception. Demarcation is answered so on a channel that stands to the branch as the operation requires, else 503;
prepare, commit, rollback and forget while a channel is associated or suspended: 503. Whatever the state: 541 when the
log or the broker failed and the outcome is not known."""


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


def block() -> str:
    """What stands in README, markers included."""
    diagram = f"```mermaid\n{state_diagram()}\n```"
    return f"{BEGIN}\n\n{_INTRODUCTION}\n\n{diagram}\n\n{_LEGEND}\n\n{answers_table()}\n\n{END}"


def embed(text: str) -> str:
    """*text* with its block brought up to date.

    Raises:
        ValueError: the markers are not in *text*.
    """
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no block between {BEGIN} and {END}")
    return before + block() + after


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


if __name__ == "__main__":
    sys.stdout.write(block() + "\n")
