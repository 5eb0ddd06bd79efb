"""Proton's examples tx_send and tx_recv, with their variants that abort: event-driven programs with batches."""

import secrets
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.client import take_all
from tests.support.proton import Message, handlers, reactor
from tests.support.service import DtxService


class TxSend(handlers.MessagingHandler, handlers.TransactionHandler):  # type: ignore[misc]
    """Sends messages in transactions of *batch* messages. With *aborts*, it aborts every second one."""

    def __init__(self, url: str, queue: str, messages: int, batch: int, *, aborts: bool) -> None:
        super().__init__()
        self._url, self._queue = url, queue
        self._messages, self._batch, self._aborts = messages, batch, aborts
        self._sent = self._confirmed = self._rounds = 0
        self._in_batch = 0
        self._transaction: Any = None

    def on_start(self, event: Any) -> None:
        self._container = event.container
        self._connection = event.container.connect(self._url, allowed_mechs="PLAIN")
        self._sender = event.container.create_sender(self._connection, self._queue)
        self._container.declare_transaction(self._connection, handler=self)

    def on_transaction_declared(self, event: Any) -> None:
        self._transaction = event.transaction
        self._send()

    def on_sendable(self, event: Any) -> None:
        self._send()

    def _send(self) -> None:
        while self._transaction and self._sender.credit and self._sent < self._messages:
            self._transaction.send(self._sender, Message(body=f"{self._rounds}.{self._in_batch}", durable=True))
            self._sent += 1
            self._in_batch += 1
            if self._in_batch == self._batch:
                aborts = self._aborts and self._rounds % 2
                (self._transaction.abort if aborts else self._transaction.commit)()
                self._transaction = None

    def _over(self) -> None:
        self._rounds += 1
        self._in_batch = 0
        if self._rounds * self._batch == self._messages:
            self._connection.close()
        else:
            self._container.declare_transaction(self._connection, handler=self)

    def on_transaction_committed(self, event: Any) -> None:
        self._over()

    def on_transaction_aborted(self, event: Any) -> None:
        self._over()


class TxReceive(handlers.MessagingHandler, handlers.TransactionHandler):  # type: ignore[misc]
    """Receives messages in transactions of *batch* messages, until it has committed *messages*.

    With *aborts*, it aborts the first transaction.
    """

    def __init__(self, url: str, queue: str, messages: int, batch: int, *, aborts: bool) -> None:
        super().__init__(prefetch=0, auto_accept=False)
        self._url, self._queue = url, queue
        self._messages, self._batch, self._aborts = messages, batch, aborts
        self._in_batch: list[str] = []
        self._transaction: Any = None
        self.committed: list[str] = []

    def on_start(self, event: Any) -> None:
        self._container = event.container
        self._connection = event.container.connect(self._url, allowed_mechs="PLAIN")
        self._receiver = event.container.create_receiver(self._connection, self._queue)
        self._container.declare_transaction(self._connection, handler=self, settle_before_discharge=True)

    def on_transaction_declared(self, event: Any) -> None:
        self._transaction = event.transaction
        self._receiver.flow(self._batch)

    def on_message(self, event: Any) -> None:
        self._transaction.accept(event.delivery)
        self._in_batch.append(event.message.body)
        if len(self._in_batch) == self._batch:
            (self._transaction.abort if self._aborts else self._transaction.commit)()

    def _over(self) -> None:
        self._in_batch.clear()
        if len(self.committed) == self._messages:
            self._connection.close()
        else:
            self._container.declare_transaction(self._connection, handler=self, settle_before_discharge=True)

    def on_transaction_committed(self, event: Any) -> None:
        self.committed += self._in_batch
        self._over()

    def on_transaction_aborted(self, event: Any) -> None:
        self._aborts = False
        self._over()


class ThreeReceivers(handlers.MessagingHandler):  # type: ignore[misc]
    """Receives from three queues in a session with a small window, and closes a link while messages wait for it."""

    def __init__(self, url: str, queues: list[str], each: int) -> None:
        super().__init__(prefetch=0)
        self._url, self._queues, self._each = url, queues, each
        self.got = [0] * len(queues)
        self.error: Any = None

    def on_start(self, event: Any) -> None:
        self._connection = event.container.connect(self._url, allowed_mechs="PLAIN", max_frame_size=1024)
        session = self._connection.session()
        session.incoming_capacity = 4096
        session.open()
        self._receivers = [event.container.create_receiver(session, queue, name=queue) for queue in self._queues]
        for receiver in self._receivers:
            receiver.flow(self._each)

    def on_message(self, event: Any) -> None:
        self.got[self._receivers.index(event.receiver)] += 1
        if self.got[0] + self.got[2] == 1:
            self._receivers[1].close()
        if self.got[::2] == [self._each] * 2:
            self._connection.close()

    def on_transport_error(self, event: Any) -> None:
        self.error = event.transport.condition
        event.container.stop()

    on_connection_error = on_transport_error


class Answering(handlers.MessagingHandler):  # type: ignore[misc]
    """Proton's examples of a server and its client in one program: one sender sends replies to all addresses."""

    def __init__(self, url: str, queue: str, requests: list[str]) -> None:
        super().__init__()
        self._url, self._queue, self._requests = url, queue, requests
        self.replies: list[str] = []
        self.relay: Any = None

    def on_start(self, event: Any) -> None:
        self._connection = event.container.connect(self._url, allowed_mechs="PLAIN")

    def on_connection_opened(self, event: Any) -> None:
        if "ANONYMOUS-RELAY" not in (event.connection.remote_offered_capabilities or ()):
            event.connection.close()
            return
        self._server = event.container.create_receiver(event.connection, self._queue, name="server")
        self.relay = event.container.create_sender(event.connection, None, name="relay")
        self._client = event.container.create_sender(event.connection, self._queue, name="client")
        self._inbox = event.container.create_receiver(event.connection, None, dynamic=True, name="inbox")

    def on_link_opened(self, event: Any) -> None:
        if event.receiver == self._inbox:
            for number, text in enumerate(self._requests):
                inbox = self._inbox.remote_source.address
                self._client.send(Message(body=text, reply_to=inbox, correlation_id=number))

    def on_message(self, event: Any) -> None:
        asked = event.message
        if event.receiver == self._server:
            reply = Message(address=asked.reply_to, body=asked.body.upper(), correlation_id=asked.correlation_id)
            self.relay.send(reply)
            return
        self.replies.append(f"{asked.correlation_id} {asked.body}")
        if len(self.replies) == len(self._requests):
            self._connection.close()


def run(program: Any) -> None:
    reactor.Container(program).run()


@pytest.mark.parametrize("aborts", [False, True])
def test_tx_send_and_tx_recv_pass_messages_on(
    service: DtxService, channel: BlockingChannel, queue: str, aborts: bool
) -> None:
    run(TxSend(service.url(), queue, 20, 5, aborts=aborts))
    kept = [f"{batch}.{number}" for batch in range(4) if not (aborts and batch % 2) for number in range(5)]
    receiving = TxReceive(service.url(), queue, len(kept), 5, aborts=aborts)
    run(receiving)
    assert sorted(receiving.committed) == kept
    assert take_all(channel, queue) == []


def test_requests_are_answered_by_one_sender(service: DtxService, queue: str) -> None:
    """Proton's server needs ANONYMOUS-RELAY, and replies to a target without an address."""
    program = Answering(f"amqp://guest:guest@{service.host}:{service.port}", queue, ["one", "two", "three"])
    run(program)
    assert program.replies == ["0 ONE", "1 TWO", "2 THREE"]


def test_a_link_is_closed_while_messages_wait_for_the_window(service: DtxService, channel: BlockingChannel) -> None:
    """Proton closes the connection if a delivery-id does not follow the last one."""
    each = 20
    queues = [f"proton-{secrets.token_hex(6)}" for _ in range(3)]
    for queue in queues:
        channel.queue_declare(queue)
        for _ in range(each):
            channel.basic_publish("", queue, bytes(3000))
    program = ThreeReceivers(f"amqp://guest:guest@{service.host}:{service.port}", queues, each)
    run(program)
    assert (program.error, program.got[::2]) == (None, [each, each])
    for queue in queues:
        channel.queue_delete(queue)
