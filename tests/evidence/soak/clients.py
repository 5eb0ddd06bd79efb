"""The clients: each thread is an application that moves money between queues and banks, with two-phase commit.

``python -m tests.evidence.soak.clients CONFIG`` is one process with several clients and their transaction manager. It
may be killed at any moment; the next process of the same slot recovers its branches.
"""

import json
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import psycopg

from dtx.client import XAER_NOTA, XAER_PROTO, XAHeuristic, XARollback
from tests.evidence.soak.ledger import Ledger, SpentBefore, what_is_wrong_with
from tests.evidence.soak.money import ACCOUNTS, BANKS, QUEUE_SIDE, QUEUES, Seen, Transfer
from tests.evidence.soak.recovery import Desk, Recovery
from tests.evidence.soak.sides import BROKEN, BankSide, QueueSide
from tests.evidence.soak.ways import WAYS

ROLLED_BACK: Final = 0.08
"""Share of transfers that are rolled back although all participants voted yes."""
LEFT: Final = 0.04
"""Share of transfers without a decision after the votes: the recovery rolls them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration of a client process.

    Args:
        slot: the prefix of its transfers' names, the same for all processes of the slot.
        life: distinguishes the processes of a slot.
        dtx: URL.
        banks: URLs.
        ledger: path.
        threads: number of clients.
        seed: of their random choices.
        apart: whether they do work, first and second phase on different connections, and repeat a second phase.
    """

    slot: str
    life: str
    dtx: str
    banks: dict[str, str]
    ledger: str
    threads: int
    seed: int
    apart: bool = False

    def to_json(self) -> str:
        """Return the configuration as a command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the command line argument."""
        return cls(**json.loads(text))


AGAIN: Final = 10.0
"""Seconds for which a second phase without an answer is repeated; afterwards the recovery completes it."""


class NotNow(Exception):
    """A transfer is not possible now: a queue is empty, or the outcome of its coin's transfer is not known."""


class TransferClient(threading.Thread):
    """One client.

    Args:
        desk: the state of the transaction manager.
        config: of its process.
        number: of the client in its process.
    """

    def __init__(self, desk: Desk, config: Config, number: int) -> None:
        super().__init__(name=f"teller{number}", daemon=True)
        self._desk = desk
        self._life = config.life
        self._random = random.Random(config.seed * 1000 + number)
        self._subscribes = self._random.choice(QUEUES) if number % 2 else None
        self._queues = QueueSide(config.dtx, subscribes=self._subscribes, apart=config.apart)
        self._repeats = AGAIN if config.apart else 0.0
        self._banks = {name: BankSide(url, "teller") for name, url in config.banks.items()}
        self._work: list[tuple[str, int, Callable[[Transfer], None]]] = [
            ("queue to queue", 4, self._queue_to_queue),
            ("queue to queue, in one phase", 2, self._in_one_phase),
            ("queue to database", 3, self._queue_to_bank),
            ("database to queue", 3, self._bank_to_queue),
            ("database to database", 1, self._bank_to_bank),
            ("queue to queue and both databases", 1, self._everywhere),
        ]
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            self._transfer()
        self._queues.close()
        for bank in self._banks.values():
            bank.close()

    # -- two-phase commit

    def _transfer(self) -> None:
        ((kind, _, work),) = self._random.choices(self._work, [weight for _, weight, _ in self._work])
        transfer = Transfer(gtrid=self._desk.begin(self._life), kind=kind)
        voted: set[str] = set()
        try:
            if self._vote(transfer, work, voted):
                self._outcome(transfer, voted)
        finally:
            self._desk.leave(transfer.gtrid, voted)

    def _vote(self, transfer: Transfer, work: Callable[[Transfer], None], voted: set[str]) -> bool:
        """Do the first phase; return whether all voted yes. If not, roll back at each reachable participant."""
        try:
            work(transfer)
            assert transfer.balance == 0, transfer
            transfer.one_phase = transfer.one_phase and not transfer.discarded
            if transfer.one_phase:
                self._desk.ledger.decide(transfer, by_dtx=True)
                return True
            for side in transfer.sides:
                if side == QUEUE_SIDE:
                    self._queues.prepare(transfer.gtrid)
                else:
                    self._banks[side].prepare(transfer.gtrid)
                voted.add(side)
                if side == QUEUE_SIDE:
                    self._tell_of_repeats(transfer)
        except NotNow:
            self._give_up(transfer, voted)
            self._desk.count("nothing to do")
            self.stop.wait(0.02)
        except XARollback:
            self._desk.count("rolled back: dtx voted no")
            self._give_up(transfer, voted)
        except SpentBefore:
            self._desk.count("rolled back: another copy of the coin was spent")
            self._give_up(transfer, voted)
        except (psycopg.errors.CheckViolation, psycopg.errors.LockNotAvailable) as error:
            self._desk.count(f"rolled back: {type(error).__name__}")
            self._give_up(transfer, voted)
        except BROKEN as error:
            begun = "rolled back: a participant was away" if transfer.sides else "not begun, nobody was there"
            self._desk.count(begun)
            self._desk.count(f"met {type(error).__name__}")
            self._abandon(transfer, voted)
            self.stop.wait(self._random.uniform(0.1, 1.0))
        else:
            return True
        return False

    def _outcome(self, transfer: Transfer, voted: set[str]) -> None:
        """Do the second phase, or the only one."""
        if transfer.one_phase:
            self._ask(transfer)
            return
        chance = self._random.random()
        if chance < LEFT:
            self._desk.count("left undecided after the votes")
            return
        try:
            if chance < LEFT + ROLLED_BACK:
                self._desk.count("rolled back: on purpose")
                self._give_up(transfer, voted)
                return
            self._desk.ledger.decide(transfer)
        except SpentBefore as coin:
            self._desk.count("rolled back: another copy of the coin was spent")
            if QUEUE_SIDE in voted:
                again = next(seen for seen in transfer.spent if seen.coin.id == str(coin))
                self._repeat(again, f"{coin} is in {transfer.gtrid}, which dtx has voted for, and was spent")
            self._give_up(transfer, voted)
            return
        left = set(voted)
        for side in transfer.sides:
            if self._tell(side, transfer.gtrid, commit=True):
                left.discard(side)
        voted.clear()
        if not left:
            self._desk.ended(transfer.gtrid)

    def _ask(self, transfer: Transfer) -> None:
        """Let dtx decide. Without an answer, the recovery repeats the request."""
        try:
            self._queues.commit_in_one_phase(transfer.gtrid)
        except XARollback:
            self._desk.count("rolled back: dtx decided so in one phase")
            self._desk.ledger.close_open(transfer.gtrid, committed=False)
        except BROKEN as error:
            self._desk.count(f"one-phase commit unanswered: {type(error).__name__}")
            self._drop(QUEUE_SIDE)
        else:
            self._desk.ledger.close_open(transfer.gtrid, committed=True)

    def _tell(self, side: str, gtrid: str, *, commit: bool) -> bool:
        """Send the outcome to a participant that voted yes; return whether the branch has ended."""
        ending = "commit" if commit else "rollback"
        failed_at: float | None = None
        while True:
            try:
                who = self._queues if side == QUEUE_SIDE else self._banks[side]
                (who.commit if commit else who.rollback)(gtrid)
            except (XAER_NOTA, XAER_PROTO, XAHeuristic, XARollback, psycopg.errors.UndefinedObject) as error:
                ended = error.facts.get("ended") if isinstance(error, XAER_NOTA) else None
                if failed_at is None or ended != ("committed" if commit else "rolled-back"):
                    self._desk.ledger.fault(f"{side} voted yes for {gtrid} and refused its {ending}: {error}")
            except BROKEN as error:
                self._desk.count(f"{ending} unanswered: {type(error).__name__}")
                self._drop(side)
                failed_at = failed_at or time.monotonic()
                if side == QUEUE_SIDE and time.monotonic() < failed_at + self._repeats:
                    time.sleep(0.1)
                    continue
                if self._repeats:
                    self._desk.count(f"{ending} failed")
                return False
            if failed_at is not None:
                self._desk.count(f"{ending} delayed")
            return True

    def _give_up(self, transfer: Transfer, voted: set[str]) -> None:
        """Roll back at all participants."""
        for side in (QUEUE_SIDE, *BANKS):
            if side in voted:
                voted.discard(side)  # from now on it is not known whether the participant has received the outcome
                self._tell(side, transfer.gtrid, commit=False)
            elif side == QUEUE_SIDE or side in transfer.entries:
                self._take_back(side, transfer)

    def _take_back(self, side: str, transfer: Transfer) -> None:
        """Roll back at a participant that has not voted, or has voted no."""
        try:
            if side != QUEUE_SIDE:
                self._banks[side].give_up()
            elif transfer.kind != "database to database":
                self._queues.roll_back_unprepared(transfer.gtrid)
        except BROKEN as error:
            self._desk.count(f"rollback before the vote: {type(error).__name__}")
            self._drop(side)

    def _abandon(self, transfer: Transfer, voted: set[str]) -> None:
        """After a lost connection, end the sessions that may have a branch without a vote."""
        for side in (QUEUE_SIDE, *transfer.entries):
            if side not in voted:
                self._drop(side)

    def _drop(self, side: str) -> None:
        (self._queues if side == QUEUE_SIDE else self._banks[side]).close()

    # -- the business

    def _queue_to_queue(self, transfer: Transfer) -> None:
        """Split a coin, join two coins, or move one."""
        source, target = self._two_queues()
        self._queues.start(transfer.gtrid)
        self._take(transfer, source, self._random.choice((1, 1, 2)))
        if transfer.spent:
            total = sum(seen.coin.amount for seen in transfer.spent)
            split = len(transfer.spent) == 1 and total > 1 and self._random.random() < 0.4
            part = self._random.randrange(1, total) if split else total
            self._put(transfer, target, *filter(None, (part, total - part)))
        self._queues.end(transfer.gtrid)

    def _in_one_phase(self, transfer: Transfer) -> None:
        transfer.one_phase = True
        self._queue_to_queue(transfer)

    def _queue_to_bank(self, transfer: Transfer) -> None:
        self._queues.start(transfer.gtrid)
        self._take(transfer, self._two_queues()[0], 1)
        self._queues.end(transfer.gtrid)
        if transfer.spent:
            self._move(transfer, self._random.choice(BANKS), transfer.spent[0].coin.amount)

    def _bank_to_queue(self, transfer: Transfer) -> None:
        amount = self._random.randrange(1, 200)
        self._move(transfer, self._random.choice(BANKS), -amount)
        self._queues.start(transfer.gtrid)
        self._put(transfer, self._random.choice(QUEUES), amount)
        self._queues.end(transfer.gtrid)

    def _bank_to_bank(self, transfer: Transfer) -> None:
        amount = self._random.randrange(1, 200)
        for bank, delta in zip(self._random.sample(BANKS, 2), (-amount, amount), strict=True):
            self._move(transfer, bank, delta)

    def _everywhere(self, transfer: Transfer) -> None:
        """Move a coin, and pay a share of it to each bank."""
        source, target = self._two_queues()
        self._queues.start(transfer.gtrid)
        self._take(transfer, source, 1)
        if transfer.spent:
            rest = transfer.spent[0].coin.amount
            for bank in self._random.sample(BANKS, 2):
                fee = min(rest, self._random.randrange(5))
                self._move(transfer, bank, fee)
                rest -= fee
            self._put(transfer, target, *filter(None, [rest]))
        self._queues.end(transfer.gtrid)

    def _two_queues(self) -> tuple[str, str]:
        """Return a source and a target."""
        source = self._subscribes or self._random.choice(QUEUES)
        return source, self._random.choice([queue for queue in QUEUES if queue != source])

    def _take(self, transfer: Transfer, queue: str, count: int) -> None:
        for _ in range(count):
            seen = self._queues.take(queue)
            if seen is None:
                break
            (transfer.discarded if self._is_repeat(seen) else transfer.spent).append(seen)
        if not transfer.spent and not transfer.discarded:
            raise NotNow
        if not transfer.spent:
            transfer.kind = "discard of a repeat"

    def _is_repeat(self, seen: Seen) -> bool:
        record = self._desk.ledger.coin(seen.coin.id)
        wrong = what_is_wrong_with(seen, record)
        if wrong is not None:
            self._desk.ledger.fault(wrong)
        if record is None or record.spent_by is None:
            return False
        if record.contested:
            raise NotNow
        return True

    def _tell_of_repeats(self, transfer: Transfer) -> None:
        """Record repeats after dtx's vote.

        Before the vote, a coin may only look like a repeat: a client that was stopped or cut off may hold a copy that
        others have spent meanwhile, and dtx refuses such a copy in a branch.
        """
        for seen in transfer.discarded:
            self._desk.count("repeats that a client recognised")
            text = f"{seen.coin.id} was spent, and dtx has voted for {transfer.gtrid}, which got it again"
            self._repeat(seen, text)

    def _repeat(self, again: Seen, text: str) -> None:
        """Record a repeat, and whether it is the copy that was spent."""
        record = self._desk.ledger.coin(again.coin.id)
        spent = None if record is None else record.copy
        redelivered = ", redelivered" if again.redelivered else ""
        self._desk.ledger.repeat(f"{text} ({spent}; {again.copy}{redelivered})", same_copy=spent == again.copy)

    def _put(self, transfer: Transfer, queue: str, *amounts: int) -> None:
        for coin in list(transfer.coins(*amounts)):
            self._queues.put(queue, coin, self._random.choice(WAYS))
            transfer.made.append((coin, queue))

    def _move(self, transfer: Transfer, bank: str, delta: int) -> None:
        transfer.entries[bank] = delta
        self._banks[bank].move(transfer.gtrid, f"account{self._random.randrange(ACCOUNTS)}", delta)


def main(text: str) -> None:
    """Run until SIGTERM; then finish the active transfers, and end."""
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # it logs each lost connection with many lines
    config = Config.from_json(text)
    desk = Desk(Ledger(Path(config.ledger)), config.slot)
    recovery = Recovery(
        desk, QueueSide(config.dtx), {name: BankSide(url, "recovery") for name, url in config.banks.items()}
    )
    threads: list[TransferClient | Recovery] = [
        TransferClient(desk, config, number) for number in range(config.threads)
    ]
    threads.append(recovery)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    for thread in threads:
        thread.start()
    ended.wait()
    for thread in threads:
        thread.stop.set()
    for thread in threads:
        thread.join()
    desk.flush()


if __name__ == "__main__":
    main(sys.argv[1])
