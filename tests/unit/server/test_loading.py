"""Imports at start-up: the service and frequent commands do not load modules that they do not use."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("loads", "without"),
    [
        ("dtx.cli.serve, dtx.server.service", ["fastapi", "uvicorn", "dtx.server.standalone", "dtx.server.alongside"]),
        (
            "dtx.cli.orders, dtx.cli.accounts, dtx.cli.audit",
            ["fastapi", "httpx", "rich", "sqlalchemy", "psycopg", "dtx.server", "dtx.log"],
        ),
        ("dtx.cli.local_api", ["uvicorn", "jinja2", "alembic", "dtx.server"]),
        ("dtx.cli.doctor.command, dtx.cli.export", ["httpx", "rich", "sqlalchemy", "psycopg", "dtx.log", "dtx.wire"]),
        ("dtx.cli.branches", ["fastapi", "httpx", "alembic", "dtx.server", "dtx.manager"]),
    ],
)
def test_unused_modules_are_not_loaded(loads: str, without: list[str]) -> None:
    code = f"import sys, {loads}; print(*(name for name in {without} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_version_and_help_load_little(word: str) -> None:
    code = (
        "import atexit, sys; from dtx.cli import main; sys.argv[1:] = [" + repr(word) + "]; "
        "slow = {'asyncio', 'prometheus_client', 'pydantic', 'rich', 'structlog'}; "
        "atexit.register(lambda: print('loaded:', *sorted(slow & set(sys.modules)))); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
