"""The possible answers to each operation, for documentation and consoles."""

from collections.abc import Iterator
from typing import Final

from dtx.xa.codes import XaFlag
from dtx.xa.model import REQUESTS, Answer, Apply, Effect, Operation, PutBack, State, Take, Vote
from dtx.xa.table import TRANSITIONS, Rule, refusal

_DEMARCATIONS: Final = REQUESTS[: REQUESTS.index(Operation.PREPARE)]
_FREE: Final = frozenset(Vote) - {Vote.ASSOCIATED}
_RESULTS: Final[dict[type[Effect], tuple[Operation, ...]]] = {
    Take: (Operation.TAKEN, Operation.NOT_TAKEN, Operation.TAKEN_IN_PART),
    Apply: (Operation.APPLIED,),
    PutBack: (Operation.PUT_BACK,),
}
"""The operations that report the result of each effect that is not immediate."""
_MAY_STICK: Final = frozenset({Apply, PutBack})
_STUCK: Final = "541"
_OUTCOME: Final = "heur…"
_ORDER: Final = (*(flag.name.lower() for flag in sorted(XaFlag, reverse=True)), _OUTCOME, _STUCK)


def answers(state: State, operation: Operation) -> list[str]:
    """The possible answers to *operation* in *state*: flags without their ``xa-``, ``heur…``, reply codes."""
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
