"""Queues by RabbitMQ's rules, and what a restart restores."""

import pytest

from dtx.log.changes import BindingRow, Define, DestinationKind, ExchangeKey, ExchangeRow, QueueRow, StoredMessage
from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.consumers import Consumer
from dtx.store.postgres.topology import DeletedQueues, VirtualHost
from dtx.xa.codes import ReplyCode, XaError
from tests.support.topology import VHOST, Idle, idle_index, names, refused, table, virtual_host

QUEUE, EXCHANGE = DestinationKind.QUEUE, DestinationKind.EXCHANGE
ME, OTHER = object(), object()
LOCKED = (
    "cannot obtain exclusive access to locked queue 'q' in vhost 'v'. It could be originally declared on another "
    "connection or the exclusive property value does not match that of the original declaration."
)


@pytest.fixture
def vhost() -> VirtualHost:
    return virtual_host()


def test_a_durable_queue_is_for_the_log(vhost: VirtualHost) -> None:
    arguments = table({"x-max-length": 5})
    declared = vhost.declare_queue(b"q", ME, durable=True, auto_delete=True, arguments=arguments)
    spec = declared.queue.spec
    assert declared.created
    assert declared.define == Define(
        queues=(QueueRow(vhost=VHOST, id=spec.id, name=b"q", auto_delete=True, arguments=arguments),)
    )
    assert spec.settings == QueueArguments(max_length=5)
    assert 0 <= spec.id < 2**62
    assert declared.queue.index.id == spec.id


def test_a_transient_queue_is_not_written_to_the_log(vhost: VirtualHost) -> None:
    """RabbitMQ treats an exclusive queue as not durable, because it is deleted with its connection."""
    assert vhost.declare_queue(b"t", ME).define is None
    exclusive = vhost.declare_queue(b"e", ME, durable=True, exclusive=True)
    assert exclusive.define is None
    assert not exclusive.queue.durable


def test_declaring_the_same_again_finds_it(vhost: VirtualHost) -> None:
    first = vhost.declare_queue(b"q", ME, durable=True)
    again = vhost.declare_queue(b"q", OTHER, durable=True, arguments=table({"mine": 1}))
    assert again.queue is first.queue
    assert not again.created
    assert again.define is None


def test_the_server_generates_unused_names(vhost: VirtualHost) -> None:
    """queue.declare: "If the queue name is empty, the server MUST create a new queue with a unique generated name"."""
    one, other = (vhost.declare_queue(b"", ME).queue.name for _ in range(2))
    assert one != other
    assert one.startswith(b"amq.gen-")
    assert len(one) == len(b"amq.gen-") + 22
    assert vhost.find_queue(one, OTHER).name == one
    assert not vhost.declare_queue(one, ME).created


@pytest.mark.parametrize("name", [b"amq.mine", b"amq.", b"amq.gen-mine"])
def test_names_of_the_server_cannot_be_taken(vhost: VirtualHost, name: bytes) -> None:
    """queue.declare: "Queue names starting with "amq." are reserved … access-refused"."""
    with refused(ReplyCode.ACCESS_REFUSED, f"queue name '{name.decode()}' contains reserved prefix 'amq.*'"):
        vhost.declare_queue(name, ME)


def test_a_declaration_that_differs_is_refused_by_name(vhost: VirtualHost) -> None:
    vhost.declare_queue(b"q", ME)
    where = "for queue 'q' in vhost 'v'"
    failed = ReplyCode.PRECONDITION_FAILED
    with refused(failed, f"inequivalent arg 'durable' {where}: received 'true' but current is 'false'"):
        vhost.declare_queue(b"q", ME, durable=True)
    with refused(failed, f"inequivalent arg 'auto_delete' {where}: received 'true' but current is 'false'"):
        vhost.declare_queue(b"q", ME, auto_delete=True)
    reason = f"inequivalent arg 'x-max-length' {where}: received the value '5' of type 'signedint' but current is none"
    with refused(failed, reason):
        vhost.declare_queue(b"q", ME, arguments=table({"x-max-length": 5}))
    with refused(ReplyCode.RESOURCE_LOCKED, LOCKED):
        vhost.declare_queue(b"q", ME, exclusive=True)


def test_an_exclusive_queue_is_locked_for_others(vhost: VirtualHost) -> None:
    """queue.declare: "The client MAY NOT attempt to use a queue that was declared as exclusive by another … 405"."""
    vhost.declare_queue(b"q", ME, exclusive=True)
    vhost.bind(b"amq.direct", QUEUE, b"q", b"k", owner=ME)
    for operation in (
        lambda: vhost.declare_queue(b"q", OTHER, exclusive=True),
        lambda: vhost.declare_queue(b"q", OTHER),
        lambda: vhost.declare_queue(b"q", ME),
        lambda: vhost.find_queue(b"q", OTHER),
        lambda: vhost.delete_queue(b"q", OTHER),
        lambda: vhost.bind(b"amq.direct", QUEUE, b"q", b"l", owner=OTHER),
        lambda: vhost.unbind(b"amq.direct", QUEUE, b"q", b"k", owner=OTHER),
    ):
        with refused(ReplyCode.RESOURCE_LOCKED, LOCKED):
            operation()
    assert vhost.unbind(b"amq.direct", QUEUE, b"q", b"not bound", owner=OTHER) is None
    assert vhost.find_queue(b"q", ME) is vhost.declare_queue(b"q", ME, exclusive=True, durable=True).queue


def test_messages_reach_an_exclusive_queue_from_anywhere(vhost: VirtualHost) -> None:
    vhost.declare_queue(b"q", ME, exclusive=True)
    assert names(vhost.route(b"", b"q")) == ["q"]


def test_exclusive_queues_go_with_their_connection(vhost: VirtualHost) -> None:
    """queue.declare, exclusive: "are deleted when that connection closes"; auto-delete exchanges go with them."""
    vhost.declare_exchange(b"x", b"fanout", durable=True, auto_delete=True)
    one = vhost.declare_queue(b"one", ME, exclusive=True).queue
    two = vhost.declare_queue(b"two", ME, exclusive=True).queue
    vhost.declare_queue(b"his", OTHER, exclusive=True)
    vhost.declare_queue(b"all", ME)
    vhost.bind(b"x", QUEUE, b"one", b"", owner=ME)
    assert vhost.disconnected(ME) == DeletedQueues((one, two), Define(removed_exchanges=(ExchangeKey(VHOST, b"x"),)))
    assert sorted(vhost.queues) == [b"all", b"his"]
    assert vhost.disconnected(ME) == DeletedQueues()
    vhost.delete_queue(b"his", OTHER)
    assert vhost.disconnected(OTHER) == DeletedQueues()


def test_exclusive_queues_go_in_steps_where_they_are_many(vhost: VirtualHost) -> None:
    names = [vhost.declare_queue(b"%d" % number, ME, exclusive=True).queue.name for number in range(5)]
    gone = []
    while (step := vhost.disconnected(ME, 2)).queues:
        assert len(step.queues) <= 2
        gone += [queue.name for queue in step.queues]
    assert gone == names


def test_a_queue_takes_its_bindings_along(vhost: VirtualHost) -> None:
    """queue.delete: bindings are deleted, and auto-delete exchanges without bindings."""
    vhost.declare_exchange(b"x", b"direct", durable=True, auto_delete=True)
    queue = vhost.declare_queue(b"q", ME, durable=True).queue
    vhost.bind(b"amq.topic", QUEUE, b"q", b"#")
    vhost.bind(b"x", QUEUE, b"q", b"k")
    assert vhost.delete_queue(b"q", ME) == DeletedQueues(
        (queue,),
        Define(
            removed_exchanges=(ExchangeKey(VHOST, b"x"),),
            removed_queues=(queue.spec.id,),
            removed_bindings=(
                BindingRow(VHOST, b"amq.topic", QUEUE, b"q", b"#"),
                BindingRow(VHOST, b"x", QUEUE, b"q", b"k"),
            ),
        ),
    )
    assert vhost.route(b"amq.topic", b"any") == ()
    assert vhost.route(b"", b"q") == ()


def test_a_name_can_be_used_again_and_is_another_queue(vhost: VirtualHost) -> None:
    """Messages are stored under the id, so those of the first queue never appear in the second."""
    first = vhost.declare_queue(b"q", ME).queue
    vhost.delete_queue(b"q", ME)
    second = vhost.declare_queue(b"q", ME).queue
    assert first.spec.id != second.spec.id
    assert vhost.remove_queue(first) == DeletedQueues()
    assert vhost.remove_queue(second).queues == (second,)


def test_deleting_a_missing_object_is_no_error(vhost: VirtualHost) -> None:
    assert vhost.delete_queue(b"q", ME) == DeletedQueues()
    with refused(ReplyCode.NOT_FOUND, "no queue 'q' in vhost 'v'"):
        vhost.find_queue(b"q", ME)


def test_a_queue_with_messages_stays_if_asked_to(vhost: VirtualHost) -> None:
    """queue.delete, if-empty: "only delete the queue if it has no messages"."""
    queue = vhost.declare_queue(b"q", ME).queue
    queue.index.put(StoredMessage(queue.spec.id, 1, b"", b"q", 0, b"\x00\x00", b""), 0.0)
    with refused(ReplyCode.PRECONDITION_FAILED, "queue 'q' in vhost 'v' not empty"):
        vhost.delete_queue(b"q", ME, if_empty=True)
    assert vhost.delete_queue(b"q", ME, if_unused=True).queues == (queue,)


def test_a_queue_with_consumers_stays_if_asked_to(vhost: VirtualHost) -> None:
    """queue.delete, if-unused: "only delete the queue if it has no consumers"."""
    queue = vhost.declare_queue(b"q", ME).queue
    queue.index.consume(Consumer(b"tag", Idle()))
    with refused(ReplyCode.PRECONDITION_FAILED, "queue 'q' in vhost 'v' in use"):
        vhost.delete_queue(b"q", ME, if_unused=True)
    assert vhost.delete_queue(b"q", ME, if_empty=True).queues == (queue,)


def test_a_refused_declaration_leaves_nothing_behind(vhost: VirtualHost) -> None:
    with pytest.raises(XaError, match="x-expires"):
        vhost.declare_queue(b"q", ME, exclusive=True, arguments=table({"x-expires": 0}))
    assert not vhost.queues
    assert vhost.disconnected(ME) == DeletedQueues()


def test_a_restart_restores_durable_queues() -> None:
    arguments = table({"x-max-priority": 5})
    vhost = virtual_host()
    cleaning = vhost.restore(
        [
            ExchangeRow(
                vhost=VHOST,
                name=b"x",
                type="topic",
                auto_delete=True,
                arguments=table({"alternate-exchange": "amq.fanout"}),
            )
        ],
        [
            QueueRow(vhost=VHOST, id=7, name=b"q", auto_delete=True, arguments=arguments),
            QueueRow(vhost=VHOST, id=8, name=b"amq.gen-r", delivered=3),
        ],
        [
            BindingRow(VHOST, b"x", QUEUE, b"q", b"a.*"),
            BindingRow(VHOST, b"amq.fanout", EXCHANGE, b"x", b""),
            BindingRow(VHOST, b"amq.fanout", QUEUE, b"amq.gen-r", b""),
        ],
    )
    assert cleaning is None
    assert names(vhost.route(b"x", b"a.b")) == ["q"]
    assert names(vhost.route(b"amq.fanout", b"a.b")) == ["amq.gen-r", "q"]
    assert names(vhost.route(b"x", b"b")) == ["amq.gen-r"]
    assert vhost.queues[b"q"].spec.settings.max_priority == 5
    assert not vhost.declare_queue(b"q", ME, durable=True, auto_delete=True, arguments=arguments).created
    vhost.unbind(b"x", QUEUE, b"q", b"a.*")
    assert b"x" not in vhost.exchanges


def test_a_binding_without_an_end_is_removed_at_restart() -> None:
    lost = (BindingRow(VHOST, b"x", QUEUE, b"q", b""), BindingRow(VHOST, b"amq.direct", QUEUE, b"q", b""))
    vhost = VirtualHost(VHOST, idle_index)
    assert vhost.restore([], [], lost) == Define(removed_bindings=lost)
