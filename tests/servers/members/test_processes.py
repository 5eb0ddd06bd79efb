"""Several members that share a port, under one supervisor."""

import json
import os
import signal
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingConnection

from dtx.client import Coordinator, XaFlag
from tests.support.client import connected
from tests.support.crash import Stage, work
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port, short_directory
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


def connections(stage: Stage, stack: ExitStack, tls: pika.SSLOptions | None = None) -> dict[int, BlockingConnection]:
    """A connection to each process, by number."""
    found: dict[int, BlockingConnection] = {}
    for _ in range(100):
        connection = stack.enter_context(connected(stage.service.url(vhost=stage.vhost), tls))
        opened = [line for line in lines(stage, "connection opened") if line["protocol"] != "dtx member"]
        found.setdefault(opened[-1]["process"], connection)
        if len(found) == 2:
            return found
    raise AssertionError("one process serves all connections")


def has_started(stage: Stage, count: int) -> bool:
    """Whether the supervisor has started *count* processes."""
    return len(lines(stage, "process started")) == count


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


@pytest.mark.parametrize("advertise", [(), ("--advertise", "amqps://127.0.0.1")], ids=["default", "amqps"])
def test_processes_share_a_port_with_tls(
    shared_rabbitmq: RabbitNode, postgres: PostgresServer, certificates: Path, advertise: tuple[str, ...]
) -> None:
    """They use TLS among themselves if the given address demands it."""
    files = {name: str(certificates / f"{name}.pem") for name in ("server", "ca", "client")}
    given = ("--tls-cert", files["server"], "--tls-key", str(certificates / "server.key"), "--tls-ca", files["ca"])
    tls = ssl.create_default_context(cafile=files["ca"])
    tls.load_cert_chain(files["client"], certificates / "client.key")
    options = ("--processes", "2", *given, *advertise)
    with Stage(shared_rabbitmq, postgres, options=options) as stage, ExitStack() as stack:
        found, queue = connections(stage, stack, pika.SSLOptions(tls, "127.0.0.1")), stage.declare("q")
        xa, xid = work(found[1].channel(), publish={queue: [b"a"]})
        assert xa.prepare(xid) is XaFlag.OK
        with Coordinator(found[2]) as coordinator:
            assert coordinator.commit(xid) is XaFlag.OK
        peers = [line for line in lines(stage, "connection opened") if line["protocol"] == "dtx member"]
        assert {line["tls"] for line in peers} == {bool(advertise)}


def test_systemd_is_notified_once_for_all_processes(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    """sd_notify(3), by the supervisor alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, short_directory("notify") as directory:
        systemd.bind(str(directory / "notify"))
        systemd.settimeout(30)
        env = {"NOTIFY_SOCKET": str(directory / "notify")}
        with Stage(shared_rabbitmq, postgres, options=("--processes", "2"), env=env) as stage:
            assert systemd.recv(99) == b"READY=1\nSTATUS=serving with 2 processes"
            assert stage.service.stop() == 0
            assert systemd.recv(99) == b"STOPPING=1"
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):
            systemd.recv(99)


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


def test_a_process_that_dies_soon_waits_longer(stage: Stage) -> None:
    for count in range(1, 4):
        os.kill(pids(stage)[1], signal.SIGKILL)
        stage.wait_for(partial(has_started, stage, 2 + count), "the restart")
    assert [round(line["pause"], 1) for line in lines(stage, "process starts again")] == [0.1, 0.4, 1.6]


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


def test_processes_use_consecutive_ports(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    peers, admin = free_port(), free_port()
    ports = ("--advertise", f"amqp://localhost:{peers}", "--admin-listen", f"127.0.0.1:{admin}")
    with Stage(shared_rabbitmq, postgres, options=("--processes", "2", *ports)) as stage:
        with psycopg.connect(stage.database) as connection:
            addresses = {address for (address,) in connection.execute("SELECT address FROM dtx.member")}
        assert addresses == {f"amqp://localhost:{peers}", f"amqp://localhost:{peers + 1}"}
        for port in (admin, admin + 1):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
                assert answer.status == 200


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
