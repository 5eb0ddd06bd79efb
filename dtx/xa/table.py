"""The transition table of a branch: a step without a row is illegal.

Theory of operation. The key of a row is (state, operation, vote). Its value is the next state and the effects, in the
order in which they must run. That order is the durability contract. What a reply promises is a ``Persist``,
``Complete`` or ``Note`` before that reply. That write is the first effect of its row: when it fails, nothing has been
released, taken or answered. One exception: once the decision to commit is in the log and the messages are in the
broker, all that the answer promises is done. The log completes the branch after the answer.

A row that ends in ``Take``, ``Apply`` or ``PutBack`` has no answer: the result of that effect is an operation, whose
row answers. One exception: when messages were taken in part, xa-rbrollback is answered first and they are put back
afterwards. So after a crash between any two effects, the log has a state with rows of its own.

Sources: X/Open XA tables 6-2 and 6-4; the rules of the classes dtx-demarcation and dtx-coordination.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.model import (
    Answer,
    Apply,
    Association,
    Complete,
    Effect,
    Ending,
    Note,
    Operation,
    Persist,
    PutBack,
    Release,
    Remember,
    State,
    Take,
    Vote,
)

A, I, R, T = State.ACTIVE, State.IDLE, State.ROLLBACK_ONLY, State.TIMED_OUT  # noqa: E741
TAKING, TAKING_1P = State.TAKING, State.TAKING_ONE_PHASE
P, C, B, H = State.PREPARED, State.COMMITTING, State.ROLLING_BACK, State.HEURISTIC
HC, HB = State.HEURISTIC_COMMITTING, State.HEURISTIC_ROLLING_BACK
U = State.UNKNOWN
LOGGED: Final = frozenset({TAKING, TAKING_1P, P, C, B, HC, HB, H})
"""The states in which the branch is in the log; every other one is presumed aborted."""
IN_DOUBT: Final = frozenset({P, C, B, HC, HB, H})
"""The states that a recovery scan lists: rolling back only after a vote."""
WITH_OUTCOME: Final = frozenset({HC, HB, H})
"""The states with a heuristic outcome: the present one, or the one after phase two."""
DOOMED: Final = frozenset({R, T})
"""The states in which only a rollback is possible (S4)."""
TIMED: Final = frozenset({A, I})
"""The states in which the timeout runs: "they run until prepare and then stop for good"."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The next state, and the effects that lead to it, in order."""

    to: State
    effects: tuple[Effect, ...] = ()


_V = Vote
_BROKER: Final = (_V.NOTHING, _V.PUBLISHED, _V.CONSUMED, _V.BOTH)
_FREE: Final = (*_BROKER, _V.LOCAL)
_ALL: Final = (_V.ASSOCIATED, *_FREE)
_WITH_CONSUMES: Final = (_V.CONSUMED, _V.BOTH)
_WITH_PUBLISHES: Final = (_V.PUBLISHED, _V.BOTH)
_OK: Final = Answer(flag=XaFlag.OK)
_RB: Final = Answer(flag=XaFlag.RBROLLBACK)
_RBTIMEOUT: Final = Answer(flag=XaFlag.RBTIMEOUT)
_END_COMMITTED: Final = (Complete(ending=Ending.COMMITTED), _OK)
_END_ROLLED_BACK: Final = (Complete(ending=Ending.ROLLED_BACK), _OK)
_REMEMBER_RB: Final = (Release(), Remember(flag=XaFlag.RBROLLBACK), _RB)
_REMEMBER_RBTIMEOUT: Final = (Release(), Remember(flag=XaFlag.RBTIMEOUT), _RBTIMEOUT)

_ENDINGS: Final = (Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK)

_Row = tuple[State | tuple[State, ...], Operation, tuple[Vote, ...], State, tuple[Effect, ...]]
_O = Operation

_ROWS: Final[tuple[_Row, ...]] = (
    # dtx-demarcation.start
    (U, _O.START, _ALL, A, (_OK,)),
    ((A, I), _O.JOIN, _ALL, A, (_OK,)),
    (A, _O.RESUME, _ALL, A, (_OK,)),
    # "xa-rbrollback: the broker marked the transaction branch rollback-only": answered, not associated.
    (R, _O.JOIN, _ALL, R, (_RB,)),
    (T, _O.JOIN, _ALL, T, (_RB,)),
    (R, _O.RESUME, (_V.ASSOCIATED,), R, (_RB,)),
    (R, _O.RESUME, _FREE, R, (Release(), _RB)),
    (T, _O.RESUME, (_V.ASSOCIATED,), T, (_RB,)),
    (T, _O.RESUME, _FREE, T, (Release(), _RB)),
    # dtx-demarcation.end
    (A, _O.END, (_V.ASSOCIATED,), A, (_OK,)),
    (A, _O.END, _FREE, I, (_OK,)),
    (A, _O.SUSPEND, _ALL, A, (_OK,)),
    # "If fail is specified then the transaction should be marked as rollback-only."
    (A, _O.FAIL, (_V.ASSOCIATED,), R, (_RB,)),
    (A, _O.FAIL, _FREE, R, (Release(), _RB)),
    *(
        row
        for operation in (_O.END, _O.FAIL, _O.SUSPEND)
        for row in (
            (R, operation, (_V.ASSOCIATED,), R, (_RB,)),
            (R, operation, _FREE, R, (Release(), _RB)),
            (T, operation, (_V.ASSOCIATED,), T, (_RBTIMEOUT,)),
            (T, operation, _FREE, T, (Release(), _RBTIMEOUT)),
        )
    ),
    # dtx-coordination.prepare
    (I, _O.PREPARE, (_V.NOTHING,), U, (Note(ending=Ending.READ_ONLY), Answer(flag=XaFlag.RDONLY))),
    (I, _O.PREPARE, (_V.PUBLISHED, _V.LOCAL), P, (Persist(state=P), _OK)),
    (I, _O.PREPARE, _WITH_CONSUMES, TAKING, (Persist(state=TAKING), Take())),
    # A prepare that ended in 541 "may or may not have been prepared": a repeated one continues it.
    (TAKING, _O.PREPARE, _BROKER, TAKING, (Take(),)),
    (TAKING, _O.TAKEN, _BROKER, P, (Persist(state=P), _OK)),
    (TAKING_1P, _O.TAKEN, _WITH_PUBLISHES, C, (Persist(state=C), Apply())),
    (TAKING_1P, _O.TAKEN, (_V.CONSUMED,), U, _END_COMMITTED),
    ((TAKING, TAKING_1P), _O.NOT_TAKEN, _BROKER, U, (Complete(ending=Ending.ROLLED_BACK), *_REMEMBER_RB)),
    # Taken in part, or unknown: messages are put back (repeated, never lost). The vote need not wait for that.
    ((TAKING, TAKING_1P), _O.TAKEN_IN_PART, _BROKER, B, (Persist(state=B), *_REMEMBER_RB, PutBack())),
    # The log has not taken the vote: a branch of another member has the xid, or has ended with it meanwhile.
    (I, _O.DUPLICATE, (_V.PUBLISHED, _V.CONSUMED, _V.BOTH, _V.LOCAL), U, _REMEMBER_RB),
    (R, _O.PREPARE, _FREE, U, _REMEMBER_RB),
    (T, _O.PREPARE, _FREE, U, _REMEMBER_RBTIMEOUT),
    # dtx-coordination.commit, one-phase
    (I, _O.ONE_PHASE, (_V.NOTHING,), U, (Note(ending=Ending.COMMITTED), _OK)),
    (I, _O.ONE_PHASE, (_V.LOCAL,), U, _END_COMMITTED),
    (I, _O.ONE_PHASE, (_V.PUBLISHED,), C, (Persist(state=C), Apply())),
    (I, _O.ONE_PHASE, _WITH_CONSUMES, TAKING_1P, (Persist(state=TAKING_1P), Take())),
    (TAKING_1P, _O.ONE_PHASE, _BROKER, TAKING_1P, (Take(),)),
    (C, _O.ONE_PHASE, _BROKER, C, (Apply(),)),
    (R, _O.ONE_PHASE, _FREE, U, _REMEMBER_RB),
    (T, _O.ONE_PHASE, _FREE, U, _REMEMBER_RBTIMEOUT),
    # dtx-coordination.commit, two-phase
    (P, _O.COMMIT, _WITH_PUBLISHES, C, (Persist(state=C), Apply())),
    (P, _O.COMMIT, (_V.CONSUMED, _V.NOTHING, _V.LOCAL), U, _END_COMMITTED),
    (C, _O.COMMIT, _BROKER, C, (Apply(),)),
    (C, _O.APPLIED, _BROKER, U, (_OK, Complete(ending=Ending.COMMITTED))),
    # dtx-coordination.rollback
    (I, _O.ROLLBACK, _FREE, U, (Release(), _OK)),
    (R, _O.ROLLBACK, _FREE, U, (Release(), _OK)),
    (T, _O.ROLLBACK, _FREE, U, (Release(), _RBTIMEOUT)),
    ((TAKING, TAKING_1P), _O.ROLLBACK, _BROKER, B, (Persist(state=B), Release(), PutBack())),
    (P, _O.ROLLBACK, _WITH_CONSUMES, B, (Persist(state=B), PutBack())),
    (P, _O.ROLLBACK, (_V.PUBLISHED, _V.NOTHING, _V.LOCAL), U, _END_ROLLED_BACK),
    (B, _O.ROLLBACK, _BROKER, B, (PutBack(),)),
    (B, _O.PUT_BACK, _BROKER, U, _END_ROLLED_BACK),
    # dtx-coordination.forget; the answer of commit and rollback is the recorded outcome, which the step fills in.
    (H, _O.FORGET, _FREE, U, (Complete(ending=Ending.FORGOTTEN), _OK)),
    (H, _O.COMMIT, _FREE, H, ()),
    (H, _O.ONE_PHASE, _FREE, H, ()),
    (H, _O.ROLLBACK, _FREE, H, ()),
    # Operators decide prepared branches. The decision is durable before its work begins, and stays until forget. These
    # rows have no answer: the step adds the outcome as the answer when all work is done.
    (P, _O.HEURISTIC_COMMIT, _WITH_PUBLISHES, HC, (Persist(state=HC), Apply())),
    (P, _O.HEURISTIC_COMMIT, (_V.CONSUMED, _V.NOTHING, _V.LOCAL), H, (Persist(state=H),)),
    (P, _O.HEURISTIC_ROLLBACK, _WITH_CONSUMES, HB, (Persist(state=HB), PutBack())),
    (P, _O.HEURISTIC_ROLLBACK, (_V.PUBLISHED, _V.NOTHING, _V.LOCAL), H, (Persist(state=H),)),
    # A repeated request waits for the end of that work. So does the transaction manager, whatever it has decided.
    *((HC, operation, _BROKER, HC, (Apply(),)) for operation in _ENDINGS),
    *((HB, operation, _BROKER, HB, (PutBack(),)) for operation in _ENDINGS),
    (HC, _O.HEURISTIC_COMMIT, _BROKER, HC, (Apply(),)),
    (HB, _O.HEURISTIC_ROLLBACK, _BROKER, HB, (PutBack(),)),
    (HC, _O.APPLIED, _BROKER, H, (Persist(state=H),)),
    (HB, _O.PUT_BACK, _BROKER, H, (Persist(state=H),)),
    # Operators discard messages that phase two cannot finish, one by one. The next request continues with the others.
    ((C, HC), _O.DISCARD, _WITH_PUBLISHES, HC, (Persist(state=HC), _OK)),
    ((B, HB), _O.DISCARD, _WITH_CONSUMES, HB, (Persist(state=HB), _OK)),
    ((C, HC), _O.DISCARD_LAST, _WITH_PUBLISHES, H, (Persist(state=H),)),
    ((B, HB), _O.DISCARD_LAST, _WITH_CONSUMES, H, (Persist(state=H),)),
    # dtx-coordination.get-timeout, set-timeout
    *(
        (state, operation, _ALL, state, (_OK,))
        for state in State
        if state is not U
        for operation in (_O.GET_TIMEOUT, _O.SET_TIMEOUT)
    ),
    # Events of a branch that has not voted. No row: a timer never decides a branch that has voted.
    ((A, I), _O.TIMEOUT, _ALL, T, (Note(ending=Ending.TIMED_OUT), Release())),
    ((A, R), _O.CHANNEL_LOST, (_V.ASSOCIATED,), R, ()),
    ((A, R), _O.CHANNEL_LOST, _FREE, R, (Release(),)),
    (T, _O.CHANNEL_LOST, (_V.ASSOCIATED,), T, ()),
    (T, _O.CHANNEL_LOST, _FREE, T, (Release(),)),
    ((A, I, R), _O.DOOM, (_V.ASSOCIATED,), R, ()),
    ((A, I, R), _O.DOOM, _FREE, R, (Release(),)),
    (T, _O.DOOM, _ALL, T, ()),
    ((R, T), _O.EXPIRE, _FREE, U, (Release(),)),
    # Phase two could not finish; the step adds the note for the log and the 541.
    *((state, _O.STUCK, _BROKER, state, ()) for state in (C, B, HC, HB)),
)


def _expand(rows: Iterable[_Row]) -> Iterator[tuple[tuple[State, Operation, Vote], Rule]]:
    for states, operation, votes, to, effects in rows:
        for state in states if isinstance(states, tuple) else (states,):
            for vote in votes:
                yield (state, operation, vote), Rule(to, effects)


TRANSITIONS: Final[dict[tuple[State, Operation, Vote], Rule]] = dict(_expand(_ROWS))
"""Every legal step of a branch."""

ASSOCIATIONS: Final[dict[tuple[Association, Operation], Association]] = {
    (Association.NONE, Operation.START): Association.ASSOCIATED,
    (Association.NONE, Operation.JOIN): Association.ASSOCIATED,
    (Association.SUSPENDED, Operation.RESUME): Association.ASSOCIATED,
    (Association.ASSOCIATED, Operation.END): Association.NONE,
    (Association.ASSOCIATED, Operation.FAIL): Association.NONE,
    (Association.ASSOCIATED, Operation.SUSPEND): Association.SUSPENDED,
    (Association.SUSPENDED, Operation.END): Association.NONE,
    (Association.SUSPENDED, Operation.FAIL): Association.NONE,
}
"""Every legal step of a channel's association with a branch (X/Open XA table 6-2)."""


def refusal(state: State, operation: Operation) -> ReplyCode:
    """The code for a step that is not in the table."""
    if state is State.UNKNOWN:
        return ReplyCode.NOT_FOUND  # rule unknownXid
    if operation is Operation.START:
        return ReplyCode.NOT_ALLOWED  # rule alreadyAssociated: "previously been seen"
    return ReplyCode.COMMAND_INVALID  # rule commandInvalid
