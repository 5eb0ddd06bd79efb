"""The routes about clients: who is connected, what their channels work for, and the end of a connection."""

from collections.abc import Iterator
from heapq import nsmallest
from http import HTTPStatus
from typing import Annotated, Final, cast
from uuid import UUID

from fastapi import APIRouter, Query

from dtx.admin import client_forms as forms
from dtx.admin.desk import Active, Arrived, ChannelFacts, Connected, Desk
from dtx.admin.looking import Asker, Limit, TheDesk
from dtx.admin.problems import Problem
from dtx.log.operator_tables import Role
from dtx.manager.entry import Entry
from dtx.store.slices import in_turns
from dtx.xa.model import State

router = APIRouter(prefix="/api", tags=["clients"])
_KEPT: Final = 10_000
"""Branches among which the first ones are looked for at a time."""
Of = Annotated[str | None, Query(max_length=255)]


def _clients(active: Active, user: str | None, vhost: str | None) -> Iterator[tuple[Connected, Arrived]]:
    for client, arrival in active.connections().items():
        if user in (None, client.who.user) and vhost in (None, client.who.vhost):
            yield client, arrival


@router.get("/connections")
async def list_connections(
    who: Asker, desk: TheDesk, user: Of = None, vhost: Of = None, cursor: int = 0, limit: Limit = 100
) -> forms.ConnectionPage:
    """Clients that are connected."""
    who.require(Role.VIEWER)
    active, _ = desk.require_active()
    later = ((client, arrival) for client, arrival in _clients(active, user, vhost) if client.id > cursor)
    found = nsmallest(limit + 1, later, key=lambda pair: pair[0].id)
    shown = [await forms.ConnectionForm.of(client, arrival) for client, arrival in found[:limit]]
    return forms.ConnectionPage(connections=shown, cursor=shown[-1].id if len(found) > limit else None)


@router.get("/connections/{number}")
async def show_connection(who: Asker, desk: TheDesk, number: int) -> forms.ClientForm:
    """One connection with its channels, and the branches that they work for."""
    who.require(Role.VIEWER)
    client, arrival = _client(desk, number)
    return await forms.ClientForm.of(client, arrival)


def _client(desk: Desk, number: int) -> tuple[Connected, Arrived]:
    active, _ = desk.require_active()
    for client, arrival in active.connections().items():
        if client.id == number:
            return client, arrival
    raise Problem(HTTPStatus.NOT_FOUND, f"there is no connection {number}")


@router.post("/connections/{number}/close", status_code=202)
async def close_connection(who: Asker, desk: TheDesk, number: int, form: forms.DisconnectForm) -> forms.ConnectionForm:
    """End a client's connection (320), as it was. Its branches go the way that they go when a client leaves."""

    async def work() -> tuple[str, forms.ConnectionForm]:
        who.require(Role.OPERATOR)
        client, arrival = _client(desk, number)
        was = await forms.ConnectionForm.of(client, arrival)
        desk.require_active()[0].disconnect(client, form.reason)
        return f"closed, it was {was.user} from {was.address}", was

    return await desk.audited(who, "disconnect", f"connection {number}", form.reason, {}, work)


@router.get("/associations")
async def list_associations(
    who: Asker,
    desk: TheDesk,
    owner: Of = None,
    vhost: Of = None,
    state: State | None = None,
    cursor: UUID | None = None,
    limit: Limit = 100,
) -> forms.AssociationPage:
    """Branches that have not voted: nobody but this dtx knows them."""
    who.require(Role.VIEWER)
    active, _ = desk.require_active()

    def wanted(entry: Entry) -> bool:
        return (
            entry.record is None
            and owner in (None, entry.branch.owner)
            and vhost in (None, entry.vhost)
            and state in (None, entry.branch.state)
            and (cursor is None or entry.id > cursor)
        )

    found: list[Entry] = []
    async for entry in in_turns(active.manager.entries()):
        if wanted(entry):
            found.append(entry)
            if len(found) > _KEPT:
                found = nsmallest(limit + 1, found, key=lambda entry: entry.id)
    found = nsmallest(limit + 1, found, key=lambda entry: entry.id)
    shown = [forms.AssociationForm.of(entry, _places(entry)) for entry in found[:limit]]
    return forms.AssociationPage(associations=shown, cursor=shown[-1].id if len(found) > limit else None)


def _places(entry: Entry) -> list[forms.PlaceForm]:
    found = []
    for channel, how in entry.branch.associations.items():
        # To the core a channel is whatever can be told apart; here they are the servers' channels.
        connection, number = cast("ChannelFacts", channel).place
        found.append(forms.PlaceForm(connection=connection, channel=number, association=how.value))
    return found


@router.get("/scans")
async def list_scans(
    who: Asker,
    desk: TheDesk,
    user: Of = None,
    vhost: Of = None,
    cursor: Annotated[str, Query(pattern=r"^\d{1,18}-\d{1,5}$")] = "0-0",
    limit: Limit = 100,
) -> forms.ScanPage:
    """Recovery scans that are open: some transaction managers never end theirs."""
    who.require(Role.VIEWER)
    active, _ = desk.require_active()
    connection, _, channel = cursor.partition("-")
    after = int(connection), int(channel)
    scans = (
        forms.ScanForm(
            connection=client.id, channel=number, user=client.who.user, vhost=client.who.vhost, left=channel.scan.left
        )
        for client, _ in _clients(active, user, vhost)
        for number, channel in client.channels.items()
        if channel.scan is not None and (client.id, number) > after
    )
    found = nsmallest(limit + 1, scans, key=lambda scan: (scan.connection, scan.channel))
    shown = found[:limit]
    more = f"{shown[-1].connection}-{shown[-1].channel}" if len(found) > limit else None
    return forms.ScanPage(scans=shown, cursor=more)
