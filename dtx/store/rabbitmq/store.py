"""The message store in RabbitMQ: a commit connection for each vhost.

Channels of client connections hold the deliveries.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, cast
from uuid import UUID, uuid4

from dtx.log.api import LogError
from dtx.log.records import Duplicate, Unit, WorkRow
from dtx.store.api import Applied, PhaseTwo, Refused, UnitOutcome
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.copies import MovedMessage
from dtx.store.rabbitmq.queries import Queries
from dtx.store.rabbitmq.service import Broker
from dtx.store.work import HeldWork, Holder
from dtx.telemetry import get_logger

_log = get_logger(part="copies")
_LOG_PATIENCE: Final = 10.0
"""Seconds that a vote waits for a record of what it has taken."""


class RabbitStore:
    """The message store in RabbitMQ.

    Args:
        broker: with dtx's own credentials.
        settings: how commit connections work.
    """

    def __init__(self, broker: Broker, settings: CommitSettings) -> None:
        self.broker = broker
        self.settings = settings
        self.copies = settings.copies
        self._perhaps_taken: dict[UUID, list[MovedMessage]] = {}
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

    def expect(self, branch_id: UUID, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        if not unit.number:
            self.copies.begin(branch_id)
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

        def doubt(units: Iterable[Unit]) -> dict[int, list[MovedMessage]]:
            return {
                unit.number: self._doubt(
                    vhost,
                    [each.to_row(0, unit.number) for each in holders[unit.number - 1][1] if each.body is not None],
                )
                for unit in units
            }

        # other members may get the messages as soon as a connection is lost, before it is noticed here
        doubtful = {} if self.copies.members is None else doubt(units)
        under_way = []
        for unit in units:
            holder, deliveries = holders[unit.number - 1]
            queue = connection.receipts.use(unit)
            channel = cast("ConsumeChannel", holder)
            copies = channel.filter.pin(delivery.tag for delivery in deliveries)
            under_way.append((unit, channel, copies, channel.take(deliveries, branch_id, unit, queue)))
        answers = {unit.number: await done for unit, _, _, done in under_way}
        doubtful = doubtful or doubt(unit for unit in units if answers[unit.number] in (None, UnitOutcome.UNKNOWN))
        outcomes: dict[int, UnitOutcome] = {}
        for unit, channel, copies, _ in under_way:
            outcome = answers[unit.number] or await connection.resolve(unit)
            outcomes[unit.number] = outcome
            if outcome is UnitOutcome.NEVER:
                channel.filter.unpin(copies)
            elif outcome is UnitOutcome.UNKNOWN:
                self.copies.release(copies.values())  # they wait as messages in doubt, until they are put back
            elif copies:
                await self._record(self.copies.settle(list(copies.values())))
            found = doubtful.get(unit.number, ())
            if outcome is UnitOutcome.UNKNOWN:
                self._perhaps_taken.setdefault(branch_id, []).extend(found)
            else:
                self.copies.end_doubt(found)
        return outcomes

    async def _record(self, recording: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_LOG_PATIENCE):
                await recording
        except (LogError, TimeoutError) as error:  # without the log the vote fails as well
            _log.warning("settlements could not be recorded", reason=str(error) or "the log does not answer")

    async def note_taken(
        self, branch_id: UUID, vhost: str, taken: Sequence[WorkRow], unknown: Sequence[WorkRow]
    ) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        found = (self.copies.copy_of(vhost, item) for item in taken)
        copies = [copy for copy in found if copy is not None]
        if copies:
            await self._record(self.copies.settle(copies))
        if unknown:
            self._perhaps_taken.setdefault(branch_id, []).extend(self._doubt(vhost, unknown))

    def _doubt(self, vhost: str, work: Sequence[WorkRow]) -> list[MovedMessage]:
        """Note messages that a branch has perhaps taken: it may put them back."""
        found = self._movable(vhost, work)
        self.copies.doubt(found)
        return found

    def _movable(self, vhost: str, work: Sequence[WorkRow]) -> list[MovedMessage]:
        return [moved for item in work if (moved := self.copies.movable(vhost, item)) is not None]

    async def restore(self, duplicate: Duplicate) -> None:
        """See :meth:`CommitConnection.restore`."""
        await self.commit_connection(duplicate.vhost).restore(duplicate)

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        """See :class:`~dtx.store.api.BrokerStore`."""
        return await self.commit_connection(vhost).resolve(unit)

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.copies.begin(phase.branch_id)
        return await self.commit_connection(phase.vhost).apply(phase)

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.copies.begin(phase.branch_id)
        if phase.unsure:
            unsure = [item for item in await phase.work() if item.unit in phase.unsure]
            moved = self._movable(phase.vhost, unsure)
            await self._record(self.copies.move(moved))
            await self.copies.announce(moved)
        self.copies.end_doubt(self._perhaps_taken.pop(phase.branch_id, ()))
        return await self.commit_connection(phase.vhost).put_back(phase)

    def logged(self, vhost: str, unit: Unit) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.commit_connection(vhost).receipts.logged(unit)

    def ended(self, branch_id: UUID) -> None:
        """See :class:`~dtx.store.api.BrokerStore`."""
        self.copies.end_doubt(self._perhaps_taken.pop(branch_id, ()))
        self.copies.end(branch_id)
