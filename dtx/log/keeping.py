"""How long a resource manager keeps what is over."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Days; ``None`` is for ever.

    Args:
        journal: lines of the journal, and with them the outcome memory; at least 1.
        archive: messages that nobody got, of branches that were forgotten.
        audit: lines of the trail of operators.
    """

    journal: int = 30
    archive: int | None = None
    audit: int | None = None
