"""The message store in RabbitMQ: a commit connection for each vhost.

Channels of client connections hold the deliveries.
"""

import asyncio
from collections.abc import Sequence
from typing import cast
from uuid import UUID, uuid4

from dtx.log.records import Unit
from dtx.store.api import Applied, PhaseTwo, Refused, UnitOutcome
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.queries import Queries
from dtx.store.rabbitmq.service import Broker
from dtx.store.work import HeldWork, Holder


class RabbitStore:
    """The message store in RabbitMQ.

    Args:
        broker: with dtx's own credentials.
        settings: how commit connections work.
    """

    def __init__(self, broker: Broker, settings: CommitSettings) -> None:
        self.broker = broker
        self.settings = settings
        self.commit_connections: dict[str, CommitConnection] = {}
        self.queries = Queries(self.commit_connection)

    async def open(self) -> None:
        """Do nothing: a commit connection begins when its vhost is first used."""

    async def close(self) -> None:
        """End all commit connections."""
        await asyncio.gather(*(connection.close() for connection in self.commit_connections.values()))

    def commit_connection(self, vhost: str) -> CommitConnection:
        """The commit connection of a vhost. If there is none, a commit connection is created and connects."""
        connection = self.commit_connections.get(vhost)
        if connection is None:
            connection = self.commit_connections[vhost] = CommitConnection(
                self.broker, vhost, self.settings, self._drop
            )
        return connection

    def _drop(self, connection: CommitConnection) -> None:
        del self.commit_connections[connection.vhost]

    def expect(self, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.commit_connection(vhost).receipts.expect(unit)

    def next_unit(self, vhost: str) -> Unit:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return self.commit_connection(vhost).next_unit()

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        """See :class:`~dtx.store.api.BrokerStore`."""
        if not work.consumes:
            return {}
        connection = self.commit_connection(vhost)
        # During an alarm a publish would block the connection of the client: then the acks have no receipt.
        receipts = connection.trusts_receipts and not connection.blocked
        return {
            holder: Unit(
                number=number,
                lock=cast("ConsumeChannel", holder).lock,
                nonce=uuid4(),
                incarnation=connection.receipts.incarnation,
                receipt=receipts and not cast("ConsumeChannel", holder).upstream.blocked,
            )
            for number, holder in enumerate(work.holders(), 1)
        }

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        """See :class:`~dtx.store.api.BrokerStore`."""
        connection = self.commit_connection(vhost)
        holders = list(work.holders().items())
        under_way = []
        for unit in units:
            holder, deliveries = holders[unit.number - 1]
            queue = connection.receipts.use(unit)
            under_way.append((unit, cast("ConsumeChannel", holder).take(deliveries, branch_id, unit, queue)))
        outcomes: dict[int, UnitOutcome] = {}
        for unit, done in under_way:
            outcome = await done
            outcomes[unit.number] = outcome if outcome is not None else await connection.resolve(unit)
        return outcomes

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.commit_connection(vhost).resolve(unit)

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.commit_connection(phase.vhost).apply(phase)

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.commit_connection(phase.vhost).put_back(phase)

    def logged(self, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.commit_connection(vhost).receipts.logged(unit)
