"""Where commands find the operators' API, and with which token. Secrets are never words of the command line."""

import os
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_TOKEN: Final = 4096
"""Octets read of a token's file: a token has some fifty."""

HOW: Final = """\b
Whom this asks:
  --api URL (or DTX_API)      that API, and no database is needed
  else, to look               the database, whether a dtx serves or not
  else, to change something   the dtx that is active, at --admin-listen; where none is, the command does it itself

\b
The token for an API is the first of:
  --token-file FILE           its first line (or DTX_TOKEN_FILE); with bash also <(secret-tool lookup service dtx)
  DTX_TOKEN                   the token itself
  --database                  whoever can open the database gets one for the moment
  the terminal                asks for it
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What the user said about the API.

    Args:
        api: its address; ``None`` for that of the settings.
        ca: PEM file of whom to trust, for https.
        token_file: where the token is.
    """

    api: str | None
    ca: Path | None
    token_file: Path | None

    def trusted(self) -> ssl.SSLContext | None:
        """For https; ``None`` for whom the system trusts.

        Raises:
            CommandError: the file holds no certificate.
        """
        if self.ca is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(Exit.USAGE, f"--api-ca: {self.ca} holds no PEM certificate: {error}") from None

    def given_token(self) -> str | None:
        """The token of file or environment.

        Raises:
            CommandError: the file cannot be read, or is empty.
        """
        if self.token_file is not None:
            try:
                with self.token_file.open("rb") as file:
                    found = file.readline(_MOST_TOKEN).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(Exit.USAGE, f"--token-file: {self.token_file} cannot be read: {error}") from None
            if not found:
                raise CommandError(Exit.USAGE, f"--token-file: the first line of {self.token_file} is empty")
            return found
        return os.environ.get("DTX_TOKEN") or None


def with_access(function: _Function) -> _Function:
    """Give a command ``--api``, ``--api-ca`` and ``--token-file``; it is called with ``access: Access``."""

    @wraps(function)
    def run(*args: Any, api: str | None, api_ca: Path | None, token_file: Path | None, **kwargs: Any) -> Any:
        if api is not None and not api.startswith(("http://", "https://")):
            raise click.BadParameter("an address begins with http:// or https://", param_hint="--api")
        base = None if api is None else api.rstrip("/")
        return function(*args, access=Access(api=base, ca=api_ca, token_file=token_file), **kwargs)

    command: Any = run
    path = click.Path(path_type=Path, dir_okay=False)
    for option in (
        click.option(
            "--token-file", envvar="DTX_TOKEN_FILE", type=path, metavar="FILE", help="Its first line is the token."
        ),
        click.option(
            "--api-ca", envvar="DTX_API_CA", type=path, metavar="FILE", help="PEM of whom to trust, for https."
        ),
        click.option("--api", envvar="DTX_API", metavar="URL", help="The API to ask; no database is needed then."),
    ):
        command = option(command)
    decorated: _Function = command
    return decorated


def ask_for_token(base: str) -> str:
    """The token, from the terminal.

    Raises:
        CommandError: nobody is there.
    """
    if not sys.stdin.isatty():
        raise CommandError(
            Exit.USAGE, f"a token for {base} is needed: --token-file, DTX_TOKEN, or --database, which makes one"
        )
    asked: str = click.prompt(f"token for {base}", hide_input=True, err=True)
    return asked.strip()


def address_of(settings: Settings) -> str:
    """Where the API of the dtx with these settings is."""
    (listen,) = settings.admin_listen
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104 - what others bind to
    scheme = "http" if settings.admin_tls_cert is None else "https"
    return f"{scheme}://[{host}]:{listen.port}" if ":" in host else f"{scheme}://{host}:{listen.port}"
