"""Compiles and runs Java programs with dtx's adapter and the libraries that they need."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import pytest

from tests.support.debian import install
from tests.support.processes import Child, end, short_directory, spawn

ROOT: Final = Path(__file__).parents[3]
ADAPTER: Final = ROOT / "dtx/client/java/src"
_SOURCES: Final = (ADAPTER, Path(__file__).parent / "java", ROOT / "examples/java")
_DEBIAN: Final = Path("/usr/share/java")
_PACKAGES: Final = {
    "amqp-client.jar": "librabbitmq-client-java",
    "btm.jar": "libbtm-java",
    "geronimo-jta-1.2-spec.jar": "libgeronimo-jta-1.2-spec-java",
    "postgresql.jar": "libpostgresql-jdbc-java",
    "slf4j-api.jar": "libslf4j-java",
    "slf4j-nop.jar": "libslf4j-java",
}
"""The libraries of the programs, and their Debian packages."""


class Java:
    """The adapter, the tests' programs and the example, compiled into a directory.

    Args:
        directory: an empty one.
    """

    def __init__(self, directory: Path) -> None:
        libraries = [str(_DEBIAN / name) for name in _PACKAGES]
        self._path = ":".join([str(directory), *libraries])
        sources = [str(path) for place in _SOURCES for path in sorted(place.rglob("*.java"))]
        command = ["javac", "--release", "11", "-Xlint:all", "-Werror", "-cp", self._path, "-d", str(directory)]
        done = subprocess.run([*command, *sources], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def command(self, program: str, *words: str, quick: bool = True) -> list[str]:
        """The command line of *program*, with little memory; if *quick*, it starts faster but its code stays slower."""
        machine = ["java", *(["-XX:TieredStopAtLevel=1"] * quick), "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx128m"]
        return [*machine, "-cp", self._path, program, *words]


class Program:
    """``Calls.java``, which makes one call after the other. Use as a context manager.

    Args:
        java: the compiled programs.
        urls: URLs of its first connections, by name.
    """

    def __init__(self, java: Java, **urls: str) -> None:
        self._java = java
        self._urls = urls
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        self._answers = self._stack.enter_context(os.fdopen(reading, encoding="utf-8"))
        input_, told = os.pipe()
        try:
            self._process: Child = spawn(self._java.command("Calls"), output=writing, input_=input_)
        finally:
            os.close(writing)
            os.close(input_)
        self._told = self._stack.enter_context(os.fdopen(told, "w", encoding="utf-8", buffering=1))
        self._stack.callback(end, self._process)
        assert self._answers.readline() == "ok ready\n"
        for name, url in self._urls.items():
            self(name, "connect", url)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def say(self, *words: object) -> str:
        """Make a call; returns the answer."""
        self._told.write(" ".join(map(str, words)) + "\n")
        return self._answers.readline().rstrip("\n")

    def __call__(self, *words: object) -> str:
        """Make a call that must succeed; returns its value."""
        said = self.say(*words)
        assert said.startswith("ok "), f"{words}: {said}"
        return said.removeprefix("ok ")

    def code(self, *words: object) -> int:
        """Make a call that must raise an XAException; returns its error code."""
        said = self.say(*words)
        assert said.startswith("xa "), f"{words}: {said}"
        return int(said.split(" ")[1])


@contextlib.contextmanager
def compiled() -> Iterator[Java]:
    """Compile everything; as root on Debian, install missing packages first.

    Skips the test with a reason if something is missing and cannot be installed.
    """
    missing = {package for name, package in _PACKAGES.items() if not (_DEBIAN / name).exists()}
    if shutil.which("javac") is None:
        missing.add("default-jdk-headless")
    for package in sorted(missing):
        install(package, package)
    still: Sequence[str] = sorted(name for name in _PACKAGES if not (_DEBIAN / name).exists())
    if still or shutil.which("javac") is None:
        pytest.skip("the Java adapter needs a JDK and Debian's " + ", ".join(sorted(set(_PACKAGES.values()))))
    with short_directory("java") as directory:
        yield Java(directory)
