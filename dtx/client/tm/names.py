"""Identity: whose a branch is can be read from its gtrid, so a transaction manager only ever touches its own.

A gtrid is ``node.process.begun.number`` in ASCII, at most 64 octets: the node's name; the incarnation of the
transaction manager, random; the wall clock when the transaction began, milliseconds in base 36; a number, base 36.
The bqual is the name of the resource; savepoints make further branches, which
have ``/`` and a number after it.
"""

import itertools
import os
import re
import secrets
import time
from dataclasses import dataclass
from typing import Final

from dtx.client.tm.errors import Misuse
from dtx.xa.xid import Xid

FORMAT_ID: Final = 0x0D7C731
"""Of all transactions of this transaction manager, unless it is given another one."""
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_NODE: Final = re.compile(r"[A-Za-z0-9_-]{1,24}")
_PROCESS_OCTETS: Final = 6


@dataclass(frozen=True, slots=True)
class Gtrid:
    """The parts of a gtrid.

    Args:
        node: whose it is.
        process: the incarnation that began it.
        begun: Unix time of its beginning, seconds, by the clock of the node.
        number: within the incarnation.
    """

    node: str
    process: str
    begun: float
    number: int

    def to_octets(self) -> bytes:
        """As it stands in xids."""
        return f"{self.node}.{self.process}.{_base36(int(self.begun * 1000))}.{_base36(self.number)}".encode()

    @classmethod
    def read(cls, octets: bytes) -> "Gtrid | None":
        """The parts of *octets*; ``None`` where no transaction manager of this kind made them."""
        try:
            node, process, begun, number = octets.decode("ascii").split(".")
            return cls(node, process, int(begun, 36) / 1000, int(number, 36))
        except ValueError:
            return None


class Identity:
    """Makes gtrids that nobody else makes.

    Args:
        node: 1 to 24 letters, digits, ``-`` or ``_``; the same over restarts. Processes with one node name share one
            log: two nodes with separate logs and one name would roll back each other's branches.
        format_id: of all its xids, 1 to 2³¹-1 (psycopg takes no more).

    Raises:
        Misuse: one of them is out of range.
    """

    def __init__(self, node: str, format_id: int = FORMAT_ID) -> None:
        if not _NODE.fullmatch(node):
            raise Misuse(f"node name {node!r} is not made of 1 to 24 letters, digits, - or _")
        if not 0 < format_id < 0x80000000:
            raise Misuse(f"format id {format_id} is not between 1 and 2147483647")
        self.node = node
        self.format_id = format_id
        self.process = secrets.token_hex(_PROCESS_OCTETS)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)

    def new(self) -> bytes:
        """A gtrid for a transaction that begins now.

        Raises:
            Misuse: this is a fork of the process that made this object: both would make the same.
        """
        if os.getpid() != self._pid:
            raise Misuse("the process was forked: make the TransactionManager after the fork, one in each process")
        return Gtrid(self.node, self.process, time.time(), next(self._numbers)).to_octets()

    def xid(self, gtrid: bytes, resource: str) -> Xid:
        """The branch of *gtrid* at a resource; with ``/`` and a number after its name: a further one."""
        return Xid(self.format_id, gtrid, resource.encode("ascii"))

    def owns(self, xid: Xid) -> Gtrid | None:
        """The parts of the gtrid of *xid* where the branch is this node's, of this process or another."""
        if xid.format_id != self.format_id:
            return None
        parts = Gtrid.read(xid.gtrid)
        return parts if parts is not None and parts.node == self.node else None


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = _DIGITS[rest] + digits
    return digits or "0"
