"""The effects that wait for the broker. Each ends in an event, whose row in the table has the next effects."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, assert_never

from dtx.log.api import LogError, TransactionLog
from dtx.log.records import BranchRecord, Fate, Unit, UnitState, WorkKind, WorkRow
from dtx.manager.branch_persistence import DTX, BrokerPersistence, log_failed
from dtx.manager.branch_runtime import BranchRuntime
from dtx.store.api import Applied, BrokerStore, PhaseTwo, Refused, Returned, UnitOutcome, UnitProgress
from dtx.telemetry import Metrics, get_logger
from dtx.xa.model import Event, Happened, Operation, State

_log = get_logger(part="manager")
UNDOING: Final = (State.ROLLING_BACK, State.HEURISTIC_ROLLING_BACK)


class BrokerEffects:
    """Takes, applies and puts back messages through a store that may fail at any point.

    Args:
        log: the transaction log, for messages that are no longer in memory.
        durable: writes entries to it.
        store: the message store.
        metrics: numbers.
    """

    def __init__(self, log: TransactionLog, durable: BrokerPersistence, store: BrokerStore, metrics: Metrics) -> None:
        self._log = log
        self._durable = durable
        self._store = store
        self._metrics = metrics

    async def note_stuck(self, entry: BranchRuntime, reason: str, actor: str) -> None:
        """Store the broker's message in the log: phase two could not finish.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        await self._durable.note_stuck(entry, reason, time.time(), actor)
        _log.warning("branch is stuck", xid=entry.xid, vhost=entry.vhost, reason=reason)

    def leave_untaken(self, entry: BranchRuntime) -> None:
        """Before a rollback: consumed messages that were not taken yet keep their places in their queues."""
        if entry.progress is UnitProgress.UNSENT:
            entry.taken.update((unit.number, UnitOutcome.NEVER) for unit in _not_taken(entry))

    async def take(self, entry: BranchRuntime) -> Event:
        """Take the consumed messages, or find out whether they were taken."""
        pending = _not_taken(entry)
        if pending:
            if entry.progress is UnitProgress.UNSENT:
                assert entry.work is not None, "a branch restored from the log is never UNSENT here"
                entry.move_units(UnitProgress.SENT)  # a repeated take would find no messages to take
                outcomes = await self._store.take(entry.id, entry.vhost, pending, entry.work)
            else:
                outcomes = {unit.number: await self._store.resolve(entry.vhost, unit) for unit in pending}
                if set(outcomes.values()) != {UnitOutcome.NEVER}:
                    work = entry.cached if entry.cached is not None else await self.read_work(entry)
                    certain, unknown = (
                        [item for item in work if item.unit is not None and outcomes.get(item.unit) is outcome]
                        for outcome in (UnitOutcome.HAPPENED, UnitOutcome.UNKNOWN)
                    )
                    await self._store.note_taken(entry.id, entry.vhost, certain, unknown)
            entry.taken.update(outcomes)
            entry.may_repeat |= UnitOutcome.UNKNOWN in outcomes.values()
        entry.move_units(UnitProgress.UNSENT)
        taken = set(entry.taken.values())
        if taken <= {UnitOutcome.HAPPENED}:
            operation = Operation.TAKEN
        elif taken == {UnitOutcome.NEVER}:
            operation = Operation.NOT_TAKEN
        else:
            operation = Operation.TAKEN_IN_PART
        return Happened(operation=operation, vote=self._durable.vote(entry))

    async def apply(self, entry: BranchRuntime) -> Event:
        """Publish the messages of a branch."""
        return await self._phase_two(entry, self._store.apply, Operation.APPLIED)

    async def put_back(self, entry: BranchRuntime) -> Event:
        """Put the consumed messages of a branch back."""
        return await self._phase_two(entry, self._store.put_back, Operation.PUT_BACK)

    async def _phase_two(
        self, entry: BranchRuntime, run: Callable[[PhaseTwo], Awaitable[Applied | Refused]], done: Operation
    ) -> Event:
        if entry.applied:
            return Happened(operation=done, vote=self._durable.vote(entry))
        phase = self._phase(entry)
        if entry.progress is not UnitProgress.REFUSED:  # after a refusal, a new unit is logged before it is sent
            entry.move_units(UnitProgress.SENT)  # from here on it may have been sent, also after an error
        try:
            result = await run(phase)
        finally:
            entry.may_repeat |= phase.repeated
        match result:
            case Applied():
                entry.move_units(UnitProgress.APPLIED)
                if entry.may_repeat:
                    self._metrics.units_repeated.inc()
                    _log.warning("messages may have been repeated", xid=entry.xid, vhost=entry.vhost, branch=entry.id)
                self._metrics.units_applied.inc()
                if result.returned:
                    await self._give_back(entry, phase, result.returned)
                return Happened(operation=done, vote=self._durable.vote(entry))
            case Refused():
                self._metrics.units_failed.inc()
                entry.may_repeat |= result.partial
                entry.move_units(UnitProgress.REFUSED)
                entry.settled |= frozenset(result.settled)
                # A unit that was refused or returned may have left its receipt: the next one needs its own nonce.
                unit = self._store.next_unit(entry.vhost)
                unit = replace(unit, attempt=phase.unit.attempt + result.partial)
                fates = await self._fates(entry)
                await self._durable.note_stuck(entry, result.reason, time.time(), DTX, fates, unit)
                return Happened(operation=Operation.STUCK, vote=self._durable.vote(entry), reason=result.reason)
            case _:  # pragma: no cover
                assert_never(result)

    async def _fates(self, entry: BranchRuntime) -> tuple[tuple[int, Fate], ...]:
        """Fates of the messages of a refused unit that the log does not have, earlier ones included.

        If any message that was sent may have arrived, an operator must know that before giving one up.
        """
        if not entry.settled and not entry.may_repeat:
            return ()
        rows = entry.cached if entry.cached is not None else await self.read_work(entry)
        kind = WorkKind.CONSUME if entry.branch.state in UNDOING else WorkKind.PUBLISH
        found = {
            item.position: Fate.UNSURE for item in rows if entry.may_repeat and item.kind is kind and item.fate is None
        }
        done = Fate.PUT_BACK if kind is WorkKind.CONSUME else Fate.PUBLISHED
        found |= {item.position: done for item in rows if item.is_open and item.position in entry.settled}
        return tuple(found.items())

    async def _give_back(self, entry: BranchRuntime, phase: PhaseTwo, returned: Sequence[Returned]) -> None:
        """Return unroutable mandatory messages to their publishers, as with tx.commit (AMQP 0-9-1, 1.9.2)."""
        work = {item.position: item for item in await phase.work()}
        for back in returned:
            origin = entry.origins.get(back.position)
            if origin is not None:
                origin.returned(work[back.position], back.code, back.text)
            _log.warning(
                "mandatory message could not be routed",
                xid=entry.xid,
                vhost=entry.vhost,
                exchange=work[back.position].exchange,
                publisher="told" if origin is not None else "gone",
            )

    def _phase(self, entry: BranchRuntime) -> PhaseTwo:
        record = entry.record
        assert record is not None

        async def work() -> Sequence[WorkRow]:
            rows = entry.cached if entry.cached is not None else await self.read_work(entry)
            # An earlier unit, perhaps of a predecessor, may have published it or put it back.
            entry.may_repeat |= any(item.fate is Fate.UNSURE for item in rows)
            # Finished messages stay finished, even if the log does not have that.
            return [item for item in rows if item.is_open and item.position not in entry.settled]

        unit = next((unit for unit in record.units if unit.number == 0), None)
        if unit is not None and entry.progress is UnitProgress.REFUSED and entry.may_repeat:
            unit = replace(unit, attempt=unit.attempt + 1)  # the log does not have the refusal
        return PhaseTwo(
            branch_id=entry.id,
            vhost=entry.vhost,
            unit=unit or self._store.next_unit(entry.vhost),
            progress=entry.progress if unit is not None else UnitProgress.REFUSED,
            size=record.bytes,
            work=work,
            assign=partial(self._durable.assign, entry),
            unsure=unsure_units(record),
        )

    async def read_work(self, entry: BranchRuntime) -> Sequence[WorkRow]:
        """The messages of a branch, from the log.

        Raises:
            XaError: 541, the log cannot be read.
        """
        try:
            return await self._log.read_work(entry.id)
        except LogError as error:
            raise log_failed(error, "reading the messages", entry.xid) from error


def unsure_units(record: BranchRecord) -> frozenset[int]:
    """The units of a decided branch that have perhaps taken their messages: the log has no outcome of them."""
    return frozenset(unit.number for unit in record.units if unit.number and unit.state is UnitState.PENDING)


def _not_taken(entry: BranchRuntime) -> list[Unit]:
    """The units that are not known to have taken their messages."""
    record = entry.record
    assert record is not None
    return [
        unit
        for unit in record.units
        if unit.number and unit.state is UnitState.PENDING and entry.taken.get(unit.number) is None
    ]
