"""Which judgements of the broker are cached, for which messages, and for how long."""

import asyncio
from typing import Any, cast

import pytest

from dtx.store.rabbitmq import validation
from dtx.store.rabbitmq.validation import Validation, Validator
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.methods import IMMEDIATE, MANDATORY, BasicPublish, ChannelClose
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.wire.amqp09.tables import entry

CHANNEL = 7
PUBLISH = BasicPublish(b"x", b"key", 0)
PLAIN = properties.build({})


def headers(**values: str) -> bytes:
    table = b"".join(entry(name.encode(), b"S", value.encode()) for name, value in values.items())
    return properties.build({Property.HEADERS: table})


class Broker:
    """The connection to the broker, and the broker's answers on it."""

    def __init__(self) -> None:
        self.engine = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
        self.engine.adopt(methods.ConnectionTuneOk(100, 4096, 0))
        self.channel = self.engine.open_channel(CHANNEL)
        self.handlers: dict[int, Any] = {}
        self.asked = 0

    def begin(self) -> None:
        """The channel is open."""
        list(self.engine.receive(methods.ChannelOpenOk().frame(CHANNEL)))

    def write(self, data: bytes) -> None:
        self.asked += data.count(methods.TxRollback().frame(CHANNEL))

    def flush(self) -> None:
        """The engine's own data is ignored."""

    def _say(self, payload: bytes) -> None:
        frame = method_frame(CHANNEL, payload)
        self.handlers[CHANNEL].frame(int.from_bytes(payload[:4], "big"), frame, 0, len(frame))

    def approve(self) -> None:
        self._say(methods.TxRollbackOk().encode())

    def refuse(self, code: int = 403) -> None:
        self._say(methods.ChannelClose(code, b"no").encode())

    def reopen(self) -> None:
        self._say(methods.ChannelOpenOk().encode())
        self._say(methods.TxSelectOk().encode())


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
async def validator(broker: Broker) -> Validator:
    broker.begin()
    return Validator(cast("Any", broker), broker.channel)


class Clock:
    """The event loop's clock, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        right = loop.time
        monkeypatch.setattr(loop, "time", lambda: right() + self.ahead)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def judged_good(validator: Validator, broker: Broker, publish: BasicPublish = PUBLISH, raw: bytes = PLAIN) -> bool:
    """Whether *publish* is known to be good. Otherwise the broker is asked and approves."""
    validation = validator.validate(publish, raw)
    if validation is None:
        return True
    broker.approve()
    assert validation.result() is None
    return False


async def test_a_valid_destination_is_not_checked_again(validator: Validator, broker: Broker) -> None:
    assert not judged_good(validator, broker)
    assert judged_good(validator, broker)
    assert broker.asked == 1


@pytest.mark.parametrize(
    ("publish", "raw"),
    [
        (BasicPublish(b"y", b"key", 0), PLAIN),
        (BasicPublish(b"x", b"other", 0), PLAIN),
        (BasicPublish(b"x", b"key", IMMEDIATE), PLAIN),
        (PUBLISH, properties.build({Property.USER_ID: b"somebody"})),
        (PUBLISH, properties.build({Property.EXPIRATION: b"1000"})),
        (PUBLISH, headers(CC="k")),
        (PUBLISH, headers(BCC="k")),
    ],
    ids=["exchange", "routing key", "immediate", "user-id", "expiration", "CC", "BCC"],
)
async def test_different_inputs_of_the_check_are_checked_separately(
    validator: Validator, broker: Broker, publish: BasicPublish, raw: bytes
) -> None:
    """Design: "cached per (exchange, routing key, user-id, checked headers)"."""
    assert not judged_good(validator, broker)
    assert not judged_good(validator, broker, publish, raw)
    assert judged_good(validator, broker, publish, raw)
    assert judged_good(validator, broker)


@pytest.mark.parametrize(
    ("publish", "raw"),
    [
        (BasicPublish(b"x", b"key", MANDATORY), PLAIN),
        (PUBLISH, properties.build({Property.DELIVERY_MODE: b"\x02", Property.CONTENT_TYPE: b"text/plain"})),
        (PUBLISH, properties.build({Property.MESSAGE_ID: b"one of its own"})),
    ],
    ids=["mandatory", "content type", "message id"],
)
async def test_inputs_the_check_ignores_share_one_result(
    validator: Validator, broker: Broker, publish: BasicPublish, raw: bytes
) -> None:
    assert not judged_good(validator, broker)
    assert judged_good(validator, broker, publish, raw)


async def test_headers_of_the_applications_own_share_a_judgement(validator: Validator, broker: Broker) -> None:
    assert not judged_good(validator, broker, raw=headers(mine="1"))
    assert judged_good(validator, broker, raw=headers(mine="2", more="3"))


async def test_a_judgement_is_believed_for_ten_seconds_and_no_longer(
    validator: Validator, broker: Broker, clock: Clock
) -> None:
    """A revoked permission or a deleted exchange is noticed then. Use does not renew the judgement."""
    assert not judged_good(validator, broker)
    for _ in range(9):
        clock.ahead += 1
        assert judged_good(validator, broker)
    clock.ahead += 1.01
    assert not judged_good(validator, broker)
    assert broker.asked == 2


async def test_a_refusal_is_never_remembered(validator: Validator, broker: Broker) -> None:
    """What was missing may exist the next moment."""
    for code in (403, 404):
        validation = validator.validate(PUBLISH, PLAIN)
        assert validation is not None
        broker.refuse(code)
        broker.reopen()
        close = validation.result()
        assert isinstance(close, ChannelClose)
        assert close.reply_code == code
    assert not judged_good(validator, broker)
    assert broker.asked == 3


async def test_a_refusal_invalidates_only_its_own_earlier_validations(validator: Validator, broker: Broker) -> None:
    """A refusal closes the channel. The judgements behind it are asked again on the next channel, in their order."""
    other = BasicPublish(b"y", b"key", 0)
    assert not judged_good(validator, broker, other)
    refused, waiting = validator.validate(PUBLISH, PLAIN), validator.validate(BasicPublish(b"z", b"key", 0), PLAIN)
    assert isinstance(refused, Validation)
    assert isinstance(waiting, Validation)
    broker.refuse()
    assert refused.result() is not None
    assert not waiting.done()
    asked = broker.asked
    broker.reopen()
    assert broker.asked == asked + 1
    broker.approve()
    assert waiting.result() is None
    assert judged_good(validator, broker, other)


async def test_a_revoked_permission_is_noticed_when_the_judgement_is_old(
    validator: Validator, broker: Broker, clock: Clock
) -> None:
    assert not judged_good(validator, broker)
    clock.ahead += 10.01
    validation = validator.validate(PUBLISH, PLAIN)
    assert validation is not None
    broker.refuse()
    broker.reopen()
    assert validation.result() is not None
    assert not judged_good(validator, broker), "the old one does not come back"


async def test_the_oldest_of_too_many_judgements_is_forgotten(
    validator: Validator, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_CACHE", 3)
    targets = [BasicPublish(b"x", b"%d" % number, 0) for number in range(4)]
    for target in targets:
        assert not judged_good(validator, broker, target)
    assert [judged_good(validator, broker, target) for target in reversed(targets)] == [True, True, True, False]


async def test_a_lost_connection_leaves_no_judgement_waiting(validator: Validator) -> None:
    validation = validator.validate(PUBLISH, PLAIN)
    assert validation is not None
    validator.lost("the test says so")
    assert validation.cancelled()
