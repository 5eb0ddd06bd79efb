"""What a broker, a cluster, a crash and members can do to messages and branches, and the tests of it.

The documentation shows this table.
"""

from dataclasses import dataclass
from typing import Final

_ALONGSIDE: Final = "tests/servers/alongside"
_CRASH: Final = "tests/servers/crash"
_MEMBERS: Final = "tests/servers/members"
_STORE: Final = "tests/unit/store"
_MEMBERSHIP: Final = "tests/servers/log/test_membership"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Args:
        name: its number.
        text: what happens.
        never: what must not happen then; empty for a property of RabbitMQ.
        tests: ids without parameters; none if no test exists.
        parts: parts of ``make evidence`` in which it happens at random.
    """

    name: str
    text: str
    never: str
    tests: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def _in(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}.py::test_{name}" for name in names)


SCENARIOS: Final = (
    Scenario(
        "F1",
        "commit-ok waits for confirms of publishes, not for acknowledgements",
        "",
        _in(f"{_CRASH}/test_acknowledgements", "a_commit_waits_for_publishes_and_not_for_acknowledgements"),
        ("cluster",),
    ),
    Scenario(
        "F2",
        "a node dies behind commit-ok: its acknowledgements may be gone",
        "",
        _in(f"{_CRASH}/test_acknowledgements", "an_acknowledgement_that_its_node_loses_repeats_the_message"),
        ("cluster",),
    ),
    Scenario(
        "F3",
        "a queue that is full or crashed refuses a message, and tx.commit answers 406 or commit-ok",
        "",
        _in(f"{_CRASH}/test_runbooks", "a_refusal_after_partial_delivery_is_a_hazard")
        + _in(f"{_CRASH}/test_trust", "a_refused_unit_is_not_trusted_when_the_queue_accepts")
        + _in(f"{_ALONGSIDE}/test_quorum_queues", "a_full_quorum_queue_that_refuses_loses_no_message"),
    ),
    Scenario(
        "F4",
        "the first publish of a channel to a quorum queue waits for its leader",
        "",
        _in(f"{_ALONGSIDE}/test_quorum_queues", "a_quorum_queue_without_a_leader_loses_no_message"),
    ),
    Scenario(
        "F5",
        "a tx.commit goes on although its connection or channel has ended",
        "",
        _in(f"{_CRASH}/test_consumer_timeout", "after_a_close_behind_tx_commit_the_lock_decides")
        + _in(f"{_CRASH}/test_ha_locks", "a_commit_under_way_is_decided_when_the_connection_ends"),
    ),
    Scenario(
        "F6",
        "RabbitMQ counts returned deliveries, and drops a message after 20",
        "",
        _in(
            f"{_ALONGSIDE}/test_delivery_limit",
            "rollbacks_lose_no_message_to_the_delivery_limit",
            "a_queue_with_a_dead_letter_exchange_moves_its_messages",
            "a_copy_that_its_queue_refuses_returns_the_message",
        ),
    ),
    Scenario(
        "F7",
        "the largest message is announced only on links of AMQP 1.0",
        "",
        _in(
            f"{_ALONGSIDE}/test_message_limit",
            "the_limit_of_rabbitmq_4_overrides_a_higher_setting",
            "a_message_too_large_to_commit_is_refused_at_publish",
        ),
    ),
    Scenario(
        "F8",
        "a publish gives a queue at most one copy, whatever bindings, CC and BCC",
        "",
        _in("tests/contract/test_channels", "each_key_of_cc_and_bcc_gets_a_copy"),
    ),
    Scenario(
        "F9",
        "a second declaration of an exchange must have the same alternate exchange",
        "",
        _in(
            f"{_ALONGSIDE}/test_identity",
            "a_second_log_with_the_name_is_refused_at_start",
            "a_second_log_with_the_name_is_refused_per_vhost",
        ),
    ),
    Scenario(
        "F10",
        "4.3 refuses transient queues that are not exclusive",
        "",
        _in(
            f"{_ALONGSIDE}/test_deprecated_features",
            "the_broker_refuses_a_transient_queue_that_is_not_exclusive",
            "dtx_needs_no_deprecated_feature",
        ),
    ),
    Scenario(
        "1",
        "a partition loses a receipt, but not the acknowledgements of its unit, and dtx dies",
        "the unit counts as never sent: loss",
        _in(
            f"{_STORE}/test_trust",
            "no_setting_makes_receipts_of_a_cluster_trusted",
            "a_detected_cluster_remains_one_without_an_answer",
        ),
        ("cluster",),
    ),
    Scenario(
        "2",
        "the connection of a unit ends before its receipt is read",
        "the receipt is gone",
        _in(f"{_CRASH}/test_phase_two", "after_a_broken_connection_the_receipt_gives_the_outcome")
        + _in(f"{_ALONGSIDE}/test_markers", "receipt_queues_that_are_gone_prove_nothing"),
    ),
    Scenario(
        "3",
        "copy 1 is acknowledged before its id is known as replayed; copy 2 follows",
        "seen twice",
        _in(
            f"{_CRASH}/test_second_copies",
            "a_copy_that_was_consumed_before_the_replay_counts",
            "a_first_replay_counts_for_channels_that_consume_already",
        ),
        ("repeats",),
    ),
    Scenario(
        "4",
        "a unit that would have settled a copy never happens",
        "the other copy suppressed: loss",
        _in(f"{_STORE}/test_copies", "a_returned_copy_does_not_count"),
        ("sim",),
    ),
    Scenario(
        "5",
        "a message is taken, prepared and rolled back: it returns with its id",
        "suppressed: loss",
        _in(f"{_CRASH}/test_second_copies", "a_message_that_was_put_back_twice_is_consumed_once"),
    ),
    Scenario(
        "6",
        "an application publishes a message again with all headers, or dead letters loop",
        "loss",
        _in(f"{_CRASH}/test_second_copies", "a_message_that_an_application_published_again_is_delivered")
        + _in(f"{_STORE}/test_copies", "other_messages_with_the_id_are_delivered"),
    ),
    Scenario(
        "7",
        "the same from another queue that got the other attempt, or with an invented id",
        "loss",
        _in(
            f"{_STORE}/test_copies",
            "a_suppressed_copy_that_comes_again_is_suppressed_again",
            "a_forged_copy_hides_no_message",
        ),
    ),
    Scenario(
        "8",
        "an application copies headers of dtx into its own publish",
        "wrong key",
        _in(f"{_STORE}/test_messages", "marks_that_an_application_has_copied_are_removed_at_commit"),
    ),
    Scenario(
        "9",
        "a unit was applied in part (406), then its transaction manager or an operator retries",
        "two copies, unrecorded",
        _in(f"{_CRASH}/test_runbooks", "a_refusal_after_partial_delivery_is_a_hazard")
        + _in(f"{_ALONGSIDE}/test_commit_connection_losses", "a_possible_repeat_is_remembered_despite_later_errors"),
    ),
    Scenario(
        "10",
        "dtx dies while its tx.commit hangs; the unit is applied again, then the first one goes on",
        "two copies, unrecorded",
        _in(f"{_CRASH}/test_ha_locks", "a_commit_under_way_is_decided_when_the_connection_ends"),
        ("cluster", "repeats"),
    ),
    Scenario(
        "11",
        "copy 2 waits behind a slow consumer of copy 1",
        "consumer timeout, delivery limit used up",
        _in(
            f"{_CRASH}/test_second_copies",
            "a_copy_waits_for_another_one_that_is_settled",
            "a_waiting_copy_comes_if_the_other_one_is_lost",
        )
        + _in(f"{_STORE}/test_copies", "a_copy_that_has_waited_long_is_delivered"),
    ),
    Scenario(
        "12",
        "two members have one copy each",
        "seen twice",
        _in(
            f"{_MEMBERS}/test_second_copies",
            "a_copy_is_suppressed_at_all_members",
            "a_copy_waits_for_that_of_another_member",
            "many_copies_are_consumed_once_at_any_member",
        )
        + _in("tests/unit/server/test_member_copies", "consumers_of_all_members_settle_one_copy"),
    ),
    Scenario(
        "13",
        "copy 1 is rejected without requeue",
        "copy 2 shown too",
        _in(f"{_CRASH}/test_second_copies", "a_copy_waits_for_another_one_that_is_settled"),
    ),
    Scenario(
        "14",
        "no-ack: the marker is written first, and dtx dies",
        "loss",
        _in(f"{_STORE}/test_copies", "a_copy_without_acknowledgement_is_suppressed_at_once"),
        ("repeats",),
    ),
    Scenario(
        "15",
        "a queue is a stream",
        "hidden from other readers",
        _in(f"{_STORE}/test_copies", "other_messages_with_the_id_are_delivered"),
    ),
    Scenario(
        "16",
        "the first replay comes after a channel without select began to consume",
        "queue unknown",
        _in(f"{_CRASH}/test_second_copies", "a_first_replay_counts_for_channels_that_consume_already"),
    ),
    Scenario(
        "17",
        "the marker is durable, its acknowledgement is lost, the same copy comes again",
        "suppressed",
        _in(f"{_CRASH}/test_second_copies", "a_crash_between_record_and_acknowledgement_shows_no_second_copy")
        + _in(f"{_STORE}/test_copies", "the_same_copy_comes_again"),
    ),
    Scenario(
        "18",
        "a second dtx of the same log starts, or a node with queues of dtx is down",
        "the start is refused, or waits",
        _in(f"{_ALONGSIDE}/test_identity", "a_restart_has_the_name_and_leaves_no_queue_behind")
        + _in(f"{_ALONGSIDE}/test_cluster", "a_node_that_fails_stops_no_branch_for_long"),
        ("cluster",),
    ),
    Scenario(
        "M1",
        "a member is silent, its lease runs out, and nobody takes its branches; it wakes, renews late and votes",
        "another member answers 404 meanwhile",
        _in(f"{_MEMBERS}/test_forwarding", "no_member_calls_a_branch_unknown_while_one_is_silent")
        + _in(_MEMBERSHIP, "a_member_that_renews_late_keeps_its_branches"),
        ("sim", "members"),
    ),
    Scenario(
        "M2",
        "the log does not have a branch; it votes and ends at its member; then that member does not know it either",
        "404 without the outcome, for a committed branch",
        _in("tests/unit/manager/test_members", "the_log_is_read_again_before_404"),
        ("sim",),
    ),
    Scenario(
        "M3",
        "two members have branches of one xid: one is prepared, the other was rolled back and left a tombstone",
        "the tombstone answers the rollback, and the other branch stays prepared for ever",
        _in(
            "tests/unit/manager/test_members",
            "the_log_is_asked_before_a_tombstone",
            "a_prepared_branch_hides_an_unvoted_one",
        ),
        ("sim",),
    ),
    Scenario(
        "M4",
        "two members have branches of one xid: one commits and leaves the log, then the other one votes",
        "one xid with two outcomes",
        _in(
            _MEMBERSHIP,
            "a_vote_after_an_ending_elsewhere_is_refused",
            "a_vote_waits_for_an_ending_under_way",
        )
        + _in(
            f"{_MEMBERS}/test_duplicate_xids",
            "a_vote_is_refused_after_an_ending_elsewhere",
            "a_vote_is_refused_after_a_vote_elsewhere",
            "a_commit_means_the_branch_that_has_voted",
        ),
    ),
    Scenario(
        "M5",
        "two members believe that the other one has the branch",
        "a request goes round and round",
        _in("tests/unit/manager/test_members", "a_forwarded_request_goes_no_further"),
    ),
    Scenario(
        "M6",
        "a commit is forwarded, and the answer is lost",
        "a wrong answer",
        _in(
            f"{_MEMBERS}/test_forwarding",
            "no_member_calls_a_branch_unknown_while_one_is_silent",
            "two_members_commit_one_branch_at_the_same_time",
        ),
        ("sim", "matrix", "members"),
    ),
    Scenario(
        "M7",
        "a member loses its lease while its connections to RabbitMQ stay up",
        "the next one waits for ever for its locks, or the old one goes on",
        _in(f"{_MEMBERS}/test_forwarding", "a_stalled_member_is_fenced"),
        ("sim", "members"),
    ),
    Scenario(
        "M8",
        "members have receipts in the same virtual host",
        "one removes receipts of another: loss",
        _in("tests/unit/manager/test_members", "the_store_keeps_receipts_of_a_found_branch")
        + _in(f"{_MEMBERS}/test_forwarding", "members_have_receipts_of_their_own"),
        ("sim", "members"),
    ),
    Scenario(
        "M9",
        "PostgreSQL is away for longer than a lease, and all leases have run out when it returns",
        "members take branches of others that live",
        _in(_MEMBERSHIP, "a_silent_member_takes_nothing_after_an_outage"),
    ),
    Scenario(
        "M10",
        "PostgreSQL fails over, and the clock of the new server is ahead: all leases have run out",
        "recover or 404 under a lost lease; members take branches of others that live",
        _in(
            _MEMBERSHIP, "a_silent_member_takes_nothing_after_an_outage", "branches_of_a_member_without_lease_are_taken"
        ),
    ),
    Scenario(
        "M11",
        "a replica of PostgreSQL that lacks the last writes becomes the primary",
        "votes are lost",
        _in(
            "tests/servers/log/test_replicas", "a_primary_that_does_not_wait_is_reported", "a_former_primary_is_refused"
        ),
    ),
    Scenario(
        "M12",
        "members write at the same time",
        "one transaction with records of two members: lost updates, deadlocks",
        _in(
            _MEMBERSHIP,
            "members_write_at_the_same_time",
            "two_members_never_take_the_same_branches",
            "no_member_delays_the_renewals_of_others",
        ),
        ("sim",),
    ),
    Scenario(
        "M13",
        "a dtx of a version that knows no members starts beside members",
        "two dtx have the same branches",
        _in(_MEMBERSHIP, "a_member_and_a_lone_dtx_exclude_each_other"),
    ),
    Scenario(
        "M14",
        "a client pretends to be a member, or a user asks for the branch of another user at another member",
        "the request is carried out",
        _in(
            "tests/unit/server/test_members",
            "a_client_with_a_wrong_secret_is_refused",
            "nothing_is_handled_before_the_proof",
        )
        + _in(
            f"{_MEMBERS}/test_forwarding",
            "a_user_controls_only_his_own_branches_through_members",
            "the_ended_branch_of_another_user_is_unknown",
        ),
    ),
    Scenario(
        "M15",
        "one of several processes on a port dies or ends",
        "clients lose connections without notice, or the port",
        _in(
            f"{_MEMBERS}/test_processes",
            "a_killed_process_is_restarted_and_its_branches_commit",
            "a_signal_ends_all_processes_in_order",
        ),
    ),
)
"""Properties of RabbitMQ (F), sequences that could lose or repeat messages, and sequences with several members (M)."""
