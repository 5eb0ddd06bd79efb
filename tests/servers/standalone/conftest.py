"""One dtx without a broker for the tests of its protocol, which do not stop it."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer
from tests.support.service import DtxService


@pytest.fixture(scope="package")
def standalone(postgres: PostgresServer) -> Iterator[DtxService]:
    database = postgres.create_database()
    with DtxService(database=database) as running:
        yield running
    postgres.drop_database(database)
