"""Directories for Delta tables and small files: on this machine, S3, Google's storage or Azure's."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyarrow import fs

_LOCAL: Final = "file"
_TICK: Final = 0.1
_HADOOP_S3: Final = re.compile("^s3[an]://")
"""Spark's names of S3; Arrow and deltalake know it as ``s3://``."""


class LakeError(Exception):
    """The lake or the results cannot be used as they are; the message says what to do."""


class LakeBusy(LakeError):
    """Another process of this machine holds the lock."""


class Files:
    """A directory: a path of this machine, or a URI such as ``s3://bucket/lake``."""

    def __init__(self, root: str) -> None:
        local = root.removeprefix(f"{_LOCAL}://")
        here = None if "://" in local else os.path.abspath(local)  # noqa: PTH100 - without "..", as Spark has it
        self.uri: Final = root.rstrip("/") if here is None else f"{_LOCAL}://{here}"
        """For Spark, which needs blanks and per cent signs unescaped."""
        self.place: Final = _HADOOP_S3.sub("s3://", self.uri) if here is None else here
        """For Arrow and deltalake."""
        try:
            if here is None:
                self._system, self._root = fs.FileSystem.from_uri(self.place)
            else:
                self._system, self._root = fs.LocalFileSystem(), here
        except (OSError, ValueError, NotImplementedError) as error:
            raise LakeError(f"{root} cannot be used as a directory: {error}") from error

    @property
    def is_local(self) -> bool:
        """Whether the directory is on this machine."""
        return bool(self._system.type_name == "local")

    @property
    def tree(self) -> Any:
        """The directory as an Arrow file system."""
        return fs.SubTreeFileSystem(self._root, self._system)

    def path(self, name: str) -> str:
        """Return the URI of *name* in this directory, for Spark."""
        return f"{self.uri}/{name}"

    def names(self, under: str = "", *, directories: bool = True) -> list[str]:
        """Return the sorted names of directories, or else of files, in *under*; none where it is missing."""
        wanted = fs.FileType.Directory if directories else fs.FileType.File
        return sorted(info.base_name for info in self._listed(under) if info.type == wanted)

    def data(self, under: str) -> dict[str, int]:
        """Return the sizes, in bytes, of all Parquet files below a directory, by their path in this one."""
        return {
            info.path[len(self._root) :].lstrip("/"): info.size
            for info in self._listed(under, recursive=True)
            if info.base_name.endswith(".parquet")
        }

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the size of each file in bytes; ``None`` where it is missing."""
        wanted = list(names)
        found = self._system.get_file_info([self._full(name) for name in wanted])
        return {
            name: info.size if info.type == fs.FileType.File else None for name, info in zip(wanted, found, strict=True)
        }

    def exists(self, name: str) -> bool:
        """Return whether there is a file or a directory of that name."""
        (info,) = self._system.get_file_info([self._full(name)])
        return bool(info.type != fs.FileType.NotFound)

    def open(self, name: str) -> Any:
        """Open a file for Arrow to read."""
        return self._system.open_input_file(self._full(name))

    def read(self, name: str) -> Any:
        """Read the JSON of a file; ``None`` where there is no file."""
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
        """Write a JSON file as a whole or not at all; a local file is synced to disk."""
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

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with its content, where it exists."""
        (info,) = self._system.get_file_info([self._full(name)])
        try:
            if info.type == fs.FileType.Directory:
                self._system.delete_dir(info.path)
            elif info.type == fs.FileType.File:
                self._system.delete_file(info.path)
        except FileNotFoundError:
            return

    @contextmanager
    def alone(self, name: str, wait: float = 0) -> Iterator[None]:
        """Hold the lock *name* against other processes of this machine until the block ends or this process dies.

        File systems of other machines have no such lock: there a Delta commit refuses the second writer.

        Args:
            name: path of the lock file in this directory.
            wait: seconds to wait for a process that holds the lock, until :class:`LakeBusy`.
        """
        if not self.is_local:
            yield
            return
        path = Path(self._full(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            until = time.monotonic() + wait
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise LakeBusy(f"another process uses {self.uri} ({name}): wait until it has ended") from None
                    time.sleep(_TICK)
            yield
        finally:
            os.close(descriptor)

    def _listed(self, under: str, *, recursive: bool = False) -> list[Any]:
        selector = fs.FileSelector(self._full(under), allow_not_found=True, recursive=recursive)
        return list(self._system.get_file_info(selector))

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
