"""What ``dtx user``, ``dtx vhost`` and ``dtx token`` have in common: their group, their options, and whom they ask."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from dtx.cli.console.access import Access, with_access
from dtx.cli.console.reach import Api, reach
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, with_settings
from dtx.config import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])

ABOUT: Final = """\b
The users of a dtx without a broker. Alongside one clients log in with the broker's users; these are operators then.
A running dtx needs no restart: a login sees what has changed at once, open connections within a few seconds.

"""


class Subcommands(click.Group):
    """A group that lists its commands in the order in which they are defined, which is that of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in that order."""
        return list(self.commands)


def with_api(function: _Function) -> _Function:
    """Give a command the flags that say whom it asks; it is called with ``settings`` first, and ``access``."""
    decorated: _Function = with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)(with_access(function))
    return decorated


def with_reason(function: _Function) -> _Function:
    """Give a command ``--reason``."""
    decorated: _Function = click.option("--reason", default="", metavar="TEXT", help="Why; for the trail.")(function)
    return decorated


@contextmanager
def api_of(settings: Settings, access: Access, *, change: bool = True) -> Iterator[Api]:
    """Whom such a command asks. Unlike branches these tables need no lease, where no dtx has it.

    Args:
        settings: which dtx.
        access: what the user said about its API.
        change: whether something is to be changed.

    Raises:
        CommandError: no token, no way to the API, or the tables are not those of this dtx.
    """
    with reach(settings, access, orders=change, make=change) as api:
        api.require_tables()
        yield api
