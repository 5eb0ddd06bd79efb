"""Roles and tags, and what they permit. It stands on nothing: a command line is parsed without loading the tables."""

from enum import StrEnum
from typing import Final


class OperatorRole(StrEnum):
    """The roles of operators. Each role includes the permissions of those before it."""

    VIEWER = "viewer"
    """Look at everything but the contents of messages."""
    OPERATOR = "operator"
    """Decide about a branch and its messages, one at a time."""
    COORDINATOR = "coordinator"
    """Decide about many at once; make users, virtual hosts and tokens; read the trail."""

    def includes(self, other: "OperatorRole") -> bool:
        """Whether a holder of this role may do everything that *other* permits."""
        return [*OperatorRole].index(self) >= [*OperatorRole].index(other)


class Tag(StrEnum):
    """What an account may be as well as its permissions: the words are RabbitMQ's, and one more for who decides."""

    ADMINISTRATOR = "administrator"
    MONITORING = "monitoring"
    IMPERSONATOR = "impersonator"
    OPERATOR = "operator"


TAGS: Final = {
    Tag.MONITORING: (OperatorRole.VIEWER, "look at branches by the operators' API and its pages"),
    Tag.OPERATOR: (OperatorRole.OPERATOR, "look, and decide about a branch"),
    Tag.ADMINISTRATOR: (OperatorRole.COORDINATOR, "look, decide about many, make users and tokens, read the trail"),
    Tag.IMPERSONATOR: (None, "publish messages with the user-id of another user"),
}
"""As what each lets a user in at the operators' API, the lowest role first; and what it permits."""
