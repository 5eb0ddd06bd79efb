"""A client's connection that speaks AMQP 1.0.

The engine (:mod:`dtx.wire.amqp10.connection`) implements the protocol. This module handles its events: login, links,
transactions and back-pressure. The nodes store the messages (:mod:`dtx.server.amqp10.nodes`). The events of one read
are handled in one pass, and their writes go to the log together, as in AMQP 0-9.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dtx.config.rules import QuotaResource
from dtx.manager import BranchManager, Requester
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.scan import Scan
from dtx.server.amqp10.links import Attaching, Control, Incoming, OutgoingLink, Shell
from dtx.server.amqp10.nodes import Home, Nodes, amqp_error
from dtx.server.amqp10.transactions import Transactions
from dtx.server.client_session import ClientTransport
from dtx.server.connection import ClientConnection, Stage
from dtx.server.limits import MAX_FRAME, ClientLimits
from dtx.store.slices import SLICE_SECONDS, advance, finish
from dtx.telemetry import get_logger
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp10.connection import Connection as Engine
from dtx.wire.amqp10.coordination import Control as ControlPlace
from dtx.wire.amqp10.coordination import (
    CoordinationEngine,
    CoordinatorAnswer,
    DeclareAsked,
    DischargeAsked,
    PromoteAsked,
    Rejects,
    Terminate,
    WorkRefused,
)
from dtx.wire.amqp10.endpoint import (
    Attached,
    Begun,
    Closed,
    Delivered,
    DeliveryLost,
    Detached,
    Disposed,
    Dropped,
    Ended,
    EndpointSettings,
    Event,
    Flowed,
    LoginAsked,
    Opened,
    Writable,
)
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import INTERNAL, Error, Role, SaslCode, peer_error, read_login
from dtx.wire.amqp10.performatives import TransactionCapability as Capability
from dtx.xa.codes import XaError
from dtx.xa.model import Association

_log = get_logger(part="connection")

_CAPABILITIES: Final = frozenset(Capability)
_ANONYMOUS_RELAY: Final = "ANONYMOUS-RELAY"
"""For a target without an address, each message names its node (AMQP Anonymous Terminus, 2.2). Requests and replies of
Proton need this.
"""
_CLOSE_PATIENCE: Final = 5.0
"""Seconds in which a client must answer close."""
_MAX_CHANNELS: Final = 0x10000
"""Channel numbers have 16 bits."""

_BEHIND: Final = "frames wait"
"""The reason to stop reading while frames of earlier reads wait."""
_LATE: Final = "events wait"
"""The reason to stop reading while events wait for other work."""
_MAX_PARTIAL: Final = 64 << 20
"""Lower bound of the limit on a connection's unfinished messages, bytes. The budget limits all connections together."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The transactions of a connection, as operators see those of a channel.

    Args:
        place: the numbers of the connection and of the channel.
        associations: the branches that the transactions work for.
        consumers: the number of links to the client.
        unacked: the number of deliveries that the client has not settled.
    """

    place: tuple[int, int]
    associations: Sequence[tuple[BranchRuntime, Association]]
    consumers: int = 0
    unacked: int = 0
    prefetch: tuple[int, int] = (0, 0)

    @property
    def mode(self) -> ChannelMode:
        """``dtx`` while there are transactions, else ``plain``."""
        return ChannelMode.DTX if self.associations else ChannelMode.PLAIN

    @property
    def scan(self) -> Scan | None:
        """``None``: only AMQP 0-9 has recovery scans."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Amqp10Limits(ClientLimits):
    """The limits of one connection, and the setting ``control_errors``."""

    control_errors: str


class Amqp10Connection(ClientConnection):
    """One client, from its protocol header to its end.

    Args:
        manager: the manager of the branches.
        limits: the limits of the connection.
        new_nodes: makes its nodes.
        transport: the client's socket.
        header: the protocol header that the client has sent.
    """

    def __init__(
        self,
        manager: BranchManager,
        limits: Amqp10Limits,
        new_nodes: Callable[[Home], Nodes],
        transport: ClientTransport,
        header: bytes,
    ) -> None:
        super().__init__(manager, transport)
        self.nodes = new_nodes(self)
        self.coordination = CoordinationEngine(_CAPABILITIES, Rejects(limits.control_errors))
        self.transactions = Transactions(self, self.coordination)
        self._engine = Engine(
            EndpointSettings(
                container_id=f"dtx-{self.id}",
                mechanisms=self.nodes.mechanisms,
                max_frame_size=limits.frame_max or MAX_FRAME,
                channel_max=min(limits.max_channels, _MAX_CHANNELS) - 1,
                max_message_size=limits.max_message_bytes,
                max_partial=max(_MAX_PARTIAL, limits.max_message_bytes),
                offered_capabilities=(_ANONYMOUS_RELAY,),
            ),
            time.monotonic(),
        )
        self._late: list[Event] | None = None
        """Events that wait for the work of :meth:`_wait_for`; ``None`` if there is none."""
        self._links: dict[tuple[int, int], Shell] = {}
        self._sessions: set[int] = set()
        """The sessions that the quota counts."""
        self._awaited = False
        self._resuming = False
        """Whether :meth:`_resume` is scheduled."""
        self._taking = False
        self._charged = 0
        self._loop = asyncio.get_running_loop()
        self._tick_timer: asyncio.TimerHandle | None = None
        self._set_timer(limits.handshake_timeout, self._too_slow)
        self._take(lambda: self._engine.receive(header, time.monotonic()))
        self._tick()

    async def connect(self) -> None:
        """Do nothing: the client sends first."""

    # -- for operators

    @property
    def channels(self) -> Mapping[int, SessionFacts]:
        """One entry for all sessions, because transactions belong to the connection."""
        if self.stage is not Stage.RUNNING:
            return {}
        links = [len(link.unsettled) for link in self._links.values() if isinstance(link, OutgoingLink)]
        return {0: SessionFacts((self.id, 0), self.transactions.associations, len(links), sum(links))}

    # -- from the client

    def client_data(self, data: bytes) -> None:
        """Handle bytes from the client."""
        self._hold_if_it_reads_nothing()
        self._take(lambda: self._engine.receive(data, time.monotonic()))
        self._charge(self._engine.unfinished)
        if self._engine.behind:
            self.hold_client(_BEHIND)
            self._loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        """Handle the rest of a long read, a slice in each turn of the loop, so that other clients get their turns."""
        if self._late is not None:
            return  # the end of the work that events wait for calls this
        self._take(lambda: self._engine.receive(b"", time.monotonic()))
        self._charge(self._engine.unfinished)
        if not self._engine.behind:
            self.release_client(_BEHIND)
        elif self.stage is not Stage.ENDED:
            self._loop.call_soon(self._catch_up)

    def _charge(self, octets: int) -> None:
        """Charge the *octets* of unfinished messages to the budget."""
        budget = self.budget
        more, self._charged = octets - self._charged, octets
        budget.charge(more)
        if more > 0 and not budget.has_room(0) and self.stage is Stage.RUNNING:
            reason = f"no memory for the message: {budget.excess(0)}"
            self._close(peer_error(AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, reason)))
            self.flush()

    def _take(self, work: Callable[[], Iterable[Event]]) -> None:
        self._taking = True
        try:
            self._handle(work())
        except Exception:  # noqa: BLE001 - logged; the client gets no details
            _log.exception("connection failed", connection=self.id)
            self._close(INTERNAL)
        self._taking = False
        self.flush()

    def _handle(self, events: Iterable[Event]) -> None:
        until = time.monotonic() + SLICE_SECONDS
        for event in events:
            if self.stage is Stage.ENDED:
                return
            if self._late is None and time.monotonic() >= until:
                self._wait_for(asyncio.sleep(0))
            if self._late is None:
                self._on(event)
            elif isinstance(event, Delivered):
                self._late.append(replace(event, payload=memoryview(bytes(event.payload))))
            else:
                self._late.append(event)

    def _wait_for(self, work: Awaitable[None]) -> None:
        """Handle no more events until *work* is done."""
        self._late = []
        self.hold_client(_LATE)
        self.manager.spawn(self._resume_after(work))

    async def _resume_after(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - logged; the client gets no details, but an answer
            _log.exception("connection failed", connection=self.id)
            self._close(INTERNAL)
        late, self._late = self._late or [], None
        self.release_client(_LATE)
        self._take(lambda: late)
        if self._engine.behind:
            self._catch_up()

    def flush(self) -> None:
        """Send the results of handled events to the log and to the client."""
        self._awaited = False
        if self.stage is Stage.RUNNING:
            self.nodes.flush()
        self.pump()
        self.outbox.flush()
        if self._engine.over and self.stage is not Stage.ENDED:
            self._end()

    def flush_soon(self, work: Callable[[], None] | None = None) -> None:
        """Flush at the end of this turn of the loop, after *work*."""
        if work is not None:
            self._loop.call_soon(work)
        elif self._taking:
            return  # :meth:`_take` ends with a flush
        if not self._awaited:
            self._awaited = True
            self._loop.call_soon(self.flush)

    def pump(self) -> None:
        """Move the engine's output to the outbox."""
        for piece in self._engine.data_to_send(time.monotonic()):
            self.outbox.send(piece)

    def _on(self, event: Event) -> None:
        match event:
            case Delivered() | Flowed() | Disposed() | Dropped() | DeliveryLost() | Writable():
                self._on_work(event)
            case LoginAsked():
                self.hold_client(event)
                self._login = self.manager.spawn(self._log_in(event))
            case Opened():
                self._enter(event)
            case Begun():
                self._begin(event.session)
            case Attached():
                self._attach(event)
            case Detached():
                self._forget((event.session, event.link), by_client=event.by_peer)
                session = self._engine.session(event.session)
                link = None if session is None else session.link(event.link)
                if link is not None and event.by_peer:
                    self._answer(link.detach)
            case Ended():
                self._forget_session(event.session, by_client=event.by_peer)
                if event.session in self._sessions:
                    self._sessions.remove(event.session)
                    self._discount_sessions(1)
                session = self._engine.session(event.session)
                if session is not None and event.by_peer:
                    self._answer(session.end)
            case Closed():
                self._on_closed(event)

    def _answer(self, end: Callable[[], None]) -> None:
        """Answer the end of a link or session after its messages have returned."""
        self.slices.then(end)
        self.slices.then(self.flush_soon)

    def _on_work(self, event: Delivered | Flowed | Disposed | Dropped | DeliveryLost | Writable) -> None:
        match event:
            case Delivered():
                self._on_delivered(event)
            case Flowed():
                shell = self._links.get((event.session, event.link))
                if isinstance(shell, OutgoingLink):
                    try:
                        shell.flowed(event)
                    except AmqpError as error:
                        self.detach(shell, error)
            case Disposed():
                self._on_disposed(event)
            case Writable():
                self._resume()
            case DeliveryLost():
                self.transactions.report_missed(event.txn_id)
            case Dropped():
                shell = self._links.get((event.session, event.link))
                if isinstance(shell, Incoming | Control):
                    shell.replenish()

    # -- opening

    async def _log_in(self, asked: LoginAsked) -> None:
        transport = self._transport
        if transport is None:
            return
        code = await self.nodes.log_in(read_login(asked.mechanism, asked.response), transport)
        if self.stage is not Stage.OPENING:
            return
        self.release_client(asked)
        if code is SaslCode.OK:
            self._take(self._engine.login)
        else:
            self._engine.refuse_login(code)
            self.flush()

    def _enter(self, event: Opened) -> None:
        try:
            who = self.nodes.enter(event.open.hostname)
        except AmqpError as error:
            self._close(peer_error(error))
            return
        if isinstance(who, Requester):
            self._entered(who)
        else:
            self._wait_for(self._enter_later(who))

    async def _enter_later(self, entering: Awaitable[Requester]) -> None:
        try:
            who = await entering
        except AmqpError as error:
            self.fail(error)
            return
        if self.stage is Stage.OPENING:
            self._entered(who)

    def _entered(self, who: Requester) -> None:
        try:
            self._admit(who)
        except XaError as error:
            self._close(peer_error(AmqpError(Condition.NOT_ALLOWED, error.reason)))
            self.flush()
            return
        self.who = who
        if self._transport is None or not self._transport.opened(who):
            reason = "connection limit reached (--max-connections)"
            self._close(peer_error(AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, reason)))
            return
        self._cancel_timer()
        self.stage = Stage.RUNNING
        self._engine.open()
        self._loop.call_soon(self._tick)  # the client's idle time-out is known now

    def recheck(self) -> None:
        """Close the connection if its user was deleted or may not enter the vhost any more."""
        reason = self.nodes.ban_reason() if self.stage is Stage.RUNNING else None
        if reason is not None:
            self.fail(AmqpError(Condition.CONNECTION_FORCED, reason))

    # -- sessions: quotas count them as channels

    def _begin(self, number: int) -> None:
        session = self._engine.session(number)
        if session is None or self.stage is not Stage.RUNNING:
            return
        holdings = self.manager.quotas.of(self.who.user, self.who.vhost)
        reason = holdings.excess(QuotaResource.CHANNELS)
        if reason is not None:
            session.end(peer_error(AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, f"session refused: {reason}")))
            return
        holdings.add(QuotaResource.CHANNELS)
        self._sessions.add(number)
        session.begin()

    def _discount_sessions(self, count: int) -> None:
        for _ in range(count):
            self.manager.quotas.of(self.who.user, self.who.vhost).remove(QuotaResource.CHANNELS)

    # -- links

    def _attach(self, event: Attached) -> None:
        session = self._engine.session(event.session)
        link = None if session is None else session.link(event.link)
        if session is None or link is None or self.stage is not Stage.RUNNING:
            return
        place = event.session, event.link
        try:
            shell = Attaching(self, session, link, event.attach).attach()
        except (AmqpError, XaError) as error:
            link.refuse(peer_error(amqp_error(error)))
        else:
            if isinstance(shell, Shell):
                self._links[place] = shell
            else:
                self._wait_for(self._attach_later(place, link, shell))

    async def _attach_later(self, place: tuple[int, int], link: Link, attaching: Awaitable[Shell]) -> None:
        try:
            shell = await attaching
        except (AmqpError, XaError) as error:
            link.refuse(peer_error(amqp_error(error)))
        else:
            if self.stage is Stage.RUNNING:
                self._links[place] = shell
            else:
                shell.shut_down()

    def detach(self, shell: Incoming | OutgoingLink, error: AmqpError) -> None:
        """End a link because of *error*."""
        if self._links.get(shell.place) is shell:
            self._forget(shell.place)
            shell.detach(peer_error(error))
        self.flush_soon()

    def terminate(self, control: ControlPlace, error: Error) -> None:
        """End a control link, and its transactions with it."""
        shell = self._links.get(control)
        self._forget(control)
        if isinstance(shell, Control):
            shell.detach(error)

    def shell(self, place: tuple[int, int]) -> Shell | None:
        """The link that is attached at *place* now. Places are reused."""
        return self._links.get(place)

    def _forget(self, place: tuple[int, int], *, by_client: bool = False) -> None:
        shell = self._links.pop(place, None)
        if isinstance(shell, Incoming):
            shell.shut_down(by_client=by_client)
        elif shell is not None:
            shell.shut_down()
        if shell is not None and not self._resuming:
            self._resuming = True
            self.flush_soon(self._resume)  # its waiting output has kept other links from sending

    def _forget_session(self, session: int, *, by_client: bool) -> None:
        self._engine.effort += len(self._links)
        for _ in self._forget_all([place for place in self._links if place[0] == session], by_client=by_client):
            pass

    def _forget_all(self, places: Iterable[tuple[int, int]], *, by_client: bool = False) -> Iterator[None]:
        """Forget links, outgoing ones first: they must not get messages that transactions return."""
        for place in sorted(places, key=lambda place: not isinstance(self._links[place], OutgoingLink)):
            try:
                self._forget(place, by_client=by_client)
            except Exception:  # noqa: BLE001 - logged; the other links must still return their messages
                _log.exception("link failed", connection=self.id, place=place)
            yield

    def _on_delivered(self, event: Delivered) -> None:
        shell = self._links.get((event.session, event.link))
        if isinstance(shell, Incoming):
            shell.delivered(event)
        elif isinstance(shell, Control):
            shell.replenish()
            asked = self.coordination.asked(event, self._engine.is_partial)
            if isinstance(asked, DeclareAsked):
                self.transactions.declare(asked)
            elif isinstance(asked, PromoteAsked):
                self.transactions.promote(asked)
            elif isinstance(asked, DischargeAsked):
                self.transactions.discharge(asked)
            else:
                self.reply(asked)

    def _on_disposed(self, event: Disposed) -> None:
        if event.role is not Role.SENDER:
            return  # dtx settles a client's message together with its outcome
        work = self._dispose(event)
        if not advance(work):
            self._wait_for(finish(work))

    def _dispose(self, event: Disposed) -> Iterator[None]:
        by_link: dict[int, list[int]] = {}
        for link, number in event.deliveries:
            by_link.setdefault(link, []).append(number)
        for handle, deliveries in by_link.items():
            shell = self._links.get((event.session, handle))
            if isinstance(shell, OutgoingLink):
                try:
                    yield from shell.disposed(deliveries, event.state, settled=event.settled)
                except WorkRefused as refusal:
                    if refusal.terminates is not None:
                        self.terminate(refusal.terminates, peer_error(refusal.error))
                    self.detach(shell, refusal.error)

    def reply(self, answer: CoordinatorAnswer | Terminate) -> None:
        """Answer a control link."""
        if isinstance(answer, Terminate):
            self.terminate(answer.control, answer.error)
        else:
            session = self._engine.session(answer.control[0])
            if session is not None and self.shell(answer.control) is not None:
                session.dispose(Role.RECEIVER, (answer.delivery_id,), answer.outcome, settled=True)
        self.flush_soon()

    # -- pace

    def client_is_slow(self) -> None:
        """See :class:`ClientConnection`."""
        super().client_is_slow()
        self.nodes.pause()

    def client_has_caught_up(self) -> None:
        """See :class:`ClientConnection`."""
        self.nodes.resume()
        super().client_has_caught_up()

    def _resume(self) -> None:
        self._resuming = False
        for shell in list(self._links.values()):
            if isinstance(shell, OutgoingLink):
                shell.resume()

    def _tick(self) -> None:
        """Check the idle time-outs, and send an empty frame when it is due."""
        if self.ended.done():
            return
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        now = time.monotonic()
        if self._holding:
            self._engine.note_received(now)
        next_at: float | None = None

        def work() -> Iterable[Event]:
            nonlocal next_at
            next_at, events = self._engine.tick(now)
            return events

        self._take(work)
        if not self.ended.done():
            self._tick_timer = self._loop.call_later(1.0 if next_at is None else max(next_at - now, 0.05), self._tick)

    # -- the end

    def _work_failed(self, error: Exception) -> None:
        _log.error("connection failed", connection=self.id, exc_info=error)
        self._close(INTERNAL)
        self.flush_soon()

    def _on_closed(self, event: Closed) -> None:
        if event.error is not None:
            reason = f"{event.error.condition}: {event.error.description}"
            _log.info("connection closed with an error", connection=self.id, by_client=event.by_peer, reason=reason)
        if not event.by_peer:
            self._leave(Stage.CLOSING)
            self._set_timer(_CLOSE_PATIENCE, self.abort)
        elif self.stage is Stage.RUNNING:
            self._leave(Stage.LEAVING, self._confirm_close)
        else:
            self._confirm_close()

    def _confirm_close(self) -> None:
        self._engine.close()
        self.flush()

    def fail(self, error: AmqpError) -> None:
        """Close the connection with *error*. Idempotent."""
        self._close(peer_error(error))
        self.flush()

    def _close(self, error: Error) -> None:
        if self.stage in (Stage.OPENING, Stage.RUNNING):
            self._engine.close(error)
            self._leave(Stage.CLOSING)
            self._set_timer(_CLOSE_PATIENCE, self.abort)

    def stop(self, frame: bytes) -> None:  # noqa: ARG002 - a frame of AMQP 0-9
        """Close the connection, because dtx stops or an operator closes it. After the end, abort its nodes."""
        if self.stage is Stage.ENDED:
            self.nodes.abort()
        else:
            self.fail(AmqpError(Condition.CONNECTION_FORCED, "the connection was closed by dtx"))

    def _leave(self, stage: Stage, then: Callable[[], None] | None = None) -> None:
        """Close all links, then leave the nodes. *then* is called when the writes of the client are complete."""
        running = self.stage is Stage.RUNNING
        self.stage = stage
        if not running:
            return
        self._discount_sessions(len(self._sessions))
        self._sessions.clear()
        self.slices.run(self._forget_all(self._links))
        self.after_work(lambda: self.nodes.leave(then))  # the transactions of control links end before

    def _release_all(self) -> None:
        self._charge(0)
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self.after_work(lambda: self.nodes.end(self._over))
