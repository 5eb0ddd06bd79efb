"""The database of a command, and ``dtx migrate``, which changes the version of its tables."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import click

from dtx.admin.safe_text import safe
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.config import Settings

_EPILOG: Final = """\b
Examples:
  dtx migrate                      bring the tables to the newest version
  dtx migrate current              show the version of the tables
  dtx migrate down                 one version back, after a question
  dtx migrate down --to base --yes remove the tables with all their contents

'dtx serve' migrates when it starts, as the same database user, which must own the tables. Run this command before, if
the start must be fast. An embedded PostgreSQL that is not running is started for this command.
"""


def database_url(settings: Settings) -> str:
    """The configured database, else the embedded PostgreSQL of the dtx that runs on the data directory.

    Raises:
        EmbeddedPostgresError: no embedded PostgreSQL runs there.
    """
    if settings.database is not None:
        return settings.database.get_secret_value()
    from dtx.embedded.postgres import connection_url

    return connection_url(settings.data_dir)


@contextmanager
def database_at_hand(settings: Settings, *, make: bool = False) -> Iterator[str]:
    """The URL of the database; an embedded PostgreSQL that does not run is started for the context.

    Args:
        settings: which database.
        make: create the embedded PostgreSQL if it is missing. Commands that read branches must not: an empty new
            database would look like "no branches".

    Raises:
        EmbeddedPostgresError: it cannot run here, or there is none.
    """
    from dtx.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError, has_cluster

    try:
        url = database_url(settings)
    except EmbeddedPostgresError:
        if not make and not has_cluster(settings.data_dir):
            raise
        # It does not run. If it cannot be started, that error tells more.
        embedded = EmbeddedPostgres(settings.data_dir)
        url = embedded.start()
        try:
            yield url
        finally:
            embedded.stop()
    else:
        yield url


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.argument("what", type=click.Choice(["head", "down", "current"]), default="head")
@click.option("--to", metavar="VERSION", help="With down: this version, or 'base' for no tables at all.")
@click.option("--yes", is_flag=True, help="With down: do not ask.")
def migrate(settings: Settings, what: str, to: str | None, yes: bool) -> int:
    """Upgrade the tables to the newest version (head), downgrade them (down), or show their version (current)."""
    from dtx.db import migrate as log

    if to is not None and what != "down":
        raise click.UsageError("--to is for down only")
    with database_at_hand(settings, make=True) as url:
        match what:
            case "current":
                found = log.current(url)
            case "head":
                found = log.upgrade(url)
            case _:
                _refuse_while_served(url)
                _ask(log.current(url), to, yes=yes)
                found = log.downgrade(url, to or "-1")
    newest = log.known_revisions()[0]
    state = "the newest" if found == newest else f"the newest is {newest}"
    click.echo(f"{safe(found or 'none')} ({state})")
    return Exit.OK


def _refuse_while_served(url: str) -> None:
    from dtx.db.connections import Dsn, connect_now

    with closing(connect_now(Dsn(url))) as connection:
        row = connection.execute("SELECT to_regclass('dtx.lease') IS NOT NULL").fetchone()
        if row is None or not row[0]:
            raise CommandError(Exit.FAILED, "there are no tables to downgrade")
        holders = connection.execute("SELECT holder FROM dtx.lease WHERE expires_at > clock_timestamp()").fetchall()
    if holders:
        names = ", ".join(safe(holder) for (holder,) in holders)
        raise CommandError(Exit.FAILED, f"dtx is serving on these tables ({names}): stop it first")


def _ask(current: str | None, to: str | None, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(Exit.USAGE, "a downgrade can lose data, and stdin is no terminal to ask on: use --yes")
    target = to or "one version back"
    click.confirm(
        f"Downgrade the tables from {current} to {target}? Data that only the newer ones have is lost",
        abort=True,
        err=True,
    )
