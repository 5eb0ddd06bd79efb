"""Ends with 0 if the dtx of this container is healthy: it answers clients, or it is a standby whose API answers.

It uses DTX_LISTEN, DTX_TLS_CERT, DTX_ADMIN_LISTEN and DTX_ADMIN_TLS_CERT, and their defaults in the image.
"""

import contextlib
import os
import socket
import ssl
import urllib.request

TIMEOUT = 5


def port(name: str, default: int) -> int:
    """The port of an address setting; of several addresses the first one."""
    return int(os.environ.get(name, "").partition(",")[0].rpartition(":")[2] or default)


# This is about life, not about identity: the certificate need not name this address.
unverified = ssl.create_default_context()
unverified.check_hostname = False
unverified.verify_mode = ssl.CERT_NONE
try:
    with socket.create_connection(("127.0.0.1", port("DTX_LISTEN", 5673)), TIMEOUT) as end:
        if "DTX_TLS_CERT" in os.environ:
            # a dtx that refuses a client without a certificate is healthy
            with contextlib.suppress(ssl.SSLError):
                unverified.wrap_socket(end).close()
        else:
            end.sendall(b"AMQP\0\0\x09\x01")
            if end.recv(1) != b"\1":  # the answer is connection.start, a frame of type 1
                raise SystemExit("no AMQP 0-9-1 at the port of clients")
except ConnectionRefusedError:
    scheme = "https" if "DTX_ADMIN_TLS_CERT" in os.environ else "http"
    url = f"{scheme}://127.0.0.1:{port('DTX_ADMIN_LISTEN', 15673)}/healthz"
    context = unverified if scheme == "https" else None
    urllib.request.urlopen(url, timeout=TIMEOUT, context=context).close()  # noqa: S310 - the scheme is one of these two
