"""The state tables of X/Open (CAE C193, chapter 6): every call of the switch, with every flag, in every state.

The states are those of one thread and one branch: R0 or R1 (xa_open), T0 to T2 (association), S0 to S5 (the branch).
A C program makes the calls. Then Python makes them without C, which shows that the bridge changes no answer.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol

import pytest

from dtx.client import XAException, Xid
from dtx.client.xa_switch.interface import SwitchCall
from dtx.client.xa_switch.switch import Switch
from tests.servers.interop.c.programs import (
    ASYNC,
    END_SCAN,
    FAIL,
    JOIN,
    MIGRATE,
    NO_FLAGS,
    NO_WAIT,
    ONE_PHASE,
    RESUME,
    RM,
    SCAN,
    START_SCAN,
    SUCCESS,
    SUSPEND,
    XA_HEURRB,
    XA_NOMIGRATE,
    XA_OK,
    XA_RBROLLBACK,
    XAER_ASYNC,
    XAER_DUPID,
    XAER_INVAL,
    XAER_NOTA,
    XAER_PROTO,
    Driver,
)
from tests.support.broker import only_standalone
from tests.support.service import DtxService

STATES: Final = (
    "closed",  # R0
    "unknown",  # R1 T0 S0
    "active",  # R1 T1 S1
    "active elsewhere",  # R1 T0 S1: another thread is associated
    "suspended",  # R1 T2 S1
    "idle",  # R1 T0 S2
    "prepared",  # R1 T0 S3
    "rollback-only",  # R1 T0 S4
    "failed elsewhere",  # R1 T1 S4: this thread is associated still, another has ended the branch with TMFAIL
    "heuristic",  # R1 T0 S5: an operator has rolled it back
)


def either(*flags: str) -> str:
    """Several flags in one."""
    return f"{sum(int(flag, 16) for flag in flags):x}"


IMPOSSIBLE: Final = {
    "open": (JOIN, SUCCESS),
    "close": (JOIN,),
    "start": (SUCCESS, either(JOIN, RESUME), START_SCAN, "1"),
    "end": (NO_FLAGS, MIGRATE, either(SUCCESS, FAIL), either(SUCCESS, SUSPEND), either(SUCCESS, MIGRATE), JOIN),
    "prepare": (ONE_PHASE, NO_WAIT),
    "commit": (SUCCESS, either(ONE_PHASE, JOIN)),
    "rollback": (FAIL, ONE_PHASE),
    "forget": (NO_WAIT,),
    "recover": (JOIN, ASYNC, either(SCAN, ASYNC)),
    "complete": (JOIN, ASYNC),
}
"""Flags that a call does not have: XAER_INVAL in every state."""
ASYNCHRONOUS: Final = {
    "open": ASYNC,
    "close": ASYNC,
    "start": ASYNC,
    "end": either(ASYNC, SUCCESS),
    "prepare": ASYNC,
    "commit": either(ASYNC, ONE_PHASE),
    "rollback": ASYNC,
    "forget": ASYNC,
}
"""The switch does not have TMUSEASYNC: XAER_ASYNC in every state."""

OK, PROTO, NOTA, DUPID, RB, HEUR = XA_OK, XAER_PROTO, XAER_NOTA, XAER_DUPID, XA_RBROLLBACK, XA_HEURRB
NOMIG: Final = XA_NOMIGRATE
# in the order of STATES
_TABLE: Final[dict[tuple[str, str], tuple[int, ...]]] = {
    ("open", NO_FLAGS): (OK, OK, OK, OK, OK, OK, OK, OK, OK, OK),
    ("close", NO_FLAGS): (OK, OK, PROTO, OK, PROTO, OK, OK, OK, PROTO, OK),
    ("start", NO_FLAGS): (PROTO, OK, PROTO, DUPID, DUPID, DUPID, DUPID, DUPID, PROTO, DUPID),
    ("start", NO_WAIT): (PROTO, OK, PROTO, DUPID, DUPID, DUPID, DUPID, DUPID, PROTO, DUPID),
    ("start", JOIN): (PROTO, NOTA, PROTO, OK, PROTO, OK, PROTO, RB, PROTO, PROTO),
    ("start", either(JOIN, NO_WAIT)): (PROTO, NOTA, PROTO, OK, PROTO, OK, PROTO, RB, PROTO, PROTO),
    ("start", RESUME): (PROTO, NOTA, PROTO, PROTO, OK, PROTO, PROTO, PROTO, PROTO, PROTO),
    ("start", either(RESUME, NO_WAIT)): (PROTO, NOTA, PROTO, PROTO, OK, PROTO, PROTO, PROTO, PROTO, PROTO),
    ("end", SUCCESS): (PROTO, NOTA, OK, PROTO, OK, PROTO, PROTO, PROTO, RB, PROTO),
    ("end", FAIL): (PROTO, NOTA, OK, PROTO, OK, PROTO, PROTO, PROTO, OK, PROTO),
    ("end", SUSPEND): (PROTO, NOTA, OK, PROTO, PROTO, PROTO, PROTO, PROTO, RB, PROTO),
    ("end", either(SUSPEND, MIGRATE)): (PROTO, NOTA, NOMIG, PROTO, PROTO, PROTO, PROTO, PROTO, RB, PROTO),
    ("prepare", NO_FLAGS): (PROTO, NOTA, PROTO, PROTO, PROTO, OK, PROTO, RB, PROTO, PROTO),
    ("commit", NO_FLAGS): (PROTO, NOTA, PROTO, PROTO, PROTO, PROTO, OK, PROTO, PROTO, HEUR),
    ("commit", NO_WAIT): (PROTO, NOTA, PROTO, PROTO, PROTO, PROTO, OK, PROTO, PROTO, HEUR),
    ("commit", ONE_PHASE): (PROTO, NOTA, PROTO, PROTO, PROTO, OK, PROTO, RB, PROTO, HEUR),
    ("rollback", NO_FLAGS): (PROTO, NOTA, PROTO, PROTO, PROTO, OK, OK, OK, PROTO, HEUR),
    ("forget", NO_FLAGS): (PROTO, NOTA, PROTO, PROTO, PROTO, PROTO, PROTO, PROTO, PROTO, OK),
    ("recover", SCAN): (PROTO, OK, OK, OK, OK, OK, OK, OK, OK, OK),
    ("recover", START_SCAN): (PROTO, OK, OK, OK, OK, OK, OK, OK, OK, OK),
    ("recover", NO_FLAGS): (PROTO, *[XAER_INVAL] * 9),
    ("recover", END_SCAN): (PROTO, *[XAER_INVAL] * 9),
    ("complete", NO_FLAGS): (PROTO,) * 10,
    ("complete", NO_WAIT): (PROTO,) * 10,
}


def expected() -> dict[str, dict[tuple[str, str], int]]:
    """The code that each call must return, by state."""
    table: dict[str, dict[tuple[str, str], int]] = {state: {} for state in STATES}
    for call, answers in _TABLE.items():
        for state, answer in zip(STATES, answers, strict=True):
            table[state][call] = answer
    for cells in table.values():
        cells.update({(call, flags): XAER_INVAL for call, many in IMPOSSIBLE.items() for flags in many})
        cells.update(dict.fromkeys(ASYNCHRONOUS.items(), XAER_ASYNC))
    return table


class Calls(Protocol):
    """Makes the calls: the C program or Python."""

    def code(self, thread: str, *words: object) -> int:
        """Make a call in a thread; returns its code."""


class InProcess:
    """The switch in Python, with the calls of the C program."""

    def __init__(self) -> None:
        self._switch = Switch()

    def code(self, thread: str, *words: object) -> int:
        """Make a call in a thread; returns its code."""
        try:
            return self._call(ord(thread), *map(str, words))
        except XAException as error:
            return error.code

    def _call(self, thread: int, call: str, *words: str) -> int:
        match call, words:
            case "open", (rmid, flags, text):
                return self._switch.open(thread, text, int(rmid), int(flags, 16))
            case "close", (rmid, flags):
                return self._switch.close(thread, int(rmid), int(flags, 16))
            case "complete", (rmid, flags):
                return self._switch.complete(thread, int(rmid), int(flags, 16))
            case "recover", (count, rmid, flags):
                return len(self._switch.recover(thread, int(count), int(rmid), int(flags, 16)))
            case "publish", (_, queue, body):
                from dtx.client.xa_switch import messages

                nothing = messages.properties_of({}, 0, transient=False)
                messages.publish(self._switch.working(thread)[1], "", queue, body.encode(), nothing)
                return XA_OK
            case _, (xid, rmid, flags):
                return self._switch.branch(thread, SwitchCall[call.upper()], Xid.parse(xid), int(rmid), int(flags, 16))
            case _:
                raise AssertionError(words)


class Cell:
    """One state, made and removed by the threads a (whose calls are tested) and b."""

    def __init__(self, calls: Calls, service: DtxService, queue: str) -> None:
        self._calls = calls
        self._service = service
        self._queue = queue
        self.xid = Xid(0x12345678, b"table" + secrets.token_bytes(59), secrets.token_bytes(64))

    def _do(self, thread: str, *words: object) -> None:
        assert self._calls.code(thread, *words) == XA_OK, words

    def _branch(self, thread: str, call: str, flags: str = NO_FLAGS) -> None:
        self._do(thread, call, self.xid, RM, flags)

    @contextmanager
    def begun(self, state: str) -> Iterator[None]:
        """Within the context the state is *state*."""
        url = self._service.url()
        for thread in ("a", "b"):
            self._do(thread, "open", RM, NO_FLAGS, f"url={url}")
        if state not in {"closed", "unknown"}:
            self._branch("b" if state == "active elsewhere" else "a", "start")
            self._do("b" if state == "active elsewhere" else "a", "publish", "-", self._queue, "x")
        match state:
            case "closed":
                self._do("a", "close", RM, NO_FLAGS)
            case "suspended":
                self._branch("a", "end", SUSPEND)
            case "rollback-only":
                self._branch("a", "end", FAIL)
            case "failed elsewhere":
                self._branch("b", "start", JOIN)
                self._branch("b", "end", FAIL)
            case "idle" | "prepared" | "heuristic":
                self._branch("a", "end", SUCCESS)
            case _:
                pass  # the branch is in its state already
        if state in {"prepared", "heuristic"}:
            self._branch("a", "prepare")
        if state == "heuristic":
            self._service.run("rollback", str(self.xid), "--reason", "the table wants it", "--yes")
        try:
            yield
        finally:
            self._clear()

    def open(self) -> None:
        """Call xa_open in thread a, which may have it open already."""
        self._do("a", "open", RM, NO_FLAGS, f"url={self._service.url()}")

    def _clear(self) -> None:
        """Leave nothing of this cell, so that the threads can be used for the next one."""
        self.open()
        for thread in ("a", "b"):
            self._calls.code(thread, "end", self.xid, RM, FAIL)
        self._calls.code("b", "rollback", self.xid, RM, NO_FLAGS)
        self._calls.code("b", "forget", self.xid, RM, NO_FLAGS)
        assert self._calls.code("b", "prepare", self.xid, RM, NO_FLAGS) == NOTA
        self._calls.code("a", "recover", 1, RM, END_SCAN)

    def code(self, call: str, flags: str) -> int:
        """Make the call in thread a; returns its code."""
        url = f"url={self._service.url()}"
        words: dict[str, tuple[object, ...]] = {
            "open": (RM, flags, url),
            "close": (RM, flags),
            "complete": (RM, flags),
            "recover": (100, RM, flags),
        }
        code = self._calls.code("a", call, *words.get(call, (self.xid, RM, flags)))
        return XA_OK if call == "recover" and code >= 0 else code


def answers(state: str, cell: Callable[[], Cell]) -> dict[tuple[str, str], int]:
    """The codes of all calls in a state.

    Calls that change nothing share a cell: all calls with impossible flags; and in the heuristic state, which needs an
    operator, all calls except forget.
    """
    calls = list(expected()[state])
    shared = [call for call in calls if expected()[state][call] in {XAER_INVAL, XAER_ASYNC}]
    if state == "heuristic":
        last = [("recover", START_SCAN), ("forget", NO_FLAGS)]
        shared = [call for call in [*shared, *calls] if call not in last] + last
    found = {}
    for together in (shared, *([call] for call in calls if call not in shared)):
        one = cell()
        with one.begun(state):
            for call, flags in together:
                found[call, flags] = one.code(call, flags)
                if call == "close" and state != "closed":
                    one.open()
    return found


@pytest.fixture(scope="module")
def driver(service: DtxService) -> Iterator[Driver]:
    """The C program. Its threads keep the service that they have opened, so each mode needs its own program."""
    del service
    with Driver(getter="dtx_xa_switch") as running:
        yield running


@pytest.mark.parametrize("state", STATES)
def test_every_call_with_every_flag(state: str, driver: Driver, service: DtxService, queue: str) -> None:
    assert answers(state, partial(Cell, driver, service, queue)) == expected()[state]
    assert driver.recovered("b") == []


@only_standalone
@pytest.mark.parametrize("state", STATES)
def test_every_call_with_every_flag_without_c(state: str, service: DtxService, queue: str) -> None:
    calls = InProcess()
    assert answers(state, partial(Cell, calls, service, queue)) == expected()[state]
    for thread in ("a", "b"):
        assert calls.code(thread, "close", RM, NO_FLAGS) == OK


def test_a_call_never_touches_messages_that_it_did_not_commit(
    driver: Driver, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """Only two calls commit: in two phases and in one phase."""
    cell = partial(Cell, driver, service, queue)
    for state, call, flags in (("prepared", "commit", NO_FLAGS), ("idle", "commit", ONE_PHASE)):
        one = cell()
        with one.begun(state):
            assert one.code(call, flags) == OK
        assert bodies() == ["x"]
    for state in ("prepared", "idle", "rollback-only"):
        one = cell()
        with one.begun(state):
            assert one.code("rollback", NO_FLAGS) == OK
        assert bodies() == []
