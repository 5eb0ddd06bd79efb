"""docker-compose.yml says what the documentation promises; no Docker is needed to check that."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of the file."""
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    found = loaded["services"]
    assert isinstance(found, dict)
    return found


def test_there_are_postgresql_rabbitmq_and_dtx(services: dict[str, Any]) -> None:
    assert set(services) == {"postgres", "rabbitmq", "dtx"}


def test_every_service_is_checked_and_published_on_the_loopback_interface_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["healthcheck"]["test"][0] == "CMD"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_dtx_waits_until_both_others_are_healthy(services: dict[str, Any]) -> None:
    assert services["dtx"]["depends_on"] == {
        name: {"condition": "service_healthy"} for name in ("postgres", "rabbitmq")
    }


def test_the_health_check_of_dtx_is_a_program(services: dict[str, Any]) -> None:
    compile(services["dtx"]["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_the_image_gets_what_the_package_is_built_from() -> None:
    """A file that the build needs and the context leaves out breaks only the image."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed |= {*wheel["packages"], *wheel["force-include"]}
    assert needed <= kept


def test_the_settings_of_dtx_are_settings_that_exist(services: dict[str, Any]) -> None:
    from dtx.config import Settings

    for name in services["dtx"]["environment"]:
        assert name.removeprefix("DTX_").lower() in Settings.model_fields
