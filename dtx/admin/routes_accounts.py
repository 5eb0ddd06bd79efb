"""Routes for users and virtual hosts of a dtx without a broker, and for operators' tokens.

They change tables that need no lease. A serving dtx sees changes at the next login, or within seconds.
"""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Final, Literal, Self, TypeVar

from fastapi import APIRouter, Path, Query
from pydantic import Field, GetPydanticSchema, model_validator

from dtx.admin.api_context import API, ApiContext, Asker, Context, LoginFirstRoute
from dtx.admin.forms import Form, Moment
from dtx.admin.identity import Identity
from dtx.admin.problems import refusals
from dtx.auth.roles import TAGS, OperatorRole
from dtx.auth.users import AccountEditor, Snapshot, User

Word = Annotated[str, Field(max_length=255)]
Why = Annotated[str, Field(max_length=2000)]
Pattern = Annotated[str | None, Field(max_length=4096)]
TokenName = Annotated[str, Path(description="Name of the token.")]
TokenReason = Annotated[str, Query(max_length=2000, description="Reason, for the audit log.")]
TagWord = Annotated[str, GetPydanticSchema(lambda _, of: of(Literal[*map(str, TAGS)]))]
RoleWord = Annotated[str, GetPydanticSchema(lambda _, of: of(Literal[*map(str, OperatorRole)]))]
_T = TypeVar("_T")
_MAKE_TOKEN: Final = refusals(
    {HTTPStatus.CONFLICT: "The name is in use, or is not 1 to 64 printable bytes without colons."}
)
_TOKEN: Final = refusals({HTTPStatus.CONFLICT: "There is no such token."})
_MAKE: Final = refusals({HTTPStatus.CONFLICT: "The name is in use, or the name or the password is not possible."})
_ACCOUNT: Final = refusals(
    {HTTPStatus.CONFLICT: "There is no such user or virtual host, or the change is not possible."}
)
router = APIRouter(prefix=API, route_class=LoginFirstRoute)


class AccountChange(Form):
    """A change, with an optional reason."""

    reason: Why = Field(default="", description="Reason, for the audit log.")


class NamedForm(AccountChange):
    """The name of a user or virtual host."""

    name: Word = Field(description="Name of the user or virtual host.")


class PasswordForm(NamedForm):
    """A user's new password."""

    password: Annotated[str, Field(max_length=2048, repr=False, description="The password, 1 to 1,024 bytes.")]
    encoding: Literal["utf-8", "base64"] = Field(default="utf-8", description="base64 for passwords that are no text.")

    @model_validator(mode="after")
    def _octets(self) -> Self:
        _ = self.octets
        return self

    @property
    def octets(self) -> bytes:
        """The bytes of the password.

        Raises:
            ValueError: it is not base64.
        """
        if self.encoding == "utf-8":
            return self.password.encode()
        try:
            return b64decode(self.password, validate=True)
        except binascii.Error:
            raise ValueError("the password is not base64") from None  # the cause might quote the password


class NewUser(PasswordForm):
    """A user to create."""

    tags: list[TagWord] = Field(default_factory=list, description="Tags of the user.")


class TagsForm(NamedForm):
    """The new tags of a user."""

    tags: list[TagWord] = Field(description="All tags of the user from now on.")


class VhostPlaceForm(NamedForm):
    """A user in a virtual host."""

    vhost: Word = Field(default="/", description="Virtual host.")


class GrantForm(VhostPlaceForm):
    """Permissions in a virtual host, as regular expressions. null changes nothing; at first nothing is permitted."""

    configure: Pattern = Field(default=None, description="Names that the user may declare and delete.")
    write: Pattern = Field(default=None, description="Names that the user may publish to, or bind.")
    read: Pattern = Field(default=None, description="Names that the user may consume from, or bind to.")


class TopicGrantForm(VhostPlaceForm):
    """Routing keys that a user may use at a topic exchange, as regular expressions. null changes nothing."""

    exchange: Word = Field(description="Name of the topic exchange.")
    write: Pattern = Field(default=None, description="Routing keys to publish with.")
    read: Pattern = Field(default=None, description="Routing keys to bind with.")


class TopicPlaceForm(VhostPlaceForm):
    """A user at a topic exchange."""

    exchange: Word | None = Field(default=None, description="null for all exchanges.")


class PermissionForm(Form):
    """The permissions of a user in a virtual host."""

    vhost: str = Field(description="Virtual host.")
    configure: str = Field(description="Names that the user may declare and delete.")
    write: str = Field(description="Names that the user may publish to, or bind.")
    read: str = Field(description="Names that the user may consume from, or bind to.")


class TopicPermissionForm(Form):
    """The routing keys that a user may use at a topic exchange, as regular expressions."""

    vhost: str = Field(description="Virtual host.")
    exchange: str = Field(description="Name of the topic exchange.")
    write: str = Field(description="Routing keys to publish with.")
    read: str = Field(description="Routing keys to bind with.")


class UserForm(Form):
    """A user with tags and permissions, without the password."""

    name: str = Field(description="Name of the user.")
    tags: list[str] = Field(description="Its tags.")
    permissions: list[PermissionForm] = Field(description="Its permissions, one entry for each virtual host.")
    topic_permissions: list[TopicPermissionForm] = Field(description="Its topic permissions.")

    @classmethod
    def of_user(cls, user: User) -> Self:
        """From the tables, without the password."""
        return cls(
            name=user.name,
            tags=sorted(user.tags),
            permissions=[PermissionForm.of(patterns, vhost=vhost) for vhost, patterns in user.grants.items()],
            topic_permissions=[
                TopicPermissionForm.of(patterns, vhost=vhost, exchange=exchange)
                for (vhost, exchange), patterns in user.topics.items()
            ],
        )


class ChangedForm(Form):
    """The name of the changed user."""

    name: str = Field(description="Name of the user.")


class RemovedForm(ChangedForm):
    """The answer to the removal of a user."""

    branches: int = Field(description="Its branches in doubt. Now only users named by --coordinator can complete them.")


class LiftedForm(ChangedForm):
    """The answer to the removal of topic permissions."""

    exchanges: int = Field(description="Number of exchanges.")


class VhostForm(Form):
    """The name of a virtual host."""

    name: str = Field(description="Name of the virtual host.")


class TokenForm(Form):
    """A token without its secret."""

    name: str = Field(description="Name of the token.")
    role: str = Field(description="viewer, operator or coordinator")
    made_by: str = Field(description="Actor that created it.")
    made_at: Moment = Field(description="Time of its creation.")
    expires_at: Moment = Field(description="Time at which it expires; null for never.")


class NewToken(Form):
    """A token to create."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="Name of the token.")
    role: RoleWord = Field(description="Role of the token.")
    seconds: float | None = Field(default=None, gt=0, le=1e9, description="Seconds until it expires; null for never.")
    reason: Why = Field(default="", description="Reason, for the audit log.")


class MadeToken(Form):
    """A new token. Only this answer contains its secret."""

    name: str = Field(description="Name of the token.")
    role: str = Field(description="Role of the token.")
    secret: str = Field(description="The token, for Authorization: Bearer.")


@router.get("/tokens", tags=["operators"])
async def list_tokens(who: Asker, context: Context) -> list[TokenForm]:
    """List tokens, without their secrets."""
    who.require(OperatorRole.COORDINATOR)
    return [TokenForm.of(token) for token in await asyncio.to_thread(context.operator_log.tokens)]


@router.post("/tokens", tags=["operators"], status_code=201, responses=_MAKE_TOKEN)
async def make_token(who: Asker, context: Context, form: NewToken) -> MadeToken:
    """Create a token. Only this answer contains its secret."""

    async def work() -> tuple[str, MadeToken]:
        who.require(OperatorRole.COORDINATOR)
        secret = await asyncio.to_thread(
            lambda: context.operator_log.make_token(form.name, OperatorRole(form.role), who.name, seconds=form.seconds)
        )
        return "made", MadeToken(name=form.name, role=form.role, secret=secret)

    detail = form.model_dump(exclude={"name", "reason"}, exclude_none=True)
    return await context.audited(who, "make-token", form.name, form.reason, detail, work)


@router.delete("/tokens/{name:path}", tags=["operators"], status_code=204, responses=_TOKEN)
async def revoke_token(who: Asker, context: Context, name: TokenName, reason: TokenReason = "") -> None:
    """Revoke a token, with immediate effect."""

    async def work() -> tuple[str, None]:
        who.require(OperatorRole.COORDINATOR)
        await asyncio.to_thread(context.operator_log.revoke_token, name)
        return "revoked", None

    await context.audited(who, "revoke-token", name, reason, {}, work)


async def _change(
    who: Identity,
    context: ApiContext,
    action: str,
    form: NamedForm,
    result: str,
    change: Callable[[AccountEditor], _T],
) -> _T:
    """Make *change* and record it in the audit log, without passwords."""

    async def work() -> tuple[str, _T]:
        who.require(OperatorRole.COORDINATOR)
        return result, await asyncio.to_thread(change, AccountEditor(context.url, context.rm))

    detail = form.model_dump(exclude={"name", "reason", "password", "encoding"}, exclude_none=True)
    return await context.audited(who, action, form.name, form.reason, detail, work)


async def read_accounts(context: ApiContext) -> Snapshot:
    """Users and virtual hosts, without a check of the role."""
    return await asyncio.to_thread(AccountEditor(context.url, context.rm).read)


@router.get("/users", tags=["users"])
async def list_users(who: Asker, context: Context) -> list[UserForm]:
    """List users by name, with their permissions."""
    who.require(OperatorRole.COORDINATOR)
    found = await read_accounts(context)
    return [UserForm.of_user(user) for user in found.users.values()]


@router.post("/users", tags=["users"], status_code=201, responses=_MAKE)
async def make_user(who: Asker, context: Context, form: NewUser) -> ChangedForm:
    """Create a user, without permissions."""
    await _change(
        who, context, "make-user", form, "made", lambda editor: editor.add_user(form.name, form.octets, form.tags)
    )
    return ChangedForm(name=form.name)


@router.post("/users/password", tags=["users"], responses=_ACCOUNT)
async def set_password(who: Asker, context: Context, form: PasswordForm) -> ChangedForm:
    """Change a password, with effect from the next login."""
    await _change(
        who, context, "set-password", form, "changed", lambda editor: editor.set_password(form.name, form.octets)
    )
    return ChangedForm(name=form.name)


@router.post("/users/tags", tags=["users"], responses=_ACCOUNT)
async def set_tags(who: Asker, context: Context, form: TagsForm) -> ChangedForm:
    """Replace the tags of a user."""
    await _change(who, context, "set-tags", form, "changed", lambda editor: editor.set_tags(form.name, form.tags))
    return ChangedForm(name=form.name)


@router.post("/users/remove", tags=["users"], responses=_ACCOUNT)
async def remove_user(who: Asker, context: Context, form: NamedForm) -> RemovedForm:
    """Remove a user with all its permissions, and close its connections. Its branches in doubt stay."""
    owned = await _change(who, context, "remove-user", form, "removed", lambda editor: editor.remove_user(form.name))
    return RemovedForm(name=form.name, branches=owned)


@router.post("/users/grant", tags=["users"], responses=_ACCOUNT)
async def grant(who: Asker, context: Context, form: GrantForm) -> PermissionForm:
    """Grant a user permissions in a virtual host. The answer contains the permissions that are in force."""
    now = await _change(
        who,
        context,
        "grant",
        form,
        "granted",
        lambda editor: editor.grant(form.name, form.vhost, configure=form.configure, write=form.write, read=form.read),
    )
    return PermissionForm.of(now, vhost=form.vhost)


@router.post("/users/revoke", tags=["users"], responses=_ACCOUNT)
async def revoke(who: Asker, context: Context, form: VhostPlaceForm) -> ChangedForm:
    """Revoke all permissions of a user in a virtual host."""
    await _change(who, context, "revoke", form, "revoked", lambda editor: editor.revoke(form.name, form.vhost))
    return ChangedForm(name=form.name)


@router.post("/users/grant-topic", tags=["users"], responses=_ACCOUNT)
async def grant_topic(who: Asker, context: Context, form: TopicGrantForm) -> TopicPermissionForm:
    """Restrict the routing keys that a user may use with a topic exchange. The answer contains the patterns in
    force.
    """
    now = await _change(
        who,
        context,
        "grant-topic",
        form,
        "granted",
        lambda editor: editor.grant_topic(form.name, form.vhost, form.exchange, write=form.write, read=form.read),
    )
    return TopicPermissionForm.of(now, vhost=form.vhost, exchange=form.exchange)


@router.post("/users/revoke-topic", tags=["users"], responses=_ACCOUNT)
async def revoke_topic(who: Asker, context: Context, form: TopicPlaceForm) -> LiftedForm:
    """Remove the restriction that grant-topic has set: all routing keys are permitted."""
    count = await _change(
        who,
        context,
        "revoke-topic",
        form,
        "revoked",
        lambda editor: editor.revoke_topic(form.name, form.vhost, form.exchange),
    )
    return LiftedForm(name=form.name, exchanges=count)


@router.get("/vhosts", tags=["users"])
async def list_vhosts(who: Asker, context: Context) -> list[VhostForm]:
    """List virtual hosts by name."""
    who.require(OperatorRole.VIEWER)
    found = await read_accounts(context)
    return [VhostForm(name=name) for name in sorted(found.vhosts)]


@router.post("/vhosts", tags=["users"], status_code=201, responses=_MAKE)
async def make_vhost(who: Asker, context: Context, form: NamedForm) -> VhostForm:
    """Create a virtual host. Users need a grant to enter it."""
    await _change(who, context, "make-vhost", form, "made", lambda editor: editor.add_vhost(form.name))
    return VhostForm(name=form.name)


@router.post("/vhosts/remove", tags=["users"], responses=_ACCOUNT)
async def remove_vhost(who: Asker, context: Context, form: NamedForm) -> VhostForm:
    """Remove a virtual host that has no branch in doubt, no durable queue and no durable exchange."""
    await _change(who, context, "remove-vhost", form, "removed", lambda editor: editor.remove_vhost(form.name))
    return VhostForm(name=form.name)
