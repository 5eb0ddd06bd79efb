"""Asking before something is decided."""

import sys
from contextlib import ExitStack
from typing import Self

import click

from dtx.cli.console.reach import Api
from dtx.cli.errors import CommandError, Exit


class Turn:
    """The right to give orders, which is given back while somebody thinks. Use as a context manager.

    Args:
        api: takes them.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pause(self) -> None:
        """Let others have it."""
        self._stack.close()

    def go_on(self) -> None:
        """Have it."""
        self._stack.enter_context(self._api.orders())


def ask(question: str) -> None:
    """Return when it may be done.

    Args:
        question: without a question mark.

    Raises:
        CommandError: nobody can be asked.
        click.Abort: no.
    """
    if not sys.stdin.isatty():
        raise CommandError(Exit.USAGE, "nobody can be asked here: say --yes, or look first with --dry-run")
    click.confirm(f"{question}?", abort=True, err=True)


def require_reason(reason: str | None, *, dry_run: bool) -> str:
    """The reason; a dry run needs none.

    Raises:
        click.UsageError: it is missing.
    """
    if not reason and not dry_run:
        raise click.UsageError("--reason is needed: it is what the next one will want to know")
    return reason or "dry run"
