"""The transaction manager's recovery: it commits decided transfers everywhere, and rolls all others back.

It repeats one-phase commits at dtx until the outcome is known.

It asks every participant for branches in doubt, ignores the branches of other transaction managers, and leaves
transfers that this process still works on alone. It also records broken guarantees: a voted branch that is unknown, a
decided one that was not committed, an answer that X/Open does not allow.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import psycopg

from dtx.client import (
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMFAIL,
    Coordinator,
    XAHeuristic,
    XARollback,
)
from tests.evidence.soak.ledger import Ledger
from tests.evidence.soak.money import QUEUE_SIDE, xid_of
from tests.evidence.soak.sides import BROKEN, BankSide, QueueSide, belongs


class Desk:
    """The state that the threads of one transaction manager share.

    Args:
        ledger: its log.
        prefix: of the names of its transfers.
    """

    def __init__(self, ledger: Ledger, prefix: str) -> None:
        self.ledger = ledger
        self.prefix = prefix
        self._lock = threading.Lock()
        self._number = 0
        self._active: set[str] = set()
        self._voted: dict[str, set[str]] = {}
        self._ended: list[str] = []
        self._counts: Counter[str] = Counter()

    def begin(self, life: str) -> str:
        """Return the name of a new transfer, which is active from now on."""
        with self._lock:
            self._number += 1
            gtrid = f"{self.prefix}{life}.{self._number}"
            self._active.add(gtrid)
            return gtrid

    def leave(self, gtrid: str, voted: set[str]) -> None:
        """End the work on a transfer.

        Args:
            gtrid: the transfer.
            voted: participants that voted yes and have not been sent the outcome.
        """
        with self._lock:
            self._active.discard(gtrid)
            if voted:
                self._voted[gtrid] = voted

    def idle(self, gtrid: str) -> bool:
        """Whether no thread works on the transfer."""
        with self._lock:
            return gtrid not in self._active

    def voted(self) -> dict[str, set[str]]:
        """Return undecided transfers, with the participants that hold them in doubt."""
        with self._lock:
            return {gtrid: set(sides) for gtrid, sides in self._voted.items()}

    def told(self, gtrid: str, side: str) -> None:
        """Record that the outcome may have been sent to a participant."""
        with self._lock:
            sides = self._voted.get(gtrid, set())
            sides.discard(side)
            if not sides:
                self._voted.pop(gtrid, None)

    def ended(self, gtrid: str) -> None:
        """Record that every participant has committed."""
        with self._lock:
            self._ended.append(gtrid)

    def count(self, what: str) -> None:
        """Count an event for the table."""
        with self._lock:
            self._counts[what] += 1

    def flush(self) -> None:
        """Write ended transfers and counts to the log."""
        with self._lock:
            ended, self._ended = self._ended, []
            counts, self._counts = self._counts, Counter()
        if ended or counts:
            self.ledger.settle(ended, counts)


class Recovery(threading.Thread):
    """Recovers every 0.5 to 2 seconds as a thread, or once by ``attempt``.

    Args:
        desk: the state of the transaction manager.
        queues: a separate session with dtx.
        banks: a separate session with each bank.
    """

    def __init__(self, desk: Desk, queues: QueueSide, banks: dict[str, BankSide]) -> None:
        super().__init__(name="recovery", daemon=True)
        self._desk = desk
        self._queues = queues
        self._banks = banks
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(random.uniform(0.5, 2.0)):
            self.attempt()
        self.close()

    def attempt(self) -> bool:
        """Recover at every reachable participant; return whether all were reachable and no transfer remains."""
        done = [self._try(self._recover_queues, self._queues)]
        done += [self._try(partial(self._recover_bank, name), bank) for name, bank in self._banks.items()]
        done.append(self._try(self._finish, self._queues))
        done.append(self._try(self._close_open, self._queues))
        self._desk.flush()
        ledger, prefix = self._desk.ledger, self._desk.prefix
        return all(done) and not ledger.unended(prefix) and not ledger.open(prefix)

    def close(self) -> None:
        """End the sessions."""
        self._queues.close()
        for bank in self._banks.values():
            bank.close()
        self._desk.flush()

    def _try(self, act: Callable[[], None], side: QueueSide | BankSide) -> bool:
        try:
            act()
        except BROKEN as error:
            self._desk.count(f"recovery met {type(error).__name__}")
            side.close()
            return False
        return True

    # -- undecided

    def _recover_queues(self) -> None:
        voted = {gtrid for gtrid, sides in self._desk.voted().items() if QUEUE_SIDE in sides}
        with self._queues.coordinator() as coordinator:
            found = {xid.gtrid.decode() for xid in coordinator.recover() if belongs(xid, self._desk.prefix)}
            for gtrid in voted - found:
                self._fault(f"{gtrid} was prepared at dtx, was told nothing, and is not in doubt")
                self._desk.told(gtrid, QUEUE_SIDE)
            for gtrid in found:
                if self._desk.idle(gtrid) and not self._desk.ledger.decided(gtrid):
                    self._desk.told(gtrid, QUEUE_SIDE)
                    self._complete(coordinator, gtrid, commit=False)

    def _recover_bank(self, name: str) -> None:
        bank = self._banks[name]
        for gtrid in bank.in_doubt(self._desk.prefix):
            if self._desk.idle(gtrid) and not self._desk.ledger.decided(gtrid):
                self._desk.told(gtrid, name)
                try:
                    bank.rollback(gtrid)
                except psycopg.errors.UndefinedObject:
                    continue  # its client has rolled it back meanwhile
                self._desk.count("rolled back by recovery at a bank")

    # -- decided

    def _finish(self) -> None:
        unended = self._desk.ledger.unended(self._desk.prefix)
        random.shuffle(unended)  # a transfer that cannot be completed yet must not delay the others each time
        for gtrid, sides in unended:
            if not self._desk.idle(gtrid):
                continue
            for side in sides:
                if side == QUEUE_SIDE:
                    with self._queues.coordinator() as coordinator:
                        if not self._complete(coordinator, gtrid, commit=True):
                            return
                else:
                    self._commit_at(side, gtrid)
            self._desk.ended(gtrid)

    def _close_open(self) -> None:
        """Repeat one-phase commits without an answer, and record their outcomes."""
        for gtrid in self._desk.ledger.open(self._desk.prefix):
            if not self._desk.idle(gtrid):
                continue
            with self._queues.coordinator() as coordinator:
                try:
                    coordinator.commit(xid_of(gtrid), one_phase=True)
                except XAER_NOTA as error:
                    committed = error.facts.get("ended") == "committed"
                except XARollback:
                    committed = False
                except (XAER_RMFAIL, XAER_PROTO):  # not known yet, or an earlier request is still in progress
                    self._desk.count("one-phase commit to be repeated")
                    continue
                else:
                    committed = True
            self._desk.ledger.close_open(gtrid, committed=committed)
            self._desk.count(f"one-phase commit found out: {'committed' if committed else 'rolled-back'}")

    def _commit_at(self, name: str, gtrid: str) -> None:
        bank = self._banks[name]
        try:
            bank.commit(gtrid)
        except psycopg.errors.UndefinedObject:
            if not bank.has(gtrid):
                self._fault(f"{gtrid} was decided and the bank {name} has lost it")
            return
        except BROKEN:
            bank.close()
            raise
        self._desk.count("committed by recovery at a bank")

    def _complete(self, coordinator: Coordinator, gtrid: str, *, commit: bool) -> bool:
        """Send the outcome to dtx; return whether the branch has ended."""
        ending = "committed" if commit else "rolled-back"
        try:
            (coordinator.commit if commit else coordinator.rollback)(xid_of(gtrid))
        except XAER_NOTA as error:
            if error.facts.get("ended") != ending:
                self._fault(f"{gtrid} was to be {ending}: {error}")
        except XAER_RMFAIL:
            self._desk.count("phase two to be repeated")
            return False
        except (XAER_PROTO, XAHeuristic, XARollback) as error:
            self._fault(f"{gtrid} was to be {ending}: {error}")
        else:
            self._desk.count(f"{ending} by recovery at dtx")
        return True

    def _fault(self, text: str) -> None:
        self._desk.ledger.fault(text)
