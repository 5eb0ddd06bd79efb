"""The files of dtx-client, and the dependency of dtx on them: each file of the package dtx has one owner."""

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES: Final = ("__init__.py", "py.typed", "client", "xa", "wire/__init__.py", "wire/amqp09")
"""In the package. The wheel of dtx excludes the same (``pyproject.toml`` of dtx)."""


class Ownership(BuildHookInterface):
    """For both distributions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files or the dependency. A checkout that is installed as editable has all files, so needs none."""
        if version == "editable":
            return
        if self.metadata.name == "dtx":
            build_data["dependencies"].append(f"dtx-client=={self.metadata.version}")
            return
        root = Path(self.root)
        package = root / "dtx" if (root / "PKG-INFO").is_file() else root.parents[1] / "dtx"
        build_data["force_include"] |= {str(package / name): f"dtx/{name}" for name in FILES}
