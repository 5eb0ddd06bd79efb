"""Which revisions of the tables this dtx knows."""

import functools
from importlib.resources import files
from pathlib import Path

from dtx.pipeline.source.errors import SourceError


@functools.cache
def newest_revision() -> str:
    """The newest revision that this dtx has a migration for.

    Raises:
        SourceError: the migrations are missing from this installation.
    """
    package = Path(str(files("dtx")))
    for place in (package / "migrations", package.parent / "migrations"):
        found = [path.name.partition("_")[0] for path in (place / "versions").glob("[0-9]*_*.py")]
        if found:
            return max(found)
    raise SourceError("the migrations are missing from this installation")
