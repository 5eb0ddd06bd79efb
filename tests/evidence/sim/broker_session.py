"""One connection of the simulated broker: AMQP 0-9-1 as RabbitMQ speaks it, as far as dtx needs that.

Methods are read and written with pika's codec, so that dtx's codec is not compared with itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pika.frame
from pika import spec

from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.frames import BODY, HEADER, HEARTBEAT, HEARTBEAT_FRAME, FrameSplitter
from tests.evidence.sim.broker import LATE, Consumer, Message, Queue, SimBroker, Unsynced

_HEARTBEAT: Final = 10
_FRAME_MAX: Final = 131_072


_HELD_UP: Final = 0.03
"""Share of units that are delayed inside tx.commit, whether or not their connection has ended."""


@dataclass(slots=True)
class _Publish:
    exchange: bytes
    routing_key: bytes
    mandatory: bool
    properties: bytes = b""
    size: int = -1
    body: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Settle:
    tag: int
    queue: Queue
    message: Message
    requeue: bool | None
    """``None``: acknowledged; ``False``: dropped; ``True``: requeued."""


class BrokerConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, broker: SimBroker) -> None:
        self.broker = broker
        self.channels: dict[int, BrokerChannel] = {}
        self.ended = False
        self._splitter = FrameSplitter(0)
        self._header_left = 8
        self._transport: Any = None
        self._heard = broker.loop.now
        self._closing = False
        self._blocked = False

    def connection_made(self, transport: Any) -> None:
        """Register the connection, and start heartbeats."""
        self._transport = transport
        self.broker.connections[self] = None
        self.broker.process.call(_HEARTBEAT / 2, self._beat)

    def _beat(self) -> None:
        if self.ended:
            return
        if self.broker.loop.now - self._heard > 2 * _HEARTBEAT and not self._blocked:
            self.end()
            return
        self._transport.write(HEARTBEAT_FRAME)
        self.broker.process.call(_HEARTBEAT / 2, self._beat)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, since the client has."""
        self.end()

    def end(self) -> None:
        """End the connection: its exclusive queues are deleted soon, each channel ends separately."""
        if self.ended:
            return
        self.ended = True
        broker = self.broker
        self._transport.abort()
        broker.connections.pop(self, None)
        gone = broker.loop.random.random() * 0.05
        broker.process.call(gone, self._release)
        for channel in self.channels.values():
            channel.connection_ended(gone)

    def _release(self) -> None:
        mine = [name for name, queue in self.broker.queues.items() if queue.owner is self]
        for name in mine:
            del self.broker.queues[name]

    def unblock(self) -> None:
        """Continue to read after the end of the alarm."""
        if self._blocked:
            self._blocked = False
            self._heard = self.broker.loop.now
            self.send(0, spec.Connection.Unblocked())
            self._transport.resume_reading()

    def published(self) -> None:
        """During an alarm, stop reading from a client that publishes."""
        if self.broker.alarm and not self._blocked:
            self._blocked = True
            self.send(0, spec.Connection.Blocked("low on memory"))
            self._transport.pause_reading()

    # -- frames

    def send(self, channel: int, method: Any) -> None:
        """Send a method."""
        self.send_raw(pika.frame.Method(channel, method).marshal())

    def send_raw(self, frames: bytes) -> None:
        """Send frames."""
        if not self.ended:
            self._transport.write(frames)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        self._heard = self.broker.loop.now
        if self._header_left:
            header, data = data[: self._header_left], data[self._header_left :]
            self._header_left -= len(header)
            if self._header_left:
                return
            capabilities = {"basic.nack": True, "connection.blocked": True, "consumer_cancel_notify": True}
            self.send(0, spec.Connection.Start(server_properties={"product": "sim", "capabilities": capabilities}))
        buffer, frames = self._splitter.feed(data)
        for key, number, start, end in frames:
            if self.ended or key == HEARTBEAT:
                continue
            payload = buffer[start + 7 : end - 1]
            if number == 0:
                self._zero(key, payload)
            elif not self._closing:
                self.take(key, number, payload)

    def take(self, key: int, number: int, payload: bytes) -> None:
        """Pass a frame to its channel."""
        channel = self.channels.get(number)
        if channel is None:
            if key != spec.Channel.Open.INDEX:
                self.close(504, "CHANNEL_ERROR - expected 'channel.open'")
                return
            channel = self.channels[number] = BrokerChannel(self, number)
        channel.frame(key, payload)

    def _zero(self, key: int, payload: bytes) -> None:
        match key:
            case spec.Connection.StartOk.INDEX:
                self.send(0, spec.Connection.Tune(2047, _FRAME_MAX, _HEARTBEAT))
            case spec.Connection.Open.INDEX:
                self.send(0, spec.Connection.OpenOk())
            case spec.Connection.Close.INDEX:
                self.send(0, spec.Connection.CloseOk())
                self._closing = True
                self.broker.process.call(self.broker.network.delay(), self.end)
            case spec.Connection.CloseOk.INDEX:
                self.end()
            case _:
                pass

    def close(self, code: int, text: str) -> None:
        """Close the connection with an exception."""
        self.send(0, spec.Connection.Close(code, text, 0, 0))
        self._closing = True
        self.broker.process.call(1.0, self.end)


class BrokerChannel:
    """One channel; it processes its methods in order, each after a delay."""

    def __init__(self, connection: BrokerConnection, number: int) -> None:
        self.connection = connection
        self.broker = connection.broker
        self.number = number
        self.tx = False
        self._confirms = 0
        """Publishes since confirm.select."""
        self._confirming = False
        self.closing = False
        self.unacked: dict[int, tuple[Queue, Message]] = {}
        self.consumers: dict[bytes, Queue] = {}
        self.prefetch = 0
        self._tags = 0
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._working = False
        self._committing = False
        self._publish: _Publish | None = None
        self._published: list[_Publish] = []
        self._settled: list[_Settle] = []
        self._ended = False

    def frame(self, key: int, payload: bytes) -> None:
        """Queue a received frame."""
        self._inbox.append((key, payload))
        if not self._working:
            self._working = True
            self.broker.process.call(self.broker.network.delay() / 4, self._work)

    def _work(self) -> None:
        self._working = False
        while self._inbox and not self._ended:
            if self._committing:
                # "RabbitMQ closes the whole connection for any frame between tx.commit and commit-ok"
                self.connection.close(504, "CHANNEL_ERROR - unexpected method while a commit is under way")
                self._inbox.clear()
                return
            key, payload = self._inbox.popleft()
            if self.closing and key != spec.Channel.CloseOk.INDEX:
                continue
            if key == HEADER:
                self._header(payload)
            elif key == BODY:
                self._body(payload)
            else:
                method = spec.methods[key]()
                method.decode(payload, 4)
                self._METHODS[key](self, method)

    def _send(self, method: Any) -> None:
        self.connection.send(self.number, method)

    def _close(self, code: int, text: str, key: int) -> None:
        """Close the channel with an exception, and discard its transaction."""
        self.closing = True
        self._published.clear()
        self._settled.clear()
        self.give_all_back()
        self._send(spec.Channel.Close(code, text, key >> 16, key & 0xFFFF))

    def give_all_back(self) -> None:
        """Requeue unsettled messages, and end the consumers."""
        self.broker.leaving.pop(self, None)
        touched = {}
        for queue in self.consumers.values():
            queue.consumers = [consumer for consumer in queue.consumers if consumer.channel is not self]
            if queue.auto_delete and not queue.consumers:
                self.broker.queues.pop(queue.name, None)
        self.consumers.clear()
        for queue, message in self.unacked.values():
            queue.give_back(message)
            touched[queue.name] = queue
        self.unacked.clear()
        for settle in self._settled:
            settle.queue.give_back(settle.message)
            touched[settle.queue.name] = settle.queue
        self._settled.clear()
        if self.broker.running:
            self.broker.feed(touched.values())

    def holds(self) -> list[Queue]:
        """Return the queues of its unsettled deliveries."""
        return [*(queue for queue, _ in self.unacked.values()), *(settle.queue for settle in self._settled)]

    def connection_ended(self, gone: float) -> None:
        """End the channel some time after its connection: a unit in tx.commit may still be applied."""
        random, process = self.broker.loop.random, self.broker.process
        self.broker.leaving[self] = None
        if random.random() < 0.3:
            self._inbox.clear()
        process.call(gone + random.random() * LATE, self._end)

    def _end(self) -> None:
        if not self._ended:
            self._work()
            self._ended = True
            if not self._committing:
                self.give_all_back()
            self.connection.channels.pop(self.number, None)

    # -- methods

    def _open(self, _: Any) -> None:
        self._send(spec.Channel.OpenOk())

    def _client_closes(self, _: Any) -> None:
        self._published.clear()
        self.give_all_back()
        self._send(spec.Channel.CloseOk())
        self._begin_anew()

    def _close_ok(self, _: Any) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Free the channel number; frames that came later belong to its next channel."""
        self._ended = True
        del self.connection.channels[self.number]
        for key, payload in self._inbox:
            self.connection.take(key, self.number, payload)

    def _flow(self, method: Any) -> None:
        """Answer, without any effect, after everything that came before."""
        self._send(spec.Channel.FlowOk(method.active))

    def _qos(self, method: Any) -> None:
        self.prefetch = method.prefetch_count
        self._send(spec.Basic.QosOk())

    def _tx_select(self, _: Any) -> None:
        self.tx = True
        self._send(spec.Tx.SelectOk())

    def _confirm_select(self, _: Any) -> None:
        self._confirming = True
        self._send(spec.Confirm.SelectOk())

    def _tx_rollback(self, _: Any) -> None:
        self._published.clear()
        for settle in self._settled:
            self.unacked[settle.tag] = settle.queue, settle.message
        self._settled.clear()
        self._send(spec.Tx.RollbackOk())

    def _queue(self, name: str, key: int) -> Queue | None:
        queue = self.broker.queues.get(name.encode())
        if queue is None:
            self._close(404, f"NOT_FOUND - no queue '{name}' in vhost '/'", key)
        elif queue.owner is not None and queue.owner is not self.connection:
            self._close(405, f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{name}'", key)
        else:
            return queue
        return None

    def _declare(self, method: Any) -> None:
        name = method.queue.encode()
        if method.passive or name in self.broker.queues:
            queue = self._queue(method.queue, spec.Queue.Declare.INDEX)
            if queue is None:
                return
        else:
            limit = (method.arguments or {}).get("x-max-length")
            owner = self.connection if method.exclusive else None
            queue = self.broker.queues[name] = Queue(name, method.durable, owner, method.auto_delete, limit)
        if not method.nowait:
            self._send(spec.Queue.DeclareOk(method.queue, len(queue.ready), len(queue.consumers)))

    def _declare_exchange(self, method: Any) -> None:
        alternate = (method.arguments or {}).get("alternate-exchange", "")
        if self.broker.exchanges.setdefault(method.exchange, alternate) != alternate:
            self._close(406, "PRECONDITION_FAILED - inequivalent arg", spec.Exchange.Declare.INDEX)
        else:
            self._send(spec.Exchange.DeclareOk())

    def _purge(self, method: Any) -> None:
        queue = self._queue(method.queue, spec.Queue.Purge.INDEX)
        if queue is not None:
            count = len(queue.ready)
            queue.ready.clear()
            self._send(spec.Queue.PurgeOk(count))

    def _delete(self, method: Any) -> None:
        queue = self.broker.queues.pop(method.queue.encode(), None)
        self._send(spec.Queue.DeleteOk(len(queue.ready) if queue is not None else 0))

    def _consume(self, method: Any) -> None:
        queue = self._queue(method.queue, spec.Basic.Consume.INDEX)
        if queue is None:
            return
        if queue.consumers and (method.exclusive or any(consumer.exclusive for consumer in queue.consumers)):
            self._close(403, "ACCESS_REFUSED - queue in exclusive use", spec.Basic.Consume.INDEX)
            return
        tag = method.consumer_tag.encode() or f"ctag-{self.number}-{len(self.consumers)}".encode()
        queue.consumers.append(Consumer(self, tag, method.no_ack, method.exclusive))
        self.consumers[tag] = queue
        self._send(spec.Basic.ConsumeOk(tag.decode()))
        self.broker.feed([queue])

    def _cancel(self, method: Any) -> None:
        queue = self.consumers.pop(method.consumer_tag.encode(), None)
        if queue is not None:
            queue.consumers = [
                c for c in queue.consumers if c.channel is not self or c.tag.decode() != method.consumer_tag
            ]
        if not method.nowait:
            self._send(spec.Basic.CancelOk(method.consumer_tag))

    def _get(self, method: Any) -> None:
        queue = self._queue(method.queue, spec.Basic.Get.INDEX)
        if queue is None:
            return
        if not queue.ready:
            self._send(spec.Basic.GetEmpty())
            return
        message = queue.ready.pop(0)
        tag = self._hand_out(queue, message, method.no_ack)
        key = message.routing_key.decode()
        self._content(
            spec.Basic.GetOk(tag, message.redelivered, message.exchange.decode(), key, len(queue.ready)), message
        )

    @property
    def has_room(self) -> bool:
        """Whether the prefetch allows another delivery."""
        return not self.prefetch or len(self.unacked) + len(self._settled) < self.prefetch

    def deliver(self, queue: Queue, consumer: Consumer, message: Message) -> None:
        """Send basic.deliver."""
        tag = self._hand_out(queue, message, consumer.no_ack)
        key = message.routing_key.decode()
        method = spec.Basic.Deliver(consumer.tag.decode(), tag, message.redelivered, message.exchange.decode(), key)
        self._content(method, message)

    def _hand_out(self, queue: Queue, message: Message, no_ack: bool) -> int:
        self._tags += 1
        if not no_ack:
            self.unacked[self._tags] = queue, message
        return self._tags

    def _content(self, method: Any, message: Message) -> None:
        head = b"\x00\x3c\x00\x00" + len(message.body).to_bytes(8, "big") + message.properties
        frames = [pika.frame.Method(self.number, method).marshal(), _frame(HEADER, self.number, head)]
        if message.body:
            frames.append(_frame(BODY, self.number, message.body))
        self.connection.send_raw(b"".join(frames))

    # -- settling

    def _ack(self, method: Any) -> None:
        self._settle(method, None, spec.Basic.Ack.INDEX)

    def _nack(self, method: Any) -> None:
        self._settle(method, method.requeue, spec.Basic.Nack.INDEX)

    def _reject(self, method: Any) -> None:
        self._settle(method, method.requeue, spec.Basic.Reject.INDEX)

    def _settle(self, method: Any, requeue: bool | None, key: int) -> None:
        tag = method.delivery_tag
        if getattr(method, "multiple", False):
            tags = [known for known in self.unacked if not tag or known <= tag]
        elif tag in self.unacked:
            tags = [tag]
        else:
            self._close(406, f"PRECONDITION_FAILED - unknown delivery tag {tag}", key)
            return
        for known in tags:
            queue, message = self.unacked.pop(known)
            self._settled.append(_Settle(known, queue, message, requeue))
        if not self.tx:
            self._apply_settled()

    def _recover(self, _: Any) -> None:
        for queue, message in self.unacked.values():
            queue.give_back(message)
        touched = {queue.name: queue for queue, _ in self.unacked.values()}
        self.unacked.clear()
        self._send(spec.Basic.RecoverOk())
        self.broker.feed(touched.values())

    def _apply_settled(self) -> list[tuple[Queue, Message]]:
        acked = []
        touched = {}
        for settle in self._settled:
            touched[settle.queue.name] = settle.queue
            if settle.requeue:
                settle.queue.give_back(settle.message)
            else:
                acked.append((settle.queue, settle.message))
                self.broker.forgotten(settle.queue, settle.message)
        self._settled.clear()
        self.broker.feed(touched.values())
        return acked

    # -- publishing

    def _basic_publish(self, method: Any) -> None:
        self._publish = _Publish(method.exchange.encode(), method.routing_key.encode(), method.mandatory)
        self.connection.published()
        if method.exchange:
            text = f"NOT_FOUND - no exchange '{method.exchange}' in vhost '/'"
            self._close(404, text, spec.Basic.Publish.INDEX)

    def _header(self, payload: bytes) -> None:
        publish = self._publish
        if publish is not None:
            publish.size = int.from_bytes(payload[4:12], "big")
            publish.properties = payload[12:]
            self._body(b"")

    def _body(self, payload: bytes) -> None:
        publish = self._publish
        if publish is None:
            return
        publish.body += payload
        if len(publish.body) >= publish.size:
            self._publish = None
            if self.tx:
                self._published.append(publish)
            elif self._confirming:
                self._confirm(publish)
            else:
                self._route(publish, [])

    def _route(self, publish: _Publish, done: list[tuple[Queue, Message]]) -> bool:
        """Put a message into its queue; return ``False`` if the queue refuses it."""
        queue = self.broker.queues.get(publish.routing_key)
        if queue is None:
            if publish.mandatory:
                method = spec.Basic.Return(312, "NO_ROUTE", "", publish.routing_key.decode())
                back = Message(0, b"", publish.routing_key, publish.properties, bytes(publish.body), False)
                self._content(method, back)
            return True
        persistent = properties.read(publish.properties).delivery_mode == properties.PERSISTENT
        message = self.broker.enqueue(
            queue, publish.exchange, publish.routing_key, publish.properties, bytes(publish.body), persistent
        )
        if message is None:
            return False
        done.append((queue, message))
        self.broker.feed([queue])
        return True

    def _confirm(self, publish: _Publish) -> None:
        """Take a message at once, and confirm it after the sync; the queue may refuse it."""
        self._confirms += 1
        taken: list[tuple[Queue, Message]] = []
        accepted = self._route(publish, taken)
        self.broker.refusals += not accepted
        if accepted and self.broker.on_apply is not None:
            self.broker.on_apply(self.connection, 1)
        unit = Unsynced(taken, [])
        self.broker.unsynced.append(unit)
        tag = self._confirms
        answer = spec.Basic.Ack(tag, False) if accepted else spec.Basic.Nack(tag, False, False)
        self.broker.process.call(self.broker.network.delay(), self._confirmed, unit, answer)

    def _confirmed(self, unit: Unsynced, answer: Any) -> None:
        self.broker.unsynced.remove(unit)
        if not self._ended:
            self._send(answer)

    # -- commit

    def _tx_commit(self, _: Any) -> None:
        self._committing = True
        if self.connection.ended:
            self._apply()  # the client has waited long enough
        else:
            random = self.broker.loop.random
            held_up = random.random() * LATE if random.random() < _HELD_UP else 0.0
            self.broker.process.call(self.broker.network.delay() + held_up, self._apply)

    def _apply(self) -> None:
        """Apply a unit at one moment, except for publishes that a queue refuses."""
        published: list[tuple[Queue, Message]] = []
        refused = [publish for publish in self._published if not self._route(publish, published)]
        if self._published and self.broker.on_apply is not None:
            self.broker.on_apply(self.connection, len(self._published))
        self._published.clear()
        unit = Unsynced(published, self._apply_settled())
        self.broker.unsynced.append(unit)
        self.broker.refusals += bool(refused)
        self.broker.process.call(self.broker.network.delay(), self._synced, unit, bool(refused))

    def _synced(self, unit: Unsynced, refused: bool) -> None:
        self.broker.unsynced.remove(unit)
        self._committing = False
        if self._ended:
            self.give_all_back()
        elif refused:
            self._close(406, "PRECONDITION_FAILED - partial tx completion", spec.Tx.Commit.INDEX)
        else:
            self._send(spec.Tx.CommitOk())

    _METHODS: Final[dict[int, Callable[["BrokerChannel", Any], None]]] = {
        spec.Channel.Open.INDEX: _open,
        spec.Channel.Close.INDEX: _client_closes,
        spec.Channel.CloseOk.INDEX: _close_ok,
        spec.Channel.Flow.INDEX: _flow,
        spec.Basic.Qos.INDEX: _qos,
        spec.Confirm.Select.INDEX: _confirm_select,
        spec.Tx.Select.INDEX: _tx_select,
        spec.Tx.Rollback.INDEX: _tx_rollback,
        spec.Tx.Commit.INDEX: _tx_commit,
        spec.Exchange.Declare.INDEX: _declare_exchange,
        spec.Queue.Declare.INDEX: _declare,
        spec.Queue.Purge.INDEX: _purge,
        spec.Queue.Delete.INDEX: _delete,
        spec.Basic.Consume.INDEX: _consume,
        spec.Basic.Cancel.INDEX: _cancel,
        spec.Basic.Get.INDEX: _get,
        spec.Basic.Ack.INDEX: _ack,
        spec.Basic.Nack.INDEX: _nack,
        spec.Basic.Reject.INDEX: _reject,
        spec.Basic.Recover.INDEX: _recover,
        spec.Basic.Publish.INDEX: _basic_publish,
    }


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return bytes((kind,)) + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + b"\xce"


def persistent_message(body: bytes) -> tuple[bytes, bytes, bool]:
    """Return properties, body and persistence of a plain persistent message, for :meth:`SimBroker.enqueue`."""
    return properties.build({properties.Property.DELIVERY_MODE: b"\x02"}), body, True
