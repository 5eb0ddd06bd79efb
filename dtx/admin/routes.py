"""The API as one application, whoever asks it: a server, or a command in its own process."""

from fastapi import FastAPI

import dtx
from dtx.admin import accounts, clients, deciding, document, exporting, health, looking, past, problems
from dtx.admin.desk import Desk


def api(desk: Desk) -> FastAPI:
    """The routes, and what they stand on."""
    app = FastAPI(
        title="dtx",
        version=dtx.__version__,
        summary="Branches in doubt: what is stuck, why, what it holds, and who decides.",
        docs_url=None,  # a page that would fetch scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        responses=document.RESPONSES,
    )
    app.state.desk = desk
    for part in (looking, exporting, past, clients, deciding, accounts, health):
        app.include_router(part.router)
    problems.install(app)
    document.describe(app)
    return app
