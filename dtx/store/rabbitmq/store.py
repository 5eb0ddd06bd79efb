"""The message store in RabbitMQ: a lane for each vhost. Channels of client connections hold the deliveries."""

import asyncio
from collections.abc import Sequence
from typing import cast
from uuid import UUID, uuid4

from dtx.log.records import Unit
from dtx.store.api import Applied, PhaseTwo, Refused, UnitOutcome
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.phase_two import Lane, LaneSettings
from dtx.store.rabbitmq.queries import Queries
from dtx.store.rabbitmq.service import Broker
from dtx.store.work import HeldWork, Holder


class RabbitStore:
    """The message store in RabbitMQ.

    Args:
        broker: with dtx's own credentials.
        settings: how lanes work.
    """

    def __init__(self, broker: Broker, settings: LaneSettings) -> None:
        self.broker = broker
        self.settings = settings
        self.lanes: dict[str, Lane] = {}
        self.queries = Queries(self.lane)

    async def open(self) -> None:
        """Do nothing: a lane begins when its vhost is first used."""

    async def close(self) -> None:
        """End all lanes."""
        await asyncio.gather(*(lane.close() for lane in self.lanes.values()))

    def lane(self, vhost: str) -> Lane:
        """The lane of a vhost. If there is none, a lane is created and connects."""
        lane = self.lanes.get(vhost)
        if lane is None:
            lane = self.lanes[vhost] = Lane(self.broker, vhost, self.settings, self._drop)
        return lane

    def _drop(self, lane: Lane) -> None:
        del self.lanes[lane.vhost]

    def expect(self, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.lane(vhost).receipts.expect(unit)

    def next_unit(self, vhost: str) -> Unit:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return self.lane(vhost).next_unit()

    def taking_units(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        """See :class:`~dtx.store.api.BrokerStore`."""
        if not work.consumes:
            return {}
        lane = self.lane(vhost)
        # During an alarm a publish would block the connection of the client: then the acks have no receipt.
        receipts = lane.trusts_receipts and not lane.blocked
        return {
            holder: Unit(
                number=number,
                lock=cast("ConsumeChannel", holder).lock,
                nonce=uuid4(),
                incarnation=lane.receipts.incarnation,
                receipt=receipts and not cast("ConsumeChannel", holder).upstream.blocked,
            )
            for number, holder in enumerate(work.holders(), 1)
        }

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        """See :class:`~dtx.store.api.BrokerStore`."""
        lane = self.lane(vhost)
        holders = list(work.holders().items())
        under_way = []
        for unit in units:
            holder, deliveries = holders[unit.number - 1]
            queue = lane.receipts.use(unit)
            under_way.append((unit, cast("ConsumeChannel", holder).take(deliveries, branch_id, unit, queue)))
        outcomes: dict[int, UnitOutcome] = {}
        for unit, done in under_way:
            outcome = await done
            outcomes[unit.number] = outcome if outcome is not None else await lane.resolve(unit)
        return outcomes

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.lane(vhost).resolve(unit)

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.lane(phase.vhost).apply(phase)

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.lane(phase.vhost).put_back(phase)

    def logged(self, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.lane(vhost).receipts.logged(unit)
