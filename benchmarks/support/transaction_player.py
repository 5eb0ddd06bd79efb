"""An AMQP 1.0 client that does one local transaction after another: declare, one transfer, discharge.

Frames are encoded once; for each transaction ids are patched in. Answers are compared byte for byte with the expected
ones. Flows are ignored, since the number of open deliveries is always below the credit.
"""

import socket
from dataclasses import dataclass
from struct import Struct
from typing import Final

from benchmarks.support.dialogue import STAMP, Phase
from benchmarks.support.load import LoadError
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER
from dtx.wire.amqp10.endpoint import AMQP, SASL, frame
from dtx.wire.amqp10.errors import AmqpError
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Begin,
    Close,
    Coordinator,
    Declare,
    Declared,
    DeliveryState,
    Discharge,
    Disposition,
    Flow,
    Open,
    Role,
    SaslCode,
    SaslInit,
    SaslOutcome,
    Source,
    Target,
    TransactionalState,
    Transfer,
    read_performative,
    read_sasl,
)
from tests.support.raw import Address, Refused

_CONTROL: Final = 0
_POSTING: Final = 1
_MAX_FRAME: Final = 131_072
_WINDOW: Final = 2048
_SIZE: Final = Struct(">I")
_ID: Final = Struct(">I")
_ID_PLACE: Final = 0xF1D1F1D1
_FIRST_ID: Final = 0x0100_0000
"""The first delivery id: large enough that all ids have the same encoded length."""
_TXN_PLACE: Final = b"\xf2txn-id\xf2\xf2txn-id\xf2"
"""A placeholder as long as dtx's transaction ids."""
_STAMP_PLACE: Final = b"\xf3stamp\xf3\xf3"
_FLOW: Final = bytes((0, 0x53, Flow.layout.code))
_PERFORMATIVE: Final = 8
"""Offset of the performative in a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postings:
    """The operations of each transaction.

    Args:
        queue: for the message.
        size: of its body, in bytes.
        pipeline: transfer, discharge, and the declare of the next transaction go in one write.
    """

    queue: str
    size: int = 1024
    pipeline: bool = False


class _Said:
    """A frame whose ids are patched in.

    Args:
        octets: the encoded frame with placeholders, in bytes.
    """

    __slots__ = ("_id", "_stamp", "_txn", "octets")

    def __init__(self, octets: bytes) -> None:
        self.octets = bytearray(octets)
        self._id = octets.find(_ID.pack(_ID_PLACE))
        self._txn = octets.find(_TXN_PLACE)
        self._stamp = octets.find(_STAMP_PLACE)

    def number(self, delivery_id: int, txn_id: bytes | None) -> bytearray:
        """Return the frame with these ids."""
        _ID.pack_into(self.octets, self._id, delivery_id)
        if txn_id is not None and self._txn >= 0:
            self.octets[self._txn : self._txn + len(txn_id)] = txn_id
        return self.octets

    def stamp(self, stamp: int) -> None:
        """Patch in the number of the message."""
        STAMP.pack_into(self.octets, self._stamp, stamp)

    def txn_id(self, answer: bytes) -> bytes:
        """Return the transaction id in *answer*, a frame of the same form."""
        return answer[self._txn : self._txn + len(_TXN_PLACE)]


def _request(tag: bytes, request: Composite) -> _Said:
    return _transfer(Transfer(handle=_CONTROL, delivery_id=_ID_PLACE, delivery_tag=tag), message.value(request))


def _transfer(performative: Transfer, payload: bytes) -> _Said:
    return _Said(frame(AMQP, 0, encode(performative) + payload))


def _answer(state: DeliveryState) -> _Said:
    said = Disposition(role=Role.RECEIVER, first=_ID_PLACE, settled=True, state=state)
    return _Said(frame(AMQP, 0, encode(said)))


class TransactionPlayer:
    """A connection that does one transaction after another; a :class:`~benchmarks.support.load.Player`.

    Args:
        postings: the operations of each transaction.
        address: of dtx.
        number: of the connection.
        run: not used: dtx chooses the ids of transactions.

    Raises:
        Refused, OSError: it cannot connect.
    """

    def __init__(self, postings: Postings, address: Address, number: int, run: bytes) -> None:  # noqa: ARG002
        self.number = number
        self.count = 0
        self._pipeline = postings.pipeline
        body = _STAMP_PLACE + bytes(octet & 0x7F for octet in range(postings.size - len(_STAMP_PLACE)))
        payload = message.head(message.Header(durable=True)) + message.data(body)
        state = TransactionalState(txn_id=_TXN_PLACE)
        self._declare = _request(b"declare", Declare())
        self._post = _transfer(
            Transfer(handle=_POSTING, delivery_id=_ID_PLACE, delivery_tag=b"post", message_format=0, state=state),
            payload,
        )
        self._discharge = _request(b"discharge", Discharge(txn_id=_TXN_PLACE, fail=False))
        self._declared = _answer(Declared(txn_id=_TXN_PLACE))
        self._posted = _answer(TransactionalState(txn_id=_TXN_PLACE, outcome=ACCEPTED))
        self._discharged = _answer(ACCEPTED)
        self._id_at = self._discharged.octets.find(_ID.pack(_ID_PLACE))
        self._next_id = _FIRST_ID
        self._waiting: dict[int, _Said] = {}
        self._txn_id: bytes | None = None
        self._declared_id: bytes | None = None
        self._buffer = b""
        self._doing = Phase.WORK
        self.socket = socket.create_connection((address.host, address.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._open(address, postings.queue)
        except BaseException:
            self.socket.close()
            raise
        self.socket.settimeout(None)

    # -- opening

    def _open(self, address: Address, queue: str) -> None:
        response = b"\x00" + address.user.encode() + b"\x00" + address.password.encode()
        source = Source(outcomes=("amqp:accepted:list", "amqp:rejected:list"))
        opening = (
            Open(container_id=f"bench-{self.number}", hostname=f"vhost:{address.vhost}", max_frame_size=_MAX_FRAME),
            Begin(remote_channel=None, next_outgoing_id=0, incoming_window=_WINDOW, outgoing_window=_WINDOW),
            Attach(
                name="control",
                handle=_CONTROL,
                role=Role.SENDER,
                source=source,
                target=Coordinator(),
                initial_delivery_count=0,
            ),
            Attach(
                name="posting",
                handle=_POSTING,
                role=Role.SENDER,
                source=source,
                target=Target(address=f"/queues/{queue}"),
                initial_delivery_count=0,
            ),
        )
        init = frame(SASL, 0, encode(SaslInit(mechanism="PLAIN", initial_response=response)))
        said = b"".join(frame(AMQP, 0, encode(performative)) for performative in opening)
        self.socket.sendall(SASL_HEADER + init + AMQP_HEADER + said)
        self._expect(SASL_HEADER)
        outcome: object = None
        while not isinstance(outcome, SaslOutcome):
            octets = self._frame()
            outcome = read_sasl(octets, _PERFORMATIVE, len(octets))
        if outcome.code is not SaslCode.OK:
            raise Refused(f"login: {outcome.code.name.lower()}")
        self._expect(AMQP_HEADER)
        links = 0
        while links < len((_CONTROL, _POSTING)):
            octets = self._frame()
            performative, _ = read_performative(octets, _PERFORMATIVE, len(octets))
            if isinstance(performative, Flow):
                links += 1  # the link has credit
            elif not isinstance(performative, Open | Begin | Attach):
                raise Refused(str(performative))

    def _expect(self, header: bytes) -> None:
        found = self._exactly(len(header))
        if found != header:
            raise Refused(f"answered {found.hex(' ')}")

    def _frame(self) -> bytes:
        size = self._exactly(_SIZE.size)
        return size + self._exactly(_SIZE.unpack(size)[0] - len(size))

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            if not more:
                raise Refused("the connection was closed without a word")
            found += more
        return found

    # -- transactions

    def begin(self) -> None:
        """Begin the next transaction; with pipelining, it was declared with the one before."""
        self._txn_id, self._declared_id = self._declared_id, None
        if self._txn_id is None:
            self._doing = Phase.WORK
            self._say(self._new(self._declare, self._declared))
        else:
            self._work()

    def go_on(self) -> bool:
        """Write the next step."""
        if self._doing is Phase.COMMIT:
            self.count += 1
            return False
        if self._txn_id is None:
            self._txn_id, self._declared_id = self._declared_id, None
            self._work()
        else:
            self._doing = Phase.COMMIT
            self._say(self._new(self._discharge, self._discharged))
        return True

    def _work(self) -> None:
        """Write the transfer; with pipelining, also all requests that need no further answer."""
        self._post.stamp((self.number << 32) + self.count)
        post = self._new(self._post, self._posted)
        if not self._pipeline:
            self._doing = Phase.WORK
            self._say(post)
            return
        self._doing = Phase.COMMIT
        self._say(post + self._new(self._discharge, self._discharged) + self._new(self._declare, self._declared))

    def _new(self, said: _Said, answer: _Said) -> bytearray:
        """Return a request with a new id, and expect *answer* for it."""
        number = self._next_id
        self._next_id += 1
        self._waiting[number] = answer
        return said.number(number, self._txn_id)

    def _say(self, frames: bytearray) -> None:
        self.socket.sendall(frames)

    # -- answers

    def hear(self, data: bytes) -> Phase | None:
        """Take received bytes."""
        if not data:
            raise self._failure("the connection was closed without a word")
        data = self._buffer + data
        position = 0
        last = len(data) - _SIZE.size
        while position <= last:
            end = position + _SIZE.unpack_from(data, position)[0]
            if end > len(data):
                break
            self._take(data[position:end])
            position = end
        self._buffer = data[position:]
        return None if self._waiting else self._doing

    def _take(self, octets: bytes) -> None:
        if octets.startswith(_FLOW, _PERFORMATIVE):
            return
        number = _ID.unpack_from(octets, self._id_at)[0] if len(octets) > self._id_at + _ID.size else 0
        answer = self._waiting.pop(number, None)
        txn_id = self._txn_id
        if answer is self._declared:
            txn_id = self._declared_id = answer.txn_id(octets)
        if answer is None or octets != answer.number(number, txn_id):
            raise self._failure(self._words(octets))

    @staticmethod
    def _words(octets: bytes) -> str:
        try:
            performative, _ = read_performative(octets, _PERFORMATIVE, len(octets))
        except AmqpError:
            return f"answered {octets[:80].hex(' ')}"
        return f"answered {performative}"

    def _failure(self, reason: str) -> LoadError:
        doing = self._doing.name.lower()
        return LoadError(f"connection {self.number}, transaction {self.count} ({doing}): {reason}")

    def close(self) -> None:
        """Close the connection in order."""
        try:
            self.socket.sendall(frame(AMQP, 0, encode(Close())))
            while self.socket.recv(_MAX_FRAME):
                pass
        except OSError:
            pass
        finally:
            self.socket.close()
