"""Networks of hosts with their own network stacks, which can be cut off from each other. Needs root and iproute2.

A packet that is cut off is lost without an answer, as behind a broken switch. All namespaces belong to processes of
this run: they and their links disappear with them, even if the run is killed.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tests.support.processes import end, spawn, wait_until

_BITS: Final = 24
_HERE: Final = 254
"""The last byte of the address of this system in the network."""


@dataclass(frozen=True, slots=True)
class Place:
    """A host.

    Args:
        address: IPv4.
        holder: id of the process that has its network stack; ``None``: this system.
    """

    address: str = "127.0.0.1"
    holder: int | None = None

    def command(self, words: Sequence[str | Path]) -> Sequence[str | Path]:
        """The command line that runs *words* on this host."""
        return words if self.holder is None else ["nsenter", f"--net=/proc/{self.holder}/ns/net", *words]


LOCAL: Final = Place()


def is_possible() -> bool:
    """Whether this machine can have such networks."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "nsenter", "unshare"))


class Network:
    """Hosts on one switch, which this system is connected to. Use as a context manager.

    Args:
        hosts: their number.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._stack = contextlib.ExitStack()
        self._link = f"dtx{secrets.token_hex(4)}"
        self._prefix = f"10.213.{secrets.randbelow(256)}"
        self.places: list[Place] = []
        self._cut: set[tuple[int, int]] = set()
        self._off: set[int] = set()

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        self._switch = Place("", self._new_stack())
        switch = str(self._switch.holder)
        _ip(self._switch, "link add switch up type bridge")
        _ip(LOCAL, f"link add {self._link} type veth peer name here netns {switch}")
        _ip(LOCAL, f"address add {self._prefix}.{_HERE}/{_BITS} dev {self._link}")
        _ip(LOCAL, f"link set {self._link} up")
        _ip(self._switch, "link set here master switch up")
        for number in range(self._hosts):
            place = Place(f"{self._prefix}.{number + 1}", self._new_stack())
            _ip(self._switch, f"link add host{number} type veth peer name switch netns {place.holder}")
            _ip(self._switch, f"link set host{number} master switch up")
            _ip(place, "link set lo up")
            _ip(place, f"address add {place.address}/{_BITS} dev switch")
            _ip(place, "link set switch up")
            self.places.append(place)

    def _new_stack(self) -> int:
        """Start a process with a network stack of its own; return its id."""
        process = spawn(["unshare", "--net", "sleep", "infinity"], output=subprocess.DEVNULL)
        self._stack.callback(end, process)
        ours, its = Path("/proc/self/ns/net"), Path(f"/proc/{process.pid}/ns/net")
        wait_until(lambda: its.readlink() != ours.readlink(), what="a network namespace")
        return process.pid

    def cut(self, one: int, other: int) -> None:
        """Cut two hosts off from each other; all others reach both."""
        for source, target in ((one, other), (other, one)):
            if (source, target) not in self._cut:
                _ip(self.places[source], f"route add blackhole {self.places[target].address}")
                self._cut.add((source, target))

    def switch_off(self, host: int) -> None:
        """Cut a host off from all others and from this system."""
        _ip(self._switch, f"link set host{host} down")
        self._off.add(host)

    def heal(self) -> None:
        """Connect all hosts again."""
        while self._cut:
            source, target = self._cut.pop()
            _ip(self.places[source], f"route del blackhole {self.places[target].address}")
        while self._off:
            _ip(self._switch, f"link set host{self._off.pop()} up")


def _ip(place: Place, words: str) -> None:
    subprocess.run(place.command(["ip", *words.split()]), check=True, capture_output=True, timeout=30)
