"""The money of the soak: coins in queues, accounts in databases, and transfers between them.

A coin is a message. One transfer makes it and another one spends it, and its id is never used again. So each finding
names the transfers that are involved, and a loss, a repeat and an unknown coin are different findings, not only a wrong
sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dtx.client import Xid

QUEUES: Final = tuple(f"till{number}" for number in range(10))
BANKS: Final = ("east", "west")
QUEUE_SIDE: Final = "queues"
"""The name of the participant with the queues, in addition to the banks."""
ACCOUNTS: Final = 60
"""In each bank: so many that transfers seldom wait for a row that a branch in doubt keeps locked."""
OPENING_BALANCE: Final = 10_000
OPENING_COINS: Final = 20
"""In each queue."""
OPENING_AMOUNT: Final = 100
TOTAL: Final = len(QUEUES) * OPENING_COINS * OPENING_AMOUNT + len(BANKS) * ACCOUNTS * OPENING_BALANCE
FORMAT_ID: Final = 0x736F616B
"""The transaction manager recognises its own branches by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coin:
    """The content of a message."""

    id: str
    amount: int

    @property
    def body(self) -> bytes:
        """The body of its message."""
        return f"{self.id} {self.amount}".encode()

    @classmethod
    def of(cls, body: bytes) -> "Coin":
        """Return the coin in a message body."""
        name, amount = body.decode().split()
        return cls(id=name, amount=int(amount))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A delivered coin.

    Args:
        coin: from the body.
        dtx_id: its header ``x-dtx-id``, by which a consumer recognises a repeat; empty if there is none.
        copy: distinguishes copies of the coin: the headers with which dtx published it.
        redelivered: whether the broker says that it has delivered this copy before.
    """

    coin: Coin
    dtx_id: str
    copy: str = ""
    redelivered: bool = False


@dataclass(slots=True, kw_only=True)
class Transfer:
    """The changes of one distributed transaction.

    Args:
        gtrid: its name, the same at every participant.
        kind: for the table.
        spent: coins that it takes.
        made: coins that it makes, with their queues.
        entries: the change at each bank.
        discarded: repeats of spent coins, which it takes without a change.
        one_phase: only dtx takes part, and decides.
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
        """The money that it would create; 0 for a correct transfer."""
        spent = sum(seen.coin.amount for seen in self.spent)
        return sum(coin.amount for coin, _ in self.made) + sum(self.entries.values()) - spent

    def coins(self, *amounts: int) -> Iterator[Coin]:
        """Yield new coins with the given amounts."""
        for number, amount in enumerate(amounts, len(self.made)):
            yield Coin(id=f"{self.gtrid}/{number}", amount=amount)


def xid_of(gtrid: str) -> Xid:
    """Return the xid of a transfer's branch at dtx."""
    return Xid(FORMAT_ID, gtrid.encode(), QUEUE_SIDE.encode())
