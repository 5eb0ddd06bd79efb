r"""Models of the requests and answers of the API; the OpenAPI document is made from them.

Names and keys are bytes on the wire. They are shown as text, with ``\x..`` escapes for bytes that are no UTF-8. Bodies
and properties are in base64.
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
from dtx.log.pages import DuplicateRow, InDoubt, JournalRow
from dtx.log.reader import Detail, LeaseHolder, MemberRow
from dtx.log.records import ArchivedMessage, BranchRecord, JournalEntry, JournalEvent, WorkRow
from dtx.manager.limits import Usage
from dtx.manager.operators import Done, Forecast
from dtx.manager.scan import Scan
from dtx.manager.unvoted import UnvotedBranch
from dtx.store.slices import finish
from dtx.wire.amqp09.tables import MAX_SHORT
from dtx.xa.model import Association

MOST_TIES: Final = 1000
"""Branches in the answer about one connection at most; ``GET /dtx/v1/associations`` lists all."""


def moment(at: float | None) -> datetime | None:
    """Seconds since the epoch as a time in UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC)


def seconds(moment: datetime | None) -> float | None:
    """A time in seconds since the epoch."""
    return None if moment is None else moment.astimezone(UTC).timestamp()


def _shown(value: object) -> object:
    return exact_name(value) if isinstance(value, bytes) else value


def _at(value: object) -> object:
    return moment(value) if isinstance(value, float | int) else value


Reason = Annotated[str, Field(min_length=1, max_length=2000, description="Reason, for journal and audit log.")]
Shown = Annotated[str, BeforeValidator(_shown)]
"""Text made from bytes."""
Moment = Annotated[datetime | None, BeforeValidator(_at)]
"""A time made from seconds since the epoch."""
AsText = Annotated[str, BeforeValidator(str)]
"""The text form of an object, for example of an xid or id."""


_ABSENT: Final = object()
*_RESOURCES, _LAST_RESOURCE = (
    "branches in doubt" if name is QuotaResource.IN_DOUBT else name for name in QuotaResource
)


class Form(BaseModel):
    """Base of all models. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, source: object, /, **more: object) -> Self:
        """From the attributes of *source* and from *more*, which overrides them. Optional fields may be missing."""
        if not more:
            return cls.model_validate(source, from_attributes=True)
        given = {name: found for name in cls.model_fields if (found := getattr(source, name, _ABSENT)) is not _ABSENT}
        return cls.model_validate(given | more)


class BranchForm(Form):
    """A branch."""

    xid: AsText = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid as text, if it is printable.")
    id: AsText = Field(description="Id of the branch in the log: a UUID.")
    vhost: str = Field(description="Virtual host.")
    state: str = Field(description="State: see States and answers.")
    version: int = Field(description="Grows with every change; an order may require it.")
    owner: str = Field(description="User that started the branch.")
    age: float | None = Field(default=None, description="Seconds since the branch was started.")
    started_at: Moment = Field(description="Time of start.")
    prepared_at: Moment = Field(description="Time of the vote; null before.")
    decided_at: Moment = Field(description="Time of the decision; null before.")
    publishes: int = Field(description="Number of messages that it publishes.")
    consumes: int = Field(description="Number of messages that it consumes.")
    bytes: int = Field(description="Size of the messages in bytes.")
    stuck: str | None = Field(description="The error because of which phase two is stuck.")
    outcome: str | None = Field(description="The heuristic outcome, also while it is still being carried out.")
    queues: list[Shown] = Field(default_factory=list, description="Queues that it consumed from.")
    destinations: list[Shown] = Field(
        default_factory=list,
        description="Queues that it publishes to; with a broker, only those through the default exchange.",
    )
    exchanges: list[Shown] = Field(
        default_factory=list, description="Exchanges that it publishes to; empty is the default exchange."
    )

    @classmethod
    def of_record(cls, record: BranchRecord, found: InDoubt | None = None) -> Self:
        """From a row of the log; *found* has its queues and exchanges."""
        more: dict[str, Any] = {"readable": record.xid.readable}
        if found is not None:
            more |= {"age": found.age, "queues": found.queues}
            more |= {"destinations": found.destinations, "exchanges": found.exchanges}
        return cls.of(record, **more)


class Page(Form):
    """A page of branches."""

    branches: list[BranchForm] = Field(description="The branches, in the order that the request asks for.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last one.")


class MessageForm(Form):
    """A message of a branch, without its contents."""

    position: int = Field(description="Number of the message in the branch, from 0 on.")
    kind: str = Field(description="publish or consume")
    fate: str | None = Field(description="Result of phase two for the message; null before.")
    exchange: Shown = Field(description="Exchange; empty for the default one.")
    routing_key: Shown = Field(description="Routing key.")
    queue: Shown | None = Field(
        description="Queue that it was consumed from, or is routed to; null if it is not routed yet."
    )
    bytes: int = Field(description="Size of the body in bytes.")


class Contents(MessageForm):
    """A message with its contents."""

    properties: str = Field(description="Content header from the property flags on, in base64.")
    body: str = Field(description="Body in base64.")

    @classmethod
    def exported(cls, work: WorkRow) -> Self:
        """From a row of the log."""
        return cls.of(work, bytes=len(work.body), **_contents(work.properties, work.body))


def _contents(properties: bytes, body: bytes) -> dict[str, str]:
    return {"properties": b64encode(properties).decode(), "body": b64encode(body).decode()}


class JournalForm(Form):
    """A line of the journal."""

    at: Moment = Field(description="Time of the event.")
    event: str = Field(description="Event, for example prepared or committed.")
    xid: AsText = Field(description="format:gtrid-hex:bqual-hex")
    vhost: str = Field(description="Virtual host.")
    owner: str = Field(description="User that started the branch.")
    actor: str = Field(description="User, operator (token:NAME) or policy (policy:NAME) that caused the event.")
    reason: str | None = Field(description="Reason that an operator gave, or the cause of the event.")
    outcome: str | None = Field(description="Heuristic outcome; null if none.")
    publishes: int = Field(description="Number of messages that it publishes.")
    consumes: int = Field(description="Number of messages that it consumes.")
    bytes: int = Field(description="Size of the messages in bytes.")
    branch: AsText = Field(description="Id of the branch: a UUID.")

    @classmethod
    def of_entry(cls, entry: JournalEntry) -> Self:
        """From a row of the journal."""
        return cls.of(entry, branch=entry.branch_id)


class DetailForm(Form):
    """One branch with its messages and its journal."""

    branch: BranchForm = Field(description="The branch.")
    messages: list[MessageForm] = Field(description="A page of messages, in the order of their positions.")
    cursor: int | None = Field(description="Cursor of the next page of messages; null on the last one.")
    decided_by: str | None = Field(description="Operator or policy that decided it heuristically.")
    decided_because: str | None = Field(description="Reason for that decision.")
    journal: list[JournalForm] = Field(description="The last 500 lines; /dtx/v1/journal has all.")

    @classmethod
    def of_detail(cls, detail: Detail, lines: list[JournalRow]) -> Self:
        """From what the log has about the branch, and the latest lines of its journal."""
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
    """The effect of an order on one message."""

    fate: str | None = Field(description="Result for the message; null if it is redirected with the next retry.")


class ForecastForm(Form):
    """The effect of an order."""

    state: str = Field(description="State of the branch before the order.")
    version: int = Field(description="Version of the branch before the order.")
    becomes: str = Field(description="State of the branch afterwards; unknown if it is no longer in the log.")
    outcome: str | None = Field(description="Heuristic outcome afterwards; null if none.")
    later_answer: str = Field(description="Answer to a later commit or rollback of the transaction manager.")
    told: str = Field(description="Deprecated: the former name of later_answer.")
    archived: int = Field(description="Undelivered messages; they go to the archive when the branch is forgotten.")
    messages: list[StepForm] = Field(description="The effect on each message.")

    @classmethod
    def of_forecast(cls, forecast: Forecast) -> Self:
        """From a forecast, with one step for each message."""
        return cls.of(forecast, told=forecast.later_answer, messages=[StepForm.of(step) for step in forecast.steps])


class DoneForm(Form):
    """The answer to an order."""

    dry_run: bool = Field(description="Whether nothing was changed.")
    forecast: ForecastForm = Field(description="The effect of the order.")
    answer: str | None = Field(default=None, description="xa-ok, or the heuristic outcome; null for a dry run.")
    state: str | None = Field(default=None, description="State of the branch now; null for a dry run.")
    version: int | None = Field(
        default=None, description="Version of the branch now; null for a dry run, or if it is no longer in the log."
    )

    @classmethod
    def of_done(cls, done: Done) -> Self:
        """From the result of an order that was carried out."""
        return cls.of(done, dry_run=False, forecast=ForecastForm.of_forecast(done.forecast))


class OrderForm(Form):
    """An order about one branch."""

    reason: Reason
    version: int | None = Field(
        default=None, description="The order is refused (412) if the branch has another version."
    )
    dry_run: bool = Field(default=False, description="Show the effect and change nothing.")


class DiscardForm(OrderForm):
    """An order to discard messages that phase two cannot publish."""

    positions: Annotated[list[int], Field(min_length=1, max_length=100_000)] = Field(
        description="Positions of the messages."
    )


def _short(name: str) -> str:
    if len(name.encode()) > MAX_SHORT:
        raise ValueError(f"AMQP permits at most {MAX_SHORT} bytes")
    return name


Short = Annotated[str, Field(max_length=MAX_SHORT), AfterValidator(_short)]
"""A name or key; AMQP limits its bytes, not its characters."""


class RedirectForm(OrderForm):
    """An order to redirect a message that phase two cannot complete: to an exchange, or back to another queue."""

    position: int = Field(description="Position of the message.")
    exchange: Short = Field(default="", description="New exchange; empty for the default one.")
    routing_key: Short = Field(default="", description="New routing key.")
    queue: Short | None = Field(
        default=None, description="New queue for a message that is put back; null for a published one."
    )


class BulkForm(Form):
    """An order about many branches: first the dry run, then the same order with the dry run's *confirm*."""

    action: Literal["commit", "rollback", "forget", "retry"] = Field(description="The order.")
    filter: FilterForm = Field(description="The branches; an empty filter selects all.")
    reason: Reason
    dry_run: bool = Field(default=True, description="Show the effect and change nothing.")
    confirm: str | None = Field(
        default=None, description="Value from the dry run; it identifies branches and versions."
    )


class BulkResult(Form):
    """The result of the order for one branch."""

    xid: str = Field(description="format:gtrid-hex:bqual-hex")
    vhost: str = Field(description="Virtual host.")
    answer: str = Field(description="xa-…, or the reason why it was refused.")
    done: bool = Field(description="Whether the order was carried out.")
    state: str | None = Field(default=None, description="State before the order; null if it was refused.")
    becomes: str | None = Field(
        default=None, description="State afterwards; unknown if it is no longer in the log, null if it was refused."
    )
    outcome: str | None = Field(default=None, description="Heuristic outcome afterwards; null if none.")
    archived: int = Field(default=0, description="Undelivered messages that go to the archive.")
    fates: dict[str, int] = Field(default_factory=dict, description="Number of messages by the result for them.")


class BulkAnswer(Form):
    """The answer to a bulk order."""

    dry_run: bool = Field(description="Whether nothing was changed.")
    confirm: str = Field(description="Value that the order needs after this dry run.")
    branches: int = Field(description="Number of branches.")
    results: list[BulkResult] = Field(description="One result for each branch.")


class CommitConnectionForm(Form):
    """The commit connection of one virtual host: dtx's own connection to the broker, which runs phase two."""

    vhost: str = Field(description="Virtual host.")
    problem: str | None = Field(description="Why it does not work; null if it works.")
    distrust: str | None = Field(description="Why receipts are not trusted; null if they are.")
    blocked: bool = Field(description="Whether the broker blocks publishers, because of a memory or disk alarm.")
    channels: int = Field(description="Number of units that can be under way at a time.")
    under_way: int = Field(description="Units that the broker is working on.")
    waiting: int = Field(description="Units that wait for a channel.")


class LeaseForm(Form):
    """The lease of a resource manager: its holder is the active dtx."""

    rm: str = Field(description="Name of the resource manager (--rm).")
    holder: str = Field(description="Machine and process id of the active dtx.")
    epoch: int = Field(description="Number that grows with every takeover.")
    taken_at: Moment = Field(description="Time of the takeover.")
    remaining: float | None = Field(description="Seconds until it expires; null if it was given back.")

    @classmethod
    def of_holder(cls, holder: LeaseHolder) -> Self:
        """From a row of the log."""
        return cls.of(holder, remaining=holder.remaining if holder.remaining > float("-inf") else None)


class UsageForm(Form):
    """Usage of one user or one virtual host."""

    scope: str = Field(description="user or vhost.")
    name: str = Field(description="Name of the user or virtual host.")
    used: dict[str, int] = Field(description=f"{', '.join(_RESOURCES)} and {_LAST_RESOURCE}.".capitalize())
    quota: dict[str, int] = Field(description="Limits of --quota.")

    @classmethod
    def of_usage(cls, usage: Usage) -> Self:
        """From the manager's present values."""
        return cls.of(usage, quota=usage.limits)


class StatusForm(Form):
    """The state of dtx."""

    rm: str = Field(description="Name of the resource manager (--rm).")
    active: bool = Field(description="Whether this dtx holds the lease.")
    draining: bool = Field(description="Whether this dtx is shutting down.")
    branches: dict[str, int] = Field(description="Number of branches by state.")
    ages: dict[str, list[int]] = Field(
        description="Histogram by state: number of branches below each of age_bounds and not below the one before; the "
        "last number is the rest."
    )
    age_bounds: list[int] = Field(description="Bounds of ages, seconds since the start.")
    stuck: int = Field(description="Branches whose phase two is stuck.")
    oldest_prepared_at: Moment = Field(description="Time of prepare of the branch that has been prepared longest.")
    in_doubt_bytes: int = Field(description="Bytes of messages of branches that have voted.")
    held_bytes: int = Field(description="Bytes of memory for messages of branches that have not voted.")
    connections: int = Field(description="Number of client connections.")
    usage: list[UsageForm] = Field(description="Users and virtual hosts with any usage.")
    commit_connections: list[CommitConnectionForm] = Field(
        description="dtx's own connections to the broker, one for each virtual host in use; empty without a broker."
    )
    lanes: list[CommitConnectionForm] = Field(description="Deprecated: the former name of commit_connections.")
    leases: list[LeaseForm] = Field(description="Leases of all resource managers in this database.")


class ConnectionForm(Form):
    """A client's connection."""

    id: int = Field(description="Number of the connection in the logs.")
    user: str = Field(description="Empty during the handshake.")
    vhost: str = Field(description="Virtual host.")
    protocol: str = Field(description="AMQP 0-9, AMQP 0-9-1 or AMQP 1.0.")
    address: str = Field(description="Remote address, host:port.")
    tls: bool = Field(description="Whether it uses TLS.")
    since: Moment = Field(description="Time of the connect.")
    state: str = Field(description="running; detached: the client has left, but branches need its deliveries.")
    channels: int = Field(description="Number of channels, or of sessions of AMQP 1.0.")
    selected: int = Field(description="Channels that selected distributed transactions.")
    associated: int = Field(description="Channels that work for a branch now.")
    suspended: int = Field(description="Associations that are suspended.")
    scans: int = Field(description="Recovery scans that are open.")

    @classmethod
    async def of_clients(cls, clients: Iterable[tuple[Connected, Arrived]]) -> list[Self]:
        """From clients, each at one moment; other tasks run in between."""
        shown: list[Self] = []
        await finish(cls._fill(clients, shown))
        return shown

    @classmethod
    def _fill(cls, clients: Iterable[tuple[Connected, Arrived]], shown: list[Self]) -> Iterator[None]:
        for client, arrival in clients:
            channels = list(client.channels.values())
            numbers: Counter[Association] = Counter()
            for channel in channels:
                for _, how in channel.associations:
                    numbers[how] += 1
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
                associated=numbers[Association.ASSOCIATED],
                suspended=numbers[Association.SUSPENDED],
                scans=sum(channel.scan is not None for channel in channels),
            )
            shown.append(form)
            yield


class ConnectionPage(Form):
    """A page of connections, the oldest first."""

    connections: list[ConnectionForm] = Field(description="The connections.")
    cursor: int | None = Field(description="Cursor of the next page; null on the last one.")


class AssociatedBranchForm(Form):
    """An association of a channel with a branch."""

    xid: str = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid as text, if it is printable.")
    state: str = Field(description="State of the branch.")
    association: str = Field(description="associated, or suspended")


class ScanForm(Form):
    """A recovery scan that is open on a channel."""

    connection: int = Field(description="Number of the connection.")
    channel: int = Field(description="Number of the channel.")
    user: str = Field(description="User of the connection.")
    vhost: str = Field(description="Virtual host.")
    left: int = Field(description="Number of xids that it has not returned yet.")

    @classmethod
    def of_scan(cls, client: Connected, channel: int, scan: Scan) -> Self:
        """From a scan that a channel of *client* has open."""
        return cls(connection=client.id, channel=channel, user=client.who.user, vhost=client.who.vhost, left=scan.left)


class ScanPage(Form):
    """Open recovery scans."""

    scans: list[ScanForm] = Field(description="The scans, by connection and channel.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last one.")


class ChannelForm(Form):
    """A channel of a connection."""

    number: int = Field(description="Number of the channel.")
    mode: str = Field(description="dtx, tx, confirm, or plain")
    branches: list[AssociatedBranchForm] = Field(description="Branches that it is associated with.")
    scan: int | None = Field(
        description="Number of xids that its recovery scan has not returned yet; null without one."
    )

    @classmethod
    def of_channel(cls, number: int, channel: ChannelFacts, most: int) -> Self:
        """From a channel, with *most* branches at most."""
        return cls(
            number=number,
            mode=channel.mode.value,
            branches=[
                AssociatedBranchForm(
                    xid=str(entry.xid), readable=entry.xid.readable, state=entry.branch.state, association=how.value
                )
                for entry, how in islice(channel.associations, most)
            ],
            scan=None if channel.scan is None else channel.scan.left,
        )


class ClientForm(Form):
    """A connection with its channels."""

    connection: ConnectionForm = Field(description="The connection.")
    channels: list[ChannelForm] = Field(
        description=f"Channels, together with at most {MOST_TIES} branches; GET /dtx/v1/associations lists all."
    )

    @classmethod
    async def of_client(cls, client: Connected, arrival: Arrived) -> Self:
        """From a client, with the first branches of its channels."""
        channels: list[ChannelForm] = []
        left = MOST_TIES
        for number, channel in sorted(client.channels.items()):
            channels.append(ChannelForm.of_channel(number, channel, left))
            left -= len(channels[-1].branches)
        (connection,) = await ConnectionForm.of_clients([(client, arrival)])
        return cls(connection=connection, channels=channels)


class DisconnectForm(Form):
    """An order to close a client's connection."""

    reason: Reason


class PlaceForm(Form):
    """A channel with an association to a branch."""

    connection: int = Field(description="Number of the connection.")
    channel: int = Field(description="Number of the channel.")
    association: str = Field(description="associated, or suspended")


class AssociationForm(Form):
    """A branch that has not voted; it exists only in the memory of its dtx."""

    id: str = Field(description="Id of the branch: a UUID.")
    xid: str = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid as text, if it is printable.")
    vhost: str = Field(description="Virtual host.")
    owner: str = Field(description="User that started the branch.")
    state: str = Field(description="State: see States and answers.")
    started_at: Moment = Field(description="Time of start.")
    associated: int = Field(description="Number of channels that work for it now.")
    suspended: int = Field(description="Number of suspended associations.")
    channels: list[PlaceForm] = Field(
        description="The channels of these associations, with numbers of that dtx; of another one at most 20."
    )
    publishes: int = Field(description="Messages that it has published so far.")
    consumes: int = Field(description="Deliveries that it has acknowledged so far.")
    bytes: int = Field(description="Size of the messages in bytes.")
    timeout: int = Field(description="Seconds from start to prepare; 0 for no limit.")
    member: str | None = Field(description="host:pid of the other dtx where it began; null for this one.")

    @classmethod
    def of_branch(cls, branch: UnvotedBranch) -> Self:
        """From a branch of any member."""
        places = [
            PlaceForm(connection=number, channel=channel, association=how) for number, channel, how in branch.places
        ]
        readable = branch.xid.readable
        return cls.of(branch, id=str(branch.id), xid=str(branch.xid), readable=readable, channels=places)


class AssociationPage(Form):
    """A page of branches that have not voted, by the time of their start."""

    associations: list[AssociationForm] = Field(description="The branches.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last one.")
    missing: list[str] = Field(description="host:pid of members that did not answer, so their branches are missing.")


class PastQuery(Form):
    """A filter for the past. Fields that are left out do not restrict it."""

    vhost: Name | None = Field(default=None, description="Virtual host.")
    owner: Name | None = Field(default=None, description="User that started the branch.")
    since: AwareDatetime | None = Field(default=None, description="At this time or later.")
    until: AwareDatetime | None = Field(default=None, description="Before this time.")
    limit: int = Field(default=100, ge=1, le=1000, description="Maximum number.")
    cursor: str | None = Field(default=None, max_length=100, description="Cursor from the previous page.")


class XidQuery(PastQuery):
    """The same, with an optional xid or global transaction."""

    xid: str | None = Field(default=None, max_length=300, description="format:gtrid-hex:bqual-hex")
    gtrid: str | None = Field(default=None, max_length=128, description="gtrid in hexadecimal.")


class JournalQuery(XidQuery):
    """A filter for lines of the journal."""

    event: list[JournalEvent] = Field(default_factory=list, max_length=20, description="Only these events.")
    latest_first: bool = Field(default=False, description="Begin with the latest line.")


class OutcomeQuery(XidQuery):
    """A filter for outcomes."""

    event: list[JournalEvent] = Field(
        default_factory=list, max_length=4, description="committed, rolled-back, read-only or forgotten"
    )


class AuditQuery(Form):
    """A filter for lines of the audit log."""

    actor: str | None = Field(default=None, max_length=300, description="User, token:NAME or policy:NAME.")
    action: str | None = Field(default=None, max_length=100, description="Name of an action, for example commit.")
    subject: str | None = Field(
        default=None, max_length=300, description="Text within the subject, for example an xid or a name."
    )
    since: AwareDatetime | None = Field(default=None, description="At this time or later.")
    until: AwareDatetime | None = Field(default=None, description="Before this time.")
    limit: int = Field(default=100, ge=1, le=1000, description="Maximum number.")
    cursor: int | None = Field(default=None, ge=0, le=1 << 62, description="Cursor from the previous page.")


class JournalPage(Form):
    """A page of lines of the journal."""

    lines: list[JournalForm] = Field(description="The lines.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last one.")


class ArchivedForm(MessageForm):
    """An undelivered message of a forgotten branch, without its contents."""

    xid: AsText = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid as text, if it is printable.")
    vhost: str = Field(description="Virtual host.")
    owner: str = Field(description="User that started the branch.")
    branch: AsText = Field(description="Id of the branch: a UUID.")
    archived_at: Moment = Field(description="Time at which the branch was forgotten.")

    @classmethod
    def of_archived(cls, message: ArchivedMessage, **more: object) -> Self:
        """From the archive; *more* has at least the number of bytes of the body."""
        return cls.of(message, readable=message.xid.readable, branch=message.branch_id, archived_at=message.at, **more)


class ArchivedContents(Contents, ArchivedForm):
    """An undelivered message of a forgotten branch, with its contents."""

    @classmethod
    def exported_from_archive(cls, message: ArchivedMessage) -> Self:
        """From the archive."""
        return cls.of_archived(message, bytes=len(message.body), **_contents(message.properties, message.body))


class ArchivePage(Form):
    """A page of messages of the archive, the latest first."""

    messages: list[ArchivedForm] = Field(description="The messages.")
    cursor: str | None = Field(description="Cursor of the next page; null on the last one.")


class DuplicateQuery(Form):
    """A filter for second copies. Fields that are left out do not restrict it."""

    vhost: Name | None = Field(default=None, description="Virtual host.")
    queue: Short | None = Field(default=None, description="Queue.")
    limit: int = Field(default=100, ge=1, le=1000, description="Maximum number.")


class DuplicateForm(Form):
    """A second copy that dtx did not deliver, without its contents."""

    id: str = Field(description="The id of the message: branch/position.")
    vhost: str = Field(description="Virtual host.")
    queue: Shown = Field(description="Queue.")
    attempt: int = Field(description="Attempt of the unit that published it.")
    exchange: Shown = Field(description="Exchange; empty for the default one.")
    routing_key: Shown = Field(description="Routing key.")
    bytes: int = Field(description="Size of the body in bytes.")
    at: Moment = Field(description="Time at which it was kept.")

    @classmethod
    def of_row(cls, row: DuplicateRow) -> Self:
        """From the log."""
        copy = row.duplicate
        return cls.of(copy, id=f"{copy.branch_id}/{copy.position}", bytes=row.bytes, at=row.at)


class MemberForm(Form):
    """One of several active dtx."""

    holder: str = Field(description="host:pid of the process.")
    address: str = Field(description="Its address for other members (--advertise).")
    instance: str = Field(description="Its id, new for each start: a UUID. Clients see it as dtx_member.")
    epoch: int = Field(description="Epoch of its lease; grows with every reconnection to the database.")
    joined_at: Moment = Field(description="Time of its start.")
    remaining: float = Field(description="Seconds until its lease ends; negative if it has ended.")
    branches: int = Field(description="Its branches in the log.")

    @classmethod
    def of_row(cls, row: MemberRow) -> Self:
        """From the log."""
        return cls.of(row, instance=str(row.instance))


class RotationForm(Form):
    """An order to change the secret of the members."""

    reason: Reason


class RestoreForm(Form):
    """An order to publish a second copy to its queue."""

    vhost: Name = Field(default="/", description="Virtual host.")
    queue: Short = Field(description="Queue.")
    reason: Reason


class AuditForm(Form):
    """A line of the audit log."""

    id: int = Field(description="Number of the line.")
    at: Moment = Field(description="Time of the request.")
    actor: str = Field(description="User, token:NAME or policy:NAME.")
    role: str = Field(description="Role of the actor.")
    address: str = Field(description="Address of the client.")
    action: str = Field(description="Name of the action.")
    subject: str = Field(description="Branch, user or other object of the action.")
    reason: str = Field(description="Reason that the actor gave; empty if none.")
    detail: str = Field(description="Parameters of the request, as JSON.")
    result: str | None = Field(description="null if dtx ended before the result was known.")


class AuditPage(Form):
    """A page of lines of the audit log, the latest first."""

    lines: list[AuditForm] = Field(description="The lines.")
    cursor: int | None = Field(description="Cursor of the next page; null on the last one.")
