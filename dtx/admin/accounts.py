"""The routes about users and virtual hosts of a dtx without a broker.

They change tables that need no lease: a dtx that serves sees what has changed at the next login, or within seconds.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter

from dtx.admin import account_forms as forms
from dtx.admin.desk import Desk
from dtx.admin.identity import Identity
from dtx.admin.looking import Asker, TheDesk
from dtx.log.operator_tables import Role
from dtx.store.postgres.editing import AccountEditor

router = APIRouter(prefix="/api", tags=["users"])
_T = TypeVar("_T")


async def _change(
    who: Identity,
    desk: Desk,
    action: str,
    form: forms.NamedForm,
    result: str,
    change: Callable[[AccountEditor], _T],
) -> _T:
    """*change*, in the trail as everything that operators do; passwords are nowhere in it."""

    async def work() -> tuple[str, _T]:
        who.require(Role.COORDINATOR)
        return result, await asyncio.to_thread(change, AccountEditor(desk.url, desk.rm))

    detail = form.model_dump(exclude={"name", "reason", "password", "encoding"}, exclude_none=True)
    return await desk.audited(who, action, form.name, form.reason, detail, work)


@router.get("/users")
async def list_users(who: Asker, desk: TheDesk) -> list[forms.UserForm]:
    """Users by name, with what they may do."""
    who.require(Role.COORDINATOR)
    found = await asyncio.to_thread(AccountEditor(desk.url, desk.rm).read)
    return [forms.UserForm.of(user) for user in found.users.values()]


@router.post("/users", status_code=201)
async def make_user(who: Asker, desk: TheDesk, form: forms.NewUser) -> forms.DoneForm:
    """Make a user, who may enter no virtual host yet."""
    await _change(
        who, desk, "make-user", form, "made", lambda editor: editor.add_user(form.name, form.octets, form.tags)
    )
    return forms.DoneForm(name=form.name)


@router.post("/users/password")
async def set_password(who: Asker, desk: TheDesk, form: forms.PasswordForm) -> forms.DoneForm:
    """Change a password: it counts from the next login."""
    await _change(
        who, desk, "set-password", form, "changed", lambda editor: editor.set_password(form.name, form.octets)
    )
    return forms.DoneForm(name=form.name)


@router.post("/users/tags")
async def set_tags(who: Asker, desk: TheDesk, form: forms.TagsForm) -> forms.DoneForm:
    """Give a user these tags and no others."""
    await _change(who, desk, "set-tags", form, "changed", lambda editor: editor.set_tags(form.name, form.tags))
    return forms.DoneForm(name=form.name)


@router.post("/users/remove")
async def remove_user(who: Asker, desk: TheDesk, form: forms.NamedForm) -> forms.RemovedForm:
    """Remove a user with all its permissions. Its connections are closed; its branches in doubt stay."""
    owned = await _change(who, desk, "remove-user", form, "removed", lambda editor: editor.remove_user(form.name))
    return forms.RemovedForm(name=form.name, branches=owned)


@router.post("/users/grant")
async def grant(who: Asker, desk: TheDesk, form: forms.GrantForm) -> forms.PermissionForm:
    """Let a user into a virtual host, or change what it may do there; the answer is what it may do now."""
    now = await _change(
        who,
        desk,
        "grant",
        form,
        "granted",
        lambda editor: editor.grant(form.name, form.vhost, configure=form.configure, write=form.write, read=form.read),
    )
    return forms.PermissionForm.of(form.vhost, now)


@router.post("/users/revoke")
async def revoke(who: Asker, desk: TheDesk, form: forms.PlaceForm) -> forms.DoneForm:
    """Take all permissions in a virtual host back: the user may not enter it any more."""
    await _change(who, desk, "revoke", form, "revoked", lambda editor: editor.revoke(form.name, form.vhost))
    return forms.DoneForm(name=form.name)


@router.post("/users/grant-topic")
async def grant_topic(who: Asker, desk: TheDesk, form: forms.TopicGrantForm) -> forms.TopicPermissionForm:
    """Say with which routing keys a user may use a topic exchange; the answer is what it may use now."""
    now = await _change(
        who,
        desk,
        "grant-topic",
        form,
        "granted",
        lambda editor: editor.grant_topic(form.name, form.vhost, form.exchange, write=form.write, read=form.read),
    )
    return forms.TopicPermissionForm.of(form.vhost, form.exchange, now)


@router.post("/users/revoke-topic")
async def revoke_topic(who: Asker, desk: TheDesk, form: forms.TopicPlaceForm) -> forms.LiftedForm:
    """Lift what grant-topic has limited: every routing key will do again."""
    count = await _change(
        who,
        desk,
        "revoke-topic",
        form,
        "revoked",
        lambda editor: editor.revoke_topic(form.name, form.vhost, form.exchange),
    )
    return forms.LiftedForm(name=form.name, exchanges=count)


@router.get("/vhosts")
async def list_vhosts(who: Asker, desk: TheDesk) -> list[forms.VhostForm]:
    """Virtual hosts by name."""
    who.require(Role.VIEWER)
    found = await asyncio.to_thread(AccountEditor(desk.url, desk.rm).read)
    return [forms.VhostForm(name=name) for name in sorted(found.vhosts)]


@router.post("/vhosts", status_code=201)
async def make_vhost(who: Asker, desk: TheDesk, form: forms.NamedForm) -> forms.VhostForm:
    """Make a virtual host. Nobody may enter it until a grant."""
    await _change(who, desk, "make-vhost", form, "made", lambda editor: editor.add_vhost(form.name))
    return forms.VhostForm(name=form.name)


@router.post("/vhosts/remove")
async def remove_vhost(who: Asker, desk: TheDesk, form: forms.NamedForm) -> forms.VhostForm:
    """Remove a virtual host that nothing is kept in: no branch in doubt, durable queue or durable exchange."""
    await _change(who, desk, "remove-vhost", form, "removed", lambda editor: editor.remove_vhost(form.name))
    return forms.VhostForm(name=form.name)
