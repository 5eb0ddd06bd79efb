"""The report of the watch on a blocked event loop."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.support.loop_watch import _Watch


def test_the_watch_names_the_innermost_functions_last() -> None:
    watch = _Watch.__new__(_Watch)
    watch._thread = threading.get_ident()
    seen = threading.Event()
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look, watch, seen)
        hold(10, seen)
    where = looking.result()
    assert len(where.splitlines()) == 8
    assert where.index("in hold") < where.index("in innermost")


def look(watch: _Watch, seen: threading.Event) -> str:
    """The stack of the loop once it is in the innermost function."""
    while "in innermost" not in (where := watch._stack()):
        pass
    seen.set()
    return where


def hold(depth: int, seen: threading.Event) -> None:
    if depth:
        hold(depth - 1, seen)
    else:
        innermost(seen)


def innermost(seen: threading.Event) -> None:
    seen.wait()
