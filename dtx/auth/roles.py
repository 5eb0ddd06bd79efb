"""Roles and tags, and their permissions. This module imports no tables, so that the command line is parsed fast."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class OperatorRole(StrEnum):
    """The roles of operators. Each role includes the permissions of those before it."""

    VIEWER = "viewer"
    """Read everything except the contents of messages."""
    OPERATOR = "operator"
    """Decide about a branch and its messages, one at a time."""
    COORDINATOR = "coordinator"
    """Decide about many at once; make users, virtual hosts and tokens; read the audit log."""

    def includes(self, other: "OperatorRole") -> bool:
        """Whether a holder of this role may do everything that *other* permits."""
        return [*OperatorRole].index(self) >= [*OperatorRole].index(other)


class Tag(StrEnum):
    """Tags of an account: those of RabbitMQ, and ``operator``."""

    ADMINISTRATOR = "administrator"
    MONITORING = "monitoring"
    IMPERSONATOR = "impersonator"
    OPERATOR = "operator"


TAGS: Final = {
    Tag.MONITORING: (OperatorRole.VIEWER, "view branches in the operators' API and its pages"),
    Tag.OPERATOR: (OperatorRole.OPERATOR, "view, and decide about a branch"),
    Tag.ADMINISTRATOR: (OperatorRole.COORDINATOR, "view, decide about many, make users and tokens, read the audit log"),
    Tag.IMPERSONATOR: (None, "publish messages with the user-id of another user"),
}
"""For each tag the role of its users in the operators' API, lowest first (``None`` for none); and its permissions."""


def split_tags(given: str | Iterable[str]) -> tuple[list[str], list[str]]:
    """The tags that dtx has, and the others.

    Args:
        given: one by one, or as text with commas between them, as in RabbitMQ.
    """
    names = {tag.strip() for tag in (given.split(",") if isinstance(given, str) else given)} - {""}
    known = {*map(str, TAGS)}
    return sorted(names & known), sorted(names - known)
