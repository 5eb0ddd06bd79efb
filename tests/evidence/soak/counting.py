"""Counting: comparison of queues, banks and journal with the log of decisions.

At the end of a round nothing moves, and every coin and account is counted. While money moves, a reader compares each
bank with the decisions. The bank must show all transfers that were known to be committed there before the query, and
only those that were decided before the query ended. Reading a queue takes messages from it, so there the clients are
the readers: they look up each coin that they receive.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import psycopg
from pika.adapters.blocking_connection import BlockingChannel

from tests.evidence.soak.ledger import Ledger, what_is_wrong_with
from tests.evidence.soak.money import BANKS, FORMAT_ID, QUEUE_SIDE, QUEUES, TOTAL, Coin, Seen
from tests.evidence.soak.sides import BROKEN, dtx_id_of
from tests.evidence.soak.world import World
from tests.support.client import connected
from tests.support.processes import wait_until

_SUMS: Final = "SELECT (SELECT sum(balance) FROM account)::bigint"
_JOURNAL: Final = (
    f"SELECT gtrid, event FROM dtx.journal WHERE event IN ('committed', 'rolled-back') AND format_id = {FORMAT_ID}"
)


@dataclass(slots=True, kw_only=True)
class Findings:
    """The differences that a count has found."""

    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    """Coins with too many copies, which a consumer can recognise."""
    wrong: list[str] = field(default_factory=list)
    copies: set[str] = field(default_factory=set)
    """Ids of coins with too many copies, also of those that are accepted."""

    @property
    def all(self) -> list[str]:
        """All differences, as text."""
        return [
            *(f"lost: {text}" for text in self.lost),
            *(f"repeated: {text}" for text in self.repeated),
            *(f"wrong: {text}" for text in self.wrong),
        ]


def compare_coins(
    found: Mapping[str, Iterable[Seen]], ledger: Ledger, allowed: Collection[str] = frozenset()
) -> Findings:
    """Compare the coins *found* in each queue with the expected ones. Those with *allowed* ids may have copies."""
    findings = Findings()
    expected = ledger.unspent()
    copies: defaultdict[Coin, list[Seen]] = defaultdict(list)
    for queue, content in found.items():
        for seen in content:
            copies[seen.coin].append(seen)
            wrong = what_is_wrong_with(seen, ledger.coin(seen.coin.id))
            if wrong is not None:
                findings.wrong.append(wrong)
            elif expected.get(seen.coin, queue) != queue:
                findings.wrong.append(f"{seen.coin.id} is in {queue} and was sent to {expected[seen.coin]}")
    for coin, seen_copies in copies.items():
        must_be = 1 if coin in expected else 0
        if len({seen.dtx_id for seen in seen_copies}) > 1:
            findings.wrong.append(f"{coin.id} has copies with different x-dtx-id")
        if len(seen_copies) > must_be and ledger.coin(coin.id) is not None:
            findings.copies.add(coin.id)
            if coin.id not in allowed:
                findings.repeated.append(f"{coin.id} is there {len(seen_copies)} times instead of {must_be}")
    findings.lost += [f"{coin.id} in {queue}" for coin, queue in expected.items() if coin not in copies]
    return findings


def compare_bank(bank: str, entries: Mapping[str, int], ledger: Ledger) -> Findings:
    """Compare the transfers that a bank has with the decided ones."""
    findings = Findings()
    decided = ledger.entries(bank)
    findings.lost += [f"{gtrid} at {bank}" for gtrid in decided.keys() - entries.keys()]
    findings.wrong += [f"{gtrid} at {bank} was never decided" for gtrid in entries.keys() - decided.keys()]
    findings.wrong += [
        f"{gtrid} at {bank} is {entries[gtrid]} and was to be {decided[gtrid]}"
        for gtrid in entries.keys() & decided.keys()
        if entries[gtrid] != decided[gtrid]
    ]
    return findings


# -- looking


def look_into_queues(channel: BlockingChannel) -> dict[str, list[Seen]]:
    """Return all ready messages of the queues, and requeue them."""
    found: dict[str, list[Seen]] = {}
    for queue in QUEUES:
        found[queue] = []
        while True:
            method, properties, body = channel.basic_get(queue)
            if method is None or properties is None or body is None:
                break
            found[queue].append(Seen(coin=Coin.of(body), dtx_id=dtx_id_of(properties)))
    give_back(channel, {queue: len(content) for queue, content in found.items()})
    return found


def give_back(channel: BlockingChannel, counts: Mapping[str, int]) -> None:
    """Requeue all messages that *channel* got, and wait until each queue has as many of them as *counts* says.

    RabbitMQ sends many acknowledgements in parts. What it has not sent when the channel ends returns in an order that
    differs between the members of a quorum queue (before 4.1.1), which then lose messages.
    """
    channel.basic_nack(0, multiple=True, requeue=True)

    def is_back() -> bool:
        return all(channel.queue_declare(name, passive=True).method.message_count >= n for name, n in counts.items())

    wait_until(is_back, seconds=60, what="the return of all messages")


def look_into_bank(url: str) -> tuple[int, dict[str, int]]:
    """Return the sum of all accounts and the transfers of this round, from one snapshot."""
    with psycopg.connect(url, connect_timeout=5, options="-c statement_timeout=15000") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        row = connection.execute(_SUMS).fetchone()
        assert row is not None
        return int(row[0]), dict(connection.execute("SELECT gtrid, delta FROM entry").fetchall())


class Count:
    """Counts at the end of each round.

    Args:
        world: the servers and the ledger.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ledger = world.ledger
        self.opening = {bank: look_into_bank(url)[0] for bank, url in world.banks.items()}
        """The sum of all accounts of each bank at the start of the round."""
        self.allowed: set[str] = set()
        """Ids of coins that a death of the broker has left with copies."""

    def enough(self) -> bool:
        """Whether each queue has as many ready messages as it must have coins. Takes no message."""
        expected = Counter(self._ledger.unspent().values())
        with connected(self.past_dtx) as connection:
            channel = connection.channel()
            return all(
                channel.queue_declare(queue, passive=True).method.message_count >= expected[queue] for queue in QUEUES
            )

    def count(self) -> Findings:
        """Compare everything, while nothing moves."""
        with connected(self.past_dtx) as connection:
            found = look_into_queues(connection.channel())
        findings = compare_coins(found, self._ledger, self.allowed)
        if findings.lost:
            with psycopg.connect(self._world.database) as database:
                kept = {Coin.of(bytes(body)).id for (body,) in database.execute("SELECT body FROM dtx.duplicate")}
            names = {text.partition(" ")[0] for text in findings.lost}
            findings.wrong += [f"{name} was suppressed as a second copy" for name in names & kept]
        total = sum(coin.amount for coin in self._ledger.unspent())
        for bank, url in self._world.banks.items():
            balance, entries = look_into_bank(url)
            other = compare_bank(bank, entries, self._ledger)
            findings.lost += other.lost
            findings.wrong += other.wrong
            if balance != self.opening[bank] + sum(entries.values()):
                findings.wrong.append(f"the accounts at {bank} hold {balance}, which its transfers do not explain")
            total += balance
        if not findings.all and total != TOTAL:
            findings.wrong.append(f"there is {total} in all instead of {TOTAL}")
        findings.wrong += self._compare_journal()
        return findings

    @property
    def past_dtx(self) -> str:
        """The URL of the server that has the messages: the broker, or dtx in standalone mode."""
        return self._world.service.url() if self._world.node is None else self._world.node.url()

    def _compare_journal(self) -> list[str]:
        """Check that the journal of dtx has the decision of each branch exactly once."""
        with psycopg.connect(self._world.database) as connection:
            told = Counter((bytes(gtrid).decode(), event) for gtrid, event in connection.execute(_JOURNAL))
        decided = {gtrid for gtrid, sides in self._ledger.decisions() if QUEUE_SIDE in sides}
        wrong = [f"the journal of dtx lacks the commit of {gtrid}" for gtrid in decided if not told[gtrid, "committed"]]
        for (gtrid, event), count in told.items():
            if (event == "committed") is not (gtrid in decided):
                wrong.append(f"the journal of dtx says that {gtrid} was {event}")
            elif count > 1:
                wrong.append(f"the journal of dtx says {count} times that {gtrid} was {event}")
        return wrong

    def allow_copies(self, findings: Findings) -> int:
        """Accept the copies that a death of the broker has left; return their number.

        They stay: only dtx knows which copy of a coin a consumer gets.
        """
        new = findings.copies - self.allowed
        self.allowed |= new
        findings.repeated.clear()
        return len(new)

    def close_round(self) -> None:
        """End the round after a count without differences."""
        self._ledger.close_round()
        for bank, url in self._world.banks.items():
            with psycopg.connect(url) as connection:
                connection.execute("DELETE FROM entry")
            self.opening[bank] = look_into_bank(url)[0]
        with psycopg.connect(self._world.database) as connection:
            connection.execute("DELETE FROM dtx.journal")


class Reader(threading.Thread):
    """Compares the banks with the decisions while money moves.

    Args:
        world: the servers and the ledger.
        opening: the sum of all accounts of each bank at the start of the round.
    """

    def __init__(self, world: World, opening: Mapping[str, int]) -> None:
        super().__init__(name="reader", daemon=True)
        self._world = world
        self._opening = opening
        self.looks = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.5):
            for bank in BANKS:
                try:
                    self._look(bank)
                except BROKEN:
                    continue  # the bank is being killed

    def _look(self, bank: str) -> None:
        ledger = self._world.ledger
        before = ledger.entries(bank, ended=True)
        balance, shown = look_into_bank(self._world.banks[bank])
        after = ledger.entries(bank)
        for gtrid in before.keys() - shown.keys():
            ledger.fault(f"{bank} does not show {gtrid}, which it had committed")
        for gtrid in shown.keys() - after.keys():
            ledger.fault(f"{bank} shows {gtrid}, which was not decided")
        for gtrid in shown.keys() & after.keys():
            if shown[gtrid] != after[gtrid]:
                ledger.fault(f"{bank} shows {shown[gtrid]} for {gtrid} instead of {after[gtrid]}")
        if balance != self._opening[bank] + sum(shown.values()):
            ledger.fault(f"{bank} holds {balance}, which the transfers that it shows do not explain")
        self.looks += 1
