"""``dtx doctor``: checks of the database, the broker and the settings, and what a check says."""

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
        name: what was looked at, for programs: ``broker.version``.
        status: how it is.
        sentence: what was found, and where it is not ok, what to do about it; no secrets.
    """

    name: str
    status: Status
    sentence: str


def ok(name: str, sentence: str) -> DoctorCheck:
    """Nothing to do."""
    return DoctorCheck(name=name, status=Status.OK, sentence=sentence)


def warning(name: str, sentence: str) -> DoctorCheck:
    """It works, and something is worse than it could be."""
    return DoctorCheck(name=name, status=Status.WARNING, sentence=sentence)


def failed(name: str, sentence: str) -> DoctorCheck:
    """It does not work, or not safely."""
    return DoctorCheck(name=name, status=Status.FAILED, sentence=sentence)
