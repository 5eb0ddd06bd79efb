"""The reference of the client names all of its public interface, and docstrings describe each argument."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import pytest

import dtx.client
import dtx.client.tm
from dtx.client import errors

PAGE: Final = (Path(__file__).parents[3] / "docs/reference/client.md").read_text(encoding="utf-8")
_DIRECTIVE: Final = re.compile(r"^\.\. (auto\w+|currentmodule):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE)
_DEPRECATED: Final = {"Session"}
_NAMED: Final = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def _options(text: str) -> dict[str, set[str]]:
    return {name: set(re.findall(r"\w+", value)) for name, value in re.findall(r":([\w-]+):(.*)", text)}


def _documented() -> Iterator[tuple[str, Any]]:
    """The functions and classes of the page, and the methods that it lists."""
    module = ""
    for directive, name, more in _DIRECTIVE.findall(PAGE):
        options = _options(more)
        if directive == "currentmodule":
            module = name
        elif directive == "automodule":
            found = importlib.import_module(name)
            wanted = options.get("members", None)
            for member, value in vars(found).items():
                shown = wanted is not None and (member in wanted or not (wanted or member.startswith("_")))
                if shown and getattr(value, "__module__", None) == name:
                    yield from _of(f"{name}.{member}", value, set(), set())
        elif directive != "autodata":
            place, _, last = (name if "." in name else f"{module}.{name}").rpartition(".")
            value = getattr(importlib.import_module(place), last)
            yield from _of(
                f"{place}.{last}", value, options.get("members", set()), options.get("exclude-members", set())
            )


def _of(name: str, value: Any, members: set[str], excluded: set[str]) -> Iterator[tuple[str, Any]]:
    yield name, value
    if inspect.isclass(value):
        for member, method in inspect.getmembers(value, inspect.isroutine):
            hidden = member.startswith("_") or member in excluded or (members and member not in members)
            if not hidden and (getattr(method, "__module__", None) or "").startswith("dtx.client"):
                yield f"{name}.{member}", method


DOCUMENTED: Final = dict(_documented())


def test_the_page_has_every_public_name() -> None:
    shown = {name.rpartition(".")[2] for name in DOCUMENTED} | {"FORMAT_ID"}
    public = {*dtx.client.__all__, *dtx.client.tm.__all__, *errors.__all__}
    assert public - shown == _DEPRECATED
    assert len(DOCUMENTED) > 150


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_name_each_argument(name: str) -> None:
    """Or they refer to the description of the same arguments elsewhere. Fields of data are described one by one."""
    value: Callable[..., Any] = DOCUMENTED[name]
    text = inspect.getdoc(value) or ""
    assert text
    plain = inspect.isclass(value) and (issubclass(value, BaseException | tuple | Enum) or is_dataclass(value))
    if plain or re.search(r"\b(as|see|of|for) :(meth|class|func|mod):", text):
        return
    arguments = inspect.signature(value).parameters.values()
    named = [each.name for each in arguments if each.name != "self" and each.kind in _NAMED]
    assert [name for name in named if not re.search(rf"\b{name}\b", text)] == []
