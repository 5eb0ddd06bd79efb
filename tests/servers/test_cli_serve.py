"""``dtx serve`` as a process: messages and exit codes when it cannot start and when it is stopped."""

import re
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest

from tests.support.processes import free_port, short_directory
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


def refusal(*options: str, **more: Any) -> tuple[int, str]:
    """The exit code and the error message of a service that cannot start."""
    with DtxService(start=False, options=options, fresh=True, **more) as service:
        service.start(wait=False)
        code = service.wait()
        said = [line for line in service.log_path.read_text().splitlines() if line.startswith("dtx: ")]
        assert len(said) == 1, service.log_path.read_text()
        assert "s3cret-word" not in service.log_path.read_text()
        return code, said[0]


def test_a_missing_broker_exits_with_4_and_a_remedy(migrated_postgres_url: str) -> None:
    code, said = refusal(broker=f"amqp://guest:s3cret-word@127.0.0.1:{free_port()}/", database=migrated_postgres_url)
    assert code == 4
    assert re.search(r"no broker answers at amqp://127.0.0.1:\d+ \(connection refused\): start one", said)
    assert "apt-get install rabbitmq-server" in said


def test_a_broker_that_refuses_the_password_is_exit_code_4(rabbitmq: RabbitNode, migrated_postgres_url: str) -> None:
    code, said = refusal(broker=f"amqp://guest:s3cret-word@127.0.0.1:{rabbitmq.port}/", database=migrated_postgres_url)
    assert code == 4
    assert "check user and password" in said


def test_a_server_that_is_no_broker_exits_with_4(migrated_postgres_url: str) -> None:
    """With a wrong port, or amqp:// to a TLS port, the message does not advise to install a broker."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        port = other.getsockname()[1]
        code, said = refusal(broker=f"amqp://guest:s3cret-word@127.0.0.1:{port}/", database=migrated_postgres_url)
    assert code == 4
    assert f"the server at amqp://127.0.0.1:{port} is not an AMQP 0-9-1 broker" in said
    assert "amqps://" in said
    assert "apt-get" not in said


def test_a_broker_port_without_tls_exits_with_4(rabbitmq: RabbitNode, migrated_postgres_url: str) -> None:
    code, said = refusal(broker=f"amqps://guest:s3cret-word@127.0.0.1:{rabbitmq.port}/", database=migrated_postgres_url)
    assert code == 4
    assert "failed (wrong version number)" in said
    assert "amqp:// for no TLS" in said


def test_newer_tables_exit_with_3_and_a_remedy(migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE dtx.alembic_version SET version_num = '9999'")
    code, said = refusal(database=migrated_postgres_url)
    assert code == 3
    assert "are at version 9999 of a newer dtx, this one knows " in said
    assert said.endswith(": start a dtx of that version, or run its 'dtx migrate down'")


def test_no_database_there_is_exit_code_3(rabbitmq: RabbitNode) -> None:
    code, said = refusal(broker=rabbitmq.url(), database=f"postgresql://u:s3cret-word@127.0.0.1:{free_port()}/x")
    assert code == 3
    assert "postgresql://u@127.0.0.1" in said


def test_an_address_in_use_is_exit_code_6(rabbitmq: RabbitNode, migrated_postgres_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refusal("--listen", f"127.0.0.1:{port}", broker=rabbitmq.url(), database=migrated_postgres_url)
    assert code == 6
    assert said == f"dtx: cannot listen on 127.0.0.1:{port}: address already in use (change --listen)"


@pytest.mark.parametrize(
    ("address", "reason"),
    [("192.0.2.77:5673", "cannot assign requested address"), ("nowhere.invalid:5673", "name .* known|.*resolution")],
)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_foreign_address_exits_with_2_and_is_named(certificates: Path, address: str, reason: str, tls: bool) -> None:
    files = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    code, said = refusal("--listen", address, *(files if tls else ()))
    assert code == 2
    assert re.fullmatch(rf"dtx: cannot listen on {re.escape(address)}: ({reason}) \(change --listen\)", said)


def test_a_service_stopped_by_a_signal_exits_with_0(dtx_service: Callable[..., DtxService]) -> None:
    service = dtx_service()
    assert service.ready_line.startswith("READY listen=127.0.0.1:")
    pika.BlockingConnection(pika.URLParameters(service.url())).close()
    assert service.stop() == 0


def test_an_embedded_postgresql_keeps_its_data_after_a_kill(
    dtx_service: Callable[..., DtxService],
) -> None:
    service = dtx_service(database="embedded")
    first = (service.data_dir / "postgres" / "PG_VERSION").stat()
    service.restart()
    pika.BlockingConnection(pika.URLParameters(service.url())).close()
    assert (service.data_dir / "postgres" / "PG_VERSION").stat().st_ino == first.st_ino


@pytest.mark.parametrize("abstract", [False, True], ids=["a path", "an abstract name"])
def test_systemd_is_notified_of_start_and_stop(dtx_service: Callable[..., DtxService], abstract: bool) -> None:
    """sd_notify(3): one datagram for each event to the socket in $NOTIFY_SOCKET; "@" begins an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, short_directory("notify") as directory:
        name = f"@dtx-{secrets.token_hex(8)}" if abstract else str(directory / "notify")
        systemd.bind(name.replace("@", "\0", 1))
        systemd.settimeout(30)
        service = dtx_service(env={"NOTIFY_SOCKET": name})
        assert systemd.recv(99) == b"READY=1\nSTATUS=serving at 127.0.0.1:%d" % service.port
        assert service.stop() == 0
        assert systemd.recv(99) == b"STOPPING=1"


def test_a_missing_notification_socket_does_not_prevent_the_start(dtx_service: Callable[..., DtxService]) -> None:
    with short_directory("notify") as directory:
        assert dtx_service(env={"NOTIFY_SOCKET": str(directory / "nobody")}).stop() == 0


def test_settings_of_the_environment_and_the_file_reach_the_service(
    dtx_service: Callable[..., DtxService], rabbitmq: RabbitNode
) -> None:
    service = dtx_service(env={"DTX_LOG_LEVEL": "debug", "DTX_LOG_FORMAT": "json"})
    log = service.log_path.read_text()
    assert '"event": "settings"' in log
    assert '"broker": "amqp://guest:***@' in log


@pytest.mark.parametrize("command", ["in-doubt", "doctor"])
def test_commands_run_beside_a_service_with_an_embedded_database(
    dtx_service: Callable[..., DtxService], command: str
) -> None:
    service = dtx_service(database="embedded")
    assert service.run(command, "--json").returncode == 0
