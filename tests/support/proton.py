"""Qpid Proton as a client for step-by-step tests; transactions work as in its examples tx_send and tx_recv."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.service import DtxService

proton: Any = pytest.importorskip("proton", reason="needs python-qpid-proton, which is built by a C compiler")
handlers: Any = pytest.importorskip("proton.handlers")
reactor: Any = pytest.importorskip("proton.reactor")
utils: Any = pytest.importorskip("proton.utils")
Message: Any = proton.Message
Delivery: Any = proton.Delivery
AtMostOnce: Any = reactor.AtMostOnce
SECONDS = 20.0
TRANSACTIONAL_STATE = 0x34


class Outcome(handlers.TransactionHandler):  # type: ignore[misc]
    """Records the outcome of a transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.transaction: Any = None
        self.happened = ""

    def on_transaction_declared(self, event: Any) -> None:
        self.transaction = event.transaction

    def on_transaction_declare_failed(self, event: Any) -> None:
        self.happened = "declare failed"

    def on_transaction_committed(self, event: Any) -> None:
        self.happened = "committed"

    def on_transaction_aborted(self, event: Any) -> None:
        self.happened = "aborted"

    def on_transaction_commit_failed(self, event: Any) -> None:
        self.happened = "commit failed"


class Control(handlers.OutgoingMessageHandler):  # type: ignore[misc]
    """The control link, as in Proton's container, but each transaction gets its own outcome."""

    def __init__(self) -> None:
        super().__init__(auto_settle=True)

    def on_settled(self, event: Any) -> None:
        event.transaction = event.delivery.transaction
        event.transaction.handle_outcome(event)


class Declared(reactor.Transaction):  # type: ignore[misc]
    """A transaction that works for a branch.

    Args:
        control: the control link.
        handler: is notified of the outcome.
        global_id: the branch; ``None``: a local transaction.
    """

    def __init__(self, control: Any, handler: Outcome, global_id: bytes | None) -> None:
        self._global_id = global_id
        super().__init__(control, handler)

    def declare(self) -> None:
        self._declare = self._send_ctrl(proton.symbol("amqp:declare:list"), [self._global_id])


class Client:
    """A connection. Use as a context manager.

    Args:
        service: the service to connect to.
        user: the user name and password.
        options: options of the connection.
    """

    def __init__(self, service: DtxService, user: str = "guest", **options: Any) -> None:
        self.blocking: Any = utils.BlockingConnection(
            f"amqp://{user}:{user}@{service.host}:{service.port}", timeout=SECONDS, allowed_mechs="PLAIN", **options
        )
        self._control: Any = None
        self._links = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.blocking.close()

    def sender(self, address: str | None, **options: Any) -> Any:
        """A link to *address*."""
        self._links += 1
        return self.blocking.create_sender(address, name=f"sender-{self._links}", **options)

    def receiver(self, address: str | None, credit: int = 1, **options: Any) -> Any:
        """A link from *address*."""
        self._links += 1
        receiver: Any = self.blocking.create_receiver(address, credit=0, name=f"receiver-{self._links}", **options)
        if credit:
            receiver.link.flow(credit)
        return receiver

    def take(self, receiver: Any) -> tuple[Any, Any]:
        """The next message, unsettled."""
        message = receiver.receive()
        return message, receiver.fetcher.unsettled.pop()

    def wait(self, condition: Callable[[], object]) -> None:
        """Process events until *condition* holds."""
        self.blocking.wait(lambda: bool(condition()), timeout=SECONDS)

    def await_settled(self, delivery: Any) -> None:
        """Process events until the peer has settled *delivery*."""
        self.wait(lambda: delivery.settled)

    def declare(self, global_id: bytes | None = None) -> tuple[Any, Outcome]:
        """Declare a transaction, for the branch *global_id* if it is given."""
        if self._control is None:
            self._control = self.blocking.container.create_sender(
                self.blocking.conn, None, name="txn-ctrl", handler=Control()
            )
            self._control.target.type = proton.Terminus.COORDINATOR
        outcome = Outcome()
        Declared(self._control, outcome, global_id)
        self.wait(lambda: outcome.transaction is not None or outcome.happened)
        assert outcome.transaction is not None, outcome.happened
        return outcome.transaction, outcome

    def send(self, transaction: Any, sender: Any, *bodies: str) -> None:
        """Send messages in a transaction, and wait for their provisional outcome."""
        deliveries = [transaction.send(sender.link, Message(body=body, durable=True)) for body in bodies]
        self.wait(lambda: all(delivery.remote_state for delivery in deliveries))
        assert [delivery.remote_state for delivery in deliveries] == [TRANSACTIONAL_STATE] * len(bodies)

    def end(self, transaction: Any, outcome: Outcome, *, fail: bool = False) -> str:
        """Discharge the transaction; return the outcome."""
        (transaction.abort if fail else transaction.commit)()
        self.wait(lambda: outcome.happened)
        return outcome.happened
