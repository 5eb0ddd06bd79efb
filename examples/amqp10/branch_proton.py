"""Sends a message with Qpid Proton in an XA branch. A transaction manager completes the branch over AMQP 0-9.

python examples/amqp10/branch_proton.py amqp://USER:PASSWORD@HOST:PORT QUEUE TEXT
"""

import os
import sys

import pika
from proton import Message, Terminus, symbol
from proton.handlers import OutgoingMessageHandler, TransactionHandler
from proton.reactor import Transaction
from proton.utils import BlockingConnection

from dtx.client import Coordinator, Xid


class Branch(Transaction):
    """Proton's transaction, but declared with the xid of a branch."""

    def __init__(self, control, handler, xid):
        self.xid = xid
        super().__init__(control, handler)  # calls declare

    def declare(self):
        self._declare = self._send_ctrl(symbol("amqp:declare:list"), [self.xid.to_wire()])


class Control(OutgoingMessageHandler):
    """Passes the outcomes of the control link to its transactions."""

    def __init__(self):
        super().__init__(auto_settle=True)

    def on_settled(self, event):
        event.transaction = event.delivery.transaction
        event.transaction.handle_outcome(event)


class Events(TransactionHandler):
    """Notes what happened to the transaction."""

    transaction = ended = None

    def on_transaction_declared(self, event):
        self.transaction = event.transaction

    def on_transaction_committed(self, event):
        self.ended = "the association has ended"

    def fail(self, event):
        raise SystemExit("dtx refused the branch, or its end")

    on_transaction_declare_failed = on_transaction_commit_failed = on_transaction_aborted = fail


url, queue, text = sys.argv[1:]
xid = Xid(1, os.urandom(16), b"queue")
client = BlockingConnection(url)
control = client.container.create_sender(client.conn, None, name="control", handler=Control())
control.target.type = Terminus.COORDINATOR
sender = client.create_sender(queue)

events = Events()
Branch(control, events, xid)  # starts the branch, or joins it
client.wait(lambda: events.transaction)
delivery = events.transaction.send(sender.link, Message(body=text, durable=True))
client.wait(lambda: delivery.remote_state)  # dtx holds the message
events.transaction.commit()  # discharge: this does not decide the branch
client.wait(lambda: events.ended)

with pika.BlockingConnection(pika.URLParameters(f"{url}/%2f")) as connection:
    manager = Coordinator(connection)
    manager.prepare(xid)  # durable; prepare the database of this transaction as well
    manager.commit(xid)
client.close()
print(f"committed {xid}")
