"""``dtx doctor``: checks of the database, the broker and the settings. This module has the result of a check."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How serious a finding is; only ``failed`` makes ``dtx doctor`` end with 1."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """One finding.

    Args:
        name: name of the check, for programs: ``broker.version``.
        status: how serious the finding is.
        sentence: the finding and, if it is not ok, the remedy; without secrets.
    """

    name: str
    status: Status
    sentence: str


def ok(name: str, sentence: str) -> DoctorCheck:
    """A finding that needs no action."""
    return DoctorCheck(name=name, status=Status.OK, sentence=sentence)


def warning(name: str, sentence: str) -> DoctorCheck:
    """A finding that does not prevent operation."""
    return DoctorCheck(name=name, status=Status.WARNING, sentence=sentence)


def failed(name: str, sentence: str) -> DoctorCheck:
    """A finding that prevents operation, or makes it unsafe."""
    return DoctorCheck(name=name, status=Status.FAILED, sentence=sentence)
