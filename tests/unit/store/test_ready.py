"""The positions of ready messages behave as a sorted list, however they are split into pieces."""

from array import array
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dtx.store.postgres import ready_messages
from dtx.store.postgres.ready_messages import PriorityReady, Ready, ReadyLine

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("append", "appendleft", "popleft")), st.just(0)),
        st.tuples(st.sampled_from(("remove", "head", "extend")), st.integers(0, 12)),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Pieces so small that a few positions fill several."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ready_messages, "_CHUNK", 4)
    patch.setattr(ready_messages, "_FRONT", 2)
    yield
    patch.undo()


@settings(max_examples=500, deadline=None)
@given(steps)
def test_a_line_is_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    line, model = ReadyLine(), list[int]()
    least = greatest = 1_000
    for action, number in actions:
        if action == "append":
            greatest += 1
            line.append(greatest)
            model.append(greatest)
        elif action == "extend":
            line.extend(array("q", range(greatest + 1, greatest + 1 + number)))
            model.extend(range(greatest + 1, greatest + 1 + number))
            greatest += number
        elif action == "appendleft":
            least -= 1
            line.appendleft(least)
            model.insert(0, least)
        elif action == "popleft" and model:
            assert line.popleft() == model.pop(0)
        elif action == "remove":
            wanted = model[number % len(model)] if model and number else least - 1
            assert line.remove(wanted) == (wanted in model)
            model = [position for position in model if position != wanted]
        else:
            assert list(line.head(number)) == model[:number]
        assert len(line) == len(model)
        assert list(line.all()) == model
        assert line.last == (model[-1] if model else -1)
        assert not model or line.first() == model[0]
    line.clear()
    assert not line
    assert not line.all()


def test_one_is_taken_out_of_the_middle_wherever_it_is() -> None:
    there = Ready()
    there.restore(array("q", range(10, 30)), {})
    there.append(5)  # its branch was in doubt for a long time
    there.put_back(7)
    assert [there.discard(position) for position in (5, 7, 10, 17, 29, 17, 31)] == [True] * 5 + [False] * 2
    assert list(there.drain()) == [*range(11, 17), *range(18, 29)]
    assert not there


def test_levels_of_priority_are_restored_in_their_order() -> None:
    there = PriorityReady(2)
    there.restore(array("q", range(12)), {3: 1, 5: 2, 7: 9})
    assert there.first(4) == [5, 7, 3, 0]
    assert there.oldest() == 0
    assert list(there.drain()) == [5, 7, 3, 0, 1, 2, 4, 6, 8, 9, 10, 11]
    assert there.oldest() is None


def test_a_position_costs_eight_bytes() -> None:
    line = ReadyLine()
    line.extend(array("q", range(10_000)))
    for position in range(10_000, 20_000):
        line.append(position)
    assert sum(chunk.buffer_info()[1] * chunk.itemsize for chunk in line._chunks) == 8 * 20_000
