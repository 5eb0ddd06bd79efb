"""What commands print: one JSON object a line for programs, tables for people."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from dtx.admin.safe_text import json_line

if TYPE_CHECKING:
    from rich.text import Text

_WIDTH_OF_A_FILE: Final = 1000
"""Columns where nobody's window limits them: nothing is folded in a pipe."""


def show_list(
    found: Collection[dict[str, Any]], show: Callable[[list[dict[str, Any]]], None], empty: str, *, as_json: bool
) -> None:
    """Print all that was found.

    Args:
        found: objects of the API.
        show: prints them for people.
        empty: what people are told where there is none.
        as_json: whether it is for programs.
    """
    if as_json:
        print_lines(found)
    elif found:
        show(list(found))
    else:
        click.echo(empty)


def print_lines(found: Iterable[Mapping[str, object]]) -> None:
    """One JSON object a line."""
    for each in found:
        click.echo(json_line(each))


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, numbers: Collection[str] = (), head: bool = True
) -> None:
    """Print a table: as wide as the window on a terminal, unfolded elsewhere.

    What does not fit is folded, never cut, since a cut xid is no xid.

    Args:
        columns: headings.
        rows: cells, never markup; what clients have named is escaped by then.
        numbers: columns that are aligned to the right.
        head: whether the headings are shown.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=head)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, markup=False, highlight=False, emoji=False, width=None if terminal else _WIDTH_OF_A_FILE
    )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), color=terminal)
