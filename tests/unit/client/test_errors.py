"""Every answer of the server has one X/Open name."""

import inspect
import re
from pathlib import Path

import pytest

import dtx.client
from dtx.client import errors
from dtx.client.errors import (
    XA_HEURMIX,
    XAER_NOTA,
    XAER_RMERR,
    XAER_RMFAIL,
    PeerIsNotDtx,
    XAError,
    XAException,
    XAHeuristic,
    XARollback,
    raised_by_flag,
    raised_by_reply_code,
)
from dtx.xa.codes import ReplyCode, XaFlag

OPERATIONS = (
    "select", "start", "end", "prepare", "commit", "one-phase commit", "rollback", "forget",
    "recover", "get-timeout", "set-timeout",
)  # fmt: skip

# X/Open CAE, "The XA Specification", xa.h
XA_H = {
    "XA_RBROLLBACK": 100,
    "XA_RBTIMEOUT": 106,
    "XA_HEURHAZ": 8,
    "XA_HEURCOM": 7,
    "XA_HEURRB": 6,
    "XA_HEURMIX": 5,
    "XAER_RMERR": -3,
    "XAER_NOTA": -4,
    "XAER_INVAL": -5,
    "XAER_PROTO": -6,
    "XAER_RMFAIL": -7,
    "XAER_DUPID": -8,
    "XAER_OUTSIDE": -9,
}


def test_names_and_numbers_are_those_of_xa_h() -> None:
    classes = [
        value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if name.startswith(("XA_", "XAER_")) and issubclass(value, XAException)
    ]
    assert {cls.name: cls.code for cls in classes} == XA_H
    assert all(cls.__name__ == cls.name for cls in classes)


@pytest.mark.parametrize("flag", XaFlag)
def test_every_flag_is_a_result_or_names_an_exception(flag: XaFlag) -> None:
    """The constants of the XML, xa-rbrollback to xa-ok."""
    raised = raised_by_flag(flag)
    if flag in (XaFlag.OK, XaFlag.RDONLY):
        assert raised is None
    else:
        assert raised is not None
        assert raised.name == f"XA_{flag.name}"
        assert issubclass(raised, XARollback if flag.name.startswith("RB") else XAHeuristic)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("code", ReplyCode)
def test_every_reply_code_has_an_error_for_every_operation(operation: str, code: ReplyCode) -> None:
    assert issubclass(raised_by_reply_code(operation, code), XAError)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (403, "XAER_RMERR"),
        (404, "XAER_NOTA"),
        (406, "XAER_OUTSIDE"),
        (502, "XAER_INVAL"),
        (503, "XAER_PROTO"),
        (506, "XAER_RMERR"),
        (530, "XAER_DUPID"),
        (540, "XAER_INVAL"),
        (541, "XAER_RMERR"),
        (999, "XAER_RMERR"),
    ],
)
def test_reply_codes_have_the_names_that_xa_users_expect(code: int, name: str) -> None:
    assert raised_by_reply_code("prepare", code).name == name


@pytest.mark.parametrize("operation", ["commit", "one-phase commit", "rollback", "forget"])
def test_a_second_phase_internal_error_does_not_mean_rolled_back(operation: str) -> None:
    """X/Open xa_commit, XAER_RMERR: "the branch's work has been rolled back"."""
    assert raised_by_reply_code(operation, 541) is XAER_RMFAIL


def test_an_error_names_the_call_and_the_servers_text() -> None:
    error = XAER_NOTA("unknown xid", 404)
    assert str(error) == "XAER_NOTA: unknown xid"
    error.call = "commit of 1:6774:62"
    assert str(error) == "XAER_NOTA: commit of 1:6774:62: unknown xid"
    assert (error.reason, error.reply_code) == ("unknown xid", 404)
    assert XA_HEURMIX("by hand").reply_code is None


def test_adapters_decide_on_the_facts_of_an_answer() -> None:
    assert XAER_NOTA("NOT_FOUND - ended=committed; at=T; gone", 404).facts == {"ended": "committed", "at": "T"}
    assert XAER_RMFAIL("the server closed the channel: 404 NOT_FOUND - ended=committed; gone").facts == {}


def test_no_adapter_looks_at_the_sentence_of_an_answer() -> None:
    """One exception: the Java adapter still reads those of dtx 0.1."""
    sources = [
        path for path in Path(dtx.client.__file__).parent.rglob("*") if path.suffix in {".py", ".java", ".c", ".h"}
    ]
    looking = [path.name for path in sources if re.search(r"completed: |illegal in state", path.read_text())]
    assert looking == ["DtxXAException.java"]


def test_a_peer_without_dtx_is_rmerr() -> None:
    assert issubclass(PeerIsNotDtx, XAER_RMERR)
