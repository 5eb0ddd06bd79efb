"""What ``dtx user`` and ``dtx vhost`` have in common: their group, and the users of the database that is meant."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from dtx.cli.connect import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings
from dtx.store.postgres.editing import AccountEditor, EditError

ABOUT: Final = """\b
The users of a dtx without a broker. Alongside a broker, clients log in with the broker's users, and these do not count.
A running dtx needs no restart: a login sees what has changed at once, open connections within a few seconds.
With an embedded PostgreSQL that is not running, it is started for the duration.
"""


class Subcommands(click.Group):
    """A group that lists its commands in the order in which they are defined, which is that of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in that order."""
        return list(self.commands)


@contextmanager
def editor(settings: Settings) -> Iterator[AccountEditor]:
    """The users of the resource manager that *settings* name.

    Raises:
        CommandError: what was asked cannot be done.
    """
    from dtx.log import migrate

    with database_at_hand(settings, make=True) as url:
        if settings.database is None and migrate.current(url) is None:
            # an embedded PostgreSQL that was made just now, for users that are wanted before the first start
            migrate.upgrade(url)
        try:
            yield AccountEditor(url, settings.rm)
        except EditError as error:
            raise CommandError(Exit.FAILED, str(error)) from None
