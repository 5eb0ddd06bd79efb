r"""What the API says and takes, as models: the OpenAPI document is made of them.

Names and keys are octets on the wire. They are shown as text, what is no UTF-8 with ``\x..`` escapes; bodies and
properties are in base64.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from dtx.admin.api_context import Arrived, ChannelFacts, Connected
from dtx.admin.branch_filter import FilterForm, Name
from dtx.admin.safe_text import exact_name
from dtx.config.rules import QuotaResource
from dtx.log.pages import InDoubt, JournalRow
from dtx.log.reader import Detail, LeaseHolder
from dtx.log.records import ArchivedMessage, BranchRecord, JournalEntry, JournalEvent, WorkRow
from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.limits import Usage
from dtx.manager.operators import Done, Forecast
from dtx.manager.scan import Scan
from dtx.store.slices import finish
from dtx.wire.amqp09.tables import MAX_SHORT
from dtx.xa.model import Association

MOST_TIES: Final = 1000
"""Branches that are shown of one connection; ``GET /api/associations`` has all of them."""


def moment(at: float | None) -> datetime | None:
    """A time, in UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC)


def seconds(moment: datetime | None) -> float | None:
    """A time as seconds since the epoch."""
    return None if moment is None else moment.astimezone(UTC).timestamp()


def _shown(value: object) -> object:
    return exact_name(value) if isinstance(value, bytes) else value


def _at(value: object) -> object:
    return moment(value) if isinstance(value, float | int) else value


Reason = Annotated[str, Field(min_length=1, max_length=2000, description="Why; goes into journal and trail.")]
Shown = Annotated[str, BeforeValidator(_shown)]
"""From octets."""
Moment = Annotated[datetime | None, BeforeValidator(_at)]
"""From seconds since the epoch."""
AsText = Annotated[str, BeforeValidator(str)]
"""From whatever has a text form: an xid, an id."""


_ABSENT: Final = object()
*_RESOURCES, _LAST_RESOURCE = (
    "those of them in doubt" if name is QuotaResource.IN_DOUBT else name for name in QuotaResource
)


class Form(BaseModel):
    """Base of all: what is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, source: object, /, **more: object) -> Self:
        """From *source*, which has the fields as attributes, but for those in *more* and those that may be left out."""
        if not more:
            return cls.model_validate(source, from_attributes=True)
        given = {name: found for name in cls.model_fields if (found := getattr(source, name, _ABSENT)) is not _ABSENT}
        return cls.model_validate(given | more)


class BranchForm(Form):
    """A branch."""

    xid: AsText = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid where it is printable.")
    id: AsText
    vhost: str
    state: str
    version: int = Field(description="Grows with every change; an order may name the one that it is about.")
    owner: str
    age: float | None = Field(default=None, description="Seconds since the branch was started.")
    started_at: Moment
    prepared_at: Moment
    decided_at: Moment
    publishes: int
    consumes: int
    bytes: int
    stuck: str | None = Field(description="The broker's words, where phase two could not finish.")
    outcome: str | None = Field(description="The heuristic outcome: the one there is, or there will be.")
    queues: list[Shown] = Field(default_factory=list, description="Where it consumed.")
    destinations: list[Shown] = Field(
        default_factory=list,
        description="Queues that it publishes to: without a broker all, with one those of the default exchange.",
    )
    exchanges: list[Shown] = Field(
        default_factory=list, description="Where it publishes; empty is the default exchange."
    )

    @classmethod
    def of_record(cls, record: BranchRecord, found: InDoubt | None = None) -> Self:
        """From the log; *found* tells where it consumed and publishes."""
        more: dict[str, Any] = {"readable": record.xid.readable}
        if found is not None:
            more |= {"age": found.age, "queues": found.queues}
            more |= {"destinations": found.destinations, "exchanges": found.exchanges}
        return cls.of(record, **more)


class Page(Form):
    """Branches, by the time of their start."""

    branches: list[BranchForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


class MessageForm(Form):
    """A message of a branch, without its contents."""

    position: int
    kind: str
    fate: str | None = Field(description="What became of it; null while that is open.")
    exchange: Shown
    routing_key: Shown
    queue: Shown | None
    bytes: int


class Contents(MessageForm):
    """A message with its contents: to look at, or to keep before it is given up."""

    properties: str = Field(description="Content header from the property flags on, in base64.")
    body: str = Field(description="In base64.")

    @classmethod
    def exported(cls, work: WorkRow) -> Self:
        """All of it."""
        return cls.of(work, bytes=len(work.body), **_contents(work.properties, work.body))


def _contents(properties: bytes, body: bytes) -> dict[str, str]:
    return {"properties": b64encode(properties).decode(), "body": b64encode(body).decode()}


class JournalForm(Form):
    """A line of the journal."""

    at: Moment
    event: str
    xid: AsText
    vhost: str
    owner: str
    actor: str
    reason: str | None
    outcome: str | None
    publishes: int
    consumes: int
    bytes: int
    branch: AsText

    @classmethod
    def of_entry(cls, entry: JournalEntry) -> Self:
        """From the log."""
        return cls.of(entry, branch=entry.branch_id)


class DetailForm(Form):
    """One branch with everything that is known of it."""

    branch: BranchForm
    messages: list[MessageForm] = Field(description="A page of them, in the order of their positions.")
    cursor: int | None = Field(description="For the next page of messages; null on the last one.")
    decided_by: str | None = Field(description="Who decided it heuristically.")
    decided_because: str | None
    journal: list[JournalForm] = Field(description="The last 500 lines; the journal itself has all.")

    @classmethod
    def of_detail(cls, detail: Detail, lines: list[JournalRow]) -> Self:
        """From the log."""
        decision = detail.decision
        return cls(
            branch=BranchForm.of_record(detail.branch),
            messages=[MessageForm.of(work, bytes=size) for work, size in zip(detail.work, detail.sizes, strict=True)],
            cursor=detail.cursor,
            decided_by=None if decision is None else decision.actor,
            decided_because=None if decision is None else decision.reason,
            journal=[JournalForm.of_entry(line.entry) for line in lines],
        )


class StepForm(MessageForm):
    """What happens to one message."""

    fate: str | None = Field(description="What becomes of it; null where it goes elsewhere when the branch goes on.")


class ForecastForm(Form):
    """What an order would do, or has done."""

    state: str = Field(description="Of the branch before.")
    version: int = Field(description="Of the branch before.")
    becomes: str = Field(description="Its state when all is done; unknown: it has left the log.")
    outcome: str | None
    told: str = Field(description="What the transaction manager is told when it asks for commit or rollback then.")
    archived: int = Field(description="Undelivered messages; they are in the archive after the branch is forgotten.")
    messages: list[StepForm]

    @classmethod
    def of_forecast(cls, forecast: Forecast) -> Self:
        """From the operators' side of the manager."""
        return cls.of(forecast, messages=[StepForm.of(step) for step in forecast.steps])


class DoneForm(Form):
    """The answer to an order."""

    dry_run: bool
    forecast: ForecastForm
    answer: str | None = Field(default=None, description="xa-ok, or the heuristic outcome; null for a dry run.")
    state: str | None = Field(default=None, description="Of the branch now; null for a dry run.")
    version: int | None = Field(default=None, description="Of the branch now; null where it is gone, or a dry run.")

    @classmethod
    def of_done(cls, done: Done) -> Self:
        """What was done."""
        return cls.of(done, dry_run=False, forecast=ForecastForm.of_forecast(done.forecast))


class OrderForm(Form):
    """An order about one branch."""

    reason: Reason
    version: int | None = Field(default=None, description="Refused (412) where the branch has another one by now.")
    dry_run: bool = Field(default=False, description="Say what would happen, and do nothing.")


class DiscardForm(OrderForm):
    """Messages that phase two is stuck with are given up."""

    positions: Annotated[list[int], Field(min_length=1, max_length=100_000)]


def _short(name: str) -> str:
    if len(name.encode()) > MAX_SHORT:
        raise ValueError(f"AMQP takes {MAX_SHORT} octets at most")
    return name


Short = Annotated[str, Field(max_length=MAX_SHORT), AfterValidator(_short)]
"""A name or key as AMQP carries it: octets are counted there, and not characters."""


class RedirectForm(OrderForm):
    """A message that phase two is stuck with goes elsewhere: to an exchange, or back to another queue."""

    position: int
    exchange: Short = ""
    routing_key: Short = ""
    queue: Short | None = None


class BulkForm(Form):
    """An order about many branches: a dry run first, then its *confirm* with the same filter."""

    action: Literal["commit", "rollback", "forget", "retry"]
    filter: FilterForm
    reason: Reason
    dry_run: bool = True
    confirm: str | None = Field(default=None, description="From the dry run: the same branches in the same versions.")


class BulkResult(Form):
    """How the order went for one branch."""

    xid: str
    vhost: str
    answer: str = Field(description="xa-…, or what stands against it.")
    done: bool


class BulkAnswer(Form):
    """The answer to a bulk order."""

    dry_run: bool
    confirm: str
    branches: int
    results: list[BulkResult]


class LaneForm(Form):
    """Where phase two happens, in one virtual host of the broker."""

    vhost: str
    problem: str | None = Field(description="Why it is not working; null when it is.")
    distrust: str | None = Field(description="Why receipts are not believed; null when they are.")
    blocked: bool = Field(description="Whether the broker takes no publishes: a memory or disk alarm.")
    channels: int = Field(description="How many units can be under way at a time.")
    under_way: int = Field(description="Units that the broker is working on.")
    waiting: int = Field(description="Units that wait for a channel.")


class LeaseForm(Form):
    """Who is the active dtx of a resource manager."""

    rm: str
    holder: str
    epoch: int
    taken_at: Moment
    remaining: float | None = Field(description="Seconds until it runs out; null where it was given back.")

    @classmethod
    def of_holder(cls, holder: LeaseHolder) -> Self:
        """From the log."""
        return cls.of(holder, remaining=holder.remaining if holder.remaining > float("-inf") else None)


class UsageForm(Form):
    """What one user or one virtual host holds."""

    scope: str = Field(description="user or vhost.")
    name: str
    used: dict[str, int] = Field(description=f"{', '.join(_RESOURCES)} and {_LAST_RESOURCE}.".capitalize())
    quota: dict[str, int] = Field(description="The most of each, where --quota says so.")

    @classmethod
    def of_usage(cls, usage: Usage) -> Self:
        """As it is now."""
        return cls.of(usage, quota=usage.limits)


class StatusForm(Form):
    """How dtx is."""

    rm: str
    active: bool
    draining: bool
    branches: dict[str, int] = Field(description="How many, by state.")
    ages: dict[str, list[int]] = Field(
        description="By state, how many are younger than each of age_bounds and not than the one before; then the rest."
    )
    age_bounds: list[int] = Field(description="Seconds since the start.")
    stuck: int = Field(description="Branches that phase two is stuck with.")
    oldest_prepared_at: Moment = Field(description="When the branch was that has been so for the longest time.")
    in_doubt_bytes: int = Field(description="Messages of branches that have voted.")
    held_bytes: int = Field(description="Memory for messages of branches that have not voted.")
    connections: int
    usage: list[UsageForm] = Field(description="Of each user and virtual host that holds anything.")
    lanes: list[LaneForm]
    leases: list[LeaseForm]


class ConnectionForm(Form):
    """A client's connection."""

    id: int = Field(description="Its number in the logs.")
    user: str = Field(description="Empty during the handshake.")
    vhost: str
    protocol: str
    address: str = Field(description="Of its socket, host:port.")
    tls: bool
    since: Moment
    state: str = Field(description="running; detached: the client is gone, and branches still need its deliveries.")
    channels: int
    selected: int = Field(description="Channels that selected distributed transactions.")
    associated: int = Field(description="Channels that work for a branch now.")
    suspended: int = Field(description="Associations that are suspended.")
    scans: int = Field(description="Recovery scans that are open.")

    @classmethod
    async def of_clients(cls, clients: Iterable[tuple[Connected, Arrived]]) -> list[Self]:
        """Clients, each as it is in one of several turns of the event loop."""
        shown: list[Self] = []
        await finish(cls._fill(clients, shown))
        return shown

    @classmethod
    def _fill(cls, clients: Iterable[tuple[Connected, Arrived]], shown: list[Self]) -> Iterator[None]:
        for client, arrival in clients:
            channels = list(client.channels.values())
            ties: Counter[Association] = Counter()
            for channel in channels:
                for _, how in channel.ties:
                    ties[how] += 1
                    yield
            form = cls(
                id=client.id,
                user=client.who.user,
                vhost=client.who.vhost,
                protocol=arrival.protocol,
                address=arrival.address,
                tls=arrival.tls,
                since=arrival.since,
                state=client.stage.value,
                channels=len(channels),
                selected=sum(channel.mode.value == "dtx" for channel in channels),
                associated=ties[Association.ASSOCIATED],
                suspended=ties[Association.SUSPENDED],
                scans=sum(channel.scan is not None for channel in channels),
            )
            shown.append(form)
            yield


class ConnectionPage(Form):
    """Connections, those that came first before others."""

    connections: list[ConnectionForm]
    cursor: int | None = Field(description="Of the next page; null on the last one.")


class TieForm(Form):
    """A branch that a channel works for, or has suspended."""

    xid: str
    readable: str | None
    state: str = Field(description="Of the branch.")
    association: str = Field(description="associated, or suspended")


class ScanForm(Form):
    """A recovery scan that is open on a channel."""

    connection: int
    channel: int
    user: str
    vhost: str
    left: int = Field(description="How many xids it has still to hand out.")

    @classmethod
    def of_scan(cls, client: Connected, channel: int, scan: Scan) -> Self:
        """A scan as it is now."""
        return cls(connection=client.id, channel=channel, user=client.who.user, vhost=client.who.vhost, left=scan.left)


class ScanPage(Form):
    """Open recovery scans."""

    scans: list[ScanForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


class ChannelForm(Form):
    """A channel of a connection."""

    number: int
    mode: str = Field(description="dtx, tx, confirm, or plain")
    branches: list[TieForm]
    scan: int | None = Field(description="How many xids its recovery scan has still to hand out; null without one.")

    @classmethod
    def of_channel(cls, number: int, channel: ChannelFacts, most: int) -> Self:
        """A channel as it is now, with *most* branches at most."""
        return cls(
            number=number,
            mode=channel.mode.value,
            branches=[
                TieForm(
                    xid=str(entry.xid), readable=entry.xid.readable, state=entry.branch.state, association=how.value
                )
                for entry, how in islice(channel.ties, most)
            ],
            scan=None if channel.scan is None else channel.scan.left,
        )


class ClientForm(Form):
    """A connection with its channels."""

    connection: ConnectionForm
    channels: list[ChannelForm] = Field(
        description=f"With {MOST_TIES} branches together at most; GET /api/associations lists all."
    )

    @classmethod
    async def of_client(cls, client: Connected, arrival: Arrived) -> Self:
        """A client as it is now."""
        channels: list[ChannelForm] = []
        left = MOST_TIES
        for number, channel in sorted(client.channels.items()):
            channels.append(ChannelForm.of_channel(number, channel, left))
            left -= len(channels[-1].branches)
        (connection,) = await ConnectionForm.of_clients([(client, arrival)])
        return cls(connection=connection, channels=channels)


class DisconnectForm(Form):
    """An order to end a client's connection."""

    reason: Reason


class PlaceForm(Form):
    """Where a branch is worked on."""

    connection: int
    channel: int
    association: str = Field(description="associated, or suspended")


class AssociationForm(Form):
    """A branch that has not voted: nobody but this dtx knows it."""

    id: str
    xid: str
    readable: str | None
    vhost: str
    owner: str
    state: str
    started_at: Moment
    associated: int
    suspended: int
    channels: list[PlaceForm]
    publishes: int = Field(description="Messages that it has published so far.")
    consumes: int = Field(description="Deliveries that it has acknowledged so far.")
    bytes: int
    timeout: int = Field(description="Seconds from start to prepare; 0 for no limit.")

    @classmethod
    def of_entry(cls, entry: BranchRuntime, places: list[PlaceForm]) -> Self:
        """A branch as it is now."""
        hows = list(entry.branch.associations.values())
        work = entry.work
        return cls(
            id=str(entry.id),
            xid=str(entry.xid),
            readable=entry.xid.readable,
            vhost=entry.vhost,
            owner=entry.branch.owner,
            state=entry.branch.state,
            started_at=entry.started_at,
            associated=hows.count(Association.ASSOCIATED),
            suspended=hows.count(Association.SUSPENDED),
            channels=places,
            publishes=0 if work is None else work.publishes,
            consumes=0 if work is None else work.consumes,
            bytes=0 if work is None else work.bytes,
            timeout=entry.branch.timeout,
        )


class AssociationPage(Form):
    """Branches that have not voted, by the time of their start."""

    associations: list[AssociationForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


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
    """An undelivered message of a forgotten branch, without its contents."""

    xid: AsText
    readable: str | None
    vhost: str
    owner: str
    branch: AsText
    archived_at: Moment

    @classmethod
    def of_archived(cls, message: ArchivedMessage, **more: object) -> Self:
        """From the archive; *more* has at least how many octets the body has."""
        return cls.of(message, readable=message.xid.readable, branch=message.branch_id, archived_at=message.at, **more)


class ArchivedContents(Contents, ArchivedForm):
    """The same with its contents."""

    @classmethod
    def exported_from_archive(cls, message: ArchivedMessage) -> Self:
        """All of it."""
        return cls.of_archived(message, bytes=len(message.body), **_contents(message.properties, message.body))


class ArchivePage(Form):
    """Messages of the archive, what came last first."""

    messages: list[ArchivedForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


class AuditForm(Form):
    """A line of the trail."""

    id: int
    at: Moment
    actor: str
    role: str
    address: str
    action: str
    subject: str
    reason: str
    detail: str
    result: str | None = Field(description="Null where dtx died before it was known.")


class AuditPage(Form):
    """Lines of the trail, the latest first."""

    lines: list[AuditForm]
    cursor: int | None = Field(description="Of the next page; null on the last one.")
