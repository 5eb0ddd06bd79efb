"""What commands print: one JSON object a line for programs, tables for people."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from dtx.admin.safe_text import json_line

if TYPE_CHECKING:
    from rich.text import Text

_WIDTH_OF_A_FILE: Final = 1000
"""Columns where stdout is no terminal, so that lines in a pipe are not folded."""


def show_list(
    found: Collection[dict[str, Any]], show: Callable[[list[dict[str, Any]]], None], empty: str, *, as_json: bool
) -> None:
    """Print a list.

    Args:
        found: objects of the API.
        show: prints them for people.
        empty: text for people where the list is empty.
        as_json: print one JSON object a line, for programs.
    """
    if as_json:
        print_lines(found)
    elif found:
        show(list(found))
    else:
        click.echo(empty)


def print_lines(found: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object a line."""
    for each in found:
        click.echo(json_line(each))


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, numbers: Collection[str] = (), head: bool = True
) -> None:
    """Print a table: as wide as the window on a terminal, unfolded elsewhere.

    Long cells are folded, never cut: a cut xid would be useless.

    Args:
        columns: headings.
        rows: cells, not interpreted as markup; the caller has escaped text that clients chose.
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
