"""The routes about users and virtual hosts of a dtx without a broker.

They change tables that need no lease: a dtx that serves sees what has changed at the next login, or within seconds.
"""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Callable
from typing import Annotated, Literal, Self, TypeVar

from fastapi import APIRouter
from pydantic import Field, model_validator

from dtx.admin.desk import Desk
from dtx.admin.forms import Form
from dtx.admin.identity import Identity
from dtx.admin.looking import Asker, TheDesk
from dtx.auth.editing import AccountEditor
from dtx.auth.permissions import Patterns, TopicPatterns
from dtx.auth.users import User
from dtx.log.operator_tables import Role

Word = Annotated[str, Field(max_length=255)]
Pattern = Annotated[str | None, Field(max_length=4096)]
Tag = Literal["monitoring", "operator", "administrator", "impersonator"]


class Change(Form):
    """What changes users may say why."""

    reason: Annotated[str, Field(max_length=2000)] = Field(default="", description="Why; goes into the trail.")


class NamedForm(Change):
    """A user or virtual host that there is, or is to be."""

    name: Word


class PasswordForm(NamedForm):
    """A user's new password."""

    password: Annotated[str, Field(max_length=2048, repr=False)]
    encoding: Literal["utf-8", "base64"] = Field(default="utf-8", description="base64: of what is no text.")

    @model_validator(mode="after")
    def _octets(self) -> Self:
        _ = self.octets
        return self

    @property
    def octets(self) -> bytes:
        """The password itself.

        Raises:
            ValueError: it is not encoded so.
        """
        if self.encoding == "utf-8":
            return self.password.encode()
        try:
            return b64decode(self.password, validate=True)
        except binascii.Error:
            raise ValueError("the password is not base64") from None  # and not what it is


class NewUser(PasswordForm):
    """A user to make."""

    tags: list[Tag] = Field(default_factory=list)


class TagsForm(NamedForm):
    """A user's tags from now on."""

    tags: list[Tag]


class PlaceForm(NamedForm):
    """A user in a virtual host."""

    vhost: Word = "/"


class GrantForm(PlaceForm):
    """What a user may do in a virtual host: regular expressions. What is null stays as it was, at first nothing."""

    configure: Pattern = None
    write: Pattern = None
    read: Pattern = None


class TopicGrantForm(PlaceForm):
    """With which routing keys a user may use a topic exchange: regular expressions. What is null stays as it was."""

    exchange: Word
    write: Pattern = None
    read: Pattern = None


class TopicPlaceForm(PlaceForm):
    """A user at a topic exchange."""

    exchange: Word | None = Field(default=None, description="null: at all of them.")


class PermissionForm(Form):
    """What a user may do in a virtual host."""

    vhost: str
    configure: str
    write: str
    read: str

    @classmethod
    def of(cls, vhost: str, patterns: Patterns) -> "PermissionForm":
        """From the tables."""
        return cls(vhost=vhost, **patterns._asdict())


class TopicPermissionForm(Form):
    """With which routing keys a user may use a topic exchange."""

    vhost: str
    exchange: str
    write: str
    read: str

    @classmethod
    def of(cls, vhost: str, exchange: str, patterns: TopicPatterns) -> "TopicPermissionForm":
        """From the tables."""
        return cls(vhost=vhost, exchange=exchange, **patterns._asdict())


class UserForm(Form):
    """A user."""

    name: str
    tags: list[str]
    permissions: list[PermissionForm]
    topic_permissions: list[TopicPermissionForm]

    @classmethod
    def of(cls, user: User) -> "UserForm":
        """From the tables, without its password."""
        return cls(
            name=user.name,
            tags=sorted(user.tags),
            permissions=[PermissionForm.of(vhost, patterns) for vhost, patterns in user.grants.items()],
            topic_permissions=[TopicPermissionForm.of(*place, patterns) for place, patterns in user.topics.items()],
        )


class DoneForm(Form):
    """It is so now."""

    name: str


class RemovedForm(DoneForm):
    """A user that is gone."""

    branches: int = Field(description="In doubt, that it has started: only a coordinator of dtx can complete them now.")


class LiftedForm(DoneForm):
    """Topic permissions that are gone."""

    exchanges: int = Field(description="At how many exchanges.")


class VhostForm(Form):
    """A virtual host."""

    name: str


router = APIRouter(prefix="/api", tags=["users"])
_T = TypeVar("_T")


async def _change(
    who: Identity,
    desk: Desk,
    action: str,
    form: NamedForm,
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
async def list_users(who: Asker, desk: TheDesk) -> list[UserForm]:
    """Users by name, with what they may do."""
    who.require(Role.COORDINATOR)
    found = await asyncio.to_thread(AccountEditor(desk.url, desk.rm).read)
    return [UserForm.of(user) for user in found.users.values()]


@router.post("/users", status_code=201)
async def make_user(who: Asker, desk: TheDesk, form: NewUser) -> DoneForm:
    """Make a user, who may enter no virtual host yet."""
    await _change(
        who, desk, "make-user", form, "made", lambda editor: editor.add_user(form.name, form.octets, form.tags)
    )
    return DoneForm(name=form.name)


@router.post("/users/password")
async def set_password(who: Asker, desk: TheDesk, form: PasswordForm) -> DoneForm:
    """Change a password: it counts from the next login."""
    await _change(
        who, desk, "set-password", form, "changed", lambda editor: editor.set_password(form.name, form.octets)
    )
    return DoneForm(name=form.name)


@router.post("/users/tags")
async def set_tags(who: Asker, desk: TheDesk, form: TagsForm) -> DoneForm:
    """Give a user these tags and no others."""
    await _change(who, desk, "set-tags", form, "changed", lambda editor: editor.set_tags(form.name, form.tags))
    return DoneForm(name=form.name)


@router.post("/users/remove")
async def remove_user(who: Asker, desk: TheDesk, form: NamedForm) -> RemovedForm:
    """Remove a user with all its permissions. Its connections are closed; its branches in doubt stay."""
    owned = await _change(who, desk, "remove-user", form, "removed", lambda editor: editor.remove_user(form.name))
    return RemovedForm(name=form.name, branches=owned)


@router.post("/users/grant")
async def grant(who: Asker, desk: TheDesk, form: GrantForm) -> PermissionForm:
    """Let a user into a virtual host, or change what it may do there; the answer is what it may do now."""
    now = await _change(
        who,
        desk,
        "grant",
        form,
        "granted",
        lambda editor: editor.grant(form.name, form.vhost, configure=form.configure, write=form.write, read=form.read),
    )
    return PermissionForm.of(form.vhost, now)


@router.post("/users/revoke")
async def revoke(who: Asker, desk: TheDesk, form: PlaceForm) -> DoneForm:
    """Take all permissions in a virtual host back: the user may not enter it any more."""
    await _change(who, desk, "revoke", form, "revoked", lambda editor: editor.revoke(form.name, form.vhost))
    return DoneForm(name=form.name)


@router.post("/users/grant-topic")
async def grant_topic(who: Asker, desk: TheDesk, form: TopicGrantForm) -> TopicPermissionForm:
    """Say with which routing keys a user may use a topic exchange; the answer is what it may use now."""
    now = await _change(
        who,
        desk,
        "grant-topic",
        form,
        "granted",
        lambda editor: editor.grant_topic(form.name, form.vhost, form.exchange, write=form.write, read=form.read),
    )
    return TopicPermissionForm.of(form.vhost, form.exchange, now)


@router.post("/users/revoke-topic")
async def revoke_topic(who: Asker, desk: TheDesk, form: TopicPlaceForm) -> LiftedForm:
    """Lift what grant-topic has limited: every routing key will do again."""
    count = await _change(
        who,
        desk,
        "revoke-topic",
        form,
        "revoked",
        lambda editor: editor.revoke_topic(form.name, form.vhost, form.exchange),
    )
    return LiftedForm(name=form.name, exchanges=count)


@router.get("/vhosts")
async def list_vhosts(who: Asker, desk: TheDesk) -> list[VhostForm]:
    """Virtual hosts by name."""
    who.require(Role.VIEWER)
    found = await asyncio.to_thread(AccountEditor(desk.url, desk.rm).read)
    return [VhostForm(name=name) for name in sorted(found.vhosts)]


@router.post("/vhosts", status_code=201)
async def make_vhost(who: Asker, desk: TheDesk, form: NamedForm) -> VhostForm:
    """Make a virtual host. Nobody may enter it until a grant."""
    await _change(who, desk, "make-vhost", form, "made", lambda editor: editor.add_vhost(form.name))
    return VhostForm(name=form.name)


@router.post("/vhosts/remove")
async def remove_vhost(who: Asker, desk: TheDesk, form: NamedForm) -> VhostForm:
    """Remove a virtual host that nothing is kept in: no branch in doubt, durable queue or durable exchange."""
    await _change(who, desk, "remove-vhost", form, "removed", lambda editor: editor.remove_vhost(form.name))
    return VhostForm(name=form.name)
