"""Helpers of the core's tests: branches in any state, and events and effects in words."""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from dtx.xa.branch import Branch, step
from dtx.xa.codes import Heuristic, XaError
from dtx.xa.model import (
    DECISIONS,
    Answer,
    Apply,
    Association,
    ChannelId,
    ChannelLost,
    Complete,
    Decide,
    Demarcation,
    Effect,
    Event,
    Happened,
    Note,
    NoteStuck,
    Operation,
    Persist,
    PutBack,
    Refuse,
    Release,
    Remember,
    Request,
    SetTimeout,
    State,
    Take,
    Vote,
)
from dtx.xa.xid import Xid

XID: Final = Xid(1, b"gt", b"b")
HERE: Final = "channel 1"
"""The channel of the request."""
THERE: Final = "channel 2"
"""Another channel."""
DEMARCATIONS: Final = frozenset(
    {Operation.START, Operation.JOIN, Operation.RESUME, Operation.END, Operation.FAIL, Operation.SUSPEND}
)
COORDINATIONS: Final = frozenset(
    {Operation.PREPARE, Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK, Operation.FORGET}
)


def branch_in(
    state: State,
    associations: Mapping[ChannelId, Association] | None = None,
    *,
    timeout: int = 0,
    deadline: float | None = None,
    outcome: Heuristic | None = None,
) -> Branch:
    """A branch in *state*."""
    return Branch(
        xid=XID,
        owner="alice",
        state=state,
        associations=associations or {},
        timeout=timeout,
        deadline=deadline,
        outcome=outcome,
    )


def event_of(operation: Operation, vote: Vote = Vote.NOTHING, channel: str = HERE, seconds: int = 0) -> Event:
    """The event of *operation*."""
    if operation in DECISIONS:
        return Decide(operation=operation, vote=vote, outcome=Heuristic.MIXED)
    if operation in DEMARCATIONS:
        return Demarcation(operation=operation, channel=channel)
    if operation in COORDINATIONS or operation is Operation.GET_TIMEOUT:
        return Request(operation=operation, vote=vote)
    if operation is Operation.SET_TIMEOUT:
        return SetTimeout(seconds=seconds)
    if operation is Operation.CHANNEL_LOST:
        return ChannelLost(channel=channel)
    return Happened(operation=operation, vote=vote, reason="no exchange 'x'")


def word(effect: Effect) -> str:
    """An effect in words, for example ``persist prepared``."""
    match effect:
        case Persist(state=state):
            return f"persist {state}"
        case Complete(ending=ending):
            return f"complete {ending}"
        case Note(ending=ending):
            return f"note {ending}"
        case NoteStuck(reason=reason):
            return f"note-stuck {reason}"
        case Remember(flag=flag):
            return f"remember {flag.wire_name}"
        case Answer(flag=flag):
            return f"answer {flag.wire_name}"
        case Refuse(code=code, reason=reason):
            return f"refuse {code.value} {reason}"
        case Take():
            return "take"
        case Apply():
            return "apply"
        case PutBack():
            return "put-back"
        case Release():
            return "release"
        case _:
            assert_never(effect)


def words(effects: Sequence[Effect]) -> str:
    """Effects in words, in order."""
    return ", ".join(map(word, effects))


def answer_to(
    branch: Branch, event: Event, taken: Operation = Operation.TAKEN, *, now: float = 0
) -> tuple[Branch, str]:
    """The final answer, as ``xa-ok`` or ``503``, when taking ends in *taken* and phase two succeeds."""
    try:
        after, effects = step(branch, event, now)
    except XaError as error:
        return branch, str(error.code.value)
    vote = event.vote if isinstance(event, Request | Happened) else Vote.NOTHING
    for effect in effects:
        match effect:
            case Answer(flag=flag):
                return after, flag.wire_name
            case Refuse(code=code):
                return after, str(code.value)
            case Take():
                return answer_to(after, Happened(operation=taken, vote=vote), now=now)
            case Apply():
                return answer_to(after, Happened(operation=Operation.APPLIED, vote=vote), now=now)
            case PutBack():
                return answer_to(after, Happened(operation=Operation.PUT_BACK, vote=vote), now=now)
            case _:
                pass
    return after, "-"
