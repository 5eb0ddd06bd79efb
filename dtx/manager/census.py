"""How many branches there are, in which states and of which ages: for numbers and operators' pages.

Counting goes through all branches, so the event loop gets its turn now and then; who comes or goes meanwhile is counted
as they were when it began, or not at all.
"""

import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dtx.manager.entry import Entry
from dtx.store.slices import in_turns
from dtx.xa.model import State

AGES: Final = (60, 600, 3600, 86_400)
"""Seconds since the start between which branches are counted: minutes, an hour, a day."""


@dataclass(slots=True, kw_only=True)
class Census:
    """What was counted.

    Args:
        ages: for each state, how many branches are younger than each of :data:`AGES`, but not than the one before; the
            last number is that of the oldest ones. Times are those that dtx has written, by its own clock.
        stuck: those that phase two is stuck with.
        oldest_prepared: when the one that has been prepared for the longest time was, seconds since the epoch.
        in_doubt_bytes: of messages of branches that have voted.
    """

    ages: dict[State, list[int]] = field(default_factory=dict)
    stuck: int = 0
    oldest_prepared: float | None = None
    in_doubt_bytes: int = 0

    @property
    def states(self) -> dict[State, int]:
        """How many branches each state has."""
        return {state: sum(ages) for state, ages in self.ages.items()}


async def count(entries: Iterable[Entry]) -> Census:
    """Count *entries*: a snapshot of them is taken at once."""
    census = Census()
    now = time.time()
    async for entry in in_turns(entries):
        ages = census.ages.get(entry.branch.state)
        if ages is None:
            ages = census.ages[entry.branch.state] = [0] * (len(AGES) + 1)
        ages[bisect_right(AGES, now - entry.started_at)] += 1
        record = entry.record
        if record is not None:
            census.stuck += record.stuck is not None
            census.in_doubt_bytes += record.bytes
            if entry.branch.state is State.PREPARED and record.prepared_at is not None:
                oldest = census.oldest_prepared
                census.oldest_prepared = record.prepared_at if oldest is None else min(oldest, record.prepared_at)
    return census
