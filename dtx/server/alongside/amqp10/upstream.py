"""The connection to the broker of one client of AMQP 1.0, with the client's own credentials."""

from typing import TYPE_CHECKING

from dtx.store.rabbitmq.service import Broker, ServiceConnection

if TYPE_CHECKING:
    from dtx.server.alongside.amqp10.nodes import BrokerNodes


class ClientUpstream(ServiceConnection):
    """A connection on which dtx acts for a client.

    Args:
        broker: where to, and as whom.
        name: shown in the broker's list of connections.
        nodes: whose it is.
    """

    def __init__(self, broker: Broker, name: str, nodes: "BrokerNodes") -> None:
        super().__init__(broker, name)
        self._nodes = nodes

    def pause_writing(self) -> None:
        """The broker is slow: so is the client, from now on."""
        self._nodes.home.hold(self)

    def resume_writing(self) -> None:
        """The broker has caught up."""
        self._nodes.home.release(self)

    def on_lost(self, reason: str) -> None:
        """The client's connection ends."""
        super().on_lost(reason)
        self._nodes.upstream_lost(reason)
