"""The numbers of the protocol."""

import pickle

import pytest

from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xa-rbrollback", 1),
        ("xa-rbtimeout", 2),
        ("xa-heurhaz", 3),
        ("xa-heurcom", 4),
        ("xa-heurrb", 5),
        ("xa-heurmix", 6),
        ("xa-rdonly", 7),
        ("xa-ok", 8),
    ],
)
def test_every_constant_has_its_name_and_value(name: str, value: int) -> None:
    """XA constants: `<constant name = "xa-rbrollback" value = "1">` and the seven that follow."""
    assert XaFlag(value).wire_name == name


def test_there_are_no_other_flags() -> None:
    assert len(XaFlag) == 8


def test_every_heuristic_outcome_has_a_flag_of_its_own() -> None:
    assert {outcome.flag for outcome in Heuristic} == {
        XaFlag.HEURCOM,
        XaFlag.HEURRB,
        XaFlag.HEURMIX,
        XaFlag.HEURHAZ,
    }


def test_an_error_shows_its_code_and_its_reason() -> None:
    error = XaError(ReplyCode.COMMAND_INVALID, "commit is illegal in state idle (xid 1:6774:62)")
    assert str(error) == "503: commit is illegal in state idle (xid 1:6774:62)"


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(XaError(ReplyCode.NOT_FOUND, "unknown xid 1:6774:62")))
    assert (error.code, error.reason) == (ReplyCode.NOT_FOUND, "unknown xid 1:6774:62")
