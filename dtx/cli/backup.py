"""``dtx backup`` and ``dtx restore``, for the embedded PostgreSQL."""

import contextlib
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from dtx.admin.safe_text import human_size, safe
from dtx.cli.database import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.cli.files import is_stream, written
from dtx.cli.options import SettingsCommand, with_settings
from dtx.config import Settings

_BACKUP: Final = """\b
Examples:
  dtx backup /backup/dtx-$(date +%F).dump
  dtx backup - | ssh elsewhere 'cat > dtx.dump'

The file has everything: branches, messages, users with their password hashes, tokens, journal and audit log. Only its
owner can read it. It has the state of the moment that is printed. An embedded PostgreSQL that is not running is started
for this command.
"""
_RESTORE: Final = """\b
Example:
  dtx restore /backup/dtx-2026-02-03.dump --data-dir /var/lib/dtx

The data directory must have no database. Stop every dtx on it first, and move its directory postgres away. Transaction
managers may have ended branches after the backup: decide these branches before clients connect. The page "Backup and
restore" of the documentation says how.
"""
_JOURNAL: Final = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'dtx.journal'::regclass
ORDER BY c.relname
"""


@click.command(cls=SettingsCommand, epilog=_BACKUP)
@with_settings("data_dir")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def backup(settings: Settings, file: Path) -> int:
    """Write the embedded PostgreSQL to FILE (- for stdout), while dtx runs."""
    _refuse_other_server(settings, "pg_dump or pg_basebackup")
    from dtx.embedded.backup import dump

    with database_at_hand(settings) as url, written(file) as target:
        moment = datetime.now(UTC)
        dump(url, target)
    size = "" if is_stream(file) else f" ({human_size(file.stat().st_size)})"
    click.echo(f"wrote {file}{size}, the state of {moment:%Y-%m-%dT%H:%M:%SZ}", err=is_stream(file))
    return Exit.OK


@click.command(cls=SettingsCommand, epilog=_RESTORE)
@with_settings("data_dir")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def restore(settings: Settings, file: Path) -> int:
    """Make the embedded PostgreSQL from FILE (- for stdin), which `dtx backup` wrote."""
    _refuse_other_server(settings, "pg_restore")
    from dtx.embedded.backup import restore as restore_dump

    with contextlib.nullcontext(sys.stdin.buffer) if is_stream(file) else file.open("rb") as source:
        version, branches = restore_dump(settings.data_dir, source, _adopt)
    click.echo(
        f"restored {settings.data_dir / 'postgres'}: tables at version {version}, "
        f"{branches} {'branch is' if branches == 1 else 'branches are'} open"
    )
    if branches:
        click.echo(
            "Decide these branches before clients connect: transaction managers may have ended them after the backup. "
            "Start dtx with --listen 127.0.0.1:5999, and alongside a broker with --replay always."
        )
    return Exit.OK


def _refuse_other_server(settings: Settings, tool: str) -> None:
    if settings.database is not None:
        raise CommandError(
            Exit.USAGE,
            f"this command is for the embedded PostgreSQL: for the server of --database use {tool}, as the page "
            '"Backup and restore" of the documentation says',
        )


def _adopt(url: str) -> tuple[str, int]:
    """Make the restored tables ready for use. Returns their version and the number of open branches."""
    from psycopg.sql import SQL, Identifier

    from dtx.db import migrate
    from dtx.db.connections import Dsn, connect_now

    version, known = migrate.current(url), migrate.known_revisions()
    if version is None:
        raise CommandError(Exit.FAILED, "the file is no backup of dtx: it has no tables of dtx")
    if version not in known:
        raise CommandError(
            Exit.DATABASE,
            f"the backup has tables of version {safe(version)} of a newer dtx, this one knows {known[0]}: "
            "restore it with a dtx of that version",
        )
    with closing(connect_now(Dsn(url), autocommit=True)) as connection:
        # Lines of the journal name the transaction that wrote them. The numbers of the old server may be ahead of this
        # one's, and readers of the journal would not see these lines. Readers take whole transactions: one for a day.
        for (day,) in connection.execute(_JOURNAL).fetchall():
            connection.execute(SQL("UPDATE {} SET xid8 = pg_current_xact_id()").format(Identifier("dtx", day)))
        connection.execute("ANALYZE")
        row = connection.execute("SELECT count(*) FROM dtx.branch").fetchone()
    assert row is not None
    return version, int(row[0])
