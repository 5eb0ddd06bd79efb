"""Money between a PostgreSQL table and a queue, in one transaction, with kill -9 during transactions.

Read the program from top to bottom. Alice sends money to Bob. The money is taken from her account, a row in PostgreSQL,
sent as a message, and added to his account. At every check, accounts and messages must have the same total; otherwise
the program ends with status 1.

PostgreSQL has two-phase commit. The queue has it through dtx, which this program kills before and after a decision.
With BROKER=amqp://… the queue is in RabbitMQ, which has no XA; otherwise it is in dtx.
"""

import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pika
import psycopg
from pika.exceptions import AMQPError

from dtx.client import tpc
from dtx.client.tpc import TwoPhaseConnection
from dtx.embedded.postgres import EmbeddedPostgresError
from examples.demo.stage import DemoError, Stage

TOTAL = 100
FORMAT_ID = 0x0D7C0DE  # identifies the transactions of this transaction manager


# -- the transaction manager ------------------------------------------------------------------------------------------
# Both sides have the same methods: those of psycopg for PostgreSQL, those of dtx.client.tpc for the queue.


class Died(Exception):
    """The transaction manager dies here; the rest of the transaction is not executed."""


class Decisions:
    """The log of the transaction manager. Transactions in the log are committed, all others are not."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def commit(self, transaction: str) -> None:
        """Decide. When this returns, the decision is on disk."""
        with self._path.open("a") as log:
            print(transaction, file=log, flush=True)
            os.fsync(log.fileno())

    def committed(self, transaction: str) -> bool:
        """Whether the decision was commit."""
        return self._path.exists() and transaction in self._path.read_text().split()


class Bank:
    """One connection to each side, and transactions over both."""

    def __init__(self, stage: Stage, decisions: Decisions) -> None:
        self.stage = stage
        self.decisions = decisions
        self.postgres = psycopg.connect(stage.database_url)
        self.amqp = pika.BlockingConnection(pika.URLParameters(stage.dtx_url))
        self.channel = self.amqp.channel()
        self.queues = TwoPhaseConnection(self.channel)
        # Any, because psycopg's annotations require its own xid class; both sides accept xids of the other.
        self.sides: dict[str, Any] = {"PostgreSQL": self.postgres, stage.keeper: self.queues}

    def close(self) -> None:
        """Close both connections."""
        self.postgres.close()
        with suppress(AMQPError):  # dtx may be dead
            self.amqp.close()

    def transact(self, name: str, work: Callable[[], None], *, kill: str = "") -> None:
        """Do *work* on both sides or on neither. *kill* tells whether dtx dies before or after the decision."""
        transaction = f"{self.stage.run}-{name}"
        for side in self.sides.values():
            side.tpc_begin(side.xid(FORMAT_ID, transaction, "branch"))
        work()
        for side in self.sides.values():
            side.tpc_prepare()
        say("both sides are prepared")
        if kill == "before the decision":
            self.stage.kill_dtx()
            raise Died("dtx is killed with kill -9, and the program ends, before the decision")
        self.decisions.commit(transaction)
        if kill == "after the decision":
            self.stage.kill_dtx()
            say("the decision is durable, and dtx is killed with kill -9 before it gets the decision")
        for side in reversed(self.sides.values()):
            side.tpc_commit()

    def recover(self) -> None:
        """After a crash: commit the decided transactions and roll the others back, on both sides."""
        for name, side in self.sides.items():
            for xid in side.tpc_recover():
                if xid.format_id != FORMAT_ID or not xid.gtrid.startswith(self.stage.run):
                    continue  # of another transaction manager
                decided = self.decisions.committed(xid.gtrid)
                if decided:
                    side.tpc_commit(xid)
                else:
                    side.tpc_rollback(xid)
                outcome = "decided, so it is committed" if decided else "never decided, so it is rolled back"
                say(f"{name:<10} has {xid.gtrid} in doubt: {outcome}")

    # -- the business -------------------------------------------------------------------------------------------------

    def send(self, amount: int) -> None:
        """Take money from Alice's account and send it as a message."""
        self.postgres.execute("UPDATE account SET balance = balance - %s WHERE name = 'alice'", [amount])
        self.channel.basic_publish("", self.stage.queue, str(amount).encode(), pika.BasicProperties(delivery_mode=2))

    def receive(self) -> None:
        """Receive a message and add its money to Bob's account."""
        method, _, body = self.channel.basic_get(self.stage.queue)
        if method is None:
            raise DemoError("the message with the money is lost")
        self.channel.basic_ack(method.delivery_tag)
        self.postgres.execute("UPDATE account SET balance = balance + %s WHERE name = 'bob'", [int(body)])


# -- the steps --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a step."""
    print(f"    {text}", flush=True)


def check(stage: Stage, alice: int, on_the_way: list[int], bob: int) -> None:
    """Read both sides over separate connections, and compare them with the expected amounts."""
    with psycopg.connect(stage.database_url) as database:
        accounts: dict[str, int] = dict(database.execute("SELECT name, balance FROM account").fetchall())
    with stage.channel_past_dtx() as channel:
        messages = []
        while (got := channel.basic_get(stage.queue))[0] is not None:
            messages.append(int(got[2]))  # not acknowledged: they return when the connection closes
    print(f"    => alice {accounts['alice']:>3}   on the way {messages!s:>8}   bob {accounts['bob']:>3}", flush=True)
    found = (accounts["alice"], sorted(messages), accounts["bob"])
    if found != (alice, sorted(on_the_way), bob) or alice + sum(on_the_way) + bob != TOTAL:
        raise DemoError(f"the two sides do not agree: {found} instead of {(alice, on_the_way, bob)}")


def killed(stage: Stage, decisions: Decisions, name: str, work: Callable[[Bank], None], kill: str) -> None:
    """Run a transaction during which dtx is killed. It stays open on both sides."""
    with closing(Bank(stage, decisions)) as bank:
        try:
            bank.transact(name, lambda: work(bank), kill=kill)
        except Died as how:
            say(str(how))
        except tpc.OperationalError as error:
            say(f"the program gets {error.xa.name if error.xa else error}; the outcome stays open")
        else:
            raise DemoError("the commit succeeded although dtx was killed")


def restart_and_recover(stage: Stage, decisions: Decisions) -> None:
    """Start dtx, and recover as the transaction manager does at each start."""
    stage.start_dtx()
    say("dtx runs again; the transaction manager asks both sides for transactions in doubt")
    with closing(Bank(stage, decisions)) as bank:
        bank.recover()


def tell(stage: Stage) -> None:
    """Run all steps."""
    decisions = Decisions(stage.directory / "decisions")
    with psycopg.connect(stage.database_url) as database:
        database.execute("CREATE TABLE account (name text PRIMARY KEY, balance integer CHECK (balance >= 0))")
        database.execute("INSERT INTO account VALUES ('alice', %s), ('bob', 0)", [TOTAL])
    check(stage, 100, [], 0)

    print("\n1. Alice sends 10. Nothing fails.")
    with closing(Bank(stage, decisions)) as bank:
        bank.transact("first", lambda: bank.send(10))
        say("committed on both sides")
    check(stage, 90, [10], 0)

    print("\n2. Alice sends 20. dtx dies between prepare and commit.")
    killed(stage, decisions, "second", lambda bank: bank.send(20), "after the decision")
    if stage.has_broker:  # without a broker, the queue can be read only after the restart of dtx
        check(stage, 90, [10], 0)
    restart_and_recover(stage, decisions)
    check(stage, 70, [10, 20], 0)

    print("\n3. Bob receives the first message. dtx dies after it has taken it from the queue, before the decision.")
    killed(stage, decisions, "third", Bank.receive, "before the decision")
    restart_and_recover(stage, decisions)
    check(stage, 70, [10, 20], 0)

    print("\n4. Bob receives both. Nothing fails.")
    with closing(Bank(stage, decisions)) as bank:
        bank.transact("fourth", bank.receive)
        bank.transact("fifth", bank.receive)
    check(stage, 70, [], 30)
    print("\nBoth sides agree: nothing was lost, and nothing was done twice.")


def main() -> int:
    """Run the demo. Return 0 if both sides agreed at every check."""
    stage = Stage()
    place = "in front of RabbitMQ" if stage.has_broker else "without a broker"
    print(f"Starting PostgreSQL for the accounts, and dtx {place} ...", flush=True)
    try:
        with stage:
            tell(stage)
    except (DemoError, EmbeddedPostgresError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
