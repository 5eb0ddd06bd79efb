"""The command line: parse, wire up, run."""

from dtx.cli.main import main, run

__all__ = ["main", "run"]
