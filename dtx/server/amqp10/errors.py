"""What a client of AMQP 1.0 hears of the errors of dtx."""

from typing import Final

from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.xa.codes import ReplyCode, XaError, XaFlag

_CONDITIONS: Final = {
    ReplyCode.ACCESS_REFUSED: Condition.UNAUTHORIZED_ACCESS,
    ReplyCode.NOT_FOUND: Condition.NOT_FOUND,
    ReplyCode.RESOURCE_LOCKED: Condition.RESOURCE_LOCKED,
    ReplyCode.PRECONDITION_FAILED: Condition.PRECONDITION_FAILED,
    ReplyCode.SYNTAX_ERROR: Condition.INVALID_FIELD,
    ReplyCode.COMMAND_INVALID: Condition.ILLEGAL_STATE,
    ReplyCode.RESOURCE_ERROR: Condition.RESOURCE_LIMIT_EXCEEDED,
    ReplyCode.NOT_ALLOWED: Condition.NOT_ALLOWED,
    ReplyCode.NOT_IMPLEMENTED: Condition.NOT_IMPLEMENTED,
    ReplyCode.INTERNAL_ERROR: Condition.INTERNAL_ERROR,
}


def amqp_error(error: XaError | WireError | AmqpError) -> AmqpError:
    """*error* with the condition that the client is told."""
    if isinstance(error, AmqpError):
        return error
    if isinstance(error, WireError):
        return AmqpError(Condition.INVALID_FIELD, str(error))
    return AmqpError(_CONDITIONS[error.code], error.reason)


def rolled_back(flag: XaFlag) -> AmqpError:
    """Why a discharge did not commit: an answer of the manager that begins with ``rb``."""
    if flag is XaFlag.RBTIMEOUT:
        return AmqpError(Condition.TIMEOUT, "the transaction took too long and is rolled back")
    return AmqpError(Condition.ROLLBACK, "the transaction is rolled back")
