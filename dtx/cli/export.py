"""``dtx export``: the messages of a branch, with properties and bodies, to keep or to look at."""

import sys
from pathlib import Path
from typing import Final

import click

from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.reach import reach
from dtx.cli.errors import CommandError, Exit
from dtx.cli.kept import Files, Lines, Unframer, Writer
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.orders import branch_path, with_xid
from dtx.config import Settings

_EPILOG: Final = (
    """\b
Examples:
  dtx export 1:6774:62 --to kept
  dtx export 1:6774:62 --position 3 | jq -r .body | base64 -d
  dtx export 1:6774:62 --archived --to kept

With --to each message becomes 000001.json, with where it was going and its properties, and 000001.body, the body as it
is: in a directory that nobody else may read, safely on disk when the command ends. Without, each becomes a line of
JSON on stdout, with its body in base64; "header" is the content header from the property flags on, in base64. Names are
shown as text, what is no UTF-8 with escapes. Bodies of any size go through a few MiB of memory. That somebody has
exported is written to the trail. The exit code is 1 when a message is missing at the end.

"""
    + HOW
)


@click.command("export", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@with_xid
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="New directory; else stdout."
)
@click.option(
    "--position", "positions", multiple=True, type=click.IntRange(min=0), metavar="NUMBER", help="These alone."
)
@click.option("--archived", is_flag=True, help="What nobody got of a branch that was forgotten.")
@with_access
def export(
    settings: Settings,
    xid: str,
    vhost: str,
    to: Path | None,
    positions: tuple[int, ...],
    archived: bool,
    access: Access,
) -> int:
    """Write the messages of a branch to files or to stdout, with properties and bodies. It decides nothing."""
    with reach(settings, access, orders=False) as api:
        writer: Writer = Lines(sys.stdout.buffer) if to is None else Files(to)
        stream = Unframer(writer)
        try:
            expected = api.download(
                branch_path(xid, "export"),
                stream.feed,
                vhost=vhost,
                archived=archived or None,
                position=positions or None,
            )
        finally:
            stream.close()
    missing = expected - stream.count
    if missing:
        raise CommandError(Exit.FAILED, f"{missing} of {expected} messages are missing: the branch has ended meanwhile")
    if positions and expected < len(set(positions)):
        raise CommandError(
            Exit.FAILED, f"{xid} has {expected} of the {len(set(positions))} messages that were asked for"
        )
    click.echo(f"{stream.count} message{'' if stream.count == 1 else 's'}{'' if to is None else f' in {to}'}", err=True)
    return Exit.OK
