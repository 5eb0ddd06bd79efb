"""Sessions of browsers: identified by their cookie, and ended by time."""

import pytest

from dtx.admin.identity import ApiCredentials, Identity
from dtx.admin.web import page_request
from dtx.admin.web.page_request import IDLE_SECONDS, LONGEST_SECONDS, MOST_DRY_RUNS, Sessions
from dtx.auth.roles import OperatorRole

BADGE = ApiCredentials(
    identity=Identity(name="olga", role=OperatorRole.OPERATOR, address="127.0.0.1"), stored="$argon2id$secret"
)


class Clock:
    """A clock that the test sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_is_found_by_its_cookie_until_its_end() -> None:
    found = Sessions()
    secret = found.begin(BADGE)
    session = found.find(secret)
    assert session is not None
    assert session.badge is BADGE
    for other in ("", secret[:-1], secret + "x", "\ud800"):
        assert found.find(other) is None
    found.end(secret)
    found.end(secret)
    assert found.find(secret) is None


def test_an_unused_session_ends_and_watching_is_no_use() -> None:
    clock = Clock()
    found = Sessions(clock)
    used, watched = found.begin(BADGE), found.begin(BADGE)
    clock.now = IDLE_SECONDS - 1
    assert found.find(used)
    assert found.find(watched, touch=False)
    clock.now = IDLE_SECONDS
    assert found.find(used)
    assert found.find(watched, touch=False) is None


def test_a_session_ends_after_a_day_of_work_however_busy() -> None:
    clock = Clock()
    found = Sessions(clock)
    secret = found.begin(BADGE)
    while clock.now < LONGEST_SECONDS:
        assert found.find(secret)
        clock.now += IDLE_SECONDS / 2
    assert found.find(secret) is None


def test_of_too_many_sessions_the_one_unused_for_longest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_request, "MOST_SESSIONS", 2)
    found = Sessions()
    first, second = found.begin(BADGE), found.begin(BADGE)
    assert found.find(first)
    third = found.begin(BADGE)
    assert [found.find(secret) is not None for secret in (first, second, third)] == [True, False, True]


def test_a_notice_is_taken_once_and_nothing_secret_is_printed() -> None:
    found = Sessions()
    secret = found.begin(BADGE)
    session = found.find(secret)
    assert session is not None
    session.notice = "done"
    assert (session.pop_notice(), session.pop_notice()) == ("done", None)
    for word in (secret, session.mark, "argon2id"):
        assert word not in repr(session)


def test_a_dry_run_permits_its_order_once() -> None:
    found = Sessions()
    session = found.find(found.begin(BADGE))
    assert session is not None
    session.add_dry_run("commit 1:61:", "3")
    for order, version in (("rollback 1:61:", "3"), ("commit 1:61:", "4"), ("commit 1:61:", "")):
        assert not session.take_dry_run(order, version)
    assert session.take_dry_run("commit 1:61:", "3")
    assert not session.take_dry_run("commit 1:61:", "3")


def test_a_session_keeps_its_latest_dry_runs() -> None:
    found = Sessions()
    session = found.find(found.begin(BADGE))
    assert session is not None
    for number in range(MOST_DRY_RUNS + 1):
        session.add_dry_run(str(number), "1")
    assert not session.take_dry_run("0", "1")
    assert all(session.take_dry_run(str(number), "1") for number in range(1, MOST_DRY_RUNS + 1))
