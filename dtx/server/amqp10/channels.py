"""What operators see of a connection that speaks AMQP 1.0."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtx.manager.entry import Entry
from dtx.manager.scan import Scan
from dtx.server.standalone.channel import Mode
from dtx.xa.model import Association


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The transactions of a connection, as those of a channel.

    Args:
        place: numbers of connection and channel.
        ties: branches that they work for.
    """

    place: tuple[int, int]
    ties: Sequence[tuple[Entry, Association]]

    @property
    def mode(self) -> Mode:
        """``dtx`` while there are transactions, else ``plain``."""
        return Mode.DISTRIBUTED if self.ties else Mode.PLAIN

    @property
    def scan(self) -> Scan | None:
        """Recovery is for AMQP 0-9 alone."""
        return None
