"""Golden dialogues of the AMQP 0-9 engine; see :mod:`.dialogue`.

Each dialogue is played in whole reads, byte by byte, and with every frame cut in two, with the same result.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.wire.amqp09.dialogue import FOLDER, Dialogue, at_once, byte_by_byte, inside_frames


@pytest.mark.parametrize("split", [at_once, byte_by_byte, inside_frames])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_engine_holds_it_so(path: "object", split: Callable[[bytes], Iterator[bytes]]) -> None:
    Dialogue(path.read_text(), split).hold()  # type: ignore[attr-defined]
