"""Backup and restore of the embedded PostgreSQL, with the ``pg_dump`` and ``pg_restore`` of its wheel.

A backup is a dump of the whole database in PostgreSQL's custom format: the state of one moment, taken while dtx runs.
A restore fills a new cluster beside the place of the old one, and renames it when it is complete. So a restore that
fails or is killed leaves no cluster that a dtx would serve.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import psycopg

from dtx.embedded.cluster import (
    DATABASE,
    EmbeddedPostgresError,
    choose_account,
    explain,
    find_programs,
    prepare_directory,
    sync_directory,
)
from dtx.embedded.postgres import EmbeddedPostgres, has_cluster, take_lock

_T = TypeVar("_T")
_VARIABLES: Final = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
}
# Other commands that lock a table, for example a migration, end soon; a dump need not wait for ever.
_DUMP: Final = ("pg_dump", "--format=custom", "--lock-wait-timeout=60s")
_RESTORE: Final = ("pg_restore", "--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges")


def dump(url: str, target: Path | None) -> None:
    """Write the database at *url* to *target*, in the custom format of ``pg_dump``; ``None`` is stdout.

    Raises:
        EmbeddedPostgresError: pg_dump failed.
    """
    _run(_DUMP if target is None else (*_DUMP, f"--file={target}"), url, "the backup failed")


def restore(data_dir: Path, source: BinaryIO, check: Callable[[str], _T]) -> _T:
    """Make the embedded PostgreSQL of *data_dir* from the dump in *source*.

    Args:
        data_dir: has no database yet.
        source: what :func:`dump` wrote, perhaps with an older major version of PostgreSQL.
        check: is called with the URL of the restored database; if it raises, nothing is restored.

    Returns:
        The result of *check*.

    Raises:
        EmbeddedPostgresError: there is a database already, it is in use, or pg_restore failed.
    """
    account = choose_account(data_dir)
    prepare_directory(data_dir, account)
    lock = take_lock(data_dir)
    try:
        if has_cluster(data_dir):
            raise EmbeddedPostgresError(
                f"there is a database in {data_dir / 'postgres'} already: move that directory away, "
                "or restore to another --data-dir"
            )
        fresh = data_dir / "restoring"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        account.give(fresh)
        try:
            server = EmbeddedPostgres(fresh)
            try:
                url = server.start()
                _run((*_RESTORE, f"--dbname={DATABASE}"), url, "the restore failed, nothing was changed", stdin=source)
                found = check(url)
            finally:
                server.stop()
            (fresh / "postgres").rename(data_dir / "postgres")
            sync_directory(data_dir)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return found
    finally:
        os.close(lock)


def _run(words: tuple[str, ...], url: str, failure: str, *, stdin: BinaryIO | None = None) -> None:
    """Run a client program of the wheel against *url*; the password is not on its command line.

    Raises:
        EmbeddedPostgresError: *failure*, with the last line of its output.
    """
    parts = psycopg.conninfo.conninfo_to_dict(url)
    secret = {_VARIABLES[name]: str(value) for name, value in parts.items() if name in _VARIABLES}
    done = subprocess.run(
        [find_programs().directory / words[0], *words[1:]],
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", **secret},
        check=False,
    )
    if done.returncode != 0:
        raise EmbeddedPostgresError(explain(failure, done.stderr.decode(errors="replace"), Path(str(parts["host"]))))
