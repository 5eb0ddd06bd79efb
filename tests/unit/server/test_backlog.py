"""Frames that wait."""

from dtx.server.alongside.backlog import Backlog


def test_frames_come_out_in_their_order_and_the_size_is_theirs() -> None:
    backlog = Backlog()
    assert not backlog
    backlog.add(1, b"one")
    backlog.add(2, b"three")
    assert (bool(backlog), backlog.size) == (True, 8)
    assert backlog.first == 1
    assert backlog.next() == (1, b"one")
    assert backlog.size == 5
    assert backlog.next() == (2, b"three")
    assert (bool(backlog), backlog.size) == (False, 0)


def test_what_came_earlier_can_be_put_before() -> None:
    earlier, backlog = Backlog(), Backlog()
    for key in (1, 2):
        earlier.add(key, b"x")
    for key in (3, 4):
        backlog.add(key, b"yy")
    backlog.put_before(earlier)
    assert backlog.size == 6
    assert [backlog.next()[0] for _ in range(4)] == [1, 2, 3, 4]
