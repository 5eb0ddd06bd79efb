"""The answers to binding.query and exchange.query of the AMQP 0-9 preview; the same in both modes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

_Binding = TypeVar("_Binding")


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingFacts:
    """The bits of binding.query-ok; none is set when what was asked for is there."""

    exchange_not_found: bool = False
    queue_not_found: bool = False
    queue_not_matched: bool = False
    key_not_matched: bool = False
    args_not_matched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The fields of exchange.query-ok; *arguments* as on the wire, without the length."""

    type: bytes = b""
    durable: bool = False
    not_found: bool = False
    arguments: bytes = b""


def search(
    bindings: Iterable[_Binding],
    queue: Callable[[_Binding], bool] | None,
    key: Callable[[_Binding], bool] | None,
    arguments: Callable[[_Binding], bool] | None,
) -> BindingFacts:
    """Search for a binding.

    "If populated" a queue, key or arguments narrow down what is searched for. What does not match says so, and is then
    left aside; so at least one bit is set unless one binding has all that was asked for.

    Args:
        bindings: what leads out of the exchange.
        queue: whether a binding leads to the queue of interest; ``None`` where any will do.
        key: the same for the routing key.
        arguments: the same for the arguments.
    """
    candidates = list(bindings)

    def lacks(matches: Callable[[_Binding], bool] | None) -> bool:
        """Keep what *matches*; whether there was nothing."""
        nonlocal candidates
        if matches is None:
            return False
        matching = [binding for binding in candidates if matches(binding)]
        candidates = matching or candidates
        return not matching

    return BindingFacts(queue_not_matched=lacks(queue), key_not_matched=lacks(key), args_not_matched=lacks(arguments))
