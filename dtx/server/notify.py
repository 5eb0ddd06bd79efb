"""Telling the outside that the service is ready: a line on stdout, and systemd's notification socket."""

import os
import socket
from collections.abc import Sequence


def say_ready(addresses: Sequence[tuple[str, int]], admin: str | None) -> None:
    """Print the line with ``READY`` that scripts wait for, and notify systemd.

    Args:
        addresses: where clients connect.
        admin: where the operators' API is.
    """
    listen = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)
    api = "" if admin is None else f" admin={admin}"
    print(f"READY listen={listen}{api} pid={os.getpid()}", flush=True)  # noqa: T201 - this is the interface
    notify(f"READY=1\nSTATUS=serving at {listen}")


def say_standing_by(holder: str) -> None:
    """Notify systemd that all is well here, and that another dtx serves: whoever waits for a start must not kill it."""
    notify(f"READY=1\nSTATUS=standing by, {holder} is active")


def notify(state: str) -> None:
    """sd_notify: one datagram to ``$NOTIFY_SOCKET``, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return  # who asked to be told is not there any more
