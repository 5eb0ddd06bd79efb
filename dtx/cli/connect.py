"""Which database a command means."""

from collections.abc import Iterator
from contextlib import contextmanager

from dtx.config import Settings


def database_url(settings: Settings) -> str:
    """The configured database, else the embedded PostgreSQL of the dtx that runs on the data directory.

    Raises:
        EmbeddedPostgresError: nothing runs there.
    """
    if settings.database is not None:
        return settings.database.get_secret_value()
    from dtx.embedded.postgres import connection_url

    return connection_url(settings.data_dir)


@contextmanager
def database_at_hand(settings: Settings, *, make: bool = False) -> Iterator[str]:
    """The database's URL; an embedded PostgreSQL that nobody runs is run meanwhile.

    Args:
        settings: which database.
        make: where there is no embedded one yet, make it. Whoever looks for branches must not find an empty one.

    Raises:
        EmbeddedPostgresError: it cannot run here, or there is none.
    """
    from dtx.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError, has_cluster

    try:
        url = database_url(settings)
    except EmbeddedPostgresError:
        if not make and not has_cluster(settings.data_dir):
            raise
        # Nobody runs it. Should it not start either, the error of that says more.
        embedded = EmbeddedPostgres(settings.data_dir)
        url = embedded.start()
        try:
            yield url
        finally:
            embedded.stop()
    else:
        yield url
