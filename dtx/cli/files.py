"""Files with secrets that commands write."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtx.cli.errors import CommandError, Exit


def is_stream(file: Path) -> bool:
    """Whether *file* means stdin or stdout."""
    return str(file) == "-"


@contextmanager
def written(file: Path) -> Iterator[Path | None]:
    """A path to write; *file* appears complete and readable only for its owner, or not at all. ``None``: stdout.

    Raises:
        CommandError: *file* exists, and is no regular file: a rename would replace it.
    """
    if is_stream(file):
        yield None
        return
    if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
        raise CommandError(Exit.USAGE, f"{file} is no regular file: use - instead, and redirect stdout to it")
    from dtx.embedded.cluster import sync_directory

    fresh = file.with_name(file.name + ".new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            yield fresh
            os.fsync(target.fileno())
        fresh.rename(file)
        sync_directory(file.parent)
    finally:
        fresh.unlink(missing_ok=True)
