"""Tables for people."""

import sys

import click
from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE = 1000
"""Columns where nobody's window limits them: nothing is folded in a pipe."""


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table with a plain head; what does not fit is folded, never cut, since a cut xid is no xid.

    Args:
        columns: headings.
        numbers: those of them that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def show_table(table: Table) -> None:
    """Print *table*: as wide as the window on a terminal, unfolded elsewhere. Its cells are ``Text``, never markup."""
    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, markup=False, highlight=False, emoji=False, width=None if terminal else _WIDTH_OF_A_FILE
    )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), color=terminal)
