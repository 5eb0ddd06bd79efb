"""What the API says about what has happened: journal, outcomes, archive, trail; and what is asked for of it."""

from datetime import UTC, datetime

from pydantic import AwareDatetime, Field

from dtx.admin.forms import Contents, Form, JournalForm, MessageForm, Name, moment, shown_body, text
from dtx.log.operators import AuditLine
from dtx.log.past import Kept
from dtx.log.records import Archived, JournalEvent


class PastQuery(Form):
    """What is asked for; what is left out is every."""

    vhost: Name | None = None
    owner: Name | None = None
    since: AwareDatetime | None = Field(default=None, description="Not before then.")
    until: AwareDatetime | None = Field(default=None, description="Before then.")
    limit: int = Field(default=100, ge=1, le=1000, description="How many at most.")
    cursor: str | None = Field(default=None, max_length=100, description="From the page before.")


class XidQuery(PastQuery):
    """The same, perhaps of one branch, or of the branches of one global transaction."""

    xid: str | None = Field(default=None, max_length=300, description="format:gtrid-hex:bqual-hex")
    gtrid: str | None = Field(default=None, max_length=128, description="In hexadecimal.")


class JournalQuery(XidQuery):
    """Which lines of the journal."""

    event: list[JournalEvent] = Field(default_factory=list, max_length=20)
    latest_first: bool = False


class OutcomeQuery(XidQuery):
    """Which outcomes."""

    event: list[JournalEvent] = Field(
        default_factory=list, max_length=4, description="committed, rolled-back, read-only or forgotten"
    )


class AuditQuery(Form):
    """Which lines of the trail."""

    actor: str | None = Field(default=None, max_length=300)
    action: str | None = Field(default=None, max_length=100)
    subject: str | None = Field(default=None, max_length=300, description="What it has within: an xid, a name.")
    since: AwareDatetime | None = Field(default=None, description="Not before then.")
    until: AwareDatetime | None = Field(default=None, description="Before then.")
    limit: int = Field(default=100, ge=1, le=1000, description="How many at most.")
    cursor: int | None = Field(default=None, ge=0, le=1 << 62, description="From the page before.")


class JournalPage(Form):
    """Lines of the journal."""

    lines: list[JournalForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


class ArchivedForm(MessageForm):
    """A message that nobody got, of a branch that was forgotten, without its contents."""

    xid: str
    readable: str | None
    vhost: str
    owner: str
    branch: str
    archived_at: datetime | None

    @classmethod
    def of_archive(cls, kept: Kept) -> "ArchivedForm":
        """From the archive."""
        return cls(**_about(kept.message), bytes=kept.bytes)


class ArchivedContents(Contents, ArchivedForm):
    """The same with its contents."""

    @classmethod
    def exported_from_archive(cls, kept: Archived) -> "ArchivedContents":
        """All of it."""
        return cls(**_about(kept), bytes=len(kept.body), **shown_body(kept.properties, kept.body))


def _about(kept: Archived) -> dict[str, object]:
    return {
        "position": kept.position,
        "kind": kept.kind,
        "fate": kept.fate,
        "exchange": text(kept.exchange),
        "routing_key": text(kept.routing_key),
        "queue": None if kept.queue is None else text(kept.queue),
        "xid": str(kept.xid),
        "readable": kept.xid.readable,
        "vhost": kept.vhost,
        "owner": kept.owner,
        "branch": str(kept.branch_id),
        "archived_at": moment(kept.at),
    }


class ArchivePage(Form):
    """Messages of the archive, what came last first."""

    messages: list[ArchivedForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


class AuditForm(Form):
    """A line of the trail."""

    id: int
    at: datetime | None
    actor: str
    role: str
    address: str
    action: str
    subject: str
    reason: str
    detail: str
    result: str | None = Field(description="Null where dtx died before it was known.")

    @classmethod
    def of(cls, line: AuditLine) -> "AuditForm":
        """From the trail."""
        return cls(
            id=line.id,
            at=moment(line.at),
            actor=line.actor,
            role=line.role,
            address=line.address,
            action=line.action,
            subject=line.subject,
            reason=line.reason,
            detail=line.detail,
            result=line.result,
        )


class AuditPage(Form):
    """Lines of the trail, the latest first."""

    lines: list[AuditForm]
    cursor: int | None = Field(description="Of the next page; null on the last one.")


def seconds(moment: datetime | None) -> float | None:
    """A time as seconds since the epoch."""
    return None if moment is None else moment.astimezone(UTC).timestamp()
