"""Money between a PostgreSQL table and a queue, in one transaction, with a kill -9 in the middle.

Read it from top to bottom. Alice sends money to Bob. It leaves her account (a row in PostgreSQL) and travels as a
message until it reaches his. At every moment accounts and messages together hold the same amount, and this program ends
with status 1 if they ever do not.

PostgreSQL can take part in a distributed transaction by itself. The queue does so through dtx, which this program kills
at the two worst moments there are. With BROKER=amqp://… the queue is one of RabbitMQ, which has no XA of its own;
without, dtx keeps it itself.
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
FORMAT_ID = 0x0D7C0DE  # ours: a transaction manager recognises its own transactions by it


# -- the transaction manager ------------------------------------------------------------------------------------------
# It is short, because both sides have the same methods: psycopg's tpc_* for PostgreSQL, dtx.client.tpc's for the queue.


class Died(Exception):
    """The transaction manager is dead; nothing after this line of its life happens."""


class Decisions:
    """The transaction manager's own log. What is in it is committed; what is not in it never will be."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def commit(self, transaction: str) -> None:
        """Decide. When this returns, the decision is on the disk."""
        with self._path.open("a") as log:
            print(transaction, file=log, flush=True)
            os.fsync(log.fileno())

    def committed(self, transaction: str) -> bool:
        """What was decided."""
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
        # psycopg's annotations name its own xid; both take the other's.
        self.sides: dict[str, Any] = {"PostgreSQL": self.postgres, stage.keeper: self.queues}

    def close(self) -> None:
        """Let go of both sides."""
        self.postgres.close()
        with suppress(AMQPError):  # dtx may be dead, and the connection with it
            self.amqp.close()

    def transact(self, name: str, work: Callable[[], None], *, kill: str = "") -> None:
        """Do *work* on both sides or on neither. *kill* says when dtx dies: before or after the decision."""
        transaction = f"{self.stage.run}-{name}"
        for side in self.sides.values():
            side.tpc_begin(side.xid(FORMAT_ID, transaction, "branch"))
        work()
        for side in self.sides.values():
            side.tpc_prepare()
        say("both sides have promised that they can commit")
        if kill == "before the decision":
            self.stage.kill_dtx()
            raise Died("dtx is killed with kill -9, and the program dies with it, before there is a decision")
        self.decisions.commit(transaction)
        if kill == "after the decision":
            self.stage.kill_dtx()
            say("the decision is made, and dtx is killed with kill -9 before it hears of it")
        for side in reversed(self.sides.values()):
            side.tpc_commit()

    def recover(self) -> None:
        """After a crash: commit what was decided, roll back the rest, on every side."""
        for name, side in self.sides.items():
            for xid in side.tpc_recover():
                if xid.format_id != FORMAT_ID or not xid.gtrid.startswith(self.stage.run):
                    continue  # somebody else's
                decided = self.decisions.committed(xid.gtrid)
                if decided:
                    side.tpc_commit(xid)
                else:
                    side.tpc_rollback(xid)
                outcome = "decided, so it is committed" if decided else "never decided, so it is rolled back"
                say(f"{name:<10} has {xid.gtrid} in doubt: {outcome}")

    # -- the business -------------------------------------------------------------------------------------------------

    def send(self, amount: int) -> None:
        """Money leaves Alice's account and goes on its way."""
        self.postgres.execute("UPDATE account SET balance = balance - %s WHERE name = 'alice'", [amount])
        self.channel.basic_publish("", self.stage.queue, str(amount).encode(), pika.BasicProperties(delivery_mode=2))

    def receive(self) -> None:
        """Money that is on its way reaches Bob's account."""
        method, _, body = self.channel.basic_get(self.stage.queue)
        if method is None:
            raise DemoError("the money that was on its way is lost")
        self.channel.basic_ack(method.delivery_tag)
        self.postgres.execute("UPDATE account SET balance = balance + %s WHERE name = 'bob'", [int(body)])


# -- the story --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """One step."""
    print(f"    {text}", flush=True)


def check(stage: Stage, alice: int, on_the_way: list[int], bob: int) -> None:
    """Look at both sides from outside, and compare with what must be there."""
    with psycopg.connect(stage.database_url) as database:
        accounts: dict[str, int] = dict(database.execute("SELECT name, balance FROM account").fetchall())
    with stage.channel_past_dtx() as channel:
        messages = []
        while (got := channel.basic_get(stage.queue))[0] is not None:
            messages.append(int(got[2]))  # not acked: they go back when the connection closes
    print(f"    => alice {accounts['alice']:>3}   on the way {messages!s:>8}   bob {accounts['bob']:>3}", flush=True)
    found = (accounts["alice"], sorted(messages), accounts["bob"])
    if found != (alice, sorted(on_the_way), bob) or alice + sum(on_the_way) + bob != TOTAL:
        raise DemoError(f"the two sides do not agree: {found} where {(alice, on_the_way, bob)} is right")


def killed(stage: Stage, decisions: Decisions, name: str, work: Callable[[Bank], None], kill: str) -> None:
    """A transaction in which dtx dies, so that it stays open on both sides."""
    with closing(Bank(stage, decisions)) as bank:
        try:
            bank.transact(name, lambda: work(bank), kill=kill)
        except Died as how:
            say(str(how))
        except tpc.OperationalError as error:
            say(f"the program gets {error.xa.name if error.xa else error}, and gives up with the outcome open")
        else:
            raise DemoError("dtx was killed and the commit went through nevertheless")


def restart_and_recover(stage: Stage, decisions: Decisions) -> None:
    """What the transaction manager does first whenever it starts."""
    stage.start_dtx()
    say("dtx runs again; the transaction manager asks both sides what is in doubt")
    with closing(Bank(stage, decisions)) as bank:
        bank.recover()


def tell(stage: Stage) -> None:
    """The story."""
    decisions = Decisions(stage.directory / "decisions")
    with psycopg.connect(stage.database_url) as database:
        database.execute("CREATE TABLE account (name text PRIMARY KEY, balance integer CHECK (balance >= 0))")
        database.execute("INSERT INTO account VALUES ('alice', %s), ('bob', 0)", [TOTAL])
    check(stage, 100, [], 0)

    print("\n1. Alice sends 10. Nobody dies.")
    with closing(Bank(stage, decisions)) as bank:
        bank.transact("first", lambda: bank.send(10))
        say("committed on both sides")
    check(stage, 90, [10], 0)

    print("\n2. Alice sends 20. dtx dies between prepare and commit.")
    killed(stage, decisions, "second", lambda bank: bank.send(20), "after the decision")
    if stage.has_broker:  # else nobody can look into the queue until dtx is there again
        check(stage, 90, [10], 0)
    restart_and_recover(stage, decisions)
    check(stage, 70, [10, 20], 0)

    print("\n3. Bob receives the first message. dtx dies after it has taken it from the queue, before the decision.")
    killed(stage, decisions, "third", Bank.receive, "before the decision")
    restart_and_recover(stage, decisions)
    check(stage, 70, [10, 20], 0)

    print("\n4. Bob receives both. Nobody dies.")
    with closing(Bank(stage, decisions)) as bank:
        bank.transact("fourth", bank.receive)
        bank.transact("fifth", bank.receive)
    check(stage, 70, [], 30)
    print("\nBoth sides agree: nothing was lost, nothing was done twice.")


def main() -> int:
    """Run it; 0 when both sides agreed all the way."""
    stage = Stage()
    place = "in front of RabbitMQ" if stage.has_broker else "with queues of its own"
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
