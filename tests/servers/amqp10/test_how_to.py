"""The programs that docs/how-to/amqp10 shows work as it says: with Proton, rhea and Qpid JMS.

Qpid JMS has no Debian package. ``QPID_JMS`` names its jars and those that it needs, separated by colons.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.client import connected, take_all
from tests.support.npm import RHEA, SECONDS, with_package
from tests.support.service import DtxService

PROGRAMS: Final = Path(__file__).parents[3] / "examples/amqp10"
BODIES: Final = [b"tea", b"milk", b"sugar"]


@pytest.fixture(scope="session")
def rhea(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with rhea and the program for it."""
    directory = with_package(RHEA, tmp_path_factory.mktemp("rhea"))
    return Path(shutil.copy(PROGRAMS / "forward_rhea.js", directory))


@pytest.fixture(scope="session")
def jms(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of the program for Qpid JMS."""
    libraries = os.environ.get("QPID_JMS")
    if not libraries or shutil.which("javac") is None:
        pytest.skip("Qpid JMS is in no package here: set QPID_JMS to its jars; it also needs a JDK")
    directory = tmp_path_factory.mktemp("jms")
    command = ["javac", "-cp", libraries, "-d", str(directory), str(PROGRAMS / "ForwardJms.java")]
    subprocess.run(command, check=True, timeout=SECONDS)
    return f"{directory}:{libraries}"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)


def url(service: DtxService) -> str:
    """The address of *service*, in the form of AMQP 1.0's clients."""
    return f"amqp://guest:guest@{service.host}:{service.port}"


def command_of(client: str, request: pytest.FixtureRequest, service: DtxService) -> list[str]:
    """The command line that the page shows for *client*, without the queues."""
    match client:
        case "proton":
            pytest.importorskip("proton", reason="needs python-qpid-proton, which is built by a C compiler")
            return [sys.executable, str(PROGRAMS / "forward_proton.py"), url(service)]
        case "rhea":
            place = [service.host, str(service.port), "guest", "guest"]
            return ["node", str(request.getfixturevalue("rhea")), *place]
        case _:
            place = [f"amqp://{service.host}:{service.port}", "guest", "guest"]
            return ["java", "-cp", request.getfixturevalue("jms"), "ForwardJms", *place]


CLIENTS: Final = ("proton", "rhea", "jms")


@pytest.mark.parametrize("client", CLIENTS)
def test_the_program_moves_each_message_once(
    client: str, request: pytest.FixtureRequest, service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    target = f"{queue}-shipping"
    channel.queue_declare(target)
    for body in BODIES:
        channel.basic_publish("", queue, body)
    command = command_of(client, request, service)
    done = run(*command, queue, target, str(len(BODIES)))
    assert done.returncode == 0, done.stderr
    assert take_all(channel, target, at_least=len(BODIES)) == BODIES
    assert take_all(channel, queue) == []
    channel.queue_delete(target)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_message_stays_if_its_target_is_full(client: str, request: pytest.FixtureRequest, small: DtxService) -> None:
    """Without a broker. Alongside one, dtx learns it from the broker at commit, and the branch is stuck."""
    with connected(small.url()) as connection:
        channel = connection.channel()
        channel.queue_declare("orders")
        channel.queue_declare("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
        channel.basic_publish("", "orders", b"tea")
        done = run(*command_of(client, request, small), "orders", "full", "1")
        assert done.returncode != 0
        assert take_all(channel, "orders", at_least=1) == [b"tea"]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_program_fails_without_a_target(
    client: str, request: pytest.FixtureRequest, service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_publish("", queue, b"tea")
    done = run(*command_of(client, request, service), queue, f"{queue}-missing", "1")
    assert done.returncode != 0
    assert f"no queue '{queue}-missing'" in done.stderr
    assert take_all(channel, queue, at_least=1) == [b"tea"]


def test_a_branch_is_completed_over_the_other_protocol(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    pytest.importorskip("proton", reason="needs python-qpid-proton, which is built by a C compiler")
    done = run(sys.executable, str(PROGRAMS / "branch_proton.py"), url(service), queue, "tea")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("committed 1:")
    # the body is a value that is text: Proton encodes a str so
    assert take_all(channel, queue, at_least=1) == [b"tea"]
