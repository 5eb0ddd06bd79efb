"""Low disk space: connections that publish are blocked; all others continue."""

from collections.abc import Iterator
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from pika.adapters.blocking_connection import BlockingConnection
from prometheus_client.parser import text_string_to_metric_families

from dtx.client import XaFlag
from tests.support.client import connected, take_all
from tests.support.crash import PERSISTENT, work
from tests.support.database_faults import refusing
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import ADMIN, DtxService


class Told:
    """The connection.blocked and unblocked notices that a connection receives."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.heard: list[str] = []
        self._connection = connection
        connection.add_on_connection_blocked_callback(lambda _, frame: self.heard.append(frame.method.reason))
        connection.add_on_connection_unblocked_callback(lambda *_: self.heard.append("unblocked"))

    def wait_for(self, *expected: str) -> None:
        def come() -> bool:
            self._connection.process_data_events(0.05)
            return self.heard == list(expected)

        wait_until(come, what=f"to hear {expected}")


def readiness(service: DtxService) -> tuple[int, str]:
    try:
        with urlopen(f"{service.admin_url}/readyz") as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def full() -> Iterator[DtxService]:
    """A dtx with its own PostgreSQL and a free-space limit that no disk satisfies."""
    with DtxService(options=(*ADMIN, "--disk-free-bytes", "1000000GiB")) as service:
        wait_until(lambda: readiness(service)[0] == HTTPStatus.SERVICE_UNAVAILABLE, what="the alarm")
        yield service


def disk(service: DtxService) -> dict[str, float]:
    """The metrics of the disk."""
    token = service.run("token", "add", "prometheus", "--role", "viewer", "--reason", "metrics").stdout.strip()
    text = Operator(service.admin_url, token=token).get("/metrics").decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in found if sample.name.startswith("dtx_disk_")}


def test_publishers_wait_while_others_make_room(full: DtxService) -> None:
    """RabbitMQ: "connections that publish are blocked"; consumers and the ends of branches continue."""
    assert readiness(full) == (503, "low on disk\n")
    shown = disk(full)
    assert 0 < shown.pop("dtx_disk_free_bytes") < 1_000_000 << 30
    assert shown == {"dtx_disk_alarm": 1, "dtx_disk_free_limit_bytes": 1_000_000 << 30}
    # dtx reads nothing from a blocked client, not even its close, so the client has its own timeout
    impatient = f"{full.url()}?blocked_connection_timeout=3"
    with connected(impatient) as publisher, connected(full.url()) as consumer:
        told = Told(publisher)
        channel = publisher.channel()
        channel.queue_declare("q", durable=True)
        channel.basic_publish("", "q", b"first", PERSISTENT)
        told.wait_for("low on disk")
        channel.basic_publish("", "q", b"second", PERSISTENT)  # dtx does not read it
        taking = consumer.channel()
        wait_until(lambda: taking.queue_declare("q", passive=True).method.message_count == 1, what="the first message")
        xa, xid = work(taking, consume={"q": 1})
        assert xa.prepare(xid) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK
        assert take_all(consumer.channel(), "q") == []


def test_a_full_disk_elsewhere_blocks_until_it_has_room(postgres: PostgresServer) -> None:
    database = postgres.create_migrated_database()
    with DtxService(database=database, options=ADMIN) as service, connected(service.url()) as connection:
        told = Told(connection)
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        assert readiness(service)[0] == HTTPStatus.OK
        with refusing(database, "message"):
            channel.basic_publish("", "q", b"refused", PERSISTENT)
            wait_until(lambda: readiness(service) == (503, "low on disk\n"), what="the alarm")
        channel = connection.channel()
        channel.basic_publish("", "q", b"taken", PERSISTENT)
        told.wait_for("low on disk", "unblocked")
        assert readiness(service)[0] == HTTPStatus.OK
        assert take_all(connection.channel(), "q") == [b"taken"]
    postgres.drop_database(database)
