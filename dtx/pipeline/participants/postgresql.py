"""Prepared transactions of PostgreSQL: ``pg_prepared_xacts``, of all databases of the server."""

from datetime import UTC, datetime

from dtx.pipeline.participants.kinds import Observation, Participant
from dtx.pipeline.participants.xids import from_gid
from dtx.pipeline.quarantine import Quarantined, sample
from dtx.pipeline.source.errors import SourceError
from dtx.pipeline.source.options import Waits
from dtx.pipeline.source.server import connected

# a prepared_at of infinity is none that Python can hold; nobody but a hand in the catalog writes one
_PREPARED = (
    "SELECT convert_to(gid, 'UTF8'), CASE WHEN isfinite(prepared) THEN prepared END, owner::text, database::text "
    "FROM pg_prepared_xacts ORDER BY prepared, gid"
)


def look(participant: Participant, waits: Waits) -> tuple[list[Observation], list[Quarantined]]:
    """What is prepared there; what is no xid is kept as it is, and counted."""
    try:
        with connected(participant.name, participant.url, waits) as server:
            rows = server.rows(_PREPARED)
    except SourceError as error:
        reason = str(error).removeprefix(f"{participant.name}: ")
        return [], [Quarantined(source=participant.name, item="pg_prepared_xacts", reason=reason, count=None)]
    now = datetime.now(UTC)
    found, raw = [], []
    for gid, prepared, owner, database in rows:
        xid = from_gid(bytes(gid).decode("utf-8", "surrogateescape"))
        if xid is None:
            raw.append(bytes(gid))
        found.append(
            Observation(
                source=participant.name,
                kind=participant.kind.value,
                rm=participant.name,
                vhost=database,
                format_id=None if xid is None else xid.format_id,
                gtrid=bytes(gid) if xid is None else xid.gtrid,
                bqual=b"" if xid is None else xid.bqual,
                state="prepared",
                owner=owner,
                since=prepared,
                observed_at=now,
            )
        )
    return found, unparsed(participant, "pg_prepared_xacts", raw)


def unparsed(participant: Participant, item: str, raw: list[bytes]) -> list[Quarantined]:
    """What is said of identifiers that are no xids: their branches are observed nevertheless."""
    if not raw:
        return []
    reason = "identifiers that are no xid: kept as they are, they match no decision"
    return [Quarantined(source=participant.name, item=item, reason=reason, count=len(raw), sample=sample(raw[0]))]
