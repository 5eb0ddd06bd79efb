r"""What the API says and takes, as models: the OpenAPI document is made of them.

Names and keys are octets on the wire. They are shown as text, what is no UTF-8 with ``\x..`` escapes; bodies and
properties are in base64.
"""

from base64 import b64encode
from datetime import UTC, datetime
from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dtx.log.reading import Detail, Holder, InDoubt, Line
from dtx.log.records import BranchRecord, JournalEntry, Work
from dtx.manager.limits import Usage
from dtx.manager.operators import Done, Forecast, Step
from dtx.telemetry import LaneNumbers
from dtx.wire.amqp09.tables import MAX_SHORT

Reason = Annotated[str, Field(min_length=1, max_length=2000, description="Why; goes into journal and trail.")]


def text(name: bytes) -> str:
    """Octets as people read them."""
    return name.decode("utf-8", "backslashreplace")


def moment(at: float | None) -> datetime | None:
    """A time, in UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC)


class Form(BaseModel):
    """Base of all: what is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BranchForm(Form):
    """A branch."""

    xid: str = Field(description="format:gtrid-hex:bqual-hex")
    readable: str | None = Field(description="The xid where it is printable.")
    id: str
    vhost: str
    state: str
    version: int = Field(description="Grows with every change; an order may name the one that it is about.")
    owner: str
    age: float | None = Field(default=None, description="Seconds since the branch was started.")
    started_at: datetime | None
    prepared_at: datetime | None
    decided_at: datetime | None
    publishes: int
    consumes: int
    bytes: int
    stuck: str | None = Field(description="The broker's words, where phase two could not finish.")
    outcome: str | None = Field(description="The heuristic outcome: the one there is, or there will be.")
    queues: list[str] = Field(default_factory=list, description="Where it consumed.")
    destinations: list[str] = Field(
        default_factory=list,
        description="Queues that it publishes to: without a broker all, with one those of the default exchange.",
    )
    exchanges: list[str] = Field(default_factory=list, description="Where it publishes; empty is the default exchange.")

    @classmethod
    def of(cls, record: BranchRecord, found: InDoubt | None = None) -> "BranchForm":
        """From the log."""
        return cls(
            xid=str(record.xid),
            readable=record.xid.readable,
            id=str(record.id),
            vhost=record.vhost,
            state=record.state,
            version=record.version,
            owner=record.owner,
            age=None if found is None else found.age,
            started_at=moment(record.started_at),
            prepared_at=moment(record.prepared_at),
            decided_at=moment(record.decided_at),
            publishes=record.publishes,
            consumes=record.consumes,
            bytes=record.bytes,
            stuck=record.stuck,
            outcome=record.outcome,
            queues=[] if found is None else [text(name) for name in found.queues],
            destinations=[] if found is None else [text(name) for name in found.destinations],
            exchanges=[] if found is None else [text(name) for name in found.exchanges],
        )


class Page(Form):
    """Branches, by the time of their start."""

    branches: list[BranchForm]
    cursor: str | None = Field(description="Of the next page; null on the last one.")


def shown_body(properties: bytes, body: bytes) -> dict[str, str]:
    """Properties and body as the API says them."""
    return {"properties": b64encode(properties).decode(), "body": b64encode(body).decode()}


class MessageForm(Form):
    """A message of a branch, without its contents."""

    position: int
    kind: str
    fate: str | None = Field(description="What became of it; null while that is open.")
    exchange: str
    routing_key: str
    queue: str | None
    bytes: int

    @classmethod
    def of(cls, work: Work, size: int | None = None) -> "MessageForm":
        """From the log; *size* is that of a body that was left there."""
        return cls(
            position=work.position,
            kind=work.kind,
            fate=work.fate,
            exchange=text(work.exchange),
            routing_key=text(work.routing_key),
            queue=None if work.queue is None else text(work.queue),
            bytes=len(work.body) if size is None else size,
        )


class Contents(MessageForm):
    """A message with its contents: to look at, or to keep before it is given up."""

    properties: str = Field(description="Content header from the property flags on, in base64.")
    body: str = Field(description="In base64.")

    @classmethod
    def exported(cls, work: Work) -> "Contents":
        """All of it."""
        return cls(
            **MessageForm.of(work).model_dump(),
            **shown_body(work.properties, work.body),
        )


class JournalForm(Form):
    """A line of the journal."""

    at: datetime | None
    event: str
    xid: str
    vhost: str
    owner: str
    actor: str
    reason: str | None
    outcome: str | None
    publishes: int
    consumes: int
    bytes: int
    branch: str

    @classmethod
    def of(cls, entry: JournalEntry) -> "JournalForm":
        """From the log."""
        return cls(
            at=moment(entry.at),
            event=entry.event,
            xid=str(entry.xid),
            vhost=entry.vhost,
            owner=entry.owner,
            actor=entry.actor,
            reason=entry.reason,
            outcome=entry.outcome,
            publishes=entry.publishes,
            consumes=entry.consumes,
            bytes=entry.bytes,
            branch=str(entry.branch_id),
        )


class DetailForm(Form):
    """One branch with everything that is known of it."""

    branch: BranchForm
    messages: list[MessageForm] = Field(description="A page of them, in the order of their positions.")
    cursor: int | None = Field(description="For the next page of messages; null on the last one.")
    decided_by: str | None = Field(description="Who decided it heuristically.")
    decided_because: str | None
    journal: list[JournalForm] = Field(description="The last 500 lines; the journal itself has all.")

    @classmethod
    def of(cls, detail: Detail, lines: list[Line]) -> "DetailForm":
        """From the log."""
        decision = detail.decision
        return cls(
            branch=BranchForm.of(detail.branch),
            messages=[MessageForm.of(work, size) for work, size in zip(detail.work, detail.sizes, strict=True)],
            cursor=detail.cursor,
            decided_by=None if decision is None else decision.actor,
            decided_because=None if decision is None else decision.reason,
            journal=[JournalForm.of(line.entry) for line in lines],
        )


class StepForm(Form):
    """What happens to one message."""

    position: int
    kind: str
    fate: str | None = Field(description="What becomes of it; null where it goes elsewhere when the branch goes on.")
    exchange: str
    routing_key: str
    queue: str | None
    bytes: int

    @classmethod
    def of(cls, step: Step) -> "StepForm":
        """From the forecast."""
        return cls(
            position=step.position,
            kind=step.kind,
            fate=step.fate,
            exchange=text(step.exchange),
            routing_key=text(step.routing_key),
            queue=None if step.queue is None else text(step.queue),
            bytes=step.bytes,
        )


class ForecastForm(Form):
    """What an order would do, or has done."""

    state: str = Field(description="Of the branch before.")
    version: int = Field(description="Of the branch before.")
    becomes: str = Field(description="Its state when all is done; unknown: it has left the log.")
    outcome: str | None
    told: str = Field(description="What the transaction manager is told when it asks for commit or rollback then.")
    archived: int = Field(description="Messages that nobody got; the archive has them once the branch is forgotten.")
    messages: list[StepForm]

    @classmethod
    def of(cls, forecast: Forecast) -> "ForecastForm":
        """From the operators' side of the manager."""
        return cls(
            state=forecast.state,
            version=forecast.version,
            becomes=forecast.becomes,
            outcome=forecast.outcome,
            told=forecast.told,
            archived=forecast.archived,
            messages=[StepForm.of(step) for step in forecast.steps],
        )


class DoneForm(Form):
    """The answer to an order."""

    dry_run: bool
    forecast: ForecastForm
    answer: str | None = Field(default=None, description="xa-ok, or the heuristic outcome; null for a dry run.")
    state: str | None = Field(default=None, description="Of the branch now; null for a dry run.")
    version: int | None = Field(default=None, description="Of the branch now; null where it is gone, or a dry run.")

    @classmethod
    def of(cls, done: Done) -> "DoneForm":
        """What was done."""
        return cls(
            dry_run=False,
            forecast=ForecastForm.of(done.forecast),
            answer=done.answer,
            state=done.state,
            version=done.version,
        )


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


Name = Annotated[str, Field(max_length=255, pattern=r"^[^\x00]*$")]
"""Of a user, a virtual host, a queue; a NUL is nowhere in the database, and cannot be asked for."""


class FilterForm(Form):
    """Which branches are meant; what is left out is every."""

    state: list[str] = Field(default_factory=list, max_length=10)
    vhost: Name | None = None
    owner: Name | None = None
    format_id: int | None = Field(default=None, ge=0, le=0xFFFFFFFF)
    branch: list[UUID] = Field(default_factory=list, max_length=1000, description="Ids: one of these.")
    gtrid: str | None = Field(default=None, max_length=260, description="order-*, or hex:6f72*")
    queue: str | None = Field(default=None, description="Consumed from it, or publishes to it.")
    exchange: str | None = None
    older_than: float | None = Field(default=None, ge=0, le=1e9, description="Seconds since the start, at least.")
    stuck: bool | None = None


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


class TokenForm(Form):
    """A token without its secret."""

    name: str
    role: str
    made_by: str
    made_at: datetime | None
    expires_at: datetime | None


class NewToken(Form):
    """A token to make."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    role: Literal["viewer", "operator", "coordinator"]
    seconds: float | None = Field(default=None, gt=0, le=1e9, description="Until it expires.")
    reason: Annotated[str, Field(max_length=2000)] = Field(default="", description="Why; goes into the trail.")


class MadeToken(Form):
    """A token that was made; its secret is told this once."""

    name: str
    role: str
    secret: str


class LaneForm(Form):
    """Where phase two happens, in one virtual host of the broker."""

    vhost: str
    problem: str | None = Field(description="Why it is not working; null when it is.")
    distrust: str | None = Field(description="Why receipts are not believed; null when they are.")
    blocked: bool = Field(description="Whether the broker takes no publishes: a memory or disk alarm.")
    channels: int = Field(description="How many units can be under way at a time.")
    under_way: int = Field(description="Units that the broker is working on.")
    waiting: int = Field(description="Units that wait for a channel.")

    @classmethod
    def of(cls, vhost: str, lane: LaneNumbers) -> "LaneForm":
        """A lane as it is now."""
        return cls(
            vhost=vhost,
            problem=lane.problem,
            distrust=lane.distrust,
            blocked=lane.blocked,
            channels=lane.channels,
            under_way=lane.under_way,
            waiting=lane.waiting,
        )


class LeaseForm(Form):
    """Who is the active dtx of a resource manager."""

    rm: str
    holder: str
    epoch: int
    taken_at: datetime | None
    remaining: float | None = Field(description="Seconds until it runs out; null where it was given back.")

    @classmethod
    def of(cls, holder: Holder) -> "LeaseForm":
        """From the log."""
        return cls(
            rm=holder.rm,
            holder=holder.holder,
            epoch=holder.epoch,
            taken_at=moment(holder.taken_at),
            remaining=holder.remaining if holder.remaining > float("-inf") else None,
        )


class UsageForm(Form):
    """What one user or one virtual host holds."""

    scope: str = Field(description="user or vhost.")
    name: str
    used: dict[str, int] = Field(description="Branches, those of them in doubt, bytes, connections and channels.")
    quota: dict[str, int] = Field(description="The most of each, where --quota says so.")

    @classmethod
    def of(cls, usage: Usage) -> Self:
        """The form of *usage*."""
        return cls(scope=usage.scope, name=usage.name, used=usage.used, quota=usage.limits)


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
    oldest_prepared_at: datetime | None = Field(
        description="When the branch was that has been so for the longest time."
    )
    in_doubt_bytes: int = Field(description="Messages of branches that have voted.")
    held_bytes: int = Field(description="Memory for messages of branches that have not voted.")
    connections: int
    usage: list[UsageForm] = Field(description="Of each user and virtual host that holds anything.")
    lanes: list[LaneForm]
    leases: list[LeaseForm]
