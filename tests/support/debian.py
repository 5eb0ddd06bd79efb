"""Installs Debian packages of programs that tests need and this machine does not have."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")


def install(package: str, what: str) -> None:
    """Install *package* if this is root on Debian; otherwise, or if that fails, do nothing.

    Args:
        package: the name of the package.
        what: the missing program, for the message.
    """
    if not _is_root_on_debian():
        return
    say(f"no {what} on this machine: installing the Debian package (a minute or two)")
    with _no_service_started(POLICY), _unhurried():
        for words in (("update",), ("install", "--yes", "--no-install-recommends", package)):
            if not _run("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words):
                return


def make_system(root: Path, suite: str, package: str) -> None:
    """Make a system of another Debian release with *package* below *root*; its programs run with chroot.

    Do nothing if this is not root on Debian; leave nothing if a step fails.

    Args:
        root: the directory of the system.
        suite: the name of the release.
        package: the package.
    """
    if not _is_root_on_debian():
        return
    say(f"making a Debian {suite} with {package} in {root} (one to four minutes, once, 450 MB)")
    if not shutil.which("debootstrap"):
        install("debootstrap", "debootstrap")
    unfinished = root.with_name(f"{root.name}.{os.getpid()}")
    inside = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"',
        str(unfinished),
    )
    apt = ("apt-get", "-q", "install", "--yes", "--no-install-recommends", package)
    root.parent.mkdir(parents=True, exist_ok=True)
    with _unhurried():
        try:
            if _run("debootstrap", "--variant=minbase", suite, str(unfinished)):
                (unfinished / "etc/hosts").write_text("127.0.0.1 localhost\n")
                with _no_service_started(unfinished / POLICY.relative_to("/")):
                    if _run(*inside, *apt):
                        unfinished.rename(root)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _is_root_on_debian() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None and Path("/etc/debian_version").exists()


def _run(*words: str) -> bool:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        say(f"{' '.join(words)} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.returncode == 0


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Stop the timer of the test: an interrupted dpkg would make later installations impossible."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


@contextlib.contextmanager
def _no_service_started(policy: Path) -> Iterator[None]:
    """Debian starts a service that it installs unless this script forbids it."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def say(sentence: str) -> None:
    """Print without pytest's capture, because the user waits."""
    print(sentence, file=sys.__stderr__, flush=True)
