"""docker-compose.yml agrees with the documentation; most tests need no Docker."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from dtx.config import Settings
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of the file."""
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    found = loaded["services"]
    assert isinstance(found, dict)
    return found


def test_either_mode_is_a_profile(services: dict[str, Any]) -> None:
    members: dict[str, set[str]] = {}
    for name, service in services.items():
        for profile in service["profiles"]:
            members.setdefault(profile, set()).add(name)
    assert members == {
        "standalone": {"postgres", "users", "standalone"},
        "alongside": {"postgres", "rabbitmq", "alongside"},
        "ha": {"postgres", "users", "standalone", "standby"},
    }


def test_everything_is_published_on_the_loopback_interface_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_every_server_has_a_health_check_that_others_await(services: dict[str, Any]) -> None:
    awaited = [
        (services[name], how["condition"])
        for service in services.values()
        for name, how in service.get("depends_on", {}).items()
    ]
    assert len(awaited) == 5
    for service, condition in awaited:
        job = service["restart"] == "no"
        assert condition == ("service_completed_successfully" if job else "service_healthy")
        # dtx has the one of its image
        assert job or service.get("build") == "." or service["healthcheck"]["test"][0] == "CMD"


def test_dtx_has_a_broker_in_only_one_profile(services: dict[str, Any]) -> None:
    assert "DTX_BROKER" in services["alongside"]["environment"]
    assert "DTX_BROKER" not in services["standalone"]["environment"]
    assert len({services[name]["environment"]["DTX_RM"] for name in ("alongside", "standalone")}) == 2


def test_the_user_of_standalone_is_made_once(services: dict[str, Any], migrated_postgres_url: str) -> None:
    """The commands of the file run twice, as for two starts; the second time a dtx is running."""
    shell, script = services["users"]["entrypoint"], services["users"]["command"][0]
    words = {**services["users"]["environment"], "DTX_DATABASE": migrated_postgres_url}
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def make() -> None:
        subprocess.run([*shell, script], env={**os.environ, **words, "PATH": bin_first}, check=True, timeout=120)

    make()
    with DtxService(database=migrated_postgres_url, options=("--rm", words["DTX_RM"])):
        make()
    with psycopg.connect(migrated_postgres_url) as database:
        assert database.execute("SELECT count(*) FROM account WHERE name = 'app'").fetchone() == (1,)


def test_active_and_standby_differ_in_nothing_but_their_ports(services: dict[str, Any]) -> None:
    """docs/operations/running: "One is active, and the others stand by"."""
    active, standby = services["standalone"], services["standby"]
    taken = [port for name in ("standalone", "standby", "postgres") for port in services[name]["ports"]]
    assert len({port.split(":")[1] for port in taken}) == len(taken)
    different = {key for key in active | standby if active.get(key) != standby.get(key)}
    assert different == {"ports", "profiles"}


def test_rabbitmq_understands_its_configuration() -> None:
    """The service user needs the tag impersonator to republish a user-id that a client has set."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    lines = compose["configs"]["rabbitmq"]["content"].splitlines()
    config = dict(line.split(" = ") for line in lines if not line.startswith("#"))
    with RabbitNode(config=config) as node:
        tags = node.api("GET", "/api/users/guest")["tags"]
    assert set(tags) == {"administrator", "impersonator"}


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker to ask; the other tests read the file")
def test_docker_understands_the_file() -> None:
    command = ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "--profile", "ha", "config", "--quiet"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "is not a docker command" in done.stderr or "unknown flag: --file" in done.stderr:
        pytest.skip("this docker has no compose; the other tests read the file")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_settings_of_dtx_are_settings_that_exist(services: dict[str, Any]) -> None:
    for service in ("alongside", "standalone", "standby"):
        for name in services[service]["environment"]:
            assert name.removeprefix("DTX_").lower() in Settings.model_fields
