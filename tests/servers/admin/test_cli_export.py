"""``dtx export``: messages of a branch or of the archive with properties and bodies, as files or as lines."""

import base64
import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from dtx.client import XaFlag, XAResource, Xid
from tests.servers.admin.conftest import orphan
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Scene, StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

LARGE = 24 * 1024 * 1024


def holding(scene: Scene, bodies: list[bytes], properties: pika.BasicProperties = PERSISTENT) -> Xid:
    """A prepared branch that publishes *bodies*."""
    scene.declare("out")
    xid = new_xid()
    with scene.connected() as connection:
        xa = XAResource(connection.channel(), timeout=60)
        xa.start(xid)
        for body in bodies:
            xa.channel.basic_publish("", "out", body, properties)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def lines(said: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in said.splitlines()]


def test_messages_are_exported_as_lines_with_properties_and_bodies(scene: Scene) -> None:
    xid = orphan(scene)
    there = lines(scene.service.run("export", str(xid), "--vhost", scene.vhost).stdout)
    by_api = scene.service.run("export", str(xid), "--vhost", scene.vhost, "--api", scene.service.admin_url)
    assert lines(by_api.stdout) == there
    assert [(each["kind"], each["routing_key"], each["queue"]) for each in there if each["kind"] == "consume"] == [
        ("consume", "in", "in")
    ]
    bodies = {str(each["kind"]): base64.b64decode(str(each["body"])) for each in there}
    assert bodies == {"publish": b"published", "consume": b"consumed"}
    assert {each["properties"]["content_type"] for each in there} == {"text/plain"}  # type: ignore[index]
    assert "2 messages" in by_api.stderr
    trail = scene.service.run("audit", "--action", "export", "--json").stdout
    assert [line["result"] for line in lines(trail)] == ["2 messages"] * 2


def test_exported_files_are_private_complete_and_safely_named(alone: StandaloneStage, tmp_path: Path) -> None:
    """File names that no message can choose; files have mode 0600, their directory 0700."""
    hostile = pika.BasicProperties(message_id="../../etc/passwd", headers={"x": "\x1b[2J/../.."})
    xid = holding(alone, [b"a", b"", b"c" * 70_000], hostile)
    kept = tmp_path / "deep" / "kept"
    os.umask(os.umask(0))
    alone.service.run("export", str(xid), "--to", str(kept))
    assert sorted(path.name for path in kept.iterdir()) == [
        f"{number:06}.{kind}" for number in (1, 2, 3) for kind in ("body", "json")
    ]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {0o600}
    assert [path.read_bytes() for path in sorted(kept.glob("*.body"))] == [b"a", b"", b"c" * 70_000]
    first = json.loads((kept / "000001.json").read_text())
    assert (first["body"], first["bytes"], first["properties"]["message_id"]) == ("000001.body", 1, "../../etc/passwd")
    again = alone.service.run("export", str(xid), "--to", str(kept), check=False)
    assert (again.returncode, "is not empty: name a new directory" in again.stderr) == (2, True)


def test_a_directory_that_cannot_be_written_is_one_sentence(alone: StandaloneStage, tmp_path: Path) -> None:
    xid = holding(alone, [b"a"])
    (tmp_path / "file").touch()
    said = alone.service.run("export", str(xid), "--to", str(tmp_path / "file" / "kept"), check=False)
    assert (said.returncode, said.stderr.count("\n"), "cannot be written" in said.stderr) == (1, 1, True)


@pytest.fixture
def patient(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    """A dtx with a lease long enough for a disk that is slow with large branches."""
    with StandaloneStage(postgres, options=(*ADMIN, "--lease-ttl", "30")) as stage:
        yield stage


@pytest.mark.parametrize("way", ["database", "api"])
def test_large_bodies_go_through_little_memory(patient: StandaloneStage, tmp_path: Path, way: str) -> None:
    """Large bodies are streamed: two of them need little more memory than one byte, less than half a body."""
    bodies = [bytes([number]) * LARGE for number in range(2)]
    large, small = holding(patient, bodies), holding(patient, [b"a"])
    where = [] if way == "database" else ["--api", patient.service.admin_url]
    took = {}
    for name, xid in (("small", small), ("large", large)):
        words = ["export", str(xid), "--to", str(tmp_path / name), "--database", patient.database, *where]
        took[name] = peak_memory([sys.executable, "-m", "dtx", *words], tmp_path)
    found = [hashlib.sha256(path.read_bytes()).digest() for path in sorted((tmp_path / "large").glob("*.body"))]
    assert found == [hashlib.sha256(body).digest() for body in bodies]
    assert took["large"] - took["small"] < LARGE / 2


def peak_memory(command: list[str], directory: Path) -> int:
    """The largest resident memory of *command*, bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    program = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DTX_", "PG"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        check=True, capture_output=True, text=True, timeout=120, cwd=directory, env=environment,
    )  # fmt: skip
    assert before >= 0
    return int(done.stdout.split()[-1]) * 1024


def test_one_message_is_picked_by_its_position(alone: StandaloneStage) -> None:
    xid = holding(alone, [b"%d" % number for number in range(100)])
    picked = lines(alone.service.run("export", str(xid), "--position", "40", "--position", "7").stdout)
    assert [base64.b64decode(str(each["body"])) for each in picked] == [b"7", b"40"]
    missing = alone.service.run("export", str(xid), "--position", "7", "--position", "100", check=False)
    assert (missing.returncode, "has only 1 of the 2 requested messages" in missing.stderr) == (1, True)


def test_a_thousand_messages_come_in_their_order(alone: StandaloneStage) -> None:
    xid = holding(alone, [b"%d" % number for number in range(1000)])
    found = lines(alone.service.run("export", str(xid), "--api", alone.service.admin_url).stdout)
    assert [int(base64.b64decode(str(each["body"]))) for each in found] == list(range(1000))


def test_missing_messages_are_reported(alone: StandaloneStage) -> None:
    for words in ((), ("--archived",)):
        said = alone.service.run("export", "1:61:62", *words, check=False)
        assert (said.returncode, said.stdout, "1:61:62" in said.stderr) == (1, "", True)
