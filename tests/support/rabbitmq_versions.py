"""Where RabbitMQ 4 answers otherwise than RabbitMQ 3.10, which standalone mode follows: tests that fail against 4."""

from typing import Final

_RECEIPTS: Final = (
    "tests/contract/protocol/test_permissions.py::test_a_refused_receipt_rolls_the_branch_back_with_a_reason"
)
DIFFERENCES: Final = {
    "tests/contract/test_dead_letters.py::test_a_dead_letter_names_the_reason[RabbitMQ-rejected]": (
        "4 adds the headers x-last-death-queue, x-last-death-reason and x-last-death-exchange"
    ),
    "tests/contract/test_dead_letters.py::test_a_dead_letter_names_the_reason[RabbitMQ-expired]": (
        "4 adds the headers x-last-death-queue, x-last-death-reason and x-last-death-exchange"
    ),
    "tests/contract/test_dead_letters.py::test_a_dead_letter_names_the_reason[RabbitMQ-maxlen]": (
        "4 adds the headers x-last-death-queue, x-last-death-reason and x-last-death-exchange"
    ),
    "tests/contract/test_dead_letters.py::test_a_key_of_the_queue_replaces_all_of_the_message[RabbitMQ]": (
        "4 leaves the header CC in dead letters"
    ),
    "tests/contract/test_dead_letters.py::test_an_invented_x_death_is_replaced[RabbitMQ]": (
        "4 takes x-death of publishers for an ordinary header"
    ),
    "tests/contract/test_dead_letters.py::test_an_x_death_that_a_client_kept_goes_on[RabbitMQ]": (
        "4 counts from 1 again after a client has published the message with its x-death"
    ),
    "tests/contract/test_topic_permissions.py::test_other_recipients_are_not_judged[RabbitMQ]": (
        "4 checks topic permissions of the routing keys in CC and BCC as well"
    ),
    "tests/contract/test_topic_permissions.py::test_a_refusal_names_the_topic[RabbitMQ]": (
        "4 says 'write access to topic', 3.10 'access to topic'"
    ),
    "tests/contract/test_topology.py::test_exchanges_are_declared_and_deleted_alike": (
        "4 answers 406 for an unknown type of exchange, 3.10 ends the connection with 503"
    ),
    "tests/contract/test_topology.py::test_arguments_of_queues_are_judged_alike[arguments41]": (
        "4 takes x-queue-leader-locator for classic queues"
    ),
}
"""Tests, and what version 4 does. A test of this table that passes is an error."""
CLUSTER_DIFFERENCES: Final = {
    f"{_RECEIPTS}[<lambda>{number}-alongside]": (
        "in a cluster, dtx trusts no receipts, so that none can be refused; a partition could lose them"
    )
    for number in range(2)
}
"""The same for a node of a cluster."""
