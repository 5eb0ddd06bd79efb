"""``dtx serve``: read the settings, then run the service."""

import asyncio
import os
import ssl

import click

from dtx import failpoint
from dtx.cli.errors import EXIT_CODES
from dtx.cli.options import SettingsCommand, with_settings
from dtx.config import ConfigError, Settings

_EXAMPLES = """\b
Examples:
  dtx serve --broker amqp://dtx:secret@127.0.0.1:5672/
  DTX_BROKER=amqp://... DTX_DATABASE=postgresql://... dtx serve
  dtx serve --config /etc/dtx.toml --coordinator tm
  dtx serve --broker amqp://... --database postgresql://... --processes 4

Every setting can be given as a flag, as an environment variable (in square brackets) and as a key of a TOML file (the
flag's name with _ for -). Flags override the environment, which overrides the file. An unknown key is an error.
Sizes: 65536, 64KiB, 1MiB. Durations: 30, 30s, 500ms, 5m, 2h, 90d; a bare number is in seconds.

Clients can connect after the line "READY listen=..." on stdout. SIGTERM stops gracefully: dtx takes no new branches and
finishes commits under way. A second signal stops at once; it loses nothing either.

With --processes 4, a supervisor runs four members on one port, restarts those that die, and passes these signals on.
The lines of their logs have the field "process".

"""


@click.command(cls=SettingsCommand, epilog=_EXAMPLES + EXIT_CODES)
@with_settings(*Settings.model_fields)
def serve(settings: Settings) -> int:
    """Run dtx, in front of a broker or as one, until a signal stops it.

    With --broker, clients connect to dtx instead of the broker and need no change. Their channels can take part in XA
    transactions (the AMQP classes dtx-demarcation and dtx-coordination). Without it, dtx is the broker: it keeps
    queues and messages in the database, and its users are those of `dtx user`.
    """
    _check_certificates(settings)
    _check_members(settings)

    import uvloop

    from dtx.server.processes import supervise
    from dtx.server.service import serve as run_service
    from dtx.telemetry import configure, get_logger

    configure(settings.log_level, settings.log_format)
    process = None
    if settings.processes > 1:
        supervised = supervise(settings)
        if isinstance(supervised, int):
            return supervised
        process, settings = supervised, supervised.settings
        configure(settings.log_level, settings.log_format, process=process.number)
    get_logger().debug("settings", **settings.redacted())
    # At a failpoint, bytes that were sent must be in the socket: asyncio writes at once, uvloop after the iteration.
    run = asyncio.run if failpoint.armed else uvloop.run
    return run(run_service(settings, process))


def _check_members(settings: Settings) -> None:
    """Raise ConfigError if dtx is to be one of several, and cannot. Other commands share a file with such settings."""
    if settings.broker is None or settings.database is None:
        for name, given in (("advertise", settings.advertise is not None), ("processes", settings.processes > 1)):
            if given:
                raise ConfigError(
                    f"{name} needs broker and database: without a broker, or with a database of its own, dtx is alone"
                )


def _check_certificates(settings: Settings) -> None:
    """Raise ConfigError with the name of the file that cannot be used; OpenSSL's errors do not name it."""
    authorities = (
        ("tls_ca", settings.tls_ca), ("member_ca", settings.member_ca), ("broker_ca", settings.broker_ca),
    )  # fmt: skip
    pairs = (
        ("tls_cert", settings.tls_cert, settings.tls_key),
        ("admin_tls_cert", settings.admin_tls_cert, settings.admin_tls_key),
    )
    ours = [item for name, cert, key in pairs for item in ((name, cert), (name.replace("cert", "key"), key))]
    for name, path in (*ours, *authorities):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise ConfigError(f"{name}: {path} is not a file that can be read")
    for _, cert, key in pairs:
        if cert is not None and key is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                # With a password given, OpenSSL does not prompt for one on the terminal.
                context.load_cert_chain(cert, key, password="")
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(
                    f"{cert} and {key} are not a PEM certificate and its unencrypted key: {error}"
                ) from None
    for name, path in authorities:
        if path is not None:
            try:
                ssl.create_default_context(cafile=path)
            except ssl.SSLError as error:
                raise ConfigError(f"{name}: {path} has no PEM certificate: {error}") from None
