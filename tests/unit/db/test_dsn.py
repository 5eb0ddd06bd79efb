"""Database URLs are checked once and never shown with their password."""

import pytest

from dtx.db.connections import Dsn
from dtx.log.api import LogError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@db.example:5433/dtx", "postgresql://me@db.example:5433/dtx"),
        ("postgres://me:p%40ss@db/dtx", "postgresql://me@db/dtx"),
        ("postgresql+psycopg://me@db/dtx", "postgresql://me@db/dtx"),
        ("postgresql:///dtx?host=/run/pg&port=5432&password=s3cret", "postgresql:///run/pg:5432/dtx"),
        ("postgresql://", "postgresql://localhost/"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert Dsn(url).shown == shown
    assert "s3cret" not in repr(Dsn(url))


@pytest.mark.parametrize(
    "url", ["mysql://me:s3cret@db", "host=db password=s3cret", "postgresql://me:s3cret@db/x?y=s3cret"]
)
def test_an_invalid_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(LogError) as caught:
        Dsn(url)
    assert "s3cret" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_an_error_of_the_driver_is_one_line_without_passwords() -> None:
    dsn = Dsn("postgresql://me:p%40ss@db/dtx")
    assert dsn.explain(Exception("cannot use p@ss\nand more.")) == "cannot use ***"
    assert dsn.explain(Exception("it is away.")) == "it is away"
    assert dsn.explain(TimeoutError()) == "TimeoutError"
