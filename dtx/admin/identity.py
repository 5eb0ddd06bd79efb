"""Authentication of requests, by token or by user and password, and the role that it gives."""

import asyncio
import binascii
import json
import time
from base64 import b64decode
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final

from fastapi import Request

from dtx.admin.problems import Problem
from dtx.auth.accounts import Accounts, LoginRefused
from dtx.auth.operators import OperatorLog, Token
from dtx.auth.roles import TAGS, OperatorRole
from dtx.log.api import LogError
from dtx.telemetry import get_logger

_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="dtx", charset="UTF-8"'}
_LETS_IN: Final = {tag: role for tag, (role, _) in reversed(TAGS.items()) if role is not None}
"""Tags and their roles, the highest first: the role of a user is that of its highest tag."""
MOST_REFUSALS: Final = 10
"""Refused sign-ins from one address that the audit log lists in a minute."""
MOST_ADDRESSES: Final = 100
"""Addresses whose refused sign-ins it lists in a minute."""
_MOST_NAME: Final = 255
_log = get_logger(part="admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """An authenticated operator.

    Args:
        name: of the user; a token has the prefix ``token:``, because a user may have the same name.
        role: its permissions.
        address: its IP address.
        is_token: whether it has no user.
    """

    name: str
    role: OperatorRole
    address: str
    is_token: bool = False

    def require(self, role: OperatorRole) -> None:
        """Check that the identity has *role*.

        Raises:
            Problem: 403, it has not.
        """
        if not self.role.includes(role):
            raise Problem(
                HTTPStatus.FORBIDDEN, f"{self.name} is {_with_article(self.role)}, but this needs {_with_article(role)}"
            )


def _with_article(role: OperatorRole) -> str:
    return f"{'an' if role is OperatorRole.OPERATOR else 'a'} {role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCredentials:
    """The credentials of a session, which are checked again with each request.

    Args:
        identity: at sign-in.
        token: the token that was used; ``None`` for a user with a password.
        stored: the stored hash of the password: a change of the password ends the session.
    """

    identity: Identity
    token: Token | None = None
    stored: str | None = field(default=None, repr=False)


class Authenticator:
    """Authenticates requests.

    Args:
        accounts: users with passwords.
        operators: tokens.
    """

    def __init__(self, accounts: Accounts, operators: OperatorLog) -> None:
        self.accounts = accounts
        self._operators = operators
        self._refusals = _Refusals(operators)

    async def identify(self, request: Request) -> Identity:
        """The identity of the sender of *request*.

        Raises:
            Problem: 401, no or wrong credentials; 403, the user has no tag for the API.
            LogUnavailable: the database cannot be used.
        """
        address = request.client.host if request.client is not None else ""
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        match scheme.lower():
            case "bearer":
                return (await self.by_token(credentials.strip(), address)).identity
            case "basic":
                return (await self.by_password(*_basic(credentials.strip()), address)).identity
            case _:
                raise Problem(HTTPStatus.UNAUTHORIZED, "a token or a user's password is needed", _CHALLENGE)

    async def by_token(self, secret: str, address: str) -> ApiCredentials:
        """Authenticate by a token.

        Raises:
            Problem: 401, it is unknown or has expired.
            LogUnavailable: the database cannot be used.
        """
        token = await asyncio.to_thread(self._operators.find_token, secret)
        if token is None:
            problem = Problem(HTTPStatus.UNAUTHORIZED, "no such token, or it has expired", _CHALLENGE)
            await self._refusals.add("unknown", address, "token", problem)
            raise problem
        return ApiCredentials(identity=_holder(token, address), token=token)

    async def by_password(self, user: bytes, password: bytes, address: str) -> ApiCredentials:
        """Authenticate by user and password. Attempts after a wrong password are delayed, as at the port for clients.

        Raises:
            Problem: 401, the login is refused; 403, the user has no tag for the API.
            LogUnavailable: the database cannot be used.
        """
        try:
            account = await self.accounts.authenticate(user, password, loopback=_is_loopback(address), peer=address)
        except LoginRefused as error:
            problem = Problem(HTTPStatus.UNAUTHORIZED, str(error), _CHALLENGE)
            await self._refusals.add(user.decode(errors="backslashreplace"), address, "password", problem)
            raise problem from None
        role = _role(account.tags)
        if role is None:
            problem = Problem(HTTPStatus.FORBIDDEN, f"user {account.name!r} has none of the tags {', '.join(_LETS_IN)}")
            await self._refusals.add(account.name, address, "password", problem)
            raise problem
        identity = Identity(name=account.name, role=role, address=address)
        return ApiCredentials(identity=identity, stored=self._stored(account.name))

    async def again(self, badge: ApiCredentials, address: str) -> Identity:
        """The present identity and role of a session.

        Args:
            badge: from the sign-in.
            address: IP address of this request.

        Raises:
            Problem: 401, the credentials are no longer valid.
            LogUnavailable: the database cannot be used.
        """
        name = badge.identity.name
        if _is_loopback(address) == _is_loopback(badge.identity.address):
            if badge.token is not None:
                for token in await asyncio.to_thread(self._operators.tokens):
                    same = (token.name, token.made_at) == (badge.token.name, badge.token.made_at)
                    if same and (token.expires_at is None or token.expires_at > time.time()):
                        return _holder(token, address)
            else:
                await asyncio.shield(self.accounts.refresh())
                found = self.accounts.users.users.get(name)
                role = None if found is None else _role(found.tags)
                if role is not None and badge.stored == self._stored(name):
                    return Identity(name=name, role=role, address=address)
        raise Problem(HTTPStatus.UNAUTHORIZED, f"the sign-in of {name} is no longer valid")

    def _stored(self, name: str) -> str | None:
        found = self.accounts.users.users.get(name)
        return None if found is None else found.password_hash


class _Refusals:
    """Records refused sign-ins in the audit log. Those beyond the limits are only counted, so that it cannot be filled.

    Args:
        operators: the audit log.
    """

    def __init__(self, operators: OperatorLog) -> None:
        self._operators = operators
        self._minute = 0
        self._listed: Counter[str] = Counter()
        self._left_out = 0

    async def add(self, name: str, address: str, what: str, problem: Problem) -> None:
        """Record a refused sign-in; if the audit log cannot be written, only a warning is logged.

        Args:
            name: name of the user.
            address: IP address of the client.
            what: ``password`` or ``token``.
            problem: the answer.
        """
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._listed = minute, Counter()
        crowded = address not in self._listed and len(self._listed) >= MOST_ADDRESSES
        if crowded or self._listed[address] >= MOST_REFUSALS:
            self._left_out += 1
            return
        self._listed[address] += 1
        left_out, self._left_out = self._left_out, 0
        detail = json.dumps({"left_out_before": left_out}) if left_out else "{}"
        try:
            await asyncio.to_thread(self._write, name[:_MOST_NAME], address, what, detail, problem)
        except LogError as error:
            _log.warning("a refused sign-in could not be recorded", address=address, reason=str(error))

    def _write(self, name: str, address: str, what: str, detail: str, problem: Problem) -> None:
        number = self._operators.begin(
            actor=name, role="none", address=address, action="sign-in", subject=what, reason="", detail=detail
        )
        self._operators.finish(number, f"{problem.status.value}: {problem.detail}")


def _holder(token: Token, address: str) -> Identity:
    return Identity(name=f"token:{token.name}", role=token.role, address=address, is_token=True)


def _role(tags: frozenset[str]) -> OperatorRole | None:
    return next((role for tag, role in _LETS_IN.items() if tag in tags), None)


def _basic(credentials: str) -> tuple[bytes, bytes]:
    try:
        user, colon, password = b64decode(credentials, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        user, colon, password = b"", b"", b""
    if not colon:
        raise Problem(HTTPStatus.UNAUTHORIZED, "basic credentials must be user:password in base64", _CHALLENGE)
    return user, password


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
