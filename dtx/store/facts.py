"""The answers to binding.query and exchange.query of the AMQP 0-9 preview; the same in both modes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

_Binding = TypeVar("_Binding")


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingFacts:
    """The bits of binding.query-ok; none is set when there is a binding that matches."""

    exchange_not_found: bool = False
    queue_not_found: bool = False
    queue_not_matched: bool = False
    key_not_matched: bool = False
    args_not_matched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The fields of exchange.query-ok; *arguments* is a field table without its length."""

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

    "If populated", a queue, key or arguments narrow the search. A criterion that no binding meets sets its bit and is
    then ignored. So no bit is set exactly when one binding meets all criteria.

    Args:
        bindings: of the exchange, as source.
        queue: whether a binding leads to the wanted queue; ``None`` for any queue.
        key: the same for the routing key.
        arguments: the same for the arguments.
    """
    candidates = list(bindings)

    def lacks(matches: Callable[[_Binding], bool] | None) -> bool:
        """Keep the candidates that match, if there are any. Returns whether there are none."""
        nonlocal candidates
        if matches is None:
            return False
        matching = [binding for binding in candidates if matches(binding)]
        candidates = matching or candidates
        return not matching

    return BindingFacts(queue_not_matched=lacks(queue), key_not_matched=lacks(key), args_not_matched=lacks(arguments))
