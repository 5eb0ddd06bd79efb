"""Labels this pod ``dtx-role=active`` while its dtx accepts clients, and ``standby`` otherwise.

The Helm chart runs it beside dtx if there are several pods: the service for clients selects the active one. Both are
ready for Kubernetes, so that an upgrade and the eviction of pods go on one by one.
"""

import json
import os
import signal
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
HOST = os.environ["KUBERNETES_SERVICE_HOST"]
URL = (
    f"https://{f'[{HOST}]' if ':' in HOST else HOST}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    f"/api/v1/namespaces/{os.environ['POD_NAMESPACE']}/pods/{os.environ['POD_NAME']}"
)
PORT = int(os.environ.get("DTX_LISTEN", "").rpartition(":")[2] or 5673)
POLL_SECONDS = 1
AGAIN_SECONDS = 30  # a label that was removed or not written comes back


def role() -> str:
    """The role of the dtx of this pod: a standby refuses connections."""
    try:
        socket.create_connection(("127.0.0.1", PORT), POLL_SECONDS).close()
    except OSError:
        return "standby"
    return "active"


def write(label: str) -> None:
    """Write the label. Token and authority are read each time: Kubernetes renews them."""
    request = urllib.request.Request(
        URL,
        method="PATCH",
        data=json.dumps({"metadata": {"labels": {"dtx-role": label}}}).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
            "Content-Type": "application/merge-patch+json",
        },
    )
    context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    urllib.request.urlopen(request, timeout=5, context=context).close()  # noqa: S310


# as process 1 of a container it would ignore the signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
written, due = "", 0.0
while True:
    now = role()
    if now != written or time.monotonic() >= due:
        try:
            write(now)
        except OSError as error:
            print(f"the label dtx-role={now} cannot be written: {error}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            written, due = now, time.monotonic() + AGAIN_SECONDS
    time.sleep(POLL_SECONDS)
