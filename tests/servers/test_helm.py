"""The Helm chart: rendered by Helm, checked by Kubernetes' schemas, and the program that labels active and standby."""

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trustme
import yaml

import dtx
from dtx.config import Settings
from tests.support.packaged import helm, kubernetes_validate
from tests.support.processes import free_port, wait_until

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/dtx"
GIVEN = ("database.url=postgresql://u:p@db/dtx",)
FULL = (
    *GIVEN, "broker.existingSecret=rabbitmq", "admin.hosts={dtx.example}", "tls.existingSecret=tls",
    "tls.clientCA=true",
    "serviceMonitor.enabled=true", "serviceMonitor.tokenSecret=token", "serviceMonitor.labels.release=prometheus",
    "networkPolicy.clients[0].podSelector.matchLabels.app=shop", "service.type=LoadBalancer", "replicas=3",
    "service.annotations.a=b", "imagePullSecrets[0].name=registry", "podAnnotations.a=b", "nodeSelector.disk=ssd",
    "tolerations[0].operator=Exists", "settings.lease_ttl=10s", "settings.max_held_bytes=67108864",
)  # fmt: skip
CASES = {
    "embedded": (),
    "embedded, full": ("persistence.storageClass=fast", "tls.existingSecret=tls", "broker.url=amqp://u:p@r/"),
    "embedded, own claim": ("persistence.existingClaim=mine",),
    "given": GIVEN,
    "given, full": FULL,
    "given, own secret": ("database.existingSecret=mine", "database.key=url", "networkPolicy.enabled=false"),
}
VALIDATE = """
import sys, yaml, kubernetes_validate
for document in yaml.safe_load_all(sys.stdin):
    if document["apiVersion"] != "monitoring.coreos.com/v1":  # a resource of Prometheus' operator
        kubernetes_validate.validate(document, sys.argv[1], strict=True)
"""


@pytest.fixture
def program(left_out: Callable[[str], None]) -> Path:
    """Helm."""
    found = helm()
    if found is None:
        left_out("the chart by Helm: it cannot be installed")
        pytest.skip("there is no Helm")
    return found


def template(program: Path, *values: str) -> subprocess.CompletedProcess[str]:
    """Run ``helm template``."""
    words = [word for value in values for word in ("--set", value)]
    command = [str(program), "template", "shop", str(CHART), "--namespace", "money", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def rendered(program: Path, *values: str) -> dict[str, dict[str, Any]]:
    """The resources by kind and name."""
    done = template(program, *values)
    assert done.returncode == 0, done.stderr
    return {f"{each['kind']} {each['metadata']['name']}": each for each in yaml.safe_load_all(done.stdout)}


def variables(workload: dict[str, Any]) -> dict[str, Any]:
    """The environment of dtx's container."""
    container = workload["spec"]["template"]["spec"]["containers"][0]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_helm_lints_the_chart(program: Path) -> None:
    done = subprocess.run([program, "lint", "--strict", CHART], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kubernetes", ["1.28", "1.37"])
@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_kubernetes_knows_every_field(
    program: Path, values: tuple[str, ...], kubernetes: str, left_out: Callable[[str], None]
) -> None:
    library = kubernetes_validate()
    if library is None:
        left_out("the chart by the schemas of Kubernetes: kubernetes-validate cannot be installed")
        return
    manifests = template(program, *values)
    assert (manifests.returncode, manifests.stderr) == (0, "")
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, kubernetes], input=manifests.stdout,
        env={"PYTHONPATH": str(library)}, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_embedded_postgresql_has_one_pod_and_a_volume(program: Path) -> None:
    found = rendered(program, "replicas=3")
    assert {key.partition(" ")[0] for key in found} == {"NetworkPolicy", "Service", "StatefulSet"}
    workload = found["StatefulSet shop-dtx"]["spec"]
    assert workload["replicas"] == 1
    assert [claim["metadata"]["name"] for claim in workload["volumeClaimTemplates"]] == ["data"]
    assert len(workload["template"]["spec"]["containers"]) == 1
    assert "dtx-role" not in found["Service shop-dtx"]["spec"]["selector"]


def test_a_given_postgresql_has_active_and_standby(program: Path) -> None:
    found = rendered(program, *GIVEN)
    workload = found["StatefulSet shop-dtx"]["spec"]
    assert workload["replicas"] == 2
    assert "volumeClaimTemplates" not in workload
    assert [each["name"] for each in workload["template"]["spec"]["containers"]] == ["dtx", "role"]
    assert found["Service shop-dtx"]["spec"]["selector"]["dtx-role"] == "active"
    assert found["PodDisruptionBudget shop-dtx"]["spec"]["maxUnavailable"] == 1
    (rule,) = found["Role shop-dtx"]["rules"]
    assert (rule["verbs"], rule["resourceNames"]) == (["patch"], ["shop-dtx-0", "shop-dtx-1"])
    assert found["Secret shop-dtx"]["stringData"] == {"database": "postgresql://u:p@db/dtx"}


def test_only_the_port_of_clients_is_published(program: Path) -> None:
    """The service for operators is always ClusterIP, and dtx knows its names."""
    found = rendered(program, *FULL)
    services = {key.partition(" ")[2]: each["spec"] for key, each in found.items() if key.startswith("Service ")}
    kinds = {name: (each.get("type"), [port["name"] for port in each["ports"]]) for name, each in services.items()}
    assert kinds == {
        "shop-dtx": ("LoadBalancer", ["amqp"]),
        "shop-dtx-admin": ("ClusterIP", ["admin"]),
        "shop-dtx-pods": (None, ["admin"]),
    }
    assert services["shop-dtx-pods"]["clusterIP"] == "None"
    assert services["shop-dtx-admin"]["selector"] == services["shop-dtx"]["selector"]
    name = found["ServiceMonitor shop-dtx"]["spec"]["endpoints"][0]["tlsConfig"]["serverName"]
    assert name == "shop-dtx-admin.money.svc"
    assert name in variables(found["StatefulSet shop-dtx"])["DTX_ADMIN_HOST"].split(",")


def test_no_password_is_in_the_pods(program: Path) -> None:
    workload = rendered(program, *GIVEN, "broker.url=amqp://u:secret@r/")["StatefulSet shop-dtx"]
    assert "secret@" not in json.dumps(workload)
    assert variables(workload)["DTX_BROKER"] == {"secretKeyRef": {"name": "shop-dtx", "key": "broker"}}


def test_the_variables_of_the_pods_are_settings_that_dtx_takes(program: Path) -> None:
    found = variables(rendered(program, *FULL)["StatefulSet shop-dtx"])
    assert {name.removeprefix("DTX_").lower() for name in found} <= set(Settings.model_fields)
    assert (found["DTX_LEASE_TTL"], found["DTX_MAX_HELD_BYTES"]) == ("10s", "67108864")
    assert "dtx.example" in found["DTX_ADMIN_HOST"].split(",")


def test_the_notes_lead_to_the_active_pod(program: Path) -> None:
    """Changes need the active dtx; pod 0 may stand by."""
    words = ["install", "shop", str(CHART), "--dry-run=client", "--set", GIVEN[0]]
    done = subprocess.run([str(program), *words], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "exec service/shop-dtx --container dtx -- dtx user grant app --all" in done.stdout
    assert "port-forward service/shop-dtx-admin 15673" in done.stdout


def test_the_chart_has_the_version_of_dtx() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == dtx.__version__


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("databse.url=postgresql://db/dtx",), "databse"),
        (("database.url=mysql://db/dtx",), "pattern"),
        ((*GIVEN, "database.existingSecret=mine"), "database"),
        (("persistence.size=large",), "size"),
        *(((f"settings.{key}=x",), key) for key in ("database", "broker", "listen", "admin_listen", "data_dir")),
        (("serviceMonitor.enabled=true",), "needs the token of a viewer"),
    ],
)
def test_wrong_values_are_refused_with_their_name(program: Path, values: tuple[str, ...], reason: str) -> None:
    done = template(program, *values)
    assert done.returncode != 0
    assert reason in done.stderr


def test_a_pod_is_labelled_active_while_clients_are_accepted(tmp_path: Path) -> None:
    """The service for clients selects ``dtx-role: active``."""
    authority, port, written = trustme.CA(), free_port(), list[tuple[str, str | None, str]]()

    class Api(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            self.send_response(200 if written else 503)  # the first attempt fails
            self.end_headers()
            written.append((self.path, self.headers["Authorization"], body["metadata"]["labels"]["dtx-role"]))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Api)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("a token\n")
    environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port),
        "POD_NAME": "shop-dtx-1", "POD_NAMESPACE": "money", "SERVICE_ACCOUNT": str(tmp_path),
        "DTX_LISTEN": f"0.0.0.0:{port}",
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, ROOT / "deploy/docker/role.py"], env=os.environ | environment)
    try:
        wait_until(lambda: len(written) == 2, what="two attempts")
        with socket.create_server(("127.0.0.1", port)):
            wait_until(lambda: len(written) == 3, what="the label of an active dtx")
        wait_until(lambda: len(written) == 4, what="the label of a standby")
    finally:
        process.terminate()
        assert process.wait(30) == 0
        server.shutdown()
        server.server_close()
    assert [role for _, _, role in written] == ["standby", "standby", "active", "standby"]
    assert {(path, token) for path, token, _ in written} == {
        ("/api/v1/namespaces/money/pods/shop-dtx-1", "Bearer a token")
    }
