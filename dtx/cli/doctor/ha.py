"""Would another dtx take over: who has the lease, who stands by, and how long it would take."""

from collections.abc import Iterator
from typing import Final

from dtx.admin.safe_text import human_duration, safe
from dtx.cli.connect import database_url
from dtx.cli.doctor.model import Check, ok, warning
from dtx.config import Settings
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LogError
from dtx.log.reading import Holder, LogReader

_HEARTBEATS: Final = 3
"""Without that many, RabbitMQ has closed a connection: until then what was sent on it may still happen."""
_SHORT_LEASE: Final = 5.0
"""Seconds: a third of it is what a renewal gets, and a failover of PostgreSQL or a paused machine takes longer."""
_LONG_TAKEOVER: Final = 120.0
_RENEWALS: Final = 3


def check_ha(settings: Settings) -> Iterator[Check]:
    """Everything that can be seen in the settings and in the database. Writes nothing."""
    if settings.database is None:
        yield ok(
            "ha",
            "the embedded PostgreSQL is this machine's: for a standby on another one, give both the same --database",
        )
    try:
        with LogReader(database_url(settings)) as log:
            leases = log.leases()
            waiting = log.standbys()
    except (LogError, EmbeddedPostgresError):
        return  # what is wrong with the database has been said
    yield from _holder(settings, [lease for lease in leases if lease.rm == settings.rm], waiting, len(leases))
    yield from _times(settings)


def _holder(settings: Settings, mine: list[Holder], waiting: int, managers: int) -> Iterator[Check]:
    active = [lease for lease in mine if lease.remaining > 0]
    others = "" if managers == 1 else f" (for one of the {managers} resource managers of this database)"
    if not active:
        yield ok("lease", _nobody(settings, mine))
        return
    (lease,) = active
    yield ok("lease", f"{safe(lease.holder)} (epoch {lease.epoch}) is the active dtx of {lease.rm}")
    if waiting:
        yield ok("ha.standby", f"{waiting} dtx stand{'s' if waiting == 1 else ''} by{others}")
    elif settings.database is not None:
        yield ok(
            "ha.standby",
            "no other dtx stands by: when this one dies, branches wait until it is started again; start a second one "
            f"with the same --database and --rm {settings.rm}",
        )


def _nobody(settings: Settings, mine: list[Holder]) -> str:
    if not mine:
        return f"no dtx has ever served as {settings.rm} on this database"
    (lease,) = mine
    return f"no dtx is active as {lease.rm}; the last one was {safe(lease.holder)} (epoch {lease.epoch})"


def _times(settings: Settings) -> Iterator[Check]:
    """How long a failover takes, and whether the lease outlives what is shorter than one."""
    lease = settings.lease_ttl
    words = f"a standby serves within {human_duration(lease + 2)} of a kill"
    open_units = _HEARTBEATS * settings.upstream_heartbeat if settings.broker is not None else 0.0
    if open_units:
        words += f", and decides what was on its way to the broker within {human_duration(open_units)} more"
    if lease < _SHORT_LEASE:
        yield warning(
            "ha.lease",
            f"--lease-ttl {human_duration(lease)} leaves a renewal {human_duration(lease / _RENEWALS)}: a pause of "
            "PostgreSQL or of this machine hands over to the standby; 10s to 30s is usual",
        )
    elif lease + open_units > _LONG_TAKEOVER:
        yield warning(
            "ha.lease", f"{words}: that is long; shorten --lease-ttl{' or --upstream-heartbeat' if open_units else ''}"
        )
    else:
        yield ok("ha.lease", words)
