"""Which API a command asks: the one that is named, that of the dtx that has the lease, or the one in this process."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeAlias, Union

from dtx.admin.safe_text import human_duration, safe
from dtx.cli.connect import database_at_hand, database_url
from dtx.cli.console.access import Access, address_of, ask_for_token
from dtx.cli.console.person import user_name
from dtx.cli.console.remote import Remote
from dtx.cli.errors import CommandError, Exit
from dtx.config import Settings

if TYPE_CHECKING:
    from dtx.cli.console.local import Local
    from dtx.log.operators import OperatorLog

_TOKEN_SECONDS: Final = 6 * 3600.0
"""As long as a large bulk order may take; nobody else gets to know the token, and it is revoked at the end."""

Api: TypeAlias = Union[Remote, "Local"]


@contextmanager
def reach(settings: Settings, access: Access, *, orders: bool, make: bool = False) -> Iterator[Api]:
    """The API to ask.

    Args:
        settings: which dtx.
        access: what the user said about its API.
        orders: whether it will be asked to change something: that takes the active dtx, where there is one.
        make: where there is no embedded PostgreSQL yet, make it with its tables, for what is wanted before the first
            start. Whoever looks for branches must not find an empty one.

    Raises:
        CommandError: no token, or no way to the API.
        LogError, EmbeddedPostgresError: the database cannot be used.
    """
    with ExitStack() as stack:
        if access.api is not None:
            yield Remote(access.api, lambda: _token(settings, access, stack), ca=access.trusted())
            return
        url = stack.enter_context(database_at_hand(settings, make=make))
        if make and settings.database is None:
            _make_tables(url)
        hint = _holder(settings, url) if orders else None
        if hint is not None:
            base = address_of(settings)
            yield Remote(
                base, lambda: access.given_token() or _lent(settings, url, stack), ca=access.trusted(), hint=hint
            )
            return
        from dtx.cli.console.local import Local

        yield stack.enter_context(Local(settings, url))


def _make_tables(url: str) -> None:
    from dtx.log import migrate

    if migrate.current(url) is None:
        migrate.upgrade(url)


def _holder(settings: Settings, url: str) -> str | None:
    """What to say where the API of the dtx that has the lease does not answer; ``None`` where none has it."""
    from dtx.log.reading import LogReader

    with LogReader(url) as log:
        leases = [lease for lease in log.leases() if lease.rm == settings.rm and lease.remaining > 0]
        if not leases or log.holder_is_dead(settings.rm):
            return None
    lease = leases[0]
    left = human_duration(max(lease.remaining, 0.1))
    return (
        f". {safe(lease.holder)} has the lease of {settings.rm} (epoch {lease.epoch}) for another {left}: name its "
        "API with --api (with --no-admin it has none, and has to be stopped first), or, if that dtx is dead, ask again "
        "when the lease has run out"
    )


def _token(settings: Settings, access: Access, stack: ExitStack) -> str:
    """For an API that was named: the database may be out of reach."""
    given = access.given_token()
    if given is not None:
        return given
    from dtx.embedded.postgres import EmbeddedPostgresError
    from dtx.log.api import LogError

    try:
        return _lent(settings, database_url(settings), stack)
    except EmbeddedPostgresError:
        pass
    except LogError as error:
        raise CommandError(Exit.DATABASE, f"no token was given, and none can be made: {error}") from None
    assert access.api is not None
    return ask_for_token(access.api)


def _lent(settings: Settings, url: str, stack: ExitStack) -> str:
    """A token for the moment, made in the database."""
    from dtx.log.operator_tables import Role
    from dtx.log.operators import OperatorLog

    log = OperatorLog(url, settings.rm)
    name = f"{user_name()[:40]} at the command line {secrets.token_hex(4)}"
    made = log.make_token(name, Role.COORDINATOR, user_name(), seconds=_TOKEN_SECONDS)
    stack.callback(_revoke, log, name)
    return made


def _revoke(log: "OperatorLog", name: str) -> None:
    from dtx.log.api import LogError

    with suppress(LogError):  # the command has done what it was for; the token expires
        log.revoke_token(name)
