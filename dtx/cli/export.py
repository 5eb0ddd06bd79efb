"""``dtx export``: the messages of a branch, with properties and bodies, to keep or to look at.

They go to lines of JSON, or to two files for each in a directory of their own. Bodies go through, and are not held.
"""

import json
import os
import sys
from base64 import b64encode
from pathlib import Path
from typing import IO, Any, Final, Protocol

import click

from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings, with_xid
from dtx.config import Settings

_MOST_HEAD: Final = 64 * 1024 * 1024
"""Octets of what comes before a body: headers of a message may be as large as a frame, and larger in JSON."""


class ExportWriter(Protocol):
    """Keeps messages, one after the other."""

    def begin(self, head: dict[str, Any]) -> None:
        """A message comes."""

    def body(self, piece: bytes) -> None:
        """Some of its body."""

    def end(self) -> None:
        """All of it has come."""

    def abandon(self) -> None:
        """The rest of it will not come."""


class Unframer:
    """Cuts the stream of the API into messages (see :mod:`dtx.admin.routes_read`).

    Args:
        writer: gets them.
    """

    def __init__(self, writer: ExportWriter) -> None:
        self._writer = writer
        self._head = bytearray()
        self._left = 0
        self._within = False
        self.count = 0
        """Messages that have come whole."""

    def feed(self, data: bytes) -> None:
        """Some of the stream.

        Raises:
            CommandError: it is none.
        """
        rest = memoryview(data)
        while rest:
            if self._within:
                piece = rest[: self._left]
                self._writer.body(bytes(piece))
                self._left -= len(piece)
                rest = rest[len(piece) :]
            else:
                rest = self._feed_head(rest)
            if self._within and not self._left:
                self._within = False
                self._writer.end()
                self.count += 1

    def _feed_head(self, rest: memoryview) -> memoryview:
        end = bytes(rest).find(b"\n")
        self._head += rest if end < 0 else rest[:end]
        if len(self._head) > _MOST_HEAD:
            raise CommandError(Exit.FAILED, "what comes is no export of dtx")
        if end < 0:
            return rest[len(rest) :]
        try:
            head = json.loads(self._head)
            self._left = int(head["bytes"])
        except (ValueError, KeyError, TypeError):
            raise CommandError(Exit.FAILED, "what comes is no export of dtx") from None
        self._head.clear()
        self._within = True
        self._writer.begin(head)
        return rest[end + 1 :]

    def close(self) -> None:
        """The stream has ended; what has begun and not ended is given up."""
        if self._within:
            self._writer.abandon()


class ExportLines:
    """One JSON object a line, the body in base64.

    Args:
        out: gets octets.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._odd = b""

    def begin(self, head: dict[str, Any]) -> None:
        """Write everything but the body."""
        self._write(json.dumps(head, ensure_ascii=True).removesuffix("}").encode() + b', "body": "')

    def body(self, piece: bytes) -> None:
        """Write what makes whole groups of base64."""
        data = self._odd + piece
        whole = len(data) - len(data) % 3
        self._write(b64encode(data[:whole]))
        self._odd = data[whole:]

    def end(self) -> None:
        """Write the end of the line."""
        self._write(b64encode(self._odd) + b'"}\n')
        self._odd = b""

    def abandon(self) -> None:
        """Leave the line as no JSON, so that nobody takes it for whole."""
        self._write(b"\n")

    def _write(self, data: bytes) -> None:
        try:
            self._out.write(data)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable("stdout", error) from None


class ExportFiles:
    """``NUMBER.json`` and ``NUMBER.body`` for each; durable when the next one begins, readable by nobody else.

    No name in it is one that a client chose.

    Args:
        directory: made where missing.

    Raises:
        CommandError: it cannot be made, or has something in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise CommandError(Exit.USAGE, f"--to: {directory} is not empty: name a new directory")
        except OSError as error:
            raise _unwritable(directory, error) from None
        self._number = 0
        self._head: dict[str, Any] = {}
        self._file: IO[bytes] | None = None

    def begin(self, head: dict[str, Any]) -> None:
        """Open the file of the body."""
        self._number += 1
        self._head = head
        self._file = self._open("body")

    def body(self, piece: bytes) -> None:
        """Write it."""
        assert self._file is not None
        try:
            self._file.write(piece)
        except OSError as error:
            raise _unwritable(self._path("body"), error) from None

    def end(self) -> None:
        """Make it durable; what describes it comes last, so that who finds that finds the body."""
        self._close()
        file = self._open("json")
        try:
            file.write(json.dumps({**self._head, "body": self._path("body").name}, indent=2).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self._path("json"), error) from None
        self._file = file
        self._close()
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def abandon(self) -> None:
        """Remove what is not whole."""
        if self._file is not None:
            self._file.close()
        self._path("body").unlink(missing_ok=True)

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self._number:06}.{kind}"

    def _open(self, kind: str) -> IO[bytes]:
        path = self._path(kind)
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")
        except OSError as error:
            raise _unwritable(path, error) from None

    def _close(self) -> None:
        file, self._file = self._file, None
        assert file is not None
        try:
            with file:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self._path("body"), error) from None


def _unwritable(path: Path | str, error: OSError) -> CommandError:
    return CommandError(Exit.FAILED, f"{path} cannot be written: {(error.strerror or str(error)).lower()}")


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
@click.option("--archived", is_flag=True, help="Export undelivered messages of a forgotten branch.")
@with_access
def export(
    settings: Settings,
    xid: str,
    vhost: str,
    to: Path | None,
    positions: tuple[int, ...],
    archived: bool,
    access: ApiAccess,
) -> int:
    """Write the messages of a branch to files or to stdout, with properties and bodies. It decides nothing."""
    with reach(settings, access, orders=False) as api:
        writer: ExportWriter = ExportLines(sys.stdout.buffer) if to is None else ExportFiles(to)
        stream = Unframer(writer)
        try:
            expected = api.export(xid, stream.feed, vhost=vhost, archived=archived, positions=positions)
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
