"""A cluster of three RabbitMQ nodes, each on a host of its own, which can be cut off from the others."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Self

from tests.support.network import Network
from tests.support.processes import wait_until
from tests.support.queues import QueueAccess
from tests.support.rabbitmq import RabbitApiError, RabbitNode

NODES: Final = 3
NET_TICK: Final = 5
"""Seconds without a sign of life after which a node takes another one for dead; the default of Erlang is 60."""
_ALONE: Final = 20.0
"""Seconds after which a node that is apart from the others is restarted."""
_ADVANCED: Final = "{kernel, [{net_setuptime, 2}]}"
"""Erlang waits so many seconds for the answer of a dead node to a new connection; the default is 7."""
_CONFIG: Final = {
    "net_ticktime": str(NET_TICK),
    "cluster_partition_handling": "pause_minority",  # as RabbitMQ's guide advises for three nodes
}


class Cluster(QueueAccess):
    """Three nodes. Use as a context manager.

    Args:
        version: the major version of RabbitMQ.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._stack = contextlib.ExitStack()
        self.nodes: list[RabbitNode] = []

    def __enter__(self) -> Self:
        try:
            self.network = self._stack.enter_context(Network(NODES))
            for place in self.network.places:
                joins = self.nodes[0] if self.nodes else None
                node = RabbitNode(version=self._version, config=_CONFIG, advanced=_ADVANCED, joins=joins, place=place)
                self.nodes.append(self._stack.enter_context(node))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> str:
        """The addresses and ports of all nodes, as in a URL with several hosts."""
        return ",".join(f"{node.place.address}:{node.port}" for node in self.nodes)

    @property
    def management_url(self) -> str:
        """The root URL of the management API of the first node."""
        return self.nodes[0].management_url

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        """The URL of the first node."""
        return self.nodes[0].url(user, password, vhost)

    # -- places

    def node_of_queue(self, queue: str) -> int:
        """The number of the node with a classic queue, or with the leader of a quorum queue."""
        found = self.ask(f"/api/queues/%2F/{queue}")
        return self._number(found.get("leader", found["node"]))

    def node_of_connection(self, name: str) -> int | None:
        """The number of the node to which a connection goes whose client named it so; ``None``: there is none."""
        for connection in self.ask("/api/connections"):
            if connection.get("client_properties", {}).get("connection_name", "").startswith(name):
                return self._number(connection["node"])
        return None

    def _number(self, node: str) -> int:
        return next(number for number, each in enumerate(self.nodes) if each.full_name == node)

    def ask(self, path: str) -> Any:
        """Get an answer of the management API from the first node that gives one."""
        for node in self.nodes:
            with contextlib.suppress(OSError, RabbitApiError):
                return node.api("GET", path, timeout=2.0)
        raise ConnectionError(f"no node answers {path}")

    # -- health

    def mend(self) -> None:
        """End all faults, and wait until all nodes and members of quorum queues work together.

        A node that was stopped does not notice that it was alone, and does not pause. As an operator does, this
        restarts it if it stays apart.
        """
        self.network.heal()
        for node in self.nodes:
            node.mend()
        try:
            self._wait_whole(_ALONE)
        except TimeoutError:
            for node in self.nodes:
                if self._is_alone(node):
                    node.stop()
                    node.start()
            self._wait_whole(180.0)

    def _wait_whole(self, seconds: float) -> None:
        wait_until(lambda: not list(self._ailments()), seconds=seconds, what="a whole cluster")

    def _is_alone(self, node: RabbitNode) -> bool:
        """Whether *node* does not answer, or was apart from all others."""
        try:
            seen = node.api("GET", "/api/nodes?columns=name,partitions")
        except (OSError, RabbitApiError):
            return True
        apart = [each.get("partitions", ()) for each in seen if each["name"] == node.full_name]
        return len(apart[0]) == len(self.nodes) - 1

    def _ailments(self) -> Iterator[str]:
        names = {node.full_name for node in self.nodes}
        for node in self.nodes:
            try:
                seen = node.api("GET", "/api/nodes?columns=name,running,partitions")
                queues = node.api("GET", "/api/queues/%2F?columns=name,type,state,online,members")
            except (OSError, RabbitApiError) as error:
                yield f"{node.name}: {error}"
                continue
            if {each["name"] for each in seen if each.get("running") and not each.get("partitions")} != names:
                yield f"{node.name} sees {seen}"
            for queue in queues:
                if queue.get("type") == "quorum" and set(queue.get("online", ())) != set(queue.get("members", ())):
                    yield f"{node.name}: {queue}"
