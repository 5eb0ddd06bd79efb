"""What people type to find branches, as a filter of the API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import QueryParams

from dtx.admin.forms import FilterForm
from dtx.admin.problems import Problem
from dtx.admin.web.visits import Fields, build
from dtx.config.values import parse_duration
from dtx.log.records import LogState
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

STATES: Final = tuple(str(state) for state in LogState)
DEFAULT_EXCHANGE: Final = "(default)"
"""What is typed for the exchange that has an empty name."""
_PLAIN: Final = ("vhost", "owner", "format_id", "queue")
NAMES: Final = ("q", "state", "older", "stuck", "exchange", "branch", *_PLAIN)
"""The fields of a search."""


def asked(given: QueryParams | Fields) -> dict[str, list[str]]:
    """The fields of a search that say something, as they were typed."""
    found: dict[str, list[str]] = {}
    for name in NAMES:
        values = given.getlist(name) if isinstance(given, QueryParams) else given.all(name)
        kept = [value.strip() for value in values if value.strip()]
        if kept:
            found[name] = kept
    return found


def filter_of(fields: Mapping[str, list[str]]) -> FilterForm:
    """The filter that they mean.

    Raises:
        Problem: 422, one of them is not as it must be.
    """
    values: dict[str, Any] = {name: fields[name][-1] for name in _PLAIN if name in fields}
    values["state"] = fields.get("state", [])
    values["branch"] = fields.get("branch", [])
    if "exchange" in fields:
        name = fields["exchange"][-1]
        values["exchange"] = "" if name == DEFAULT_EXCHANGE else name
    if "stuck" in fields:
        values["stuck"] = fields["stuck"][-1] == "yes"
    if "older" in fields:
        values["older_than"] = _seconds(fields["older"][-1])
    if "q" in fields:
        values |= _looked_for(fields["q"][-1])
    return build(FilterForm, values)


def _seconds(words: str) -> float:
    try:
        return parse_duration(words)
    except ValueError as error:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"age: {error}") from None


def _looked_for(words: str) -> dict[str, Any]:
    """A whole xid means the branches of its transaction; text is looked for within the gtrid, patterns as they are."""
    if words.count(":") == 2:
        try:
            xid = Xid.parse(words)
        except XaError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, error.reason) from None
        return {"format_id": xid.format_id, "gtrid": f"hex:{xid.gtrid.hex()}"}
    if "*" in words or words.startswith("hex:"):
        return {"gtrid": words}
    return {"gtrid": f"*{words}*"}
