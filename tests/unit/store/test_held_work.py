"""The work of a branch that has not voted."""

from dtx.store.work import Budget, HeldPublish, HeldWork


class Publish(HeldPublish):
    """Counts how often it is compared."""

    compared = 0

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        Publish.compared += 1
        return self is other


def held(count: int) -> tuple[HeldWork, list[Publish]]:
    work = HeldWork(1 << 20, count, Budget(1 << 20))
    publishes = [Publish(b"", b"q", False, b"", b"%d" % number) for number in range(count)]
    for publish in publishes:
        work.add_publish(publish)
    return work, publishes


def test_a_withdrawn_publish_leaves_the_others_in_order() -> None:
    work, publishes = held(3)
    work.withdraw(publishes[1])
    work.withdraw(publishes[1])
    assert list(work.items) == [publishes[0], publishes[2]]
    assert (work.count, work.publishes, work.bytes, work.budget.used) == (2, 2, 2, 2)


def test_very_many_publishes_are_withdrawn_without_scanning_others() -> None:
    """A broker may refuse all publishes of a transaction, and the last ones first."""
    work, publishes = held(1000)
    Publish.compared = 0
    for publish in reversed(publishes):
        work.withdraw(publish)
    assert not work.items
    assert work.budget.used == 0
    assert Publish.compared == 0
