"""Every write to the log, in each form that has failpoints of its own."""

from collections.abc import Iterator

from dtx.log.changes import Change, Define, Store
from dtx.log.records import (
    Advance,
    CompleteWrite,
    DuplicateWrite,
    Insert,
    JournalEvent,
    LogState,
    LogWrite,
    NoteWrite,
    SettlementsWrite,
)
from dtx.manager.branch_persistence import EVENT
from dtx.xa.codes import Heuristic
from dtx.xa.model import Ending
from tests.support.branches import a_branch, a_duplicate, a_line, a_settlement, a_unit

NEVER_LOGGED = (Ending.READ_ONLY, Ending.TIMED_OUT)
"""Endings of branches that the log does not have. Only a line of the journal is written."""


def every_record() -> Iterator[LogWrite]:
    """One record of each kind, state and ending."""
    branch = a_branch()
    for state in (LogState.TAKING, LogState.PREPARED, LogState.COMMITTING):
        yield Insert(branch=a_branch(state=state))
    for state in LogState:
        if state is not LogState.TAKING:
            outcome = Heuristic.HAZARD if state is LogState.HEURISTIC else None
            yield Advance(id=branch.id, expect=LogState.TAKING, version=1, to=state, outcome=outcome)
    same = LogState.COMMITTING
    yield Advance(id=branch.id, expect=same, version=1, to=same, unit=a_unit())
    yield Advance(id=branch.id, expect=same, version=1, to=same, stuck="404", unit=a_unit())
    for event in (JournalEvent.DISCARDED, JournalEvent.REDIRECTED):
        yield Advance(id=branch.id, expect=same, version=1, to=same, stuck="404", journal=a_line(branch, event))
    for ending, event in EVENT.items():
        if ending not in NEVER_LOGGED:
            yield CompleteWrite(id=branch.id, expect=same, version=1, journal=a_line(branch, event))
        yield NoteWrite(journal=a_line(branch, event))
    yield NoteWrite(journal=a_line(branch, JournalEvent.COMMITTED), change=Change())
    yield SettlementsWrite(settlements=(a_settlement(branch),))
    yield DuplicateWrite(duplicate=a_duplicate(branch))
    yield Store(change=Change())
    yield Define()
