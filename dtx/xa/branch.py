"""One transaction branch as a value, and the step that changes it.

``step(branch, event, now) -> (branch, effects)``. The manager runs all effects in order. When one of them fails, it
runs none of the later ones and keeps the branch in the last state that is known to be durable.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, assert_never

from dtx.xa.codes import Heuristic, ReplyCode, XaError
from dtx.xa.model import (
    Answer,
    Association,
    ChannelId,
    ChannelLost,
    Decide,
    Demarcation,
    Effect,
    Event,
    Happened,
    NoteStuck,
    Operation,
    Persist,
    Refuse,
    Request,
    SetTimeout,
    State,
    Vote,
)
from dtx.xa.table import ASSOCIATIONS, DOOMED, TIMED, TRANSITIONS, WITH_OUTCOME, Rule, refusal
from dtx.xa.xid import Xid

_COMPLETIONS: Final = frozenset(
    {Operation.PREPARE, Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK, Operation.FORGET}
)
# An attribute of an enum class costs as much as a lookup in the table; each step uses these.
_NONE: Final = Association.NONE
_ASSOCIATED: Final = Vote.ASSOCIATED
_NOTHING: Final = Vote.NOTHING
_START: Final = Operation.START
_STUCK: Final = Operation.STUCK
_HEURISTIC: Final = State.HEURISTIC
_NO_ASSOCIATIONS: Mapping[ChannelId, Association] = MappingProxyType({})


class Branch(NamedTuple):
    """A transaction branch: a tuple, since every step of every branch makes one.

    Args:
        xid: its identifier.
        owner: the authenticated user that started it.
        state: its state.
        associations: channels that are associated or suspended; others are absent.
        timeout: seconds, 0 for none.
        deadline: the time at which the timeout ends, in the unit of *now*; ``None`` for never.
        outcome: the heuristic outcome, in the states that have one; there ``None`` means hazard.
    """

    xid: Xid
    owner: str
    state: State = State.UNKNOWN
    associations: Mapping[ChannelId, Association] = _NO_ASSOCIATIONS
    timeout: int = 0
    deadline: float | None = None
    outcome: Heuristic | None = None

    def association(self, channel: ChannelId) -> Association:
        """The association of *channel* with this branch."""
        return self.associations.get(channel, Association.NONE)


def step(branch: Branch, event: Event, now: float) -> tuple[Branch, tuple[Effect, ...]]:
    """Apply *event* to *branch*.

    Args:
        branch: in state ``UNKNOWN`` for an unknown xid.
        event: the request, or what happened.
        now: the time, in seconds of any steady clock.

    Returns:
        The branch after all effects, and the effects in order.

    Raises:
        XaError: the table has no such step; the branch is unchanged.
    """
    match event:
        case Demarcation():
            return _demarcate(branch, event.operation, event.channel, now)
        case Request():
            rule = _look_up(branch, event.operation, event.vote)
            if rule.to in WITH_OUTCOME:
                return _move(branch, rule), _with_outcome(rule, branch.outcome)
            return _move(branch, rule), rule.effects
        case Decide():
            rule = _look_up(branch, event.operation, event.vote)
            return _move(branch, rule)._replace(outcome=event.outcome), _with_outcome(rule, event.outcome)
        case Happened():
            rule = _look_up(branch, event.operation, event.vote)
            if event.operation is _STUCK:
                reason = f"{branch.state} could not finish: {event.reason} (xid {branch.xid})"
                return branch, (
                    NoteStuck(reason=event.reason),
                    Refuse(code=ReplyCode.INTERNAL_ERROR, reason=reason),
                )
            if rule.to in WITH_OUTCOME:
                return _move(branch, rule), _with_outcome(rule, branch.outcome)
            return _move(branch, rule), rule.effects
        case SetTimeout():
            rule = _look_up(branch, Operation.SET_TIMEOUT, Vote.NOTHING)
            deadline = now + event.seconds if event.seconds else None
            return _with_state(branch, branch.state, branch.associations, deadline, event.seconds), rule.effects
        case ChannelLost():
            if event.channel not in branch.associations:
                return branch, ()
            associations = _associate(branch.associations, event.channel, Association.NONE)
            branch = _with_state(branch, branch.state, associations, branch.deadline)
            rule = _look_up(branch, Operation.CHANNEL_LOST, Vote.NOTHING)
            return _move(branch, rule), rule.effects
        case _:  # pragma: no cover
            assert_never(event)


def _with_outcome(rule: Rule, outcome: Heuristic | None) -> tuple[Effect, ...]:
    """The effects of *rule*; where they leave the branch heuristically completed, the outcome is the answer."""
    known = outcome or Heuristic.HAZARD
    effects: list[Effect] = [
        Persist(state=effect.state, outcome=known) if isinstance(effect, Persist) else effect for effect in rule.effects
    ]
    if rule.to is _HEURISTIC and not any(isinstance(effect, Answer) for effect in effects):
        effects.append(Answer(flag=known.flag))
    return tuple(effects)


def is_legal(branch: Branch, operation: Operation, vote: Vote = Vote.NOTHING) -> bool:
    """Whether the table has a row for *operation* in the present state of *branch*."""
    return (branch.state, operation, _vote(branch, vote)) in TRANSITIONS


def _demarcate(
    branch: Branch, operation: Operation, channel: ChannelId, now: float
) -> tuple[Branch, tuple[Effect, ...]]:
    before = branch.associations.get(channel, _NONE)
    after = ASSOCIATIONS.get((before, operation))
    if after is None:
        raise _wrong_association(branch, operation, before)
    if branch.state in DOOMED:
        after = _NONE  # X/Open table 6-2: [RB] leaves no association, for any operation
    associations = _associate(branch.associations, channel, after)
    rule = TRANSITIONS.get((branch.state, operation, _ASSOCIATED if associations else _NOTHING))
    if rule is None:
        raise _illegal(branch, operation)
    deadline = branch.deadline
    if operation is _START and branch.timeout:
        deadline = now + branch.timeout
    return _with_state(branch, rule.to, associations, deadline), rule.effects


def _associate(
    associations: Mapping[ChannelId, Association], channel: ChannelId, association: Association
) -> Mapping[ChannelId, Association]:
    if association is not _NONE:
        return {**associations, channel: association}
    left = {other: how for other, how in associations.items() if other != channel}
    return left or _NO_ASSOCIATIONS


def _with_state(
    branch: Branch,
    state: State,
    associations: Mapping[ChannelId, Association],
    deadline: float | None,
    timeout: int | None = None,
) -> Branch:
    if timeout is None:
        timeout = branch.timeout
    if state not in TIMED:
        deadline = None
    return Branch(branch.xid, branch.owner, state, associations, timeout, deadline, branch.outcome)


def _move(branch: Branch, rule: Rule) -> Branch:
    if rule.to is branch.state:
        return branch
    return _with_state(branch, rule.to, branch.associations, branch.deadline)


def _vote(branch: Branch, vote: Vote) -> Vote:
    return Vote.ASSOCIATED if branch.associations else vote


def _look_up(branch: Branch, operation: Operation, vote: Vote) -> Rule:
    rule = TRANSITIONS.get((branch.state, operation, _ASSOCIATED if branch.associations else vote))
    if rule is None:
        raise _illegal(branch, operation)
    return rule


def _wrong_association(branch: Branch, operation: Operation, association: Association) -> XaError:
    if (branch.state, operation, Vote.ASSOCIATED) not in TRANSITIONS:
        return _illegal(branch, operation)  # an unknown xid, or a state without associations, is reported first
    relation = "not associated with" if association is Association.NONE else f"{association} on"
    return _refused(branch, f"{operation} is illegal: the branch is {relation} this channel")


def _illegal(branch: Branch, operation: Operation) -> XaError:
    code = refusal(branch.state, operation)
    if code is ReplyCode.NOT_FOUND:
        return XaError(code, f"unknown xid {branch.xid}")
    if code is ReplyCode.NOT_ALLOWED:
        return XaError(code, f"already known, in state {branch.state}; start it with join or resume (xid {branch.xid})")
    if branch.associations and operation in _COMPLETIONS:
        count = len(branch.associations)
        return _refused(branch, f"{operation} is illegal while {count} channel(s) are associated or suspended")
    return _refused(branch, f"{operation} is illegal in state {branch.state}")


def _refused(branch: Branch, reason: str) -> XaError:
    return XaError(ReplyCode.COMMAND_INVALID, f"{reason} (xid {branch.xid})", {"state": branch.state})
