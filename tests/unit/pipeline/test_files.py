"""Small files of a lake, on this machine and in an object store."""

from pathlib import Path

import pytest
from pyarrow import fs

from dtx.pipeline.files import Files, LakeError


def test_s3_has_the_scheme_that_spark_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    class System:
        @staticmethod
        def from_uri(uri: str) -> tuple[object, str]:
            asked.append(uri)
            return fs.LocalFileSystem(), str(tmp_path)

    monkeypatch.setattr("dtx.pipeline.files.fs.FileSystem", System)
    files = Files("s3a://bucket/lake/")
    assert (files.uri, files.place) == ("s3a://bucket/lake", "s3://bucket/lake")
    assert files.path("month=2026-11") == "s3a://bucket/lake/month=2026-11"
    assert asked == ["s3://bucket/lake"]


def test_a_place_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LakeError, match="ftp://h/lake cannot be used as a directory"):
        Files("ftp://h/lake")


def test_json_is_whole_or_named_as_damaged(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    assert files.read("a/b.json") is None
    files.write("a/b.json", {"n": 1})
    assert files.read("a/b.json") == {"n": 1}
    (tmp_path / "a/b.json").write_text('{"n"')
    with pytest.raises(LakeError, match=r"b\.json is damaged"):
        files.read("a/b.json")
    files.remove("a")
    files.remove("a")
    assert not files.exists("a")


def test_sizes_name_missing_files(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"12345")
    files = Files(str(tmp_path))
    assert files.sizes(["x.parquet", "y.parquet"]) == {"x.parquet": 5, "y.parquet": None}
    assert files.data("") == {"x.parquet": 5}


def test_two_do_not_have_a_lock_at_once(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    with files.alone("lock"), pytest.raises(LakeError, match="another process uses"), files.alone("lock"):
        pass
    with files.alone("lock"):
        pass
