"""The Java adapter with the unmodified RabbitMQ client: every call, every flag, every code that a test can produce.

The numbers are those of ``javax.transaction.xa.XAResource`` and ``XAException``.
"""

import secrets
from collections.abc import Callable

import pytest

from dtx.client import Xid
from tests.servers.interop.java_programs import Java, Program
from tests.support.broker import Broker
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

NO_FLAGS, JOIN, RESUME = 0, 0x00200000, 0x08000000
SUCCESS, FAIL, SUSPEND = 0x04000000, 0x20000000, 0x02000000
START_SCAN, END_SCAN = 0x01000000, 0x00800000
XA_OK, XA_RDONLY = "0", "3"
XA_RBROLLBACK, XA_RBTIMEOUT, XA_HEURRB = 100, 106, 6
XAER_NOTA, XAER_INVAL, XAER_PROTO, XAER_RMFAIL, XAER_DUPID = -4, -5, -6, -7, -8


def a_xid() -> Xid:
    """A binary xid of the maximum length, with NULs."""
    return Xid(0xFFFFFFFE, b"\0" + secrets.token_bytes(63), secrets.token_bytes(63) + b"\0")


def published(program: Program, xid: Xid, queue: str, body: str = "x") -> None:
    """Make an idle branch with a message."""
    program("a", "start", xid, NO_FLAGS)
    program("a", "publish", queue, body)
    program("a", "end", xid, SUCCESS)


def test_a_branch_is_committed_in_two_phases(program: Program, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    published(program, xid, queue, "two")
    assert program("a", "prepare", xid) == XA_OK
    assert bodies() == []
    assert program("b", "recover", START_SCAN | END_SCAN).split() == [str(xid)]
    program("b", "commit", xid)
    assert bodies() == ["two"]
    assert program("b", "recover", START_SCAN | END_SCAN) == ""


def test_a_branch_is_committed_in_one_phase(program: Program, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    published(program, xid, queue, "one")
    program("a", "commit", xid, "one-phase")
    assert bodies() == ["one"]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_rollback_undoes_publishes_and_consumption(
    program: Program, broker: Broker, queue: str, bodies: Callable[[], list[str]], prepared: bool
) -> None:
    with broker.channel() as channel:
        channel.basic_publish("", queue, b"stays")
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    assert program("a", "get", queue) == "stays"
    program("a", "ack")
    program("a", "publish", queue, "never")
    program("a", "end", xid, SUCCESS)
    if prepared:
        assert program("a", "prepare", xid) == XA_OK
    program("a", "rollback", xid)
    assert bodies() == ["stays"]


def test_a_branch_without_work_is_read_only(program: Program) -> None:
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    program("a", "end", xid, SUCCESS)
    assert program("a", "prepare", xid) == XA_RDONLY
    assert program.code("a", "commit", xid) == XAER_NOTA


def test_two_connections_work_for_one_branch(program: Program, queue: str, bodies: Callable[[], list[str]]) -> None:
    """The manager starts the second one with TMJOIN, because isSameRM is true."""
    assert program("a", "same", "b") == "true"
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    program("a", "publish", queue, "a")
    program("b", "start", xid, JOIN)
    program("b", "publish", queue, "b")
    program("a", "end", xid, SUCCESS)
    assert program.code("a", "prepare", xid) == XAER_PROTO  # b is associated
    program("b", "end", xid, SUCCESS)
    program("b", "prepare", xid)
    program("a", "commit", xid)
    assert sorted(bodies()) == ["a", "b"]


def test_work_of_a_suspended_branch_is_its_own(program: Program, queue: str, bodies: Callable[[], list[str]]) -> None:
    outer, inner = a_xid(), a_xid()
    program("a", "start", outer, NO_FLAGS)
    program("a", "publish", queue, "outer")
    program("a", "end", outer, SUSPEND)
    published(program, inner, queue, "inner")
    program("a", "rollback", inner)
    program("a", "start", outer, RESUME)
    program("a", "end", outer, SUCCESS)
    program("a", "commit", outer, "one-phase")
    assert bodies() == ["outer"]


def test_a_branch_that_failed_can_only_be_rolled_back(program: Program, queue: str) -> None:
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    program("a", "publish", queue, "x")
    program("a", "end", xid, FAIL)
    assert program.code("a", "prepare", xid) == XA_RBROLLBACK
    program("a", "rollback", xid)
    assert program.code("a", "rollback", xid) == XAER_NOTA


def test_a_branch_that_took_too_long_is_rolled_back(program: Program, queue: str) -> None:
    assert program("b", "timeout", 1) == "1"
    xid = a_xid()
    program("b", "start", xid, NO_FLAGS)
    program("b", "publish", queue, "x")
    assert program("b", "timeout", 0) == "0"
    while (said := program.say("a", "start", xid, JOIN)) == "ok ":  # until a join reports the time-out
        program.say("a", "end", xid, SUCCESS)  # fails if the time-out comes now
    assert said.startswith(f"xa {XA_RBROLLBACK} ")
    assert program.code("b", "end", xid, SUCCESS) == XA_RBTIMEOUT
    assert program.code("a", "prepare", xid) == XA_RBTIMEOUT
    program("a", "rollback", xid)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("prepare",), XAER_NOTA),
        (("commit",), XAER_NOTA),
        (("rollback",), XAER_NOTA),
        (("forget",), XAER_NOTA),
        (("start", JOIN), XAER_NOTA),
        (("start", JOIN | RESUME), XAER_INVAL),
        (("start", 1), XAER_INVAL),
        (("end", SUCCESS | FAIL), XAER_INVAL),
    ],
    ids=str,
)
def test_an_unknown_branch_and_unknown_flags_are_named(
    program: Program, words: tuple[str | int, ...], code: int
) -> None:
    assert program.code("a", words[0], a_xid(), *words[1:]) == code


def test_calls_in_a_wrong_state_leave_the_connection_open(
    program: Program, queue: str, bodies: Callable[[], list[str]]
) -> None:
    xid = a_xid()
    published(program, xid, queue)
    assert program.code("a", "start", xid, NO_FLAGS) == XAER_DUPID
    assert program.code("a", "forget", xid) == XAER_PROTO
    assert program.code("a", "commit", xid) == XAER_PROTO
    program("a", "prepare", xid)
    assert program.code("a", "prepare", xid) == XAER_PROTO
    assert program.code("a", "commit", xid, "one-phase") == XAER_PROTO
    program("a", "commit", xid)
    assert bodies() == ["x"]


def test_a_repeated_call_after_a_lost_answer_succeeds(program: Program, queue: str) -> None:
    """The manager repeats a call without an answer; dtx still knows that the branch ended as requested."""
    for call in ("commit", "rollback"):
        xid = a_xid()
        published(program, xid, queue)
        program("a", "prepare", xid)
        program("a", call, xid)
        program("b", call, xid)
        assert program.code("b", "rollback" if call == "commit" else "commit", xid) == XAER_NOTA


def test_a_heuristic_outcome_is_raised_until_it_is_forgotten(
    program: Program, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    xid = a_xid()
    published(program, xid, queue)
    program("a", "prepare", xid)
    service.run("rollback", str(xid), "--reason", "the manager's machine is lost", "--yes")
    assert program.code("a", "commit", xid) == XA_HEURRB
    assert program.code("a", "commit", xid) == XA_HEURRB
    program("a", "forget", xid)
    assert program.code("a", "commit", xid) == XAER_NOTA
    assert bodies() == []


def test_a_scan_is_started_first_and_has_several_pages(program: Program, service: DtxService, queue: str) -> None:
    program("small", "connect", service.url(), 4096)  # the largest frame, so a page has 30 of these xids
    assert program.code("small", "recover", NO_FLAGS) == XAER_INVAL
    assert program.code("small", "recover", 1) == XAER_INVAL
    many = [a_xid() for _ in range(100)]
    for xid in many:
        published(program, xid, queue)
        program("a", "prepare", xid)
    assert set(program("small", "recover", START_SCAN).split()) == set(map(str, many))
    for xid in many:
        program("small", "rollback", xid)
    assert program("small", "recover", NO_FLAGS) == ""
    assert program("small", "recover", END_SCAN) == ""
    assert program.code("small", "recover", END_SCAN) == XAER_INVAL
    program("small", "close")


def test_a_service_that_died_is_found_again(program: Program, service: DtxService, queue: str) -> None:
    prepared, idle, active = a_xid(), a_xid(), a_xid()
    published(program, prepared, queue, "durable")
    program("a", "prepare", prepared)
    published(program, idle, queue, "lost")
    program("a", "start", active, NO_FLAGS)
    service.kill9()
    assert program.code("a", "commit", prepared) == XAER_RMFAIL
    assert program.code("a", "end", active, SUCCESS) == XA_RBROLLBACK
    assert program.code("a", "start", a_xid(), NO_FLAGS) == XAER_RMFAIL
    service.start()
    assert program("a", "recover", START_SCAN | END_SCAN).split() == [str(prepared)]
    program("a", "commit", prepared)
    assert program.code("a", "prepare", idle) == XAER_NOTA
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    assert program("a", "get", queue) == "durable"
    program("a", "ack")
    program("a", "end", xid, SUCCESS)
    program("a", "commit", xid, "one-phase")


def test_a_resource_in_a_log_completes_its_branches(
    java: Java, program: Program, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """Narayana does so after a crash, also for a branch that was committed before, which no scan lists any more."""
    committed, prepared, undone = a_xid(), a_xid(), a_xid()
    for xid in (committed, prepared, undone):
        published(program, xid, queue, str(xid.gtrid[1]))
        program("a", "prepare", xid)
    program("a", "commit", committed)
    log = program("a", "save")
    with Program(java) as other:
        other("kept", "load", log)
        assert other.code("kept", "commit", prepared) == XAER_RMFAIL  # it knows no connection
        other("elsewhere", "connect", service.url(vhost="elsewhere"))
        assert other.code("kept", "commit", prepared) == XAER_RMFAIL
        other("mine", "connect", service.url())
        assert (other("kept", "same", "mine"), other("mine", "same", "kept")) == ("true", "true")
        assert (other("kept", "same", "elsewhere"), other("elsewhere", "same", "kept")) == ("false", "false")
        other("kept", "commit", committed)
        other("kept", "commit", prepared)
        other("kept", "rollback", undone)
        assert other("kept", "recover", START_SCAN | END_SCAN) == ""
        assert other.code("kept", "forget", undone) == XAER_NOTA
        assert other.code("kept", "start", a_xid(), NO_FLAGS) == XAER_PROTO
        assert other.code("kept", "end", a_xid(), SUCCESS) == XAER_PROTO
        assert other("kept", "timeout", 5) == "0"
        assert other.code("kept", "prepare", a_xid()) == XAER_NOTA
        assert other("again", "load", other("kept", "save")) == ""
        other("mine", "close")
        assert other.code("kept", "commit", committed) == XAER_RMFAIL
    assert sorted(bodies()) == sorted(str(xid.gtrid[1]) for xid in (committed, prepared))


def test_a_log_has_no_password(java: Java) -> None:
    with Program(java, a="amqp://olga:s3cret@dtx.example:5673/orders") as program:
        log = bytes.fromhex(program("a", "save"))
    assert b"olga@dtx.example:5673/orders" in log
    assert b"s3cret" not in log


def test_a_connection_that_breaks_takes_its_branch_along(program: Program, queue: str) -> None:
    xid = a_xid()
    program("a", "start", xid, NO_FLAGS)
    program("a", "publish", queue, "lost")
    program("a", "break")
    assert program.code("a", "end", xid, SUCCESS) == XA_RBROLLBACK
    said = program.say("a", "rollback", xid)
    assert said == "ok " or f"xa {XAER_NOTA} " in said


@pytest.mark.parametrize("how", [("get", "no-such-queue"), ("break",)], ids=["channel", "connection"])
def test_a_channel_closed_within_its_branch_takes_no_further_work(
    program: Program, queue: str, bodies: Callable[[], list[str]], how: tuple[str, ...]
) -> None:
    """A new channel would not belong to the branch: work on it would take effect at once."""
    xid, other = a_xid(), a_xid()
    program("a", "start", xid, NO_FLAGS)
    program("a", "publish", queue, "one")
    program.say("a", *how)
    for _ in range(2):
        said = program.say("a", "publish", queue, "escaped")
        assert said.startswith(f"error java.io.IOException: the channel was closed within branch {xid}, ")
        assert program.code("a", "start", other, NO_FLAGS) == XAER_PROTO
    assert program.code("a", "end", xid, SUCCESS) == XA_RBROLLBACK
    assert program.say("a", "rollback", xid) == "ok " or how == ("break",)
    published(program, other, queue, "two")
    program("a", "commit", other, "one-phase")
    assert bodies() == ["two"]


def test_a_url_with_a_final_slash_means_the_default_vhost(
    program: Program, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """The project's texts use such URLs. The client itself would ask for a virtual host with an empty name."""
    program("slash", "connect", service.url().removesuffix("%2F"))
    assert program("slash", "same", "a") == "true"
    xid = a_xid()
    program("slash", "start", xid, NO_FLAGS)
    program("slash", "publish", queue, "x")
    program("slash", "end", xid, SUCCESS)
    program("slash", "commit", xid, "one-phase")
    program("slash", "close")
    assert bodies() == ["x"]


def test_a_client_that_reads_no_stream_is_refused(program: Program, service: DtxService) -> None:
    """The adapter maps dtx's answers where it reads frames from a stream; the client itself understands none."""
    program("nio", "connect", service.url(), "nio")
    said = program.say("nio", "start", a_xid(), NO_FLAGS)
    assert said.startswith(f"xa {XAER_RMFAIL} 0 ")
    assert "needs plain sockets: do not call useNio() or netty()" in said


@pytest.mark.parametrize("call", [("start", NO_FLAGS), ("commit",), ("recover", START_SCAN)], ids=lambda call: call[0])
def test_a_refused_login_is_named(program: Program, service: DtxService, call: tuple[str, int]) -> None:
    """No call was made, so no outcome is unknown."""
    program("wrong", "connect", service.url().replace("guest:guest@", "guest:wrong@"))
    verb, *flags = call
    said = program.say("wrong", verb, *([] if verb == "recover" else [a_xid()]), *flags)
    assert said.startswith(f"xa {XAER_RMFAIL} 0 ")
    assert "the login as guest at " in said
    assert "was refused" in said
    assert "not known" not in said


def test_a_server_that_is_not_dtx_is_named(java: Java, rabbitmq: RabbitNode) -> None:
    with Program(java, broker=rabbitmq.url()) as beside:
        said = beside.say("broker", "start", a_xid(), NO_FLAGS)
    assert said.startswith(f"xa {XAER_RMFAIL} 0 ")
    assert "is not dtx: connect to dtx's port" in said
