"""What the API says about clients: their connections, channels, branches that have not voted, recovery scans."""

import asyncio
from collections import Counter
from datetime import datetime
from itertools import chain, islice
from typing import Final

from pydantic import Field

from dtx.admin.desk import Arrived, ChannelFacts, Connected
from dtx.admin.forms import Form, Reason, moment
from dtx.manager.entry import Entry
from dtx.xa.model import Association

MOST_TIES: Final = 1000
"""Branches that are shown of one connection; ``GET /api/associations`` has all of them."""


class ConnectionForm(Form):
    """A client's connection."""

    id: int = Field(description="Its number in the logs.")
    user: str = Field(description="Empty during the handshake.")
    vhost: str
    protocol: str
    address: str = Field(description="Of its socket, host:port.")
    tls: bool
    since: datetime | None
    state: str = Field(description="running; detached: the client is gone, and branches still need its deliveries.")
    channels: int
    selected: int = Field(description="Channels that selected distributed transactions.")
    associated: int = Field(description="Channels that work for a branch now.")
    suspended: int = Field(description="Associations that are suspended.")
    scans: int = Field(description="Recovery scans that are open.")

    @classmethod
    async def of(cls, client: Connected, arrival: Arrived) -> "ConnectionForm":
        """A client as it is now."""
        channels = list(client.channels.values())
        ties: Counter[Association] = Counter()
        every = chain.from_iterable(channel.ties for channel in channels)
        for number, (_, how) in enumerate(every, 1):
            ties[how] += 1
            if not number % 1000:
                await asyncio.sleep(0)
        return cls(
            id=client.id,
            user=client.who.user,
            vhost=client.who.vhost,
            protocol=arrival.protocol,
            address=arrival.address,
            tls=arrival.tls,
            since=moment(arrival.since),
            state=client.stage.value,
            channels=len(channels),
            selected=sum(channel.mode.value == "dtx" for channel in channels),
            associated=ties[Association.ASSOCIATED],
            suspended=ties[Association.SUSPENDED],
            scans=sum(channel.scan is not None for channel in channels),
        )


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
    def of(cls, number: int, channel: ChannelFacts, most: int) -> "ChannelForm":
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
    async def of(cls, client: Connected, arrival: Arrived) -> "ClientForm":
        """A client as it is now."""
        channels: list[ChannelForm] = []
        left = MOST_TIES
        for number, channel in sorted(client.channels.items()):
            channels.append(ChannelForm.of(number, channel, left))
            left -= len(channels[-1].branches)
        return cls(connection=await ConnectionForm.of(client, arrival), channels=channels)


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
    started_at: datetime | None
    associated: int
    suspended: int
    channels: list[PlaceForm]
    publishes: int = Field(description="Messages that it has published so far.")
    consumes: int = Field(description="Deliveries that it has acknowledged so far.")
    bytes: int
    timeout: int = Field(description="Seconds from start to prepare; 0 for no limit.")

    @classmethod
    def of(cls, entry: Entry, places: list[PlaceForm]) -> "AssociationForm":
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
            started_at=moment(entry.started_at),
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
