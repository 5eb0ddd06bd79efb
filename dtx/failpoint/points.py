"""The list of all failpoints: number, module, and a sentence.

Numbers and names never change. A sentence says what is durable, sent or answered when the point is reached. *Before*
and *after* in a name mean the write, the send or the step that the name has.
"""

from enum import Enum


class Point(Enum):
    """An instant at which dtx may die."""

    # -- the log

    LOG_TAKING_BEFORE = 101, "dtx.log.write_queue", "nothing is durable: no vote, and no message was taken"
    LOG_TAKING_AFTER = (
        102,
        "dtx.log.write_queue",
        "the branch is logged as taking, with its work; no message was taken yet",
    )
    LOG_PREPARED_BEFORE = 103, "dtx.log.write_queue", "no vote is durable; alongside, consumed messages have been taken"
    LOG_PREPARED_AFTER = 104, "dtx.log.write_queue", "the vote is durable; no answer was sent"
    LOG_COMMITTING_BEFORE = 105, "dtx.log.write_queue", "the decision to commit is not durable"
    LOG_COMMITTING_AFTER = 106, "dtx.log.write_queue", "the decision to commit is durable; no message was published yet"
    LOG_ROLLING_BACK_BEFORE = 107, "dtx.log.write_queue", "the decision to roll back is not durable"
    LOG_ROLLING_BACK_AFTER = (
        108,
        "dtx.log.write_queue",
        "the decision to roll back is durable; no message was put back yet",
    )
    LOG_UNIT_BEFORE = 109, "dtx.log.write_queue", "phase two needs a new unit, and the log has the old one"
    LOG_UNIT_AFTER = 110, "dtx.log.write_queue", "the log has lock and nonce of the unit that will be sent"
    LOG_STUCK_BEFORE = 111, "dtx.log.write_queue", "the broker refused phase two; the log does not have that"
    LOG_STUCK_AFTER = (
        112,
        "dtx.log.write_queue",
        "the log has the broker's refusal; phase two waits for a new request",
    )
    LOG_HEURISTIC_COMMITTING_BEFORE = 113, "dtx.log.write_queue", "an operator's decision to commit is not durable"
    LOG_HEURISTIC_COMMITTING_AFTER = (
        114,
        "dtx.log.write_queue",
        "an operator's decision to commit is durable; its work has not begun",
    )
    LOG_HEURISTIC_ROLLING_BACK_BEFORE = 115, "dtx.log.write_queue", "an operator's decision to roll back is not durable"
    LOG_HEURISTIC_ROLLING_BACK_AFTER = (
        116,
        "dtx.log.write_queue",
        "an operator's decision to roll back is durable; its work has not begun",
    )
    LOG_HEURISTIC_BEFORE = (
        117,
        "dtx.log.write_queue",
        "a heuristic outcome is not durable; its work is done, or (standalone) is done by this very write",
    )
    LOG_HEURISTIC_AFTER = (
        118,
        "dtx.log.write_queue",
        "a heuristic outcome is durable and its work is done; no answer was sent",
    )
    LOG_MENDED_BEFORE = (
        119,
        "dtx.log.write_queue",
        "an operator's change to a message on which phase two is stuck is not durable",
    )
    LOG_MENDED_AFTER = 120, "dtx.log.write_queue", "the change is durable: the message is redirected or discarded"
    LOG_COMMITTED_BEFORE = (
        121,
        "dtx.log.write_queue",
        "the log still has a branch whose commit is done, or (standalone) is done by this very write",
    )
    LOG_COMMITTED_AFTER = 122, "dtx.log.write_queue", "the log has removed the branch as committed"
    LOG_ROLLED_BACK_BEFORE = (
        123,
        "dtx.log.write_queue",
        "the log still has a branch whose roll-back is done, or (standalone) is done by this very write",
    )
    LOG_ROLLED_BACK_AFTER = 124, "dtx.log.write_queue", "the log has removed the branch as rolled back"
    LOG_FORGOTTEN_BEFORE = 125, "dtx.log.write_queue", "the log still has the heuristic outcome"
    LOG_FORGOTTEN_AFTER = 126, "dtx.log.write_queue", "the log has removed the heuristic outcome"
    LOG_NOTED_BEFORE = (
        127,
        "dtx.log.write_queue",
        "the journal has no line about the end of a branch that was never logged",
    )
    LOG_NOTED_AFTER = (
        128,
        "dtx.log.write_queue",
        "the journal has a line about the end of a branch that was never logged",
    )
    LOG_ONE_PHASE_BEFORE = (
        129,
        "dtx.log.write_queue",
        "a one-phase commit without a broker is not durable: none of its work is",
    )
    LOG_ONE_PHASE_AFTER = (
        130,
        "dtx.log.write_queue",
        "a one-phase commit without a broker is durable, with its work; no message is shown yet",
    )
    LOG_STORED_BEFORE = 131, "dtx.log.write_queue", "publishes and acknowledgements outside of branches are not durable"
    LOG_STORED_AFTER = 132, "dtx.log.write_queue", "they are durable; nothing is confirmed or shown yet"
    LOG_DEFINED_BEFORE = 133, "dtx.log.write_queue", "topology is only in memory"
    LOG_DEFINED_AFTER = 134, "dtx.log.write_queue", "topology is durable; no answer was sent"
    LOG_SENT = (
        135,
        "dtx.log.writer",
        "a group of records was sent to PostgreSQL; whether it commits is not known",
    )
    LOG_CARRIED = 136, "dtx.log.writer", "the connection was lost under a group: whether it committed is not known"
    LOG_SETTLED = 137, "dtx.log.writer", "it is known again; no waiting caller was told"

    # -- the database, its lease and its tables

    MIGRATION_BEFORE = 201, "dtx.server.service", "the tables are those of an earlier version, or there are none"
    MIGRATION_AFTER = 202, "dtx.server.service", "the tables are those of this version"
    LEASE_TAKE_BEFORE = 203, "dtx.log.lease", "the lease is free, or has run out"
    LEASE_TAKE_AFTER = 204, "dtx.log.lease", "this dtx has the lease; earlier sessions of others cannot write any more"
    EPOCH_BEFORE = (
        205,
        "dtx.log.writer",
        "the session of the writer is new; an earlier session of this dtx may still write",
    )
    EPOCH_SENT = 206, "dtx.log.writer", "the new epoch was sent"
    EPOCH_AFTER = 207, "dtx.log.writer", "no earlier session of this dtx can write any more"
    LEASE_RENEW_BEFORE = 208, "dtx.log.lease", "the lease is about to be renewed"
    LEASE_RENEW_AFTER = 209, "dtx.log.lease", "the lease is renewed"
    LEASE_LOST = 210, "dtx.log.lease", "another dtx has the lease: PostgreSQL accepts no write of this one"
    LEASE_RELEASE_BEFORE = 211, "dtx.log.lease", "everything is written; this dtx still has the lease"
    LEASE_RELEASE_AFTER = 212, "dtx.log.lease", "a standby may take over"
    PARTITIONS_BEFORE = 213, "dtx.log.postgres", "the journal's partitions for the coming days may be missing"
    PARTITIONS_AFTER = 214, "dtx.log.postgres", "the partitions exist, and old ones were dropped"

    # -- start and end of the service

    RESTART_ROW = (
        301,
        "dtx.manager.maintenance",
        "one more branch of the log was read; a branch that needs a decision waits",
    )
    RESTART_LOADED = 302, "dtx.manager.maintenance", "all branches of the log were read; none was decided"
    RESTART_DECIDE_BEFORE = 303, "dtx.manager.maintenance", "an unfinished branch is about to be resumed"
    RESTART_DECIDE_AFTER = 304, "dtx.manager.maintenance", "its outcome is decided, and the log has it"
    REREAD_BEFORE = (
        305,
        "dtx.manager.branch_persistence",
        "a write failed: the state in memory is not valid any more",
    )
    REREAD_AFTER = 306, "dtx.manager.branch_persistence", "the log was read again"
    STORE_OPENED = 307, "dtx.server.standalone.mode", "topology and positions of messages are loaded; branches are not"
    STORE_BEGUN = (
        308,
        "dtx.server.standalone.mode",
        "the queues are filled; messages that a restart does not keep are being removed",
    )
    ACCOUNTS_BEFORE = (
        309,
        "dtx.auth.accounts",
        "without a broker, there may be no user and no virtual host yet",
    )
    ACCOUNTS_AFTER = 310, "dtx.auth.accounts", "guest and its virtual host were created, if there were none"
    READY_BEFORE = 311, "dtx.server.service", "clients can connect; READY was not written"
    READY_AFTER = 312, "dtx.server.service", "the line with READY was written"
    STOP_DRAINED = 313, "dtx.server.service", "no operation is pending, or --drain-timeout is over"

    # -- work and effects of a branch

    HELD_PUBLISH = 401, "dtx.store.work", "a publish is held in memory for its branch"
    HELD_CONSUME = (
        402,
        "dtx.store.work",
        "an acknowledgement is held in memory for its branch; the message still belongs to the queue",
    )
    TAKE_BEFORE = (
        403,
        "dtx.manager.effects",
        "the log has the branch as taking; its consumed messages are about to be taken",
    )
    TAKE_AFTER = 404, "dtx.manager.effects", "the result of taking is known; the log does not have it"
    APPLY_BEFORE = (
        405,
        "dtx.manager.effects",
        "the decision to commit is durable; the messages are about to be published",
    )
    APPLY_AFTER = 406, "dtx.manager.effects", "they are published, or refused; no answer was sent"
    PUT_BACK_BEFORE = (
        407,
        "dtx.manager.effects",
        "the decision to roll back is durable; consumed messages are about to be put back",
    )
    PUT_BACK_AFTER = 408, "dtx.manager.effects", "they are back, or refused; no answer was sent"
    RELEASE_BEFORE = 409, "dtx.manager.effects", "the branch cannot commit any more; its deliveries are still held"
    RELEASE_AFTER = 410, "dtx.manager.effects", "publishes are dropped; deliveries are being returned"
    REMEMBER_BEFORE = (
        411,
        "dtx.manager.effects",
        "a branch was rolled back without its transaction manager; it has no tombstone",
    )
    REMEMBER_AFTER = 412, "dtx.manager.effects", "a tombstone will answer one rollback"
    ANSWER_BEFORE = 413, "dtx.manager.effects", "all that the answer promises is durable"
    ANSWER_AFTER = 414, "dtx.manager.effects", "the answer was handed over to be sent"
    REFUSE_BEFORE = 415, "dtx.manager.effects", "phase two is stuck and the log has it"
    REFUSE_AFTER = 416, "dtx.manager.effects", "the refusal was handed over to be sent"
    SHOWN_BEFORE = (
        417,
        "dtx.store.postgres.branches",
        "a commit without a broker is durable, and the queues do not show it",
    )
    SHOWN_AFTER = (
        418,
        "dtx.store.postgres.branches",
        "the queues show the published messages, and have dropped the consumed ones",
    )
    RETURNED_BEFORE = (
        419,
        "dtx.store.postgres.branches",
        "a roll-back without a broker is durable; consumed messages are still held",
    )
    RETURNED_AFTER = 420, "dtx.store.postgres.branches", "consumed messages are in their places again"
    ORDER_JUDGED = 421, "dtx.manager.operators", "an operator's order is legal; nothing of it is durable"
    ORDER_DONE = 422, "dtx.manager.operators", "an operator's order is carried out; the operator was not told"
    AUDIT_BEFORE = 423, "dtx.admin.api_context", "an action is not in the audit log, and has not begun"
    AUDIT_BEGUN = 424, "dtx.admin.api_context", "the action is in the audit log as begun, but has not begun"
    AUDIT_END_BEFORE = 425, "dtx.admin.api_context", "the action has ended; the audit log does not have its result"
    AUDIT_ENDED = 426, "dtx.admin.api_context", "the audit log has the result; the operator was not told"

    # -- frames to the broker

    LOCK_BEFORE = (
        501,
        "dtx.server.alongside.lock",
        "the first select of a connection; nothing shows that it may act for branches",
    )
    LOCK_AFTER = 502, "dtx.server.alongside.lock", "its lock exists: a successor will wait for the connection to end"
    TAKING_BEFORE = 503, "dtx.store.rabbitmq.send_queue", "no frame of a unit that takes messages is sent"
    TAKING_ACKED = (
        504,
        "dtx.store.rabbitmq.send_queue",
        "its acknowledgements are sent, without receipt and tx.commit: they have no effect",
    )
    TAKING_RECEIPTED = 505, "dtx.store.rabbitmq.send_queue", "its receipt is sent too"
    TAKING_SENT = (
        506,
        "dtx.store.rabbitmq.send_queue",
        "tx.commit is sent: the broker settles the consumed messages, now or never",
    )
    TAKING_COMMITTED = 507, "dtx.store.rabbitmq.send_queue", "tx.commit-ok was received: only dtx has the messages"
    SETTLE_BEFORE = (
        508,
        "dtx.store.rabbitmq.send_queue",
        "acknowledgements outside of a branch, or requeued deliveries: nothing is sent",
    )
    SETTLE_SENT = 509, "dtx.store.rabbitmq.send_queue", "they are sent, with tx.commit"
    SETTLE_COMMITTED = 510, "dtx.store.rabbitmq.send_queue", "tx.commit-ok was received: they are settled"
    UNIT_BEFORE = (
        511,
        "dtx.store.rabbitmq.commit_connection",
        "the log has the unit of phase two; no frame of it is sent",
    )
    UNIT_PUBLISHED = (
        512,
        "dtx.store.rabbitmq.commit_connection",
        "its messages are sent, without receipt and tx.commit: they are not visible",
    )
    UNIT_RECEIPTED = 513, "dtx.store.rabbitmq.commit_connection", "its receipt is sent too"
    UNIT_SENT = (
        514,
        "dtx.store.rabbitmq.commit_connection",
        "tx.commit is sent: the broker enqueues the messages, now or never",
    )
    UNIT_COMMITTED = (
        515,
        "dtx.store.rabbitmq.commit_connection",
        "tx.commit-ok was received: the messages are in their queues",
    )
    UNIT_REFUSED = (
        516,
        "dtx.store.rabbitmq.commit_connection",
        "the broker has closed the unit's channel: it refuses a message",
    )
    UNIT_LOST = 517, "dtx.store.rabbitmq.commit_connection", "the connection was lost under the unit"
    RESOLVE_BEFORE = 518, "dtx.store.rabbitmq.commit_connection", "the outcome of a unit is to be determined"
    RESOLVE_FREE = 519, "dtx.store.rabbitmq.commit_connection", "its lock is free: the unit has happened, or never will"
    RESOLVE_READ = 520, "dtx.store.rabbitmq.commit_connection", "the receipts are read"
    COMMIT_CONNECTION_LOCK_BEFORE = (
        521,
        "dtx.store.rabbitmq.commit_connection",
        "a connection of dtx's own is open; nothing shows that it may act",
    )
    COMMIT_CONNECTION_LOCK_AFTER = 522, "dtx.store.rabbitmq.commit_connection", "its lock exists"
    MARKER_BEFORE = (
        523,
        "dtx.store.rabbitmq.receipts",
        "no marker is in the receipt queues: the broker is new, or has restarted",
    )
    MARKER_WRITTEN = 524, "dtx.store.rabbitmq.receipts", "markers are sent, without tx.commit"
    MARKER_SENT = 525, "dtx.store.rabbitmq.receipts", "markers are sent, with tx.commit"
    MARKER_AFTER = 526, "dtx.store.rabbitmq.receipts", "a marker is in every receipt queue"
    COMMIT_CONNECTION_READY = (
        527,
        "dtx.store.rabbitmq.commit_connection",
        "the commit connection of a vhost is about to work",
    )
    DRAIN_BEFORE = (
        528,
        "dtx.store.rabbitmq.receipts",
        "the log has the outcome of every unit of a generation; its receipts exist",
    )
    DRAIN_PURGED = 529, "dtx.store.rabbitmq.receipts", "its receipts are gone; its marker may still be unacknowledged"
    DRAIN_AFTER = 530, "dtx.store.rabbitmq.receipts", "the marker is being returned"

    # -- answers to the dtx methods

    REPLY_SELECT_BEFORE = 601, "dtx.server.failpoints", "the channel is selected; the client was not told"
    REPLY_SELECT_SENT = 602, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_START_BEFORE = 603, "dtx.server.failpoints", "the branch is in memory; the client was not told"
    REPLY_START_SENT = 604, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_END_BEFORE = (
        605,
        "dtx.server.failpoints",
        "the association has ended or is suspended; the client was not told",
    )
    REPLY_END_SENT = 606, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_PREPARE_BEFORE = (
        607,
        "dtx.server.failpoints",
        "the vote is durable, or the branch is rolled back; the client was not told",
    )
    REPLY_PREPARE_SENT = 608, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_COMMIT_BEFORE = 609, "dtx.server.failpoints", "the commit is decided, and done; the client was not told"
    REPLY_COMMIT_SENT = 610, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_ROLLBACK_BEFORE = 611, "dtx.server.failpoints", "the roll-back is decided, and done; the client was not told"
    REPLY_ROLLBACK_SENT = 612, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_FORGET_BEFORE = 613, "dtx.server.failpoints", "the heuristic outcome is forgotten; the client was not told"
    REPLY_FORGET_SENT = 614, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_RECOVER_BEFORE = 615, "dtx.server.failpoints", "the list of a recovery scan is made; the client was not told"
    REPLY_RECOVER_SENT = 616, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_GET_TIMEOUT_BEFORE = 617, "dtx.server.failpoints", "the timeout is known; the client was not told"
    REPLY_GET_TIMEOUT_SENT = 618, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_SET_TIMEOUT_BEFORE = 619, "dtx.server.failpoints", "the timeout is set; the client was not told"
    REPLY_SET_TIMEOUT_SENT = 620, "dtx.server.failpoints", "the answer is in the socket of the client"
    REPLY_EXCEPTION_BEFORE = (
        621,
        "dtx.server.failpoints",
        "a method of dtx-coordination is refused; the client was not told",
    )
    REPLY_EXCEPTION_SENT = 622, "dtx.server.failpoints", "the answer is in the socket of the client"

    # -- members

    FORWARD_BEFORE = (
        701,
        "dtx.server.members.forwarding",
        "a request for a branch that other members may have was received; nothing was sent to them",
    )
    FORWARD_SENT = 702, "dtx.server.members.client", "the request is in the socket of another member"
    FORWARD_ANSWERED = (
        703,
        "dtx.server.members.forwarding",
        "other members have answered, or cannot; the client was not told",
    )
    FORWARDED_BEFORE = 704, "dtx.server.members.server", "another member's request was received; it has not begun"
    FORWARDED_AFTER = 705, "dtx.server.members.server", "the request is carried out; the other member was not told"
    FORWARDED_SENT = 706, "dtx.server.members.server", "the answer is in the socket of the other member"
    ADOPT_BEFORE = 707, "dtx.log.membership", "members may be gone; their branches still belong to them"
    ADOPT_MOVED = 708, "dtx.log.membership", "their branches are moved in a transaction that has not committed"
    ADOPT_AFTER = 709, "dtx.log.membership", "their branches belong to this member, which has not loaded them"
    ADOPT_LOADED = 710, "dtx.manager.maintenance", "they are loaded, and unfinished ones are being resumed"

    def __init__(self, number: int, module: str, sentence: str) -> None:
        self.number = number
        self.module = module
        """The module that has the point."""
        self.sentence = sentence
        """What is durable, sent or answered at the point."""

    @property
    def label(self) -> str:
        """Its name on command lines and in traces: ``log-prepared-after``."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def named(cls, name: str) -> "Point":
        """The point of this name or number.

        Raises:
            ValueError: there is none.
        """
        for point in cls:
            if name in (point.label, point.name, str(point.number)):
                return point
        raise ValueError(f"no failpoint is called {name!r} (python -m dtx.failpoint --list)")
