"""Logins without a password: with a certificate or anonymously, if a setting allows it."""

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtx.auth.users import EditError
from dtx.wire.amqp10.endpoint import Closed
from dtx.wire.amqp10.performatives import Role, SaslCode, Source, Target
from tests.servers.amqp10.raw import Raw
from tests.support.postgres import PostgresServer
from tests.support.service import DtxService
from tests.support.users import StandaloneUsers


@pytest.fixture(scope="module")
def open_house(postgres: PostgresServer, certificates: Path) -> Iterator[DtxService]:
    """A service that accepts certificates instead of passwords, and anonymous clients as ``visitor``."""
    database = postgres.create_database()
    files = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-ca": "ca.pem"}
    options = [word for flag, file in files.items() for word in (flag, str(certificates / file))]
    with DtxService(database=database, options=(*options, "--tls-login", "--anonymous-user", "visitor")) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def users(open_house: DtxService) -> Iterator[StandaloneUsers]:
    """Its users ``client``, ``server`` and ``visitor``, who are removed afterwards."""
    made = StandaloneUsers(open_house)
    names = ("client", "server", "visitor")
    for name in names:
        made.add(name)
        made.permit(name)
    yield made
    for name in names:
        with contextlib.suppress(EditError):  # the test has done it
            made.remove(name)


@pytest.fixture
def tls(certificates: Path) -> ssl.SSLContext:
    """The TLS context of a client whose certificate names ``client``."""
    made = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    made.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    return made


@pytest.mark.parametrize("response", [b"", None, b"client"])
def test_a_certificate_names_the_user_of_the_client(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext, response: bytes | None
) -> None:
    with Raw(open_house, tls=tls, mechanism="EXTERNAL", response=response) as raw:
        assert raw.login is SaslCode.OK
        raw.opened()
        users.remove("client")
        error = raw.expect(Closed).error  # the connection is that of this user
        assert error is not None
        assert "user 'client'" in str(error.description)


def test_a_certificate_is_good_for_no_other_user(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext
) -> None:
    for response in (b"server", b"guest", b"client\x00", b"CLIENT"):
        with Raw(open_house, tls=tls, mechanism="EXTERNAL", response=response) as raw:
            assert raw.login is SaslCode.AUTH
            assert raw.socket.recv(1) == b""


def test_a_certificate_that_names_no_user_is_good_for_nothing(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext
) -> None:
    users.remove("client")
    with Raw(open_house, tls=tls, mechanism="EXTERNAL", response=b"") as raw:
        assert raw.login is SaslCode.AUTH


def test_a_password_is_still_good_beside_a_certificate(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext
) -> None:
    with Raw(open_house, tls=tls, user="server", password="server") as raw:
        assert raw.mechanisms == ("EXTERNAL", "PLAIN", "ANONYMOUS")
        raw.opened()
    with Raw(open_house, tls=tls, user="server", password="wrong") as raw:
        assert raw.login is SaslCode.AUTH


@pytest.mark.parametrize("response", [None, b"", b"somebody@example.com"])
def test_an_anonymous_client_is_the_user_of_the_setting(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext, response: bytes | None
) -> None:
    users.permit("visitor", write="^$", read="^$", configure="^$")
    with Raw(open_house, tls=tls, mechanism="ANONYMOUS", response=response) as raw:
        session = raw.opened().begin()
        link = session.new_link("not allowed", Role.RECEIVER)
        link.attach(source=Source(dynamic=True), target=Target())
        error = raw.detached(link)
        assert error is not None
        assert "for user 'visitor'" in str(error.description)


def test_an_anonymous_login_without_that_user_is_refused(
    open_house: DtxService, users: StandaloneUsers, tls: ssl.SSLContext
) -> None:
    users.remove("visitor")
    with Raw(open_house, tls=tls, mechanism="ANONYMOUS") as raw:
        assert raw.login is SaslCode.AUTH


@pytest.mark.parametrize("mechanism", ["ANONYMOUS", "EXTERNAL", "SCRAM-SHA-256", ""])
def test_only_passwords_are_accepted_without_a_setting(service: DtxService, mechanism: str) -> None:
    with Raw(service, mechanism=mechanism, response=b"guest") as raw:
        assert raw.mechanisms == ("PLAIN",)
        assert raw.login is SaslCode.AUTH
        assert raw.socket.recv(1) == b""
