"""A transaction manager that recovers: messages of dtx and rows of databases in one transaction.

::

    tm = TransactionManager(
        node="orders-1",
        log="/var/lib/orders/tm.db",
        resources=[
            DtxResource("queue", "amqp://guest:guest@127.0.0.1:5673/"),
            Pep249Resource("orders", lambda: psycopg.connect("postgresql://…")),
        ],
    )
    with tm, tm.transaction() as tx:
        tx.enlist("orders").execute("INSERT INTO orders VALUES (%s, %s)", (1, "tea"))
        tx.enlist("queue").basic_publish("", "shipping", b"1")

The protocol is two-phase commit with presumed abort. The table shows the result if the process dies:

====================================================  =================================================================
moment of the failure                                 result
====================================================  =================================================================
before any branch is prepared                         the servers roll back by themselves: the connections are closed
with branches prepared, before the decision           recovery writes "rollback" to the log and rolls them back, when
                                                      they are older than the interval and the process is dead
while the decision is being written                   the log has the decision or not; recovery follows the log
after the decision, in the second phase               recovery commits the branches that are left
when a branch alone commits in one phase              the branch is committed or not, as its resource decides; the log
                                                      has no record of it. The program does not know the outcome: it
                                                      must look for the data that it wrote
when all branches are completed, before the log       recovery asks again; the branches are not known any more, so it
                                                      finishes the decision
while a heuristic outcome is recorded or forgotten    it is recorded first; recovery finds it again at the resource
at any point of recovery                              the next round continues
====================================================  =================================================================

:class:`TransactionManager` is for threads, :class:`~dtx.client.tm.asynchronous.AsyncTransactionManager` for asyncio.
"""

from dtx.client.tm.commitment import Outcome
from dtx.client.tm.databases import open_log
from dtx.client.tm.decisions import Decision, DecisionLog, DecisionRow
from dtx.client.tm.errors import (
    HeuristicCommit,
    HeuristicHazard,
    HeuristicMixed,
    HeuristicOutcome,
    HeuristicReport,
    HeuristicRollback,
    LogFailed,
    Misuse,
    OutcomeUnknown,
    RolledBack,
    TimedOut,
    TransactionError,
)
from dtx.client.tm.manager import Transaction, TransactionManager
from dtx.client.tm.recovery import FORMAT_ID, Gtrid, RecoveryReport
from dtx.client.tm.resources import DtxResource, Pep249Resource, Resource, ResourceSession

Session = ResourceSession  # deprecated: the former name, kept for one version

__all__ = [
    "FORMAT_ID",
    "Decision",
    "DecisionLog",
    "DecisionRow",
    "DtxResource",
    "Gtrid",
    "HeuristicCommit",
    "HeuristicHazard",
    "HeuristicMixed",
    "HeuristicOutcome",
    "HeuristicReport",
    "HeuristicRollback",
    "LogFailed",
    "Misuse",
    "Outcome",
    "OutcomeUnknown",
    "Pep249Resource",
    "RecoveryReport",
    "Resource",
    "ResourceSession",
    "RolledBack",
    "Session",
    "TimedOut",
    "Transaction",
    "TransactionError",
    "TransactionManager",
    "open_log",
]
