"""A place that is not a directory of this machine, for all that dtx and Spark know: ``store://bucket/…``.

Spark reaches it by a file system of Hadoop's that gives any scheme to what it mounts; dtx by one of Arrow's, which
knows, as a store of objects does, no directory that could be moved. What both find is kept in a directory of this
machine. S3 itself speaks another way, but wants no more of dtx, and less of its moves.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import SparkSession

ROOT: Final = "store://bucket"


class Store(fs.FileSystemHandler):  # type: ignore[misc]
    """Files of a directory, by their names behind ``bucket/``.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._local = fs.LocalFileSystem()
        self._root = str(directory)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other._root == self._root

    def __hash__(self) -> int:
        return hash(self._root)

    def _path(self, name: str) -> str:
        assert name == "bucket" or name.startswith("bucket/"), name
        return f"{self._root}{name.removeprefix('bucket')}"

    def _named(self, infos: list[Any]) -> list[Any]:
        return [
            fs.FileInfo(f"bucket{info.path.removeprefix(self._root)}", info.type, mtime=info.mtime, size=info.size or 0)
            for info in infos
        ]

    def get_type_name(self) -> str:
        return "store"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return self._named(self._local.get_file_info([self._path(path) for path in paths]))

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        here = self._path(selector.base_dir)
        told = fs.FileSelector(here, allow_not_found=selector.allow_not_found, recursive=selector.recursive)
        return self._named(self._local.get_file_info(told))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(self._path(path), recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._local.delete_dir(self._path(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._local.delete_dir_contents(self._path(path), missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise PermissionError("nobody empties the bucket")

    def delete_file(self, path: str) -> None:
        self._local.delete_file(self._path(path))

    def move(self, src: str, dest: str) -> None:
        """Of an object: copied, and removed then."""
        if Path(self._path(src)).is_dir():
            raise OSError(f"there are no directories to be moved: {src}")
        self.copy_file(src, dest)
        self.delete_file(src)

    def copy_file(self, src: str, dest: str) -> None:
        self._local.copy_file(self._path(src), self._path(dest))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._local.open_input_stream(self._path(path))

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self._local.open_input_file(self._path(path))

    def open_output_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:
        return self._local.open_output_stream(self._path(path), metadata=metadata)

    def open_append_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:
        raise OSError(f"objects are not appended to: {path}")


def arrows(directory: Path) -> SimpleNamespace:
    """``pyarrow.fs`` with that store beside what it has."""

    class System:
        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            if uri.startswith("store://"):
                return fs.PyFileSystem(Store(directory)), uri.removeprefix("store://")
            return tuple(fs.FileSystem.from_uri(uri))

    return SimpleNamespace(**{**vars(fs), "FileSystem": System})


def mount(spark: SparkSession, directory: Path) -> None:
    """Let *spark* find it, from now on."""
    spark.conf.set("fs.store.impl", "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme")
    spark.conf.set("fs.store.impl.disable.cache", "true")
    for child in directory.iterdir():
        spark.conf.set(f"fs.viewfs.mounttable.bucket.link./{child.name}", child.as_uri())
