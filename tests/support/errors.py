"""The texts of errors by code, as clients and operators get them: read from the source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from itertools import product
from math import prod
from typing import Final, NamedTuple

from dtx.wire.amqp09.errors import HardCode
from dtx.wire.amqp10.errors import Condition
from dtx.xa.codes import ReplyCode

Code = ReplyCode | HardCode | Condition | HTTPStatus
CODES: Final[dict[str, type[Code]]] = {kind.__name__: kind for kind in (ReplyCode, HardCode, Condition, HTTPStatus)}
_FIELD: Final = re.compile(r"\{\w*\}|")
_MOST: Final = 6
"""Texts that are written out for one f-string: if there were more, its widest part stays a field."""


class _Place(NamedTuple):
    """Where an expression is. *name* is how the function is called, *code* is what the ``if`` around it is for."""

    module: str
    owner: str = ""
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    name: str = ""
    code: ast.expr | None = None


class Source:
    """Pairs of a code and a text in *modules*; variables, parameters and results of functions are followed."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._functions: dict[str, list[_Place]] = defaultdict(list)
        self._calls: dict[str, list[tuple[ast.Call, _Place]]] = defaultdict(list)
        self._pairs: list[tuple[ast.Attribute, ast.expr, _Place]] = []
        for module, text in modules.items():
            self._enter(ast.parse(text), _Place(module))

    def _enter(self, node: ast.AST, place: _Place) -> None:
        parts: list[ast.expr] = []
        match node:
            case ast.ClassDef(name=name):
                place = place._replace(owner=name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                place = place._replace(function=node, name=place.owner if name == "__init__" else name)
                self._functions[place.name].append(place)
            case ast.Call(func=func):
                self._calls[_name(func)].append((node, place))
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Tuple(elts=parts):
                pass
            case ast.If(test=ast.Compare(left=ast.Name(id="code"), comparators=[code])):
                place = place._replace(code=code)
            case _:
                pass
        if len(parts) > 1 and _name(getattr(parts[1], "func", parts[1])) != "describe":  # has a pair of its own
            match place.code if _name(parts[0]) == "code" else parts[0]:
                case ast.Attribute(value=ast.Name(id=kind)) as code if kind in CODES:
                    self._pairs.append((code, parts[1], place))
                case _:
                    pass
        for child in ast.iter_child_nodes(node):
            self._enter(child, place)

    def errors(self) -> dict[str, dict[Code, list[str]]]:
        """By the name of their kind: the codes that are used, in their order, with their texts."""
        found: dict[str, dict[Code, set[str]]] = {kind: defaultdict(set) for kind in CODES}
        for code, text, place in self._pairs:
            kind = _name(code.value)
            texts = {each for each in self._texts(text, place, ()) if not _FIELD.fullmatch(each)}
            found[kind][CODES[kind][code.attr]] |= texts
        return {
            kind: {code: sorted(codes[code]) for code in sorted(codes, key=str) if codes[code]}
            for kind, codes in found.items()
        }

    def _texts(self, node: ast.expr, place: _Place, seen: tuple[ast.expr, ...]) -> list[str]:
        """The texts that *node* may be. What is known only at run time is a name in braces."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                options = [self._texts(part, place, seen) for part in parts]
                while prod(map(len, options)) > _MOST:
                    widest = max(range(len(parts)), key=lambda index: len(options[index]))
                    options[widest] = [_field(parts[widest])]
                return ["".join(each) for each in product(*options)]
            case ast.FormattedValue(value=value):
                return self._texts(value, place, seen)
            case ast.IfExp(body=one, orelse=other):
                return self._texts(one, place, seen) + self._texts(other, place, seen)
            case ast.Name() | ast.Call() if node not in seen:
                known: set[str] = set()
                for value, where in self._values(node, place):
                    texts = self._texts(value, where, (*seen, node))
                    known |= {text for text in texts if isinstance(value, ast.IfExp) or not _FIELD.fullmatch(text)}
                return sorted(known) or [_field(node)]
            case _:
                return [_field(node)]

    def _values(self, node: ast.Name | ast.Call, place: _Place) -> Iterator[tuple[ast.expr, _Place]]:
        """The results of a function; the values of a variable and the arguments for a parameter."""
        if isinstance(node, ast.Call):
            found = self._functions[_name(node.func)]
            of = _name(node.func.value).strip("_") if isinstance(node.func, ast.Attribute) else "self"
            for where in found:
                near = where.module == place.module if of == "self" else of in where.owner.lower()
                if where.function is not None and (near or len(found) == 1) and _is_text(where.function.returns):
                    results = [each.value for each in ast.walk(where.function) if isinstance(each, ast.Return)]
                    yield from ((result, where) for result in results if result is not None)
            return
        for each in ast.walk(place.function) if place.function is not None else ():
            match each:
                case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                    if isinstance(target, ast.Name) and target.id == node.id:
                        yield value, place
                case ast.arguments(args=arguments) if each is place.function.args:  # type: ignore[union-attr]
                    names = [argument.arg for argument in arguments if argument.arg != "self"]
                    if any(argument.arg == node.id and _is_text(argument.annotation) for argument in arguments):
                        for call, where in self._calls[place.name]:
                            given = dict(zip(names, call.args, strict=False))
                            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                            near = where.module == place.module or len(self._functions[place.name]) == 1
                            if near and node.id in given:
                                yield given[node.id], where
                case _:
                    pass


def _is_text(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in {"str", "str | None"}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _field(node: ast.expr) -> str:
    """A name for what *node* computes: of a call, of its first argument."""
    text = ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)
    text = re.sub(r"\[[^]]*\]", "", re.sub(r"^len\(.*", "length", text))
    text = re.sub(r"^([a-z_]+\(|'[^']*'\.join\()+'?|^self\.|\.(name|value|__name__)\b|\.\w+\(.*", "", text)
    words = re.match(r"[\w.]*", text)
    return f"{{{words[0].rpartition('.')[2].lower().strip('_') if words else ''}}}"
