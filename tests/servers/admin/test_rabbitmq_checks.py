"""The health checks of certificates, beside those of a real RabbitMQ with the same files."""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService

_CHECK = "/api/health/checks/certificate-expiration"


def _write(directory: Path, name: str, authority: trustme.CA, days: int) -> None:
    ends = datetime.now(UTC) + timedelta(days)
    certificate = authority.issue_cert("127.0.0.1", not_after=ends)
    (directory / f"{name}.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    (directory / f"{name}.key").write_bytes(certificate.private_key_pem.bytes())


@pytest.fixture(scope="module")
def both(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Operator, Operator]]:
    """RabbitMQ and dtx, whose certificate for clients ends in 20 days. That of dtx's API ends in 40 days."""
    authority, files = trustme.CA(), tmp_path_factory.mktemp("files")
    authority.cert_pem.write_to_path(str(files / "ca.pem"))
    _write(files, "server", authority, 20)
    _write(files, "api", authority, 40)
    flags = {"tls-cert": "server.pem", "tls-key": "server.key", "tls-ca": "ca.pem"}
    flags |= {"admin-tls-cert": "api.pem", "admin-tls-key": "api.key"}
    options = [word for flag, file in flags.items() for word in (f"--{flag}", str(files / file))]
    database = postgres.create_migrated_database()
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, database)
        node = stack.enter_context(RabbitNode(tls=files, in_memory=True))
        dtx = stack.enter_context(DtxService(database=database, options=(*ADMIN, *options)))
        trusted = ssl.create_default_context(cafile=files / "ca.pem")
        yield Operator(node.management_url), Operator(dtx.admin_url, ca=trusted)


def _of_clients(expired: list[dict[str, Any]]) -> list[dict[str, list[datetime]]]:
    """The times in the rows of listeners for clients."""
    names = ("certfile_expires_on", "cacertfile_expires_on")
    rows = [row for row in expired if row["protocol"] == "amqp/ssl"]
    return [{name: list(map(_moment, row[name])) for name in names} for row in rows]


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "words",
    ["0/days", "2/weeks", "19/DAYS", "3/weeks", "1/months", "1/years", "99/years", "99999999999999/years", "x/days",
     "1/decades"],
)  # fmt: skip
def test_a_certificate_that_expires_fails_the_check(both: tuple[Operator, Operator], words: str) -> None:
    theirs, ours = (one.ask("GET", f"{_CHECK}/{words}") for one in both)
    assert ours.status == theirs.status, (ours, theirs)
    if theirs.status == 503:
        assert (ours.body["status"], ours.body["reason"]) == (theirs.body["status"], theirs.body["reason"])
        assert set(ours.body["expired"][0]) == set(theirs.body["expired"][0])
        assert _of_clients(ours.body["expired"]) == _of_clients(theirs.body["expired"])
        assert _of_clients(ours.body["expired"])


def test_the_check_includes_the_certificate_of_the_api(both: tuple[Operator, Operator]) -> None:
    _, dtx = both
    four, six = (dtx.ask("GET", f"{_CHECK}/{weeks}/weeks").body["expired"] for weeks in (4, 6))
    assert [[row["protocol"] for row in found] for found in (four, six)] == [["amqp/ssl"], ["amqp/ssl", "https"]]
    port = int(dtx.url.rpartition(":")[2])
    assert (six[1]["port"], Path(six[1]["certfile"]).name) == (port, "api.pem")
    assert dtx.get(f"/api/health/checks/port-listener/{port}")["status"] == "ok"
    assert dtx.get("/api/health/checks/protocol-listener/https")["status"] == "ok"
