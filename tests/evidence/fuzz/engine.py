"""One coverage-guided run of one target with atheris: ``python -m tests.evidence.fuzz.engine TARGET [WORD …]``.

The words are options of libFuzzer. It does not return, so :mod:`tests.evidence.fuzz.campaign` starts this as a process.
Most inputs for a whole dtx are mutated by frame, because a change of single bytes nearly always breaks a frame.
"""

import random
import sys

import atheris

with atheris.instrument_imports(include=["dtx"], enable_loader_override=False):
    from tests.evidence.fuzz.targets import TARGETS, Target

from tests.evidence.fuzz.conversations import MUTATIONS
from tests.evidence.fuzz.corpus import frames_of
from tests.evidence.fuzz.server import be_strict

_BLIND = 0.3
"""Share of mutations of raw bytes."""
_ARGUMENTS = 0.4
"""Share of mutations of the payload of a single frame."""
_READS = 0.1
"""Share of mutations that also change the reads."""
_PAYLOAD = 4096


def mutate_frames(data: bytes, most: int, seed: int) -> bytes:
    """Mutate a conversation by frame; the first byte, which chooses the reads, is mutated separately."""
    dice = random.Random(seed)
    frames, rest = frames_of(data[1:])
    for _ in range(dice.choice((1, 1, 2, 4))):
        if not frames or dice.random() < _BLIND:
            return bytes(atheris.Mutate(data, most))
        if dice.random() < _ARGUMENTS:  # libFuzzer knows the bytes that code compares with the payload
            position = dice.randrange(len(frames))
            frame = frames[position]
            payload = bytes(atheris.Mutate(frame[7:-1], _PAYLOAD))
            frames[position] = frame[:3] + len(payload).to_bytes(4, "big") + payload + b"\xce"
        else:
            mutated = b"".join(dice.choice(MUTATIONS)(dice, frames))
            frames, rest = frames_of(mutated)
    first = dice.randrange(256) if dice.random() < _READS else data[0]
    return (bytes((first,)) + b"".join(frames) + rest)[:most]


def main(words: list[str]) -> None:
    """Run until libFuzzer reaches its limits or finds a failure."""
    target: Target = TARGETS[words[1]]
    be_strict()
    more = {"custom_mutator": mutate_frames} if target.frames else {}
    atheris.Setup([words[0], f"-max_len={target.most}", *words[2:]], target.run, **more)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
