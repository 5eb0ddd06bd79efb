"""Moves messages from one queue to another with Qpid Proton, each in a transaction.

python examples/amqp10/forward_proton.py amqp://USER:PASSWORD@HOST:PORT SOURCE TARGET COUNT
"""

import sys

from proton import Message
from proton.handlers import MessagingHandler, TransactionHandler
from proton.reactor import Container


class Forward(MessagingHandler, TransactionHandler):
    def __init__(self, url, source, target, count):
        super().__init__(prefetch=0, auto_accept=False)
        self.url, self.source, self.target, self.left = url, source, target, count
        self.transaction = None

    def on_start(self, event):
        self.container = event.container
        self.connection = self.container.connect(self.url, reconnect=False)
        self.sender = self.container.create_sender(self.connection, self.target)
        self.receiver = self.container.create_receiver(self.connection, self.source)

    def on_sendable(self, event):
        if event.sender == self.sender and self.transaction is None:
            self.begin()

    def begin(self):
        self.container.declare_transaction(self.connection, handler=self)

    def on_transaction_declared(self, event):
        self.transaction = event.transaction
        self.receiver.flow(1)

    def on_message(self, event):
        self.transaction.send(self.sender, Message(body=event.message.body, durable=True))
        self.transaction.accept(event.delivery)
        self.transaction.commit()

    def on_transaction_committed(self, event):
        self.left -= 1
        if self.left:
            self.begin()
        else:
            self.connection.close()

    def fail(self, event):  # the message is in the source queue again
        self.connection.close()
        raise SystemExit("the transaction was not committed")

    on_transaction_declare_failed = on_transaction_commit_failed = on_transaction_aborted = fail

    def on_transport_error(self, event):
        raise SystemExit(f"no connection: {event.transport.condition}")

    def on_link_error(self, event):
        raise SystemExit(f"refused: {event.link.remote_condition}")


url, source, target, count = sys.argv[1:]
Container(Forward(url, source, target, int(count))).run()
