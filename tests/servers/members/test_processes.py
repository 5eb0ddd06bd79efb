"""Several members that share a port, under one supervisor."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.client import Coordinator, XaFlag
from tests.support.crash import Stage, work
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN


@pytest.fixture
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A broker, a log, and a dtx of two processes."""
    with Stage(shared_rabbitmq, postgres, options=("--processes", "2", *ADMIN)) as stage:
        yield stage


def lines(stage: Stage, event: str) -> list[dict[str, Any]]:
    """The lines of the log with *event*. Each line is JSON, apart from those of stdout."""
    found = [line for line in stage.service.log_path.read_text().splitlines() if not line.startswith("stdout: ")]
    return [line for line in map(json.loads, found) if line["event"] == event]


def pids(stage: Stage) -> dict[int, int]:
    """The processes by number."""
    return {line["number"]: line["pid"] for line in lines(stage, "process started")}


def is_running(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def connections(stage: Stage, stack: ExitStack) -> dict[int, BlockingConnection]:
    """A connection to each process, by number."""
    found: dict[int, BlockingConnection] = {}
    for _ in range(100):
        connection = stack.enter_context(stage.connected())
        opened = [line for line in lines(stage, "connection opened") if line["protocol"] != "dtx member"]
        found.setdefault(opened[-1]["process"], connection)
        if len(found) == 2:
            return found
    raise AssertionError("one process serves all connections")


def wait_restarted(stage: Stage, number: int, before: int) -> None:
    """Wait until a process serves again, which was *before*."""

    def serves() -> bool:
        started = pids(stage)[number] != before
        return started and sum(line["process"] == number for line in lines(stage, "serving")) == 2

    stage.wait_for(serves, "the restart")


def test_a_branch_of_one_process_commits_at_the_other(stage: Stage) -> None:
    queue = stage.declare("q")
    with ExitStack() as stack:
        found = connections(stage, stack)
        for one, other in ((1, 2), (2, 1)):
            xa, xid = work(found[one].channel(), publish={queue: [b"%d" % one]})
            assert xa.prepare(xid) is XaFlag.OK
            with Coordinator(found[other]) as coordinator:
                assert list(coordinator.recover()) == [xid]
                assert coordinator.commit(xid) is XaFlag.OK
    assert sorted(stage.bodies(queue)) == [b"1", b"2"]


def test_the_admin_port_takes_orders_for_all_processes(stage: Stage) -> None:
    queue = stage.declare("q")
    with ExitStack() as stack:
        for connection in connections(stage, stack).values():
            xa, xid = work(connection.channel(), publish={queue: [b"a"]})
            assert xa.prepare(xid) is XaFlag.OK
            assert [branch["xid"] for branch in stage.in_doubt()] == [str(xid)]
            stage.service.run("rollback", str(xid), "--vhost", stage.vhost, "--reason", "test", "--yes")
            stage.wait_for_state(xid, "heuristic")
            with Coordinator(connection) as coordinator:
                coordinator.forget(xid)
    assert stage.bodies(queue) == []


def test_a_killed_process_is_restarted_and_its_branches_commit(stage: Stage) -> None:
    queue, before = stage.declare("q"), pids(stage)
    with ExitStack() as stack:
        found, xids = connections(stage, stack), []
        for number in range(5):
            xa, xid = work(found[1].channel(), publish={queue: [b"%d" % number]})
            assert xa.prepare(xid) is XaFlag.OK
            xids.append(xid)
        os.kill(before[1], signal.SIGKILL)
        with Coordinator(found[2]) as coordinator:
            for xid in xids:
                assert coordinator.commit(xid) is XaFlag.OK
        wait_restarted(stage, 1, before[1])
        assert pids(stage)[2] == before[2]
        xa, xid = work(connections(stage, stack)[1].channel(), publish={queue: [b"5"]})
        assert xa.prepare(xid) is xa.commit(xid) is XaFlag.OK
    assert sorted(stage.bodies(queue)) == [b"%d" % number for number in range(6)]


def test_a_signal_ends_all_processes_in_order(stage: Stage) -> None:
    """A branch under way still votes; the supervisor waits for it."""
    queue, running = stage.declare("q"), pids(stage)
    with ExitStack() as stack:
        channel = connections(stage, stack)[2].channel()
        xa, xid = work(channel, publish={queue: [b"a"]}, end=False)
        stage.service.signal(signal.SIGTERM)
        stage.wait_for(lambda: len(lines(stage, "stopping")) == 2, "the signal at all processes")
        assert stage.service.running
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK
    assert stage.service.wait() == 0
    assert not any(map(is_running, running.values()))
    assert len(pids(stage)) == len(lines(stage, "process started"))
    assert stage.bodies(queue) == [b"a"]


def test_processes_end_when_their_supervisor_is_killed(stage: Stage) -> None:
    running = pids(stage)
    stage.service.kill9()
    stage.wait_for(lambda: not any(map(is_running, running.values())), "the end of all processes")
    stage.service.start()


def test_a_second_signal_ends_all_processes_at_once(stage: Stage) -> None:
    with ExitStack() as stack:
        work(connections(stage, stack)[1].channel(), end=False)
        for count in (1, 2):
            stage.service.signal(signal.SIGINT)
            stage.wait_for(lambda: len(lines(stage, "stopping")) == 2, f"signal {count}")
        assert stage.service.wait() == 130


def test_one_line_announces_that_all_processes_serve(stage: Stage) -> None:
    service = stage.service
    ready = [line for line in service.log_path.read_text().splitlines() if "READY" in line]
    assert ready == [f"stdout: READY listen=127.0.0.1:{service.port} admin={service.admin_url} pid={service.pid}"]
    stage.wait_for(lambda: len(lines(stage, "serving")) == 2, "the line of the other process")
    admins = {line["process"]: line["admin"] for line in lines(stage, "serving")}
    assert admins.keys() == {1, 2}
    assert admins[1] == service.admin_url != admins[2]


def test_a_process_takes_only_members_at_its_own_port(stage: Stage) -> None:
    with psycopg.connect(stage.database) as connection:
        addresses = [urlsplit(address) for (address,) in connection.execute("SELECT address FROM dtx.member")]
    assert len({address.port for address in addresses} - {stage.service.port}) == 2
    for address in addresses:
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(b"AMQP\0\0\x09\x01")
            assert client.recv(64) == b"AMQP\0\0\x09\x01"
            assert client.recv(64) == b""


def test_a_port_in_use_is_refused(stage: Stage) -> None:
    second = stage.another_service("--listen", f"127.0.0.1:{stage.service.port}", start=False)
    with pytest.raises(RuntimeError, match="address already in use"):
        second.start()
    assert second.wait() == 6


def test_a_start_that_fails_ends_with_its_code(stage: Stage) -> None:
    """The database is unknown to all processes."""
    second = stage.another_service("--database", "postgresql://127.0.0.1:1/none", start=False)
    with pytest.raises(RuntimeError, match="exit status 3"):
        second.start()


def test_processes_need_a_broker(stage: Stage) -> None:
    done = stage.service.run("serve", "--processes", "2", check=False)
    assert done.returncode == 2
    assert "processes needs broker and database" in done.stderr
