"""The choice of the operators' API that a command asks, and of its token.

The API is the one of ``--api``, else that of the dtx that has the lease, else the one in this process
(:mod:`dtx.cli.local_api`). No option takes a secret: other users of the machine can read command lines.
"""

import os
import secrets
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dtx.admin.safe_text import human_duration, safe
from dtx.cli.api_client import Api, Remote, user_name
from dtx.cli.database import database_at_hand, database_url
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import with_options
from dtx.config import Settings

if TYPE_CHECKING:
    from dtx.auth.operators import OperatorLog

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_TOKEN: Final = 4096
"""Bytes read at most from a token's file; a token has about fifty."""
_TOKEN_SECONDS: Final = 6 * 3600.0
"""Enough for a large bulk order. The token stays in this process and is revoked at the end."""

HOW: Final = """\b
The command asks:
  --api URL (or DTX_API)      that API; no database is needed
  else, to read               the database, whether a dtx serves or not
  else, to change something   the active dtx, at --admin-listen; if there is none, the command does it itself

\b
The token for an API is the first of:
  --token-file FILE           its first line (or DTX_TOKEN_FILE); in bash also <(secret-tool lookup service dtx)
  DTX_TOKEN                   the token itself
  --database                  the command creates a temporary token in the database
  the terminal                the command asks for the token
"""
_WHERE: Final = ". Name the --admin-listen of a dtx that runs"
"""The hint if the API of --api does not answer."""
_END_CERTIFICATE: Final = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAccess:
    """The user's options about the API.

    Args:
        api: its address; ``None`` for that of the settings.
        ca: PEM file of the certificate authorities to trust for https; ``None`` for those of the system.
        token_file: file whose first line is the token.
    """

    api: str | None
    ca: Path | None
    token_file: Path | None

    def trusted(self) -> ssl.SSLContext:
        """The TLS context for https.

        Raises:
            CommandError: the file cannot be read or has no certificate.
        """
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise CommandError(Exit.USAGE, f"--api-ca: {self.ca} has no PEM certificate: {error}") from None

    def trusted_here(self, certificate: Path | None) -> ssl.SSLContext:
        """The TLS context for the API of the dtx with the same settings.

        Without ``--api-ca`` it trusts the very *certificate* of the settings, for whatever host it was issued.

        Raises:
            CommandError: see :meth:`trusted`.
        """
        if self.ca is None and certificate is not None:
            with suppress(OSError, ValueError, ssl.SSLError):  # it is for another user; then as for any API
                # the first one of a chain: authorities behind it have issued certificates for others as well
                own, end, _ = certificate.read_text("ascii").partition(_END_CERTIFICATE)
                context = ssl.create_default_context(cadata=own + end)
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
                return context
        return self.trusted()

    def given_token(self) -> str | None:
        """The token from the file, else from ``DTX_TOKEN``.

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
    """Give a command ``--api``, ``--api-ca`` and ``--token-file``; it is called with ``access: ApiAccess``."""

    @wraps(function)
    def run(*args: Any, api: str | None, api_ca: Path | None, token_file: Path | None, **kwargs: Any) -> Any:
        if api is not None and not api.startswith(("http://", "https://")):
            raise click.BadParameter("the address must begin with http:// or https://", param_hint="--api")
        base = None if api is None else api.rstrip("/")
        return function(*args, access=ApiAccess(api=base, ca=api_ca, token_file=token_file), **kwargs)

    path = click.Path(path_type=Path, dir_okay=False)
    command: _Function = with_options(
        click.option(
            "--api", envvar="DTX_API", metavar="URL", help="Address of the API to ask; no database is needed then."
        ),
        click.option(
            "--api-ca",
            envvar="DTX_API_CA",
            type=path,
            metavar="FILE",
            help="PEM file of certificate authorities to trust for https.",
        ),
        click.option(
            "--token-file",
            envvar="DTX_TOKEN_FILE",
            type=path,
            metavar="FILE",
            help="File whose first line is the token.",
        ),
    )(run)
    return command


@contextmanager
def reach(settings: Settings, access: ApiAccess, *, orders: bool, make: bool = False) -> Iterator[Api]:
    """The API to ask.

    Args:
        settings: which dtx.
        access: the user's options about its API.
        orders: whether the command changes something; then the active dtx is asked, if there is one.
        make: create the embedded PostgreSQL and its tables if it is missing, for changes before the first start.
            Commands that read branches must not: an empty new database would look like "no branches".

    Raises:
        CommandError: no token, or no way to the API.
        LogError, EmbeddedPostgresError: the database cannot be used.
    """
    with ExitStack() as stack:
        if access.api is not None:
            remote = Remote(access.api, lambda: _token(settings, access, stack), ca=access.trusted(), hint=_WHERE)
            yield stack.enter_context(remote)
            return
        url = stack.enter_context(database_at_hand(settings, make=make))
        if make and settings.database is None:
            _make_tables(url)
        hint = _holder(settings, url) if orders else None
        if hint is not None:
            base = _address_of(settings)
            remote = Remote(
                base,
                lambda: access.given_token() or _temporary_token(settings, url, stack),
                ca=access.trusted_here(settings.admin_tls_cert),
                hint=hint,
            )
            yield stack.enter_context(remote)
            return
        from dtx.cli.local_api import LocalApi

        yield stack.enter_context(LocalApi(settings, url))


def _make_tables(url: str) -> None:
    from dtx.db import migrate

    if migrate.current(url) is None:
        migrate.upgrade(url)


def _address_of(settings: Settings) -> str:
    """The address of the API of a dtx with these settings."""
    (listen,) = settings.admin_listen
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104 - what others bind to
    scheme = "http" if settings.admin_tls_cert is None else "https"
    return f"{scheme}://[{host}]:{listen.port}" if ":" in host else f"{scheme}://{host}:{listen.port}"


def _holder(settings: Settings, url: str) -> str | None:
    """A hint for the case that the API of the lease holder does not answer; ``None`` if no live dtx has the lease."""
    from dtx.log.reader import LogReader

    with LogReader(url) as log:
        leases = [lease for lease in log.leases() if lease.rm == settings.rm and lease.remaining > 0]
        if not leases or log.holder_is_dead(settings.rm):
            return None
    lease = leases[0]
    left = human_duration(max(lease.remaining, 0.1))
    return (
        f". {safe(lease.holder)} has the lease of {settings.rm} (epoch {lease.epoch}) for another {left}: name its "
        "API with --api (a dtx with --no-admin has none: stop it first), or, if that dtx is dead, try again "
        "when the lease has expired"
    )


def _token(settings: Settings, access: ApiAccess, stack: ExitStack) -> str:
    """The token for ``--api``, where the database may be out of reach."""
    given = access.given_token()
    if given is not None:
        return given
    from dtx.embedded.postgres import EmbeddedPostgresError
    from dtx.log.api import LogError

    try:
        return _temporary_token(settings, database_url(settings), stack)
    except EmbeddedPostgresError:
        pass
    except LogError as error:
        raise CommandError(Exit.DATABASE, f"no token was given, and none can be created: {error}") from None
    if not sys.stdin.isatty():
        raise CommandError(
            Exit.USAGE,
            f"a token for {access.api} is needed: use --token-file, DTX_TOKEN, or --database, which creates one",
        )
    asked: str = click.prompt(f"token for {access.api}", hide_input=True, err=True)
    return asked.strip()


def _temporary_token(settings: Settings, url: str, stack: ExitStack) -> str:
    """A temporary token, created in the database and revoked when *stack* is closed."""
    from dtx.auth.operators import OperatorLog
    from dtx.auth.roles import OperatorRole

    log = OperatorLog(url, settings.rm)
    name = f"{user_name()[:40]} at the command line {secrets.token_hex(4)}"
    made = log.make_token(name, OperatorRole.COORDINATOR, user_name(), seconds=_TOKEN_SECONDS)
    stack.callback(_revoke, log, name)
    return made


def _revoke(log: "OperatorLog", name: str) -> None:
    from dtx.log.api import LogError

    with suppress(LogError):  # the command is done, and the token expires anyway
        log.revoke_token(name)
