"""Lists sentences of the documentation that are longer than the style allows.

``python -m tests.support.sentences`` prints them, the longest first.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MOST_WORDS: Final = 25
_GENERATED: Final = re.compile(r"<!-- (\S+) -->.*?<!-- /\1 -->", re.DOTALL)
_FENCED: Final = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]*`")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d+\.|:)\s+")
_END: Final = re.compile(r"(?<=[.!?])[*)\"]*\s+(?=[\"*(]*(?:[A-Z\d]|code\b|dtx\b))")
_WORD: Final = re.compile(r"[^\W_][\w'.,/-]*")


def pages() -> list[Path]:
    """The pages for readers."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page of Markdown, without code and generated blocks. A code span counts as one word."""
    text = _FENCED.sub("\n", _GENERATED.sub("\n", text))
    for block in _blocks(text):
        plain = _LINK.sub(r"\1", _CODE.sub("code", block))
        yield from (part.strip() for part in _END.split(plain) if part.strip())


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items, headings and cells of tables."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = not line.strip() or line.startswith("#") or line.lstrip().startswith("|") or _ITEM.match(line)
        if starts and block:
            yield " ".join(block)
            block = []
        if line.lstrip().startswith("|"):
            yield from re.split(r"(?<!\\)\|", line)
        elif line.strip():
            block.append(_ITEM.sub("", line).strip())


def words(sentence: str) -> int:
    """The number of words."""
    return len(_WORD.findall(sentence))


def too_long() -> list[tuple[int, str, str]]:
    """Long sentences: number of words, page, text; the longest first."""
    found = [
        (words(sentence), str(page.relative_to(ROOT)), sentence)
        for page in pages()
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if words(sentence) > MOST_WORDS
    ]
    return sorted(found, reverse=True)


if __name__ == "__main__":
    for count, page, sentence in too_long():
        sys.stdout.write(f"{count} {page}: {sentence}\n")
