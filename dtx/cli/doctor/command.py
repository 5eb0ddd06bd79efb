"""The command ``dtx doctor``."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click

from dtx.admin.safe_text import safe
from dtx.cli.doctor import DoctorCheck, Status, failed, ok, warning
from dtx.cli.errors import Exit, explain
from dtx.cli.options import BROKER_SETTINGS, DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import Column, Listing, Row, with_form
from dtx.config import Settings

if TYPE_CHECKING:
    from rich.text import Text

_STYLES: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def _status(row: Row) -> "Text":
    from rich.text import Text

    return Text(row["status"], style=_STYLES[Status(row["status"])])


_COLUMNS: Final = (
    Column("status", cell=_status),
    Column("check"),
    Column("sentence", cell=lambda row: row["sentence"]),
)
_SOON: Final = timedelta(days=30)
"""A certificate that expires within this time is a warning."""
_EPILOG = """\b
Examples:
  dtx doctor
  dtx doctor --broker amqps://dtx@broker.example --json | jq -r 'select(.status == "failed").sentence'

The exit code is 1 if a check failed, else 0; warnings do not count."""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@with_settings(
    "listen", "tls_cert", "tls_key", "tls_ca",
    "admin_listen", "no_admin", "admin_tls_cert", "admin_tls_key", "admin_proxy",
    *BROKER_SETTINGS, *DATABASE_SETTINGS, "unsafe", "coordinator", "lease_ttl", "upstream_heartbeat",
)  # fmt: skip
@with_form
def doctor(settings: Settings, listing: Listing) -> int:
    """Check the database, the broker and dtx's permissions there, and say what to fix.

    Give it the settings of 'dtx serve'. Without --broker it checks the users and messages of dtx itself. It changes
    nothing, and can run while dtx serves.
    """
    checks = list(run_checks(settings))
    rows = [{"check": check.name, "status": str(check.status), "sentence": check.sentence} for check in checks]
    listing.show(lambda: rows, _COLUMNS, "")
    return Exit.FAILED if any(check.status is Status.FAILED for check in checks) else Exit.OK


def run_checks(settings: Settings) -> Iterator[DoctorCheck]:
    """Run all checks, in the order in which their findings should be fixed."""
    from dtx.cli.doctor.broker import check_broker
    from dtx.cli.doctor.database import check_database, check_ha, check_left_behind, check_standalone

    for name, sentence in (*settings.deprecated().items(), *settings.unencrypted().items()):
        yield warning(name, sentence)
    yield from _guarded("certificates", _check_certificates, settings)
    yield from _guarded("database", check_database, settings)
    yield from _guarded("ha", check_ha, settings)
    if settings.broker is not None:
        yield from _guarded("broker", check_broker, settings)
        yield from _guarded("standalone", check_left_behind, settings)
    else:
        yield from _guarded("standalone", check_standalone, settings)


def _check_certificates(settings: Settings) -> Iterator[DoctorCheck]:
    """The files of certificates. A dtx that runs uses them as they were at its start."""
    from dtx.tls import expirations

    files = {name: getattr(settings, name) for name in ("tls_cert", "tls_ca", "admin_tls_cert")}
    for name, path in files.items():
        if path is None:
            continue
        ends = expirations(path.read_text("utf-8", "replace"))
        if not ends:
            yield failed(name, f"{path} has no PEM certificate")
            continue
        end = min(ends)
        left, until = end - datetime.now(UTC), f"{end:%Y-%m-%d %H:%M} UTC"
        if left <= timedelta():
            yield failed(name, f"a certificate in {path} has expired at {until}: renew it, then restart dtx")
        elif left < _SOON:
            yield warning(name, f"a certificate in {path} expires at {until}: renew it, then restart dtx")
        else:
            yield ok(name, f"the certificates in {path} are valid until {until}")


def _guarded(
    name: str, checks: Callable[[Settings], Iterator[DoctorCheck]], settings: Settings
) -> Iterator[DoctorCheck]:
    """Run one group of checks. An unexpected exception becomes a finding, so that the other groups still run."""
    try:
        for check in checks(settings):
            # Sentences quote servers, and servers quote text that clients chose.
            yield DoctorCheck(name=check.name, status=check.status, sentence=safe(check.sentence))
    except Exception as error:  # noqa: BLE001
        yield failed(name, f"the checks ended early: {safe(explain(error)[1])}")
