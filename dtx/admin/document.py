"""The OpenAPI document: made of the routes, and told what they do not know, which is who asks and how errors look."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dtx.admin.forms import Form
from dtx.admin.problems import MEDIA_TYPE


class ProblemForm(Form):
    """Why something was not done (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


_PROBLEM: Final = f"#/components/schemas/{ProblemForm.__name__}"
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"description": "A problem.", "content": {MEDIA_TYPE: {"schema": {"$ref": _PROBLEM}}}}
}
"""Of every route, besides what it answers where all is well."""
OPEN: Final[dict[str, Any]] = {"security": []}
"""Of a route that everybody may ask."""
_SCHEMES: Final = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token of dtx token, or of /api/tokens."},
    "user": {"type": "http", "scheme": "basic", "description": "A user of dtx user with a tag that lets it in."},
}


def describe(app: FastAPI) -> None:
    """Let the document of *app* say that too."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            found["components"]["securitySchemes"] = _SCHEMES
            found["components"]["schemas"][ProblemForm.__name__] = ProblemForm.model_json_schema()
            found["security"] = [{name: []} for name in _SCHEMES]
            app.openapi_schema = found
        return app.openapi_schema

    # FastAPI's own way to change the document
    app.openapi = document  # type: ignore[method-assign]
