"""Pages about users, virtual hosts, permissions, tokens and quotas.

Each change is one of :mod:`dtx.admin.routes_accounts`, which checks the role and writes the audit log. Its form is a
page of its own. The address of the form names the change and its object; the fields are those of the request to the
API.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from dtx.admin import routes_accounts as accounts
from dtx.admin.api_context import ApiContext, page_of
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem, as_problem
from dtx.admin.web.page_request import Fields, Visit, Visitor, build, read_form
from dtx.admin.web.rendering import address, redirect_to
from dtx.auth.operators import TokenError
from dtx.auth.roles import TAGS, OperatorRole
from dtx.auth.users import EditError, Snapshot, User
from dtx.config.rules import QuotaResource
from dtx.config.values import parse_duration

router = APIRouter()
_Row = TypeVar("_Row")
_PAGE: Final = 50
_PATTERNS: Final = ("configure", "write", "read")
_NAMES: Final = ("name", "vhost", "exchange")
_SCOPES: Final = ("user", "vhost")
Word = Annotated[str, Query(max_length=600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePage:
    """The page of a change of users, virtual hosts or tokens.

    Args:
        headline: its name, also on the button.
        form: the request to the API.
        run: the function of the API.
        fields: of the page, unless the address has them.
        done: the notice afterwards, with fields of the request and of the answer.
        then: the page afterwards.
        effect: a sentence, for changes that remove something.
    """

    headline: str
    form: type[BaseModel]
    run: Callable[[Identity, ApiContext, Any], Awaitable[Any]]
    fields: tuple[str, ...]
    done: str
    then: str
    effect: str = ""


async def _revoke_token(who: Identity, context: ApiContext, form: accounts.NamedForm) -> None:
    await accounts.revoke_token(who, context, form.name, form.reason)


CHANGES: Final = {
    "make-user": ChangePage(
        headline="Add user",
        form=accounts.NewUser,
        run=accounts.make_user,
        fields=("name", "password", "repeat", "tags"),
        done="User {name} is added. Without permissions, it cannot enter a virtual host.",
        then="user",
    ),
    "set-password": ChangePage(
        headline="Change password",
        form=accounts.PasswordForm,
        run=accounts.set_password,
        fields=("name", "password", "repeat"),
        done="The password of user {name} is changed, with effect from the next login.",
        then="user",
    ),
    "set-tags": ChangePage(
        headline="Change tags",
        form=accounts.TagsForm,
        run=accounts.set_tags,
        fields=("name", "tags"),
        done="The tags of user {name} are changed.",
        then="user",
    ),
    "remove-user": ChangePage(
        headline="Remove user",
        form=accounts.NamedForm,
        run=accounts.remove_user,
        fields=("name",),
        done="User {name} is removed. Number of its branches in doubt, which stay: {branches}.",
        then="users",
        effect="Its permissions are removed, its connections and sessions end. Its branches in doubt stay: then only "
        "users named by --coordinator can complete them.",
    ),
    "grant": ChangePage(
        headline="Set permissions",
        form=accounts.GrantForm,
        run=accounts.grant,
        fields=("name", "vhost", *_PATTERNS),
        done="The permissions of user {name} in virtual host {vhost} are set.",
        then="user",
    ),
    "revoke": ChangePage(
        headline="Revoke permissions",
        form=accounts.VhostPlaceForm,
        run=accounts.revoke,
        fields=("name", "vhost"),
        done="User {name} has no permissions in virtual host {vhost}.",
        then="user",
        effect="The user cannot enter the virtual host any more.",
    ),
    "grant-topic": ChangePage(
        headline="Set topic permissions",
        form=accounts.TopicGrantForm,
        run=accounts.grant_topic,
        fields=("name", "vhost", "exchange", "write", "read"),
        done="The topic permissions of user {name} at exchange {exchange} in virtual host {vhost} are set.",
        then="user",
    ),
    "revoke-topic": ChangePage(
        headline="Remove topic permissions",
        form=accounts.TopicPlaceForm,
        run=accounts.revoke_topic,
        fields=("name", "vhost", "exchange"),
        done="User {name} may use every routing key at exchange {exchange} in virtual host {vhost}.",
        then="user",
        effect="The user may then use every routing key at this exchange.",
    ),
    "make-vhost": ChangePage(
        headline="Add virtual host",
        form=accounts.NamedForm,
        run=accounts.make_vhost,
        fields=("name",),
        done="Virtual host {name} is added. Users need permissions to enter it.",
        then="vhosts",
    ),
    "remove-vhost": ChangePage(
        headline="Remove virtual host",
        form=accounts.NamedForm,
        run=accounts.remove_vhost,
        fields=("name",),
        done="Virtual host {name} is removed.",
        then="vhosts",
        effect="All permissions in it are removed. A virtual host with branches in doubt, durable queues or durable "
        "exchanges is not removed.",
    ),
    "make-token": ChangePage(
        headline="Add token",
        form=accounts.NewToken,
        run=accounts.make_token,
        fields=("name", "role", "lifetime"),
        done="",
        then="tokens",
    ),
    "revoke-token": ChangePage(
        headline="Remove token",
        form=accounts.NamedForm,
        run=_revoke_token,
        fields=("name",),
        done="Token {name} is removed.",
        then="tokens",
        effect="Requests with this token are refused at once, and its sessions end.",
    ),
}


def _pages(rows: Iterable[_Row], key: Callable[[_Row], str], page: str, after: str, **given: str) -> dict[str, Any]:
    """One page of *rows* in the order of *key*, for a template."""
    found = sorted(rows, key=key)
    shown, last = page_of([row for row in found if key(row) > after][: _PAGE + 1], _PAGE)
    return {
        "given": {name: value for name, value in given.items() if value},
        "rows": shown,
        "total": len(found),
        "first": address(page, **given) if after else None,
        "more": None if last is None else address(page, **given, after=key(last)),
    }


async def _accounts(visit: Visit) -> Snapshot:
    """The users and virtual hosts, for coordinators."""
    visit.who.require(OperatorRole.COORDINATOR)
    return await accounts.read_accounts(visit.context)


def _page(visit: Visit, template: str, **context: object) -> Response:
    return visit.show(template, section="accounts", standalone=visit.context.standalone, **context)


@router.get("/users")
async def show_users(visit: Visitor, q: Word = "", after: Word = "") -> Response:
    """The users."""
    found = await _accounts(visit)
    users = (user for user in found.users.values() if q.strip() in user.name)
    return _page(visit, "users.html", **_pages(users, lambda user: user.name, "users", after, q=q.strip()))


@router.get("/user")
async def show_user(visit: Visitor, name: Word) -> Response:
    """One user with its permissions."""
    user = (await _accounts(visit)).users.get(name)
    if user is None:
        raise Problem(HTTPStatus.NOT_FOUND, f"there is no user {name!r}")
    return _page(visit, "user.html", user=user)


@router.get("/permissions")
async def show_permissions(visit: Visitor, user: Word = "", vhost: Word = "", after: Word = "") -> Response:
    """The permissions of all users in all virtual hosts, and the topic permissions."""
    found = await _accounts(visit)
    kept = [one for one in found.users.values() if user in ("", one.name)]
    granted = [(one.name, where, of) for one in kept for where, of in one.grants.items() if vhost in ("", where)]
    topics = [(one.name, *place, of) for one in kept for place, of in one.topics.items() if vhost in ("", place[0])]
    return _page(
        visit,
        "permissions.html",
        topics=sorted(topics)[:_PAGE],
        total_topics=len(topics),
        **_pages(granted, lambda row: f"{row[0]}\n{row[1]}", "permissions", after, user=user, vhost=vhost),
    )


@router.get("/vhosts")
async def show_vhosts(visit: Visitor, after: Word = "") -> Response:
    """The virtual hosts."""
    names = [found.name for found in await accounts.list_vhosts(visit.who, visit.context)]
    return _page(visit, "vhosts.html", **_pages(names, str, "vhosts", after))


@router.get("/tokens")
async def show_tokens(visit: Visitor, after: Word = "") -> Response:
    """The tokens, without their secrets."""
    found = await accounts.list_tokens(visit.who, visit.context)
    return _page(visit, "tokens.html", **_pages(found, lambda token: token.name, "tokens", after))


@router.get("/quotas")
async def show_quotas(visit: Visitor, scope: Word = "", after: Word = "") -> Response:
    """The quotas, and the usage of users and virtual hosts."""
    visit.who.require(OperatorRole.VIEWER)
    status = (await visit.pulse.snapshot()).status
    usage = [each for each in status.usage if scope in ("", each.scope)]
    active = visit.context.active
    return _page(
        visit,
        "quotas.html",
        limits=[] if active is None else sorted(active.manager.quotas.limits.items()),
        resources=[*QuotaResource],
        bytes=QuotaResource.BYTES,
        scopes=_SCOPES,
        live="always",
        **_pages(usage, lambda each: f"{each.scope}\n{each.name}", "quotas", after, scope=scope),
    )


@router.get("/change")
async def ask_to_change(
    visit: Visitor, action: Word, name: Word = "", vhost: Word = "", exchange: Word = ""
) -> Response:
    """The form of a change."""
    found = await _accounts(visit)
    values: dict[str, Any] = dict.fromkeys(_PATTERNS, ".*")
    user = found.users.get(name)
    if user is not None:
        values |= _present(user, vhost, exchange)
    return _form(visit, found, action, {"name": name, "vhost": vhost, "exchange": exchange}, values)


def _present(user: User, vhost: str, exchange: str) -> dict[str, Any]:
    """The present values of the fields of a change of *user*."""
    granted = user.topics.get((vhost, exchange)) if exchange else user.grants.get(vhost)
    return {"tags": user.tags} | ({} if granted is None else granted._asdict())


@router.post("/change")
async def change(
    request: Request, visit: Visitor, action: Word, name: Word = "", vhost: Word = "", exchange: Word = ""
) -> Response:
    """Make a change."""
    fields = await read_form(request, visit)
    place = {key: value for key, value in (("name", name), ("vhost", vhost), ("exchange", exchange)) if value}
    wanted = _wanted(action)
    values = _typed(wanted, fields)
    try:
        form = _request(wanted, values | place, fields)
        answer = await wanted.run(visit.who, visit.context, form)
    except (Problem, EditError, TokenError) as error:
        visit.who.require(OperatorRole.COORDINATOR)
        return _form(visit, await _accounts(visit), action, place, values, as_problem(error))
    if isinstance(answer, accounts.MadeToken):
        return _page(visit, "token-made.html", token=answer)
    told = form.model_dump(exclude={"password"}) | ({} if answer is None else answer.model_dump())
    visit.session.notice = wanted.done.format_map(told)
    return redirect_to(address(wanted.then, name=told["name"] if wanted.then == "user" else None))


def _wanted(action: str) -> ChangePage:
    wanted = CHANGES.get(action)
    if wanted is None:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no change {action!r}")
    return wanted


def _typed(wanted: ChangePage, fields: Fields) -> dict[str, Any]:
    """The fields that were typed, except passwords. Blanks at the ends belong to patterns and names."""
    values: dict[str, Any] = {}
    for name in ("reason", *wanted.fields):
        if name == "tags":
            values[name] = fields.all(name)
        elif name in _PATTERNS:
            values[name] = fields.exactly(name)
        elif name not in ("password", "repeat") and fields.one(name):
            values[name] = fields.exactly(name) if name in _NAMES else fields.one(name)
    return values


def _request(wanted: ChangePage, values: dict[str, Any], fields: Fields) -> BaseModel:
    """The request to the API.

    Raises:
        Problem: 422, a field is malformed.
    """
    given = dict(values)
    lifetime = given.pop("lifetime", None)
    if lifetime is not None:
        try:
            given["seconds"] = parse_duration(lifetime)
        except ValueError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"lifetime: {error}") from None
    if "password" in wanted.fields:
        given["password"] = fields.exactly("password")
        if given["password"] != fields.exactly("repeat"):
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "the two passwords are different")
    return build(wanted.form, given)


def _form(
    visit: Visit,
    found: Snapshot,
    action: str,
    place: dict[str, str],
    values: dict[str, Any],
    problem: Problem | None = None,
) -> Response:
    wanted = _wanted(action)
    there = {name: value for name, value in place.items() if value}
    back = address(wanted.then)
    if wanted.then == "user":
        back = address("user", name=there["name"]) if "name" in there else address("users")
    return visit.show(
        "change.html",
        HTTPStatus.OK if problem is None else problem.status,
        section="accounts",
        action=action,
        change=wanted,
        place=there,
        fields=[name for name in wanted.fields if name not in there],
        values=values,
        problem=problem,
        vhosts=sorted(found.vhosts),
        roles=[*OperatorRole],
        tags=TAGS,
        back=back,
    )
