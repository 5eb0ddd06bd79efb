"""What commands print: JSON and YAML for programs, tables for people; once, or again and again with ``--watch``."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import click

from dtx.admin.safe_text import human_duration, json_line, safe
from dtx.cli.options import duration, with_options

if TYPE_CHECKING:
    from rich.text import Text

Row = Mapping[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
MOST_ROWS: Final = 1000
"""Rows of a table; JSON and YAML have all."""
_WIDTH_OF_A_FILE: Final = 1000
"""Columns where stdout is no terminal, so that lines in a pipe are not folded."""
_PLAIN: Final = re.compile(r"(?!(?i:true|false|null|yes|no|on|off|[yn])$)[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
"""Strings that YAML reads as strings without quotes."""
_LONGEST: Final = 76
"""Characters of a long xid or name in a table: enough for an xid of two UUIDs."""
_LONGEST_KEY: Final = 1024
"""Characters of a key before ``:``; YAML wants longer ones after ``?``."""


def cell_text(value: object) -> str:
    """A value of the API as the text of a cell."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list() if all(isinstance(each, str) for each in value):
            return ", ".join(map(safe, value))
        case list() | dict():
            return safe(json.dumps(value, ensure_ascii=False)) if value else ""
        case _:
            return safe(str(value))


class Column(NamedTuple):
    """A column of a table.

    Args:
        name: its heading.
        field: the field of a row, ``a.b`` for a field of a field; the default is *name* with underscores.
        cell: the text of a row, escaped; the default is the value of *field*.
        number: whether it is aligned to the right.
        wide: whether it is only in wide tables.
        cut: whether its text is cut in tables that are not wide.
    """

    name: str
    field: str = ""
    cell: "Callable[[Row], str | Text] | None" = None
    number: bool = False
    wide: bool = False
    cut: bool = False

    @property
    def key(self) -> str:
        """The field to sort by."""
        return self.field or self.name.replace(" ", "_")

    def text(self, row: Row, *, whole: bool = True) -> "str | Text":
        """The cell of *row*."""
        found = cell_text(field_of(row, self.key)) if self.cell is None else self.cell(row)
        return shortened(found) if self.cut and not whole and isinstance(found, str) else found


def name_columns(*headings: str) -> Iterator[Column]:
    """Columns of names that clients choose, which may be long."""
    return (Column(heading, cut=True) for heading in headings)


def shortened(text: str) -> str:
    """*text* without its middle if it is long: the ends of xids and names tell them apart."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half + 1 :]}"


def field_of(row: Row, key: str) -> Any:
    """The field *key* of *row*, ``a.b`` for a field of a field; ``None`` if there is none."""
    found: Any = row
    for word in key.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return found


def _order(value: object) -> tuple[bool, bool, Any]:
    """A key that compares values of any types: none, then numbers, then text."""
    if isinstance(value, int | float):
        return True, False, value
    return value is not None, True, "" if value is None else cell_text(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """How a command shows what it has found.

    Args:
        form: the format.
        sort: heading or field to sort by, after ``-`` in descending order; ``None`` keeps the order of the API.
        every: seconds between two times; ``None`` for once.
    """

    form: Literal["table", "wide", "json", "yaml"] = "table"
    sort: str | None = None
    every: float | None = None

    @property
    def wide(self) -> bool:
        """Whether tables have all columns, and whole xids and names."""
        return self.form == "wide"

    @property
    def for_people(self) -> bool:
        """Whether it is a table."""
        return self.form in {"table", "wide"}

    def show(
        self,
        read: Callable[[], Iterable[Row]],
        columns: Sequence[Column],
        empty: str,
        *,
        table: Callable[[Iterable[Row]], Iterable[str]] | None = None,
        limit: int | None = None,
    ) -> None:
        """Show a list.

        Args:
            read: returns the rows; called each time.
            columns: of the table; their names can be sorted by.
            empty: text for people where the list is empty.
            table: makes the lines for people if that is more than a table.
            limit: rows at most, after they have been sorted.

        Raises:
            click.BadParameter: there is no column of that name to sort by.
        """

        def lines() -> Iterable[str]:
            found = islice(read() if self.sort is None else self._sorted(list(read()), columns), limit)
            if self.form == "json":
                return map(json_line, found)
            first = next(found, None)
            if first is None:
                return ["[]" if self.form == "yaml" else empty]
            rows = chain([first], found)
            if self.form == "yaml":
                return chain.from_iterable(yaml_lines([each]) for each in rows)
            return self.table(columns, rows) if table is None else table(rows)

        self._repeat(lines)

    def show_one(self, read: Callable[[], Row], lines: Callable[[Row], Iterable[str]]) -> None:
        """Show one object.

        Args:
            read: returns it; called each time.
            lines: makes the lines for people.
        """
        forms: dict[str, Callable[[Row], Iterable[str]]] = {"json": lambda row: [json_line(row)], "yaml": yaml_lines}
        self._repeat(lambda: forms.get(self.form, lines)(read()))

    def table(self, columns: Sequence[Column], rows: Iterable[Row]) -> Iterator[str]:
        """The lines of a table, with a line about rows that are left out."""
        rest = iter(rows)
        shown = [column for column in columns if self.wide or not column.wide]
        yield from table_lines(
            [column.name for column in shown],
            ([column.text(row, whole=self.wide) for column in shown] for row in islice(rest, MOST_ROWS)),
            numbers=[column.name for column in shown if column.number],
        )
        if more := sum(1 for _ in rest):
            yield f"the first {MOST_ROWS} of {MOST_ROWS + more} are shown; --output json has all"

    def _sorted(self, rows: list[Row], columns: Sequence[Column]) -> list[Row]:
        assert self.sort is not None
        name = self.sort.removeprefix("-")
        key = next((column.key for column in columns if column.name == name), name)
        if rows and not any(key.partition(".")[0] in row for row in rows):
            known = ", ".join(column.name for column in columns)
            raise click.BadParameter(f"there is no column {safe(name)}: the columns are {known}", param_hint="--sort")
        return sorted(rows, key=lambda row: _order(field_of(row, key)), reverse=self.sort.startswith("-"))

    def _repeat(self, lines: Callable[[], Iterable[str]]) -> None:
        if self.every is None:
            for line in lines():
                click.echo(line)
            return
        try:
            for number in range(sys.maxsize):
                self._again(lines(), first=number == 0)
                time.sleep(self.every)
        except KeyboardInterrupt:
            return

    def _again(self, lines: Iterable[str], *, first: bool) -> None:
        """Print *lines*: on a terminal in the place of the former ones, as many as there is room for."""
        if not sys.stdout.isatty():
            if not first and self.form != "json":
                click.echo("---" if self.form == "yaml" else "")
            for line in lines:
                click.echo(line)
            return
        assert self.every is not None
        head = f"every {human_duration(self.every)}, at {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends"
        shown = [click.style(head, dim=True), *lines][: shutil.get_terminal_size().lines - 1]
        click.echo("\033[H\033[J" + "\n".join(shown))


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    found = duration(ctx, param, value)
    if found is not None and found < 0.1:
        raise click.BadParameter("the shortest time is 100ms")
    return found


def with_form(function: _Function) -> _Function:
    """Give a command ``--output``; it is called with ``listing: Listing``."""

    @wraps(function)
    def run(
        *args: Any, form: Any, as_json: bool, watch: float | None = None, sort: str | None = None, **kwargs: Any
    ) -> Any:
        return function(*args, listing=Listing(form="json" if as_json else form, sort=sort, every=watch), **kwargs)

    command: _Function = with_options(
        click.option(
            "--output", "form", type=click.Choice(["table", "wide", "json", "yaml"]), default="table",
            show_default=True, help="wide: all columns, and whole xids and names; json: one object a line.",
        ),
        click.option("--json", "as_json", is_flag=True, help="The same as --output json."),
    )(run)  # fmt: skip
    return command


def with_output(function: _Function) -> _Function:
    """Give a command ``--output`` and ``--watch``; it is called with ``listing: Listing``."""
    watch = click.option(
        "--watch", is_flag=False, flag_value="2", callback=_seconds, metavar="[SECONDS]",
        help="Show it again and again, every 2 seconds without a value, until Ctrl-C.",
    )  # fmt: skip
    return with_form(watch(function))


with_sort: Final = click.option(
    "--sort", metavar="COLUMN", help="Sort by a column, or by a field of the JSON; -COLUMN: descending."
)


def with_listing(function: _Function) -> _Function:
    """Give a command the options of lists: ``--sort``, and those of :func:`with_output`."""
    return with_sort(with_output(function))


def yaml_lines(value: object, indent: str = "") -> Iterator[str]:
    """*value* of JSON as YAML, in block form."""
    match value:
        case list() if value:
            for each in value:
                first, *rest = yaml_lines(each, indent + "  ")
                yield f"{indent}- {first[len(indent) + 2 :]}"
                yield from rest
        case Mapping() if value:
            for name, each in value.items():
                key = _yaml_scalar(name)
                if len(key) > _LONGEST_KEY:
                    yield f"{indent}? {key}"
                    key = ""
                if isinstance(each, list | Mapping) and each:
                    yield f"{indent}{key}:"
                    yield from yaml_lines(each, indent + "  ")
                else:
                    yield f"{indent}{key}: {_yaml_scalar(each)}"
        case _:
            yield indent + _yaml_scalar(value)


def _yaml_scalar(value: object) -> str:
    """A scalar, or an empty list or mapping. Text of JSON is text of YAML, but for characters that YAML refuses."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, numbers: Collection[str] = (), head: bool = True
) -> None:
    """Print a table: see :func:`table_lines`."""
    for line in table_lines(columns, rows, numbers=numbers, head=head):
        click.echo(line)


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, numbers: Collection[str] = (), head: bool = True
) -> Iterator[str]:
    """The lines of a table: as wide as the window on a terminal, unfolded elsewhere.

    Long cells are folded, never cut.

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
        number = column in numbers
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console = Console(
        file=sys.stdout,
        markup=False,
        highlight=False,
        emoji=False,
        width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE,
    )
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        yield line.rstrip()
