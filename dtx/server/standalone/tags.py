"""The deliveries of a channel that are not settled, by their tags."""

from collections.abc import Iterable
from itertools import takewhile
from typing import Final, Generic, TypeVar

from dtx.wire.amqp09.methods import Settle
from dtx.xa.codes import ReplyCode, XaError

ALL: Final = 0
"""With ``multiple``: "the delivery tag is zero … acknowledgement of all outstanding messages"."""

T = TypeVar("T")


class Unsettled(Generic[T]):
    """What was delivered on a channel and is not settled, in the order of the tags."""

    __slots__ = ("_deliveries", "_next")

    def __init__(self) -> None:
        self._deliveries: dict[int, T] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._deliveries)

    def next_tag(self) -> int:
        """A tag for something that needs no acknowledgement. "The delivery tag is valid only within the channel"."""
        tag = self._next
        self._next += 1
        return tag

    def add(self, delivery: T) -> int:
        """Keep *delivery*; its tag."""
        tag = self._next
        self._next = tag + 1
        self._deliveries[tag] = delivery
        return tag

    def take(self, settle: Settle) -> dict[int, T]:
        """The deliveries that *settle* means, by their tags; they are not kept any more.

        Raises:
            XaError: 406 for a tag that is not outstanding.
        """
        wanted = settle.delivery_tag
        known = self._deliveries
        if not settle.multiple:
            delivery = known.pop(wanted, None)
            if delivery is None:
                raise _unknown(wanted)
            return {wanted: delivery}
        if wanted == ALL:
            return self.take_all()
        if wanted not in known:
            raise _unknown(wanted)
        return {tag: known.pop(tag) for tag in list(takewhile(wanted.__ge__, known))}

    def take_all(self) -> dict[int, T]:
        """All of them."""
        found, self._deliveries = self._deliveries, {}
        return found

    def restore(self, deliveries: Iterable[tuple[int, T]]) -> None:
        """Keep again what was taken: tx.rollback does "not redeliver" it, so it is acknowledged anew."""
        self._deliveries.update(deliveries)
        self._deliveries = dict(sorted(self._deliveries.items()))


def _unknown(tag: int) -> XaError:
    return XaError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")
