"""``dtx export``: writes the messages of a branch, with properties and bodies.

The output is lines of JSON, or two files for each message in a new directory. Bodies are streamed, not kept in memory.
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
"""Bytes of JSON before a body at most: headers of a message may be as large as a frame, and larger in JSON."""


class ExportWriter(Protocol):
    """Writes messages, one after the other."""

    def begin(self, head: dict[str, Any]) -> None:
        """Begin a message; *head* has everything but its body."""

    def body(self, piece: bytes) -> None:
        """Add a piece of the body."""

    def end(self) -> None:
        """Complete the message."""

    def abandon(self) -> None:
        """Give up the message, whose rest will not arrive."""


class ExportParser:
    """Splits the stream of the API into messages (format: :mod:`dtx.admin.routes_read`).

    Args:
        writer: gets the messages.
    """

    def __init__(self, writer: ExportWriter) -> None:
        self._writer = writer
        self._head = bytearray()
        self._left = 0
        self._within = False
        self.count = 0
        """Complete messages so far."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream.

        Raises:
            CommandError: the stream is no export of dtx.
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
            raise CommandError(Exit.FAILED, "the answer is no export of dtx")
        if end < 0:
            return rest[len(rest) :]
        try:
            head = json.loads(self._head)
            self._left = int(head["bytes"])
        except (ValueError, KeyError, TypeError):
            raise CommandError(Exit.FAILED, "the answer is no export of dtx") from None
        self._head.clear()
        self._within = True
        self._writer.begin(head)
        return rest[end + 1 :]

    def close(self) -> None:
        """End the stream and give up a message that is not complete."""
        if self._within:
            self._writer.abandon()


class ExportLines:
    """Writes one JSON object a line, with the body in base64.

    Args:
        out: binary file.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._odd = b""

    def begin(self, head: dict[str, Any]) -> None:
        """Write everything but the body."""
        self._write(json.dumps(head, ensure_ascii=True).removesuffix("}").encode() + b', "body": "')

    def body(self, piece: bytes) -> None:
        """Write whole groups of base64 and keep the rest for the next piece."""
        data = self._odd + piece
        whole = len(data) - len(data) % 3
        self._write(b64encode(data[:whole]))
        self._odd = data[whole:]

    def end(self) -> None:
        """Write the end of the line."""
        self._write(b64encode(self._odd) + b'"}\n')
        self._odd = b""

    def abandon(self) -> None:
        """End the line as invalid JSON, so that it is not taken for a complete message."""
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
    """Writes ``NUMBER.json`` and ``NUMBER.body`` for each message, readable for this user only.

    A message is durable when the next one begins. No file name is one that a client chose.

    Args:
        directory: created if it is missing.

    Raises:
        CommandError: the directory cannot be created, or is not empty.
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
        """Open the file for the body."""
        self._number += 1
        self._head = head
        self._file = self._open("body")

    def body(self, piece: bytes) -> None:
        """Write a piece of the body."""
        assert self._file is not None
        try:
            self._file.write(piece)
        except OSError as error:
            raise _unwritable(self._path("body"), error) from None

    def end(self) -> None:
        """Make the message durable. The ``.json`` file is written last: where it exists, the body is complete."""
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
        """Remove the incomplete body."""
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

With --to, each message becomes two files: 000001.json has its destination and properties, 000001.body its body. Only
this user can read the directory, and the files are on disk when the command ends. Without --to, each message becomes a
line of JSON on stdout, with its body in base64. "header" is the content header from the property flags on, in base64.
Bytes of names that are no UTF-8 are escaped. Memory is limited to a few MiB, whatever the size of the bodies. The
export is recorded in the audit log. The exit code is 1 if a message is missing at the end.

"""
    + HOW
)


@click.command("export", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@with_xid
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="New directory; default: stdout."
)
@click.option(
    "--position",
    "positions",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Only this message; can be repeated.",
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
    """Write the messages of a branch, with properties and bodies, to files or to stdout. The branch does not change."""
    with reach(settings, access, orders=False) as api:
        writer: ExportWriter = ExportLines(sys.stdout.buffer) if to is None else ExportFiles(to)
        stream = ExportParser(writer)
        try:
            expected = api.export(xid, stream.feed, vhost=vhost, archived=archived, positions=positions)
        finally:
            stream.close()
    missing = expected - stream.count
    if missing:
        raise CommandError(
            Exit.FAILED, f"{missing} of {expected} messages are missing, because the branch has ended during the export"
        )
    if positions and expected < len(set(positions)):
        raise CommandError(Exit.FAILED, f"{xid} has only {expected} of the {len(set(positions))} requested messages")
    click.echo(f"{stream.count} message{'' if stream.count == 1 else 's'}{'' if to is None else f' in {to}'}", err=True)
    return Exit.OK
