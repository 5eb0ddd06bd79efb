"""The files beside Spark: small ones, and whole directories that are moved or removed. Local, HDFS, S3, GCS, Azure."""

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyarrow import fs

from dtx.pipeline.archive.layout import LakeError

_LOCAL: Final = "file"
_IN_ONE_STEP: Final = {"local", "hdfs"}
"""File systems, as Arrow calls them, that move a directory with all that is in it; stores of objects have none."""
_HADOOP_S3: Final = re.compile("^s3[an]://")
"""What Spark calls S3 where nobody has told it better; Arrow knows it by its own name alone."""


class Files:
    """A directory of a file system.

    Args:
        root: a path of this machine, or a URI such as ``s3a://bucket/lake``, ``hdfs://host/lake``.

    Raises:
        LakeError: there is no such kind of file system here.
    """

    def __init__(self, root: str) -> None:
        local = root.removeprefix(f"{_LOCAL}://")
        here = None if "://" in local else str(Path(local).absolute())
        self.uri: Final = root.rstrip("/") if here is None else f"{_LOCAL}://{here}"
        """For Spark, which takes a blank or a per cent sign in it as it is; others would not."""
        try:
            if here is None:
                self._system, self._root = fs.FileSystem.from_uri(_HADOOP_S3.sub("s3://", self.uri))
            else:
                self._system, self._root = fs.LocalFileSystem(), here
        except (OSError, ValueError, NotImplementedError) as error:
            raise LakeError(f"{root} cannot be used as a directory for the lake: {error}") from error

    @property
    def is_local(self) -> bool:
        """Whether it is a directory of this machine."""
        return bool(self._system.type_name == "local")

    def path(self, name: str) -> str:
        """The URI of *name* in this directory, for Spark."""
        return f"{self.uri}/{name}"

    def names(self, under: str = "", *, directories: bool = True) -> list[str]:
        """Names in the directory *under*, sorted; none where it is not there."""
        selector = fs.FileSelector(self._full(under), allow_not_found=True)
        wanted = fs.FileType.Directory if directories else fs.FileType.File
        return sorted(info.base_name for info in self._system.get_file_info(selector) if info.type == wanted)

    def changed(self, under: str) -> list[int]:
        """When the files in the directory *under* were written, microseconds since the epoch."""
        selector = fs.FileSelector(self._full(under), allow_not_found=True)
        return [(info.mtime_ns or 0) // 1000 for info in self._system.get_file_info(selector)]

    def exists(self, name: str) -> bool:
        """Whether there is a file or a directory of that name."""
        (info,) = self._system.get_file_info([self._full(name)])
        return bool(info.type != fs.FileType.NotFound)

    def size(self, under: str) -> tuple[int, int]:
        """Data files in a directory, and their bytes."""
        selector = fs.FileSelector(self._full(under), allow_not_found=True)
        sizes = [info.size for info in self._system.get_file_info(selector) if info.base_name.endswith(".parquet")]
        return len(sizes), sum(sizes)

    def data(self, under: str) -> list[tuple[str, int]]:
        """Names and bytes of all data files in a directory and those below it, but for what Spark is writing."""
        found = [each for each in self._files(under) if each[0].endswith(".parquet")]
        return sorted(each for each in found if not any(part.startswith((".", "_")) for part in each[0].split("/")))

    def _files(self, under: str) -> list[tuple[str, int]]:
        """Names and bytes of all files in a directory and those below it."""
        selector = fs.FileSelector(self._full(under), allow_not_found=True, recursive=True)
        return [
            (info.path[len(self._root) :].lstrip("/"), info.size)
            for info in self._system.get_file_info(selector)
            if info.type == fs.FileType.File
        ]

    def tail(self, name: str, octets: int) -> bytes:
        """The last *octets* of a file."""
        with self._system.open_input_file(self._full(name)) as file:
            file.seek(max(0, file.size() - octets))
            return bytes(file.read())

    def read(self, name: str) -> Any:
        """JSON of a file; ``None`` where there is none.

        Raises:
            LakeError: it is no JSON.
        """
        try:
            with self._system.open_input_stream(self._full(name)) as file:
                text = file.read()
        except FileNotFoundError:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise LakeError(f"{self.path(name)} is damaged: {error}") from error

    def write(self, name: str, content: Any) -> None:
        """Write JSON: the whole file or none of it, and on disk where this machine keeps it."""
        full = self._full(name)
        self._system.create_dir(full.rpartition("/")[0], recursive=True)
        beside = f"{full}.{uuid4().hex}.tmp"
        with self._system.open_output_stream(beside) as file:
            file.write(json.dumps(content, indent=1, sort_keys=True).encode())
        if self.is_local:
            _sync(Path(beside))
        self._system.move(beside, full)
        if self.is_local:
            _sync(Path(full).parent)

    def move(self, name: str, to: str) -> None:
        """Move a directory; nothing happens where it has been moved already, and what is left of it comes after.

        Several may be at it at the same time. Stores of objects move one file after the other.
        """
        if not self.exists(name):
            return
        if self._system.type_name not in _IN_ONE_STEP:
            for file, _ in self._files(name):
                self._move(file, f"{to}{file[len(name) :]}")
            self.remove(name)  # the directory itself, which some keep as an object without octets
            return
        self._move(name, to)

    def _move(self, name: str, to: str) -> None:
        full = self._full(to)
        self._system.create_dir(full.rpartition("/")[0], recursive=True)
        try:
            self._system.move(self._full(name), full)
        except OSError:
            if self.exists(name):
                raise

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all that is in it, where it is there."""
        (info,) = self._system.get_file_info([self._full(name)])
        try:
            if info.type == fs.FileType.Directory:
                self._system.delete_dir(info.path)
            elif info.type == fs.FileType.File:
                self._system.delete_file(info.path)
        except FileNotFoundError:
            return

    @contextmanager
    def alone(self, name: str, *, shared: bool = False) -> Iterator[None]:
        """Keep others out who ask for the same *name*, as long as this lasts and no longer than this process lives.

        On file systems other than this machine's there is no such lock: there the operator has to see to it. Nor is
        there one for who may not write, where nobody has made it yet.

        Args:
            name: of a file.
            shared: keep out only those who want to be alone; if one is there, wait until he is through.

        Raises:
            LakeError: somebody else is at it.
        """
        descriptor = _lock_file(Path(self._full(name)), to_read=shared) if self.is_local else None
        if descriptor is None:
            yield
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LakeError(f"another process is at work in {self.uri} ({name}): wait until it has ended") from None
            yield
        finally:
            os.close(descriptor)

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _lock_file(path: Path, *, to_read: bool) -> int | None:
    """A descriptor of the file, which is made; ``None`` where whoever wants to read finds none and may not make it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if not to_read or error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
