"""The reference of the operators' HTTP API, from its OpenAPI document."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from dtx.admin.api import api
from tests.support.routes import ROUTES

_Json = dict[str, Any]
_TAGS: Final = {
    "branches": "Branches",
    "orders": "Orders",
    "journal": "Journal",
    "archive": "Archive",
    "clients": "Clients",
    "users": "Users and virtual hosts",
    "rabbitmq": "RabbitMQ's management API",
    "operators": "Tokens and audit log",
    "service": "State, health and metrics",
}
_FORMATS: Final = {"date-time": "time", "uuid": "UUID"}
_REF: Final = "#/components/schemas/"


def document() -> _Json:
    """The OpenAPI document."""
    context: Any = SimpleNamespace()
    found: _Json = api(context).openapi()
    return found


class Reference:
    """The sections of the reference.

    Args:
        api: the OpenAPI document.
    """

    def __init__(self, api: _Json) -> None:
        self._paths: _Json = api["paths"]
        self._schemas: _Json = api["components"]["schemas"]

    def routes(self) -> str:
        """Every route, by subject."""
        lines: list[str] = []
        for tag, heading in _TAGS.items():
            lines += [f"## {heading}", ""]
            if tag == "rabbitmq":
                lines += [*self._rabbitmq(), ""]
                continue
            for path, methods in self._paths.items():
                for method, route in methods.items():
                    if tag in route["tags"]:
                        lines += self._route(f"{method.upper()} {path}", route)
        return "\n".join(lines).rstrip()

    def _rabbitmq(self) -> Iterator[str]:
        """The routes whose parameters and answers RabbitMQ's documentation describes."""
        yield from ("| route | role | |", "| --- | --- | --- |")
        for path, methods in self._paths.items():
            for method, route in methods.items():
                if "rabbitmq" in route["tags"]:
                    name = f"{method.upper()} {path}"
                    yield f"| `{name}` | {ROUTES[name][0]} | {' '.join(route['description'].split())} |"

    def _route(self, name: str, route: _Json) -> Iterator[str]:
        role, _ = ROUTES[name]
        described = " ".join(str(route["description"]).split())
        yield from (f"### `{name}`", "", described, "")
        yield f"- Role: {'none' if role is None else role}"
        if body := route.get("requestBody"):
            yield f"- Body: {self._content(body['content'])}"
        yield ""
        if parameters := route.get("parameters"):
            yield from ("| parameter | type | default | |", "| --- | --- | --- | --- |")
            for parameter in parameters:
                schema = parameter["schema"]
                default = "required" if parameter["required"] else _default(schema)
                about = parameter.get("description") or schema["description"]
                yield f"| `{parameter['name']}` | {self._type(schema)} | {default} | {about} |"
            yield ""
        yield from ("| status | answer |", "| --- | --- |")
        for status, answer in sorted(route["responses"].items()):
            if status != "default":
                yield f"| {status} | {self._answer(int(status), answer)} |"
        yield ""

    def _answer(self, status: int, answer: _Json) -> str:
        content = self._content(answer.get("content", {}))
        if status >= 300:
            return str(answer["description"])
        generic = answer["description"] == "Successful Response"
        return content if generic else f"{content}. {answer['description']}"

    def _content(self, content: _Json) -> str:
        if not content:
            return "no content"
        media, of = next(iter(content.items()))
        schema = of.get("schema", {})
        return self._type(schema) if media == "application/json" and schema else f"`{media}`"

    def objects(self) -> str:
        """Every object of requests and answers, by name."""
        asked = set(self._asked())
        lines: list[str] = []
        for name, schema in sorted(self._schemas.items()):
            if "properties" not in schema:
                continue
            lines += [f"### {name}", "", " ".join(schema["description"].split()), ""]
            lines += ["| field | type | default | |" if name in asked else "| field | type | |"]
            lines += ["| --- | --- | --- | --- |" if name in asked else "| --- | --- | --- |"]
            for field, of in schema["properties"].items():
                default = f"{'required' if field in schema.get('required', ()) else _default(of)} | "
                lines += [f"| `{field}` | {self._type(of)} | {default * (name in asked)}{of['description']} |"]
            lines += [""]
        return "\n".join(lines).rstrip()

    def _asked(self) -> Iterator[str]:
        """The names of the objects in bodies of requests."""
        for methods in self._paths.values():
            for route in methods.values():
                for of in route.get("requestBody", {}).get("content", {}).values():
                    yield from self._within(of["schema"])

    def _within(self, schema: _Json) -> Iterator[str]:
        if ref := schema.get("$ref"):
            name = ref.removeprefix(_REF)
            yield name
            for field in self._schemas[name].get("properties", {}).values():
                yield from self._within(field)
        for inner in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
            yield from self._within(inner)

    def _type(self, schema: _Json) -> str:
        match schema:
            case {"anyOf": [inner, {"type": "null"}]}:
                return f"{self._kind(inner)} or null{_range(inner)}"
            case _:
                return f"{self._kind(schema)}{_range(schema)}"

    def _kind(self, schema: _Json) -> str:
        match schema:
            case {"$ref": ref}:
                name = ref.removeprefix(_REF)
                found = self._schemas[name]
                return self._kind(found) if "properties" not in found else f"[{name}](#{name.lower()})"
            case {"anyOf": each}:
                return " or ".join(map(self._kind, each))
            case {"enum": values}:
                return ", ".join(f"`{value}`" for value in values)
            case {"type": "array", "items": items}:
                return f"array of {self._kind(items)}"
            case {"type": "object", "additionalProperties": {} as values}:
                return f"object of {self._kind(values)}"
            case {"type": "string"}:
                return _FORMATS.get(schema.get("format", ""), "string")
            case _:
                return str(schema.get("type", "value"))


def _range(schema: _Json) -> str:
    above = schema.get("exclusiveMaximum")
    for suffix, unit in (("imum", ""), ("Length", " characters"), ("Items", " items")):
        least = schema.get(f"min{suffix}")
        most = schema.get(f"max{suffix}", None if above is None else above - 1)
        match least, most:
            case None, None:
                pass
            case None, most:
                return f", at most {most:,.0f}{unit}"
            case least, None:
                return f", at least {least:,.0f}{unit}"
            case least, most:
                return f", {least:,.0f} to {most:,.0f}{unit}"
    return ""


def _default(schema: _Json) -> str:
    match schema.get("default"):
        case None | [] | "":
            return ""
        case bool() as value:
            return f"`{str(value).lower()}`"
        case value:
            return f"`{value}`"
