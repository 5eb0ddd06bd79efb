"""Small files and whole directories of a lake, where nobody can move a directory."""

import errno
import os
from pathlib import Path

import pytest

from dtx.pipeline.archive.files import Files
from dtx.pipeline.archive.layout import LakeError
from tests.servers.pipeline import elsewhere
from tests.servers.pipeline.elsewhere import ROOT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dtx.pipeline.archive.files.fs", elsewhere.arrows(tmp_path))
    return tmp_path


def there(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def test_a_directory_of_a_store_is_moved_file_by_file_and_whoever_comes_next_moves_what_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(f"{ROOT}/lake")
    for name in ("a.json", "deep/b.json", "deep/c.json"):
        files.write(f"from/{name}", {})
    step = Files._move
    moved: list[str] = []

    def die(files: Files, name: str, to: str) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(name)
        step(files, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "_move", die)
        with pytest.raises(KeyboardInterrupt):
            files.move("from", "into/it")
    assert len(there(place)) == 3
    assert [path for path in there(place) if path.startswith("lake/into")] != []
    assert [path for path in there(place) if path.startswith("lake/from")] != []
    for _ in range(2):
        files.move("from", "into/it")
        assert there(place) == ["lake/into/it/a.json", "lake/into/it/deep/b.json", "lake/into/it/deep/c.json"]
        assert not files.exists("from")


def test_two_who_move_the_same_directory_of_a_store_do_not_stop_each_other(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = Files(f"{ROOT}/lake"), Files(f"{ROOT}/lake")
    for name in ("a.json", "b.json"):
        files.write(f"from/{name}", {})
    step = Files._move

    def overtaken(files: Files, name: str, to: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Files, "_move", step)
            other.move("from", "to")
        step(files, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "_move", overtaken)
        files.move("from", "to")
    assert there(place) == ["lake/to/a.json", "lake/to/b.json"]


def test_what_a_store_refuses_is_no_success(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("access denied")

    files = Files(f"{ROOT}/lake")
    files.write("from/a.json", {})
    monkeypatch.setattr(elsewhere.Store, "move", refuse)
    with pytest.raises(OSError, match="access denied"):
        files.move("from", "to")
    assert there(place) == ["lake/from/a.json"]


def test_s3_is_known_by_the_name_that_spark_has_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    class System:
        @staticmethod
        def from_uri(uri: str) -> object:
            asked.append(uri)
            return elsewhere.arrows(tmp_path).FileSystem.from_uri(ROOT)

    monkeypatch.setattr("dtx.pipeline.archive.files.fs.FileSystem", System)
    assert Files("s3a://bucket/lake/").uri == "s3a://bucket/lake"
    assert Files("s3://bucket/lake").path("rm=a") == "s3://bucket/lake/rm=a"
    assert asked == ["s3://bucket/lake"] * 2


def test_who_may_only_read_reads_with_the_lock_that_is_there_or_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lake that is mounted to be read, or belongs to somebody else; root may do everything, so it is played."""
    files = Files(str(tmp_path))
    opens = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opens(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr("dtx.pipeline.archive.files.os.open", read_only)
        with files.alone("lock", shared=True):
            pass
        with pytest.raises(OSError, match="Read-only"), files.alone("lock"):
            pass
    with files.alone("lock"):
        pass
    monkeypatch.setattr("dtx.pipeline.archive.files.os.open", read_only)
    with files.alone("lock", shared=True):
        monkeypatch.undo()
        with pytest.raises(LakeError, match="another process is at work"), files.alone("lock"):
            pass
