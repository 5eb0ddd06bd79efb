"""Which versions of the tables this dtx knows."""

from typing import Final

from alembic.script import ScriptDirectory

from dtx.log.migrate import script_location

NO_TABLES: Final = "none"


def known_revisions() -> list[str]:
    """All versions, the newest first."""
    return [script.revision for script in ScriptDirectory(str(script_location())).walk_revisions()]
