"""What scripts, systemd and the supervisor of several processes are told about the state of the service."""

import os
import socket
from collections.abc import Sequence
from typing import Final

STANDBY: Final = "STANDBY"
"""The first word of the line that a member writes for its supervisor while it stands by."""


def announce_ready(addresses: Sequence[tuple[str, int]], admin: str | None) -> None:
    """Print the ``READY`` line that scripts wait for, and notify systemd.

    Args:
        addresses: host and port of each listening socket.
        admin: URL of the operators' API.
    """
    listen = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)
    api = "" if admin is None else f" admin={admin}"
    print(f"READY listen={listen}{api} pid={os.getpid()}", flush=True)  # noqa: T201 - this is the interface
    notify(f"READY=1\nSTATUS=serving at {listen}")


def announce_standby(holder: str) -> None:
    """Notify systemd that this dtx is a healthy standby: without READY, systemd stops it after the start timeout."""
    notify(f"READY=1\nSTATUS=standing by, {holder} is active")


def announce_standby_to_supervisor(holder: str) -> None:
    """The same for one of several processes, whose stdout is read by their supervisor."""
    print(f"{STANDBY} {holder}", flush=True)  # noqa: T201 - its only reader is the supervisor


def notify(state: str) -> None:
    """Send one datagram to ``$NOTIFY_SOCKET``, if it is set (sd_notify(3))."""
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
        return  # the receiver has gone
