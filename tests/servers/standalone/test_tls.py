"""TLS of a dtx without a broker, and secrets that must never be in its log."""

import base64
import ssl
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPError

from dtx.client import XAResource
from dtx.wire.amqp09 import handshake, methods
from dtx.xa.codes import XaFlag
from tests.support.client import new_xid
from tests.support.postgres import PostgresServer
from tests.support.raw import RawClient
from tests.support.service import DtxService
from tests.support.topology import table
from tests.support.users import StandaloneUsers

SECRETS = ("r1ght-s3cret", "wr0ng-s3cret", "n3w-s3cret", "amqpla1n-s3cret")
RIGHT, WRONG, NEW, OTHER = SECRETS


@pytest.fixture(scope="module")
def service(postgres: PostgresServer, certificates: Path) -> Iterator[DtxService]:
    """A dtx that accepts only TLS, requires client certificates and logs at debug level."""
    database = postgres.create_database()
    files = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-ca": "ca.pem"}
    options = [word for flag, file in files.items() for word in (flag, str(certificates / file))]
    with DtxService(database=database, options=(*options, "--log-level", "debug")) as running:
        yield running
    postgres.drop_database(database)


def context(certificates: Path, client: str | None = "client") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if client is not None:
        made.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
    return made


def encrypted(service: DtxService, made: ssl.SSLContext) -> pika.ConnectionParameters:
    parameters = pika.URLParameters(service.url())
    parameters.ssl_options = pika.SSLOptions(made, "127.0.0.1")
    parameters.connection_attempts = 1
    return parameters


def test_a_branch_over_tls(service: DtxService, certificates: Path) -> None:
    connection = BlockingConnection(encrypted(service, context(certificates)))
    channel = connection.channel()
    queue = channel.queue_declare("encrypted", durable=True).method.queue
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, bytes(3_000_000))
    xa.end(xid)
    assert xa.prepare(xid) == XaFlag.OK
    assert xa.commit(xid) == XaFlag.OK
    assert channel.basic_get(queue, auto_ack=True)[2] == bytes(3_000_000)
    connection.close()


def test_a_client_without_a_certificate_is_refused(service: DtxService, certificates: Path) -> None:
    with pytest.raises((AMQPError, ssl.SSLError, OSError)):
        BlockingConnection(encrypted(service, context(certificates, None)))
    with RawClient(service.url()) as peer:
        peer.send_raw(b"AMQP\x00\x00\x09\x01")
        assert b"AMQP" not in peer.drain()
    BlockingConnection(encrypted(service, context(certificates))).close()


def test_a_certificate_is_no_login(service: DtxService, certificates: Path) -> None:
    """The password is required in addition to the certificate."""
    with RawClient(service.url("client", "client"), tls=context(certificates)) as peer:
        peer.begin()
        assert sorted(peer.start.mechanisms.split()) == [b"AMQPLAIN", b"PLAIN"]
        peer.say(0, peer.start_ok(properties=table({"capabilities": {"authentication_failure_close": True}})))
        end = peer.end()
        assert end is not None
        assert end.reply_code == 403


def test_no_password_is_in_the_log(service: DtxService, certificates: Path) -> None:
    """No password of a login is logged, right or wrong, by PLAIN or AMQPLAIN, at debug level."""
    users = StandaloneUsers(service)
    users.add("alice")
    users.permit("alice")
    for password in (NEW, RIGHT):
        users.renew("alice", password)
    amqplain = table({"LOGIN": "alice", "PASSWORD": OTHER})
    for mechanism, response, key in (
        (b"PLAIN", handshake.plain(b"alice", RIGHT.encode()), methods.ConnectionTune.KEY),
        (b"PLAIN", handshake.plain(b"alice", WRONG.encode()), methods.ConnectionClose.KEY),
        (b"PLAIN", handshake.plain(b"nobody", WRONG.encode()), methods.ConnectionClose.KEY),
        (b"PLAIN", WRONG.encode(), methods.ConnectionClose.KEY),
        (b"AMQPLAIN", amqplain, methods.ConnectionClose.KEY),
        (b"AMQPLAIN", amqplain[:-1], methods.ConnectionClose.KEY),
        (b"EXTERNAL", WRONG.encode(), methods.ConnectionClose.KEY),
    ):
        with RawClient(service.url(), tls=context(certificates)) as peer:
            peer.begin()
            capable = table({"capabilities": {"authentication_failure_close": True}})
            peer.say(0, peer.start_ok(mechanism, response, capable))
            while (frame := peer.frame()) is not None and frame.key != key:
                pass
    said = service.log_path.read_text()
    assert "login refused" in said
    found = [
        (word, line)
        for word in SECRETS
        for form in (word, base64.b64encode(word.encode()).decode().rstrip("="), word.encode().hex())
        for line in said.splitlines()
        if form in line
    ]
    assert found == []
