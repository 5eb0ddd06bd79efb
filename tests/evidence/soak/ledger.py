"""The transaction manager's log: decisions in SQLite, on disk before a participant receives them.

All processes of a run share it, and it survives each of them. Presumed abort: only commits are written. A decision is
written together with all changes of the transfer, so the log is also the reference for queues and databases. A coin can
be spent only once, so two transfers with two copies of one coin (a repeat) cannot both be decided.

In one phase dtx decides. Such a transfer is *open* from the request until its outcome is known. Its changes are written
before the request, because its coins may become visible immediately. If it is rolled back, its changes are removed.
"""

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.evidence.soak.money import QUEUE_SIDE, Coin, Seen, Transfer

_SCHEMA = """
CREATE TABLE decision (
    gtrid TEXT PRIMARY KEY, kind TEXT NOT NULL, sides TEXT NOT NULL, at REAL NOT NULL, ended INTEGER NOT NULL DEFAULT 0,
    open INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX unended ON decision (gtrid) WHERE NOT ended;
CREATE TABLE coin (
    id TEXT PRIMARY KEY, amount INTEGER NOT NULL, queue TEXT NOT NULL, made_by TEXT NOT NULL, spent_by TEXT,
    dtx_id TEXT, copy TEXT
) WITHOUT ROWID;
CREATE INDEX unspent ON coin (id) WHERE spent_by IS NULL;
CREATE TABLE entry (
    bank TEXT NOT NULL, gtrid TEXT NOT NULL, delta INTEGER NOT NULL, PRIMARY KEY (bank, gtrid)
) WITHOUT ROWID;
CREATE TABLE fault (at REAL NOT NULL, text TEXT NOT NULL);
CREATE TABLE repeat (at REAL NOT NULL, text TEXT NOT NULL, same_copy INTEGER NOT NULL);
CREATE TABLE count (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""
_COIN = """
SELECT amount, made_by, spent_by, dtx_id, copy, EXISTS (SELECT 1 FROM decision WHERE gtrid = spent_by AND open)
FROM coin WHERE id = ?
"""


class SpentBefore(Exception):
    """A transfer cannot be decided, because another one has spent its coin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The entry of a coin."""

    amount: int
    made_by: str
    spent_by: str | None
    dtx_id: str | None
    """The ``x-dtx-id`` of the spent copy."""
    copy: str | None
    """Which copy was spent."""
    contested: bool
    """The transfer that spends it was requested in one phase, and its outcome is not known yet."""


class Ledger:
    """A process's connection to the log, shared by its threads.

    Args:
        path: the database.
        make: whether to create it.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")  # each commit is on disk when it returns
        if make:
            self._database.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _read(self, query: str, *parameters: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._database.execute(query, parameters).fetchall()

    # -- decisions

    def decide(self, transfer: Transfer, *, by_dtx: bool = False) -> None:
        """Decide to commit. When this returns, the decision is on disk.

        Args:
            transfer: its changes.
            by_dtx: dtx is asked to commit it in one phase next: it is open until ``close_open``.

        Raises:
            SpentBefore: another transfer has spent one of its coins.
        """
        with self._writing() as database:
            for seen in transfer.spent:
                done = database.execute(
                    "UPDATE coin SET spent_by = ?, dtx_id = ?, copy = ? WHERE id = ? AND spent_by IS NULL",
                    (transfer.gtrid, seen.dtx_id, seen.copy, seen.coin.id),
                )
                if done.rowcount != 1:
                    raise SpentBefore(seen.coin.id)
            database.executemany(
                "INSERT INTO coin (id, amount, queue, made_by) VALUES (?, ?, ?, ?)",
                [(coin.id, coin.amount, queue, transfer.gtrid) for coin, queue in transfer.made],
            )
            database.executemany(
                "INSERT INTO entry (bank, gtrid, delta) VALUES (?, ?, ?)",
                [(bank, transfer.gtrid, delta) for bank, delta in transfer.entries.items()],
            )
            database.execute(
                "INSERT INTO decision (gtrid, kind, sides, at, open) VALUES (?, ?, ?, ?, ?)",
                (transfer.gtrid, transfer.kind, json.dumps(transfer.sides), time.time(), by_dtx),
            )

    def close_open(self, gtrid: str, *, committed: bool) -> None:
        """Record the outcome of an open transfer. Idempotent."""
        with self._writing() as database:
            if committed:
                database.execute("UPDATE decision SET open = 0, ended = 1 WHERE gtrid = ? AND open", (gtrid,))
                return
            if database.execute("DELETE FROM decision WHERE gtrid = ? AND open", (gtrid,)).rowcount == 0:
                return
            seen = database.execute("SELECT id, spent_by FROM coin WHERE made_by = ? AND spent_by NOT NULL", (gtrid,))
            for coin, spender in seen.fetchall():
                text = f"{coin} was spent by {spender}, and dtx had rolled back {gtrid}, which made it"
                database.execute("INSERT INTO fault VALUES (?, ?)", (time.time(), text))
            database.execute("UPDATE coin SET spent_by = NULL, dtx_id = NULL, copy = NULL WHERE spent_by = ?", (gtrid,))
            database.execute("DELETE FROM coin WHERE made_by = ?", (gtrid,))

    def decided(self, gtrid: str) -> bool:
        """Whether the transfer is decided or open; otherwise it will never be committed."""
        return bool(self._read("SELECT 1 FROM decision WHERE gtrid = ?", gtrid))

    def unended(self, prefix: str) -> list[tuple[str, list[str]]]:
        """Return the decided transfers of a slot, with participants, that are not known to be committed everywhere."""
        query = "SELECT gtrid, sides FROM decision WHERE NOT ended AND NOT open AND gtrid >= ? AND gtrid < ?"
        return [(str(gtrid), json.loads(str(sides))) for gtrid, sides in self._read(query, prefix, prefix + "\x7f")]

    def open(self, prefix: str) -> list[str]:
        """Return the open transfers of a slot."""
        query = "SELECT gtrid FROM decision WHERE open AND gtrid >= ? AND gtrid < ?"
        return [str(gtrid) for (gtrid,) in self._read(query, prefix, prefix + "\x7f")]

    def settle(self, ended: Iterable[str], counts: Counter[str]) -> None:
        """Mark transfers as ended, and add counts. After a kill before this, recovery completes the transfers again."""
        with self._writing() as database:
            database.executemany("UPDATE decision SET ended = 1 WHERE gtrid = ?", [(gtrid,) for gtrid in ended])
            database.executemany(
                "INSERT INTO count VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n", counts.items()
            )

    # -- coins

    def coin(self, coin: str) -> Record | None:
        """Return the entry of a coin; ``None`` if no decided transfer makes it."""
        rows = self._read(_COIN, coin)
        if not rows:
            return None
        amount, made_by, spent_by, dtx_id, copy, contested = rows[0]
        return Record(
            amount=int(str(amount)),
            made_by=str(made_by),
            spent_by=None if spent_by is None else str(spent_by),
            dtx_id=None if dtx_id is None else str(dtx_id),
            copy=None if copy is None else str(copy),
            contested=bool(contested),
        )

    def unspent(self) -> dict[Coin, str]:
        """Return every coin that must exist, with its queue."""
        rows = self._read("SELECT id, amount, queue FROM coin WHERE spent_by IS NULL")
        return {Coin(id=str(name), amount=int(str(amount))): str(queue) for name, amount, queue in rows}

    # -- banks

    def entries(self, bank: str, *, ended: bool = False) -> dict[str, int]:
        """Return the changes decided for a bank in this round; *ended*: only those known to be committed everywhere."""
        query = "SELECT gtrid, delta FROM entry WHERE bank = ?"
        if ended:
            query += " AND gtrid IN (SELECT gtrid FROM decision WHERE ended)"
        return {str(gtrid): int(str(delta)) for gtrid, delta in self._read(query, bank)}

    # -- figures

    def fault(self, text: str) -> None:
        """Record a broken guarantee."""
        with self._writing() as database:
            database.execute("INSERT INTO fault VALUES (?, ?)", (time.time(), text))

    def faults(self) -> list[str]:
        """Return all broken guarantees."""
        return [str(text) for (text,) in self._read("SELECT text FROM fault ORDER BY at")]

    def repeat(self, text: str, *, same_copy: bool = False) -> None:
        """Record a further copy of a coin that was spent, or the copy that was spent."""
        with self._writing() as database:
            database.execute("INSERT INTO repeat VALUES (?, ?, ?)", (time.time(), text, same_copy))

    def repeats(self) -> list[str]:
        """Return all recorded repeats."""
        return [str(text) for (text,) in self._read("SELECT text FROM repeat ORDER BY at")]

    def same_copies(self) -> int:
        """Return the number of repeats that are the copy that was spent."""
        return int(str(self._read("SELECT count(*) FROM repeat WHERE same_copy")[0][0]))

    def counts(self) -> Counter[str]:
        """Return the counts of all rounds."""
        return Counter({str(name): int(str(n)) for name, n in self._read("SELECT name, n FROM count")})

    def progress(self) -> int:
        """Return the number of transfers decided in this round."""
        return int(str(self._read("SELECT count(*) FROM decision")[0][0]))

    def decisions(self) -> list[tuple[str, list[str]]]:
        """Return the transfers decided in this round, with their participants."""
        rows = self._read("SELECT gtrid, sides FROM decision")
        return [(str(gtrid), json.loads(str(sides))) for gtrid, sides in rows]

    def decision_times(self) -> list[float]:
        """Return the times of the round at which a transfer with queues was decided after the votes."""
        rows = self._read("SELECT at FROM decision WHERE instr(sides, ?) AND NOT instr(kind, 'one phase')", QUEUE_SIDE)
        return [float(str(at)) for (at,) in rows]

    def close_round(self) -> None:
        """Delete the decisions of the round. Coins remain, because a repeat may come much later."""
        with self._writing() as database:
            database.execute(
                "INSERT INTO count SELECT 'committed: ' || kind, count(*) FROM decision WHERE true GROUP BY kind "
                "ON CONFLICT (name) DO UPDATE SET n = n + excluded.n"
            )
            database.execute("DELETE FROM decision")
            database.execute("DELETE FROM entry")


def what_is_wrong_with(seen: Seen, record: Record | None) -> str | None:
    """Compare a delivered coin with its entry; return the broken guarantee, ``None`` if there is none."""
    if record is None:
        return f"{seen.coin.id} was delivered, and its making was never decided"
    if record.amount != seen.coin.amount:
        return f"{seen.coin.id} is worth {seen.coin.amount} and was made as {record.amount}"
    if record.spent_by is not None and not record.contested and record.dtx_id != seen.dtx_id:
        return f"{seen.coin.id} came again as {seen.dtx_id!r}, it was {record.dtx_id!r} when {record.spent_by} spent it"
    return None
