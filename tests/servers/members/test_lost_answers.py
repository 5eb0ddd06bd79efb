"""The answer of another member is lost: the log decides what it was."""

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from dtx.client import XA_HEURCOM, XAER_RMFAIL, XaFlag, Xid
from tests.support.crash import Stage, work
from tests.support.failpoints import ArmedService
from tests.support.processes import free_port
from tests.support.proxy import Proxy
from tests.support.service import ADMIN


class Far(NamedTuple):
    """A member that others reach through a proxy."""

    service: ArmedService
    proxy: Proxy


@pytest.fixture
def far(stage: Stage) -> Iterator[Far]:
    """The member with the branches; clients ask ``stage.service``."""
    port = free_port()
    with Proxy("127.0.0.1", port) as proxy:
        options = ("--advertise", f"amqp://127.0.0.1:{proxy.port}", *ADMIN)
        service = stage.another_service(*options, start=False)
        service.port = port
        service.start()
        yield Far(service, proxy)


def ask(stage: Stage, far: Far, call: str, xid: Xid, done: Callable[[], bool], lost: str = "down") -> XaFlag | str:
    """Make a call at the first member; after *done*, the connection between the members is lost.

    Args:
        stage: has the first member.
        far: has the branch.
        call: of a coordinator; ``one-phase`` for a commit.
        xid: of the branch.
        done: whether the other member has carried it out.
        lost: the direction in which no data comes.
    """
    answer: list[XaFlag | str] = []
    with stage.coordinator() as coordinator:
        assert coordinator.get_timeout(xid) == 60  # the members are connected now
        far.proxy.stall("down" if lost == "down" else "up")

        def run() -> None:
            try:
                if call == "one-phase":
                    answer.append(coordinator.commit(xid, one_phase=True))
                else:
                    answer.append(getattr(coordinator, call)(xid) or XaFlag.OK)
            except XAER_RMFAIL as error:
                answer.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        stage.wait_for(done, "the end of the request")
        far.proxy.cut()
        thread.join(30)
        far.proxy.resume()
    return answer[0]


@pytest.mark.parametrize("call", ["commit", "rollback", "one-phase", "prepare"])
def test_a_lost_answer_is_found_in_the_log(stage: Stage, far: Far, call: str) -> None:
    queue = stage.declare("q")
    with stage.connected(far.service) as connection:
        xa, xid = work(connection.channel(), publish={queue: [b"a"]})
        if call in ("commit", "rollback"):
            assert xa.prepare(xid) is XaFlag.OK
        event = {"commit": "committed", "one-phase": "committed", "rollback": "rolled-back"}.get(call, "prepared")
        assert ask(stage, far, call, xid, lambda: event in stage.history(xid)) is XaFlag.OK
        assert stage.states() == ({xid: "prepared"} if call == "prepare" else {})
    assert stage.bodies(queue) == ([b"a"] if event == "committed" else [])


def test_a_lost_answer_of_a_heuristic_branch_is_found(stage: Stage, far: Far) -> None:
    queue = stage.declare("q")
    with stage.connected(far.service) as connection:
        xa, xid = work(connection.channel(), publish={queue: [b"a"]})
        assert xa.prepare(xid) is XaFlag.OK
    words = ("--vhost", stage.vhost, "--reason", "its manager is lost", "--yes")
    far.service.run("commit", str(xid), *words)
    with stage.coordinator() as coordinator:
        assert coordinator.get_timeout(xid) == 60
        far.proxy.cut_after("down", 0)
        with pytest.raises(XA_HEURCOM):
            coordinator.commit(xid)
    assert ask(stage, far, "forget", xid, lambda: "forgotten" in stage.history(xid)) is XaFlag.OK


def test_a_request_that_never_came_has_no_answer(stage: Stage, far: Far) -> None:
    """541, and the branch is as it was: the transaction manager tries again."""
    queue = stage.declare("q")
    with stage.connected(far.service) as connection:
        xa, xid = work(connection.channel(), publish={queue: [b"a"]})
        assert xa.prepare(xid) is XaFlag.OK
    answer = ask(stage, far, "commit", xid, lambda: True, lost="up")
    assert isinstance(answer, str)
    assert stage.states() == {xid: "prepared"}
    with stage.coordinator() as coordinator:
        assert coordinator.commit(xid) is XaFlag.OK
    assert stage.bodies(queue) == [b"a"]
