"""One coverage-guided run of one target, by atheris: ``python -m tests.evidence.fuzz.engine TARGET [WORD …]``.

The words are libFuzzer's, which does not return, so this is a process of its own; :mod:`tests.evidence.fuzz.campaign`
starts it. What a client says to a whole dtx is mutated as frames most of the time: hardly any byte that is changed
alone leaves a frame a frame.
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
"""How often octets are mutated as such nevertheless."""
_ARGUMENTS = 0.4
"""How often the payload of a single frame is."""
_READS = 0.1
"""How often the same is said in other pieces."""
_PAYLOAD = 4096


def mutate_frames(data: bytes, most: int, seed: int) -> bytes:
    """Another conversation: the first octet, which chooses the reads, stays apart."""
    dice = random.Random(seed)
    frames, rest = frames_of(data[1:])
    for _ in range(dice.choice((1, 1, 2, 4))):
        if not frames or dice.random() < _BLIND:
            return bytes(atheris.Mutate(data, most))
        if dice.random() < _ARGUMENTS:  # libFuzzer knows which octets were compared with what
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
    """Run until libFuzzer has enough, or has found something."""
    target: Target = TARGETS[words[1]]
    be_strict()
    more = {"custom_mutator": mutate_frames} if target.frames else {}
    atheris.Setup([words[0], f"-max_len={target.most}", *words[2:]], target.run, **more)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
