"""What a client of AMQP 1.0 hears of what the broker said in AMQP 0-9-1."""

from dtx.server.amqp10.addresses import Address, ExchangeAddress
from dtx.server.amqp10.nodes import amqp_error
from dtx.store.rabbitmq.upstream import words
from dtx.wire.amqp09.methods import ChannelClose
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.xa.codes import ReplyCode, XaError

_KNOWN = frozenset(ReplyCode)


def broker_error(close: ChannelClose) -> AmqpError:
    """The broker's own words, with the condition that says the same as its reply code."""
    if close.reply_code not in _KNOWN:
        return AmqpError(Condition.INTERNAL_ERROR, words(close))
    return amqp_error(XaError(ReplyCode(close.reply_code), words(close)))


def check_address(address: Address) -> None:
    """Refuse what a broker would close the whole connection for: "Malformed UTF-8 in shortstr" (501).

    Raises:
        AmqpError: invalid-field.
    """
    key = address.key or b"" if isinstance(address, ExchangeAddress) else b""
    try:
        (address.name + b"/" + key).decode()
    except UnicodeDecodeError:
        raise AmqpError(Condition.INVALID_FIELD, "the names that a broker has are UTF-8") from None


def broker_gone(reason: object) -> AmqpError:
    """The connection to the broker is lost, and that of the client cannot go on."""
    return AmqpError(Condition.CONNECTION_FORCED, f"the connection to the broker is gone: {reason}")
