"""The money of the soak: coins in queues, accounts in databases, and what one transfer does to both.

A coin is a message. It is made by one transfer and spent by another, its id is never used again, so whoever finds it
can be told which transfer put it there and which one must have taken it away: that is what makes a loss, a repeat and
a coin from nowhere three different findings, and not only a sum that is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dtx.client import Xid

QUEUES: Final = tuple(f"till{number}" for number in range(10))
BANKS: Final = ("east", "west")
QUEUE_SIDE: Final = "queues"
"""The name of the participant that the queues are, beside the banks."""
ACCOUNTS: Final = 60
"""In each bank: enough that two transfers seldom wait for one row, which a branch in doubt keeps locked."""
OPENING_BALANCE: Final = 10_000
OPENING_COINS: Final = 20
"""In each queue."""
OPENING_AMOUNT: Final = 100
TOTAL: Final = len(QUEUES) * OPENING_COINS * OPENING_AMOUNT + len(BANKS) * ACCOUNTS * OPENING_BALANCE
FORMAT_ID: Final = 0x736F616B
"""Ours: a transaction manager recognises its own branches by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coin:
    """What a message is worth."""

    id: str
    amount: int

    @property
    def body(self) -> bytes:
        """As it is published."""
        return f"{self.id} {self.amount}".encode()

    @classmethod
    def of(cls, body: bytes) -> "Coin":
        """The coin that a message is."""
        name, amount = body.decode().split()
        return cls(id=name, amount=int(amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A coin as it was delivered.

    Args:
        coin: what it says.
        dtx_id: its header ``x-dtx-id``, by which a consumer recognises a repeat; empty where there is none.
    """

    coin: Coin
    dtx_id: str


@dataclass(slots=True, kw_only=True)
class Transfer:
    """What one distributed transaction does.

    Args:
        gtrid: its name; the same at every participant.
        kind: for the table.
        spent: coins that it takes.
        made: coins that it makes, with their queues.
        entries: what it adds to each bank.
        discarded: coins that it takes for nothing: repeats of coins that were spent before.
        one_phase: dtx alone is asked, and decides.
    """

    gtrid: str
    kind: str
    spent: list[Seen] = field(default_factory=list)
    made: list[tuple[Coin, str]] = field(default_factory=list)
    entries: dict[str, int] = field(default_factory=dict)
    discarded: list[Seen] = field(default_factory=list)
    one_phase: bool = False

    @property
    def sides(self) -> list[str]:
        """The participants."""
        queues = [QUEUE_SIDE] if self.spent or self.made or self.discarded else []
        return [*queues, *self.entries]

    @property
    def balance(self) -> int:
        """What it would make out of nothing; a transfer is right when it is 0."""
        spent = sum(seen.coin.amount for seen in self.spent)
        return sum(coin.amount for coin, _ in self.made) + sum(self.entries.values()) - spent

    def coins(self, *amounts: int) -> Iterator[Coin]:
        """New coins of its own."""
        for number, amount in enumerate(amounts, len(self.made)):
            yield Coin(id=f"{self.gtrid}/{number}", amount=amount)


def xid_of(gtrid: str) -> Xid:
    """The branch of a transfer at dtx."""
    return Xid(FORMAT_ID, gtrid.encode(), QUEUE_SIDE.encode())
