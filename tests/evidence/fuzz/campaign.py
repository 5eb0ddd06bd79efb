"""Fuzzing for a given time: ``python -m tests.evidence.fuzz.campaign [--seconds N] [--keep] [TARGET …]``.

Each target runs in a separate process, from the corpus and from conversations of real clients. An input on which a
target fails is left in a file, and a command that repeats it is printed. With ``--keep`` new inputs are distilled into
the corpus.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from dtx.wire.amqp09 import handshake, methods, properties, tables
from dtx.wire.amqp09.methods import DtxStart
from dtx.xa.xid import Xid
from tests.evidence.fuzz import amqp10, corpus, server, server10
from tests.evidence.fuzz.conversations import broker_of_its_own, conversation
from tests.evidence.fuzz.targets import TARGETS

FINDINGS: Final = Path(".fuzz")
_LIMITS: Final = ("-timeout=20", "-rss_limit_mb=1024", "-print_final_stats=1")
_XID: Final = Xid(1, b"gtrid", b"bqual")


def seeds(name: str) -> list[bytes]:
    """Return the first inputs of a target, for use without a corpus."""
    queue = methods.QueueDeclare(b"q", durable=True).frame(1)
    arguments = b"".join(tables.entry(key, b"l", bytes(7) + b"\x05") for key in (b"x-max-length", b"x-message-ttl"))
    match name:
        case "conversation":
            dice = random.Random(1)
            said = [say(dice, b"q") for say in (conversation, broker_of_its_own) * 3]
            return [bytes((number,)) + queue + b"".join(frames) for number, frames in enumerate(said)]
        case "amqp10-conversation":
            return [bytes((seed,)) + b"".join(server10.conversation(random.Random(seed))) for seed in range(6)]
        case "opening":
            return [b"\x00" + server.START_OK + server.ENTER + server.TWO_CHANNELS]
        case "xid":
            return [_XID.to_wire(), str(_XID).encode()]
        case "call":
            return [b"\x00" + DtxStart(xid=_XID).encode()]
        case "sasl":
            login = tables.entry(b"LOGIN", b"S", b"guest") + tables.entry(b"PASSWORD", b"S", b"guest")
            return [server.START_OK[7:-1], handshake.plain(b"guest", b"guest"), login]
        case "properties":
            basic = {properties.Property.USER_ID: b"guest", properties.Property.PRIORITY: b"\x01"}
            return [properties.build(basic, {b"CC": b"v", b"k": b"w"})]
        case "table" | "arguments":
            return [arguments, tables.entry(b"t", b"F", arguments) + tables.entry(b"a", b"A", b"t\x01S" + bytes(4))]
        case "topic":
            return [b"a.*.#\na.b.c"]
        case "amqp10-value" | "amqp10-peer":
            return amqp10.seeds(name)
        case _:
            return [b"\x00" * 12]


def run(name: str, seconds: int, keep: bool) -> int | None:
    """Fuzz one target; return the number of inputs, ``None`` if one of them failed."""
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dtx-fuzz-") as directory:
        found = Path(directory)
        for number, data in enumerate([*seeds(name), *(path.read_bytes() for path in corpus.stored(name))]):
            (found / f"seed-{number}").write_bytes(data)
        words = [sys.executable, "-m", "tests.evidence.fuzz.engine", name, f"-max_total_time={seconds}", *_LIMITS]
        words += [f"-artifact_prefix={FINDINGS}/{name}-", str(found)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(ended.stdout[-3000:], ended.stderr[-3000:], sep="\n")
            print(f"{name}: FAILED; again: {sys.executable} -m tests.evidence.fuzz.engine {name} {FINDINGS}/{name}-…")
            return None
        runs = [line.split()[1] for line in ended.stderr.splitlines() if line.startswith("stat::number_of_executed")]
        print(f"{name}: {' '.join(runs)} inputs, {len(list(found.iterdir()))} of them reached something new", end="")
        if keep:
            server.be_strict()
            inputs = [path.read_bytes() for path in found.iterdir()]
            kept = corpus.distil(TARGETS[name], inputs, lambda data: corpus.pieces(name, data))
            print(f"; {len(kept)} kept, {corpus.store(name, kept)} octets", end="")
        print(flush=True)
        return sum(map(int, runs))


def main() -> int:
    """Run the command; return 1 if a target failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="renew the corpus")
    options = parser.parse_args()
    stood = [run(name, options.seconds, options.keep) for name in options.targets or TARGETS]
    return 1 if None in stood else 0


if __name__ == "__main__":
    sys.exit(main())
