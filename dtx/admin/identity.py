"""Who asks: a token, or a user with a password; and what that permits."""

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
"""The role of a user is that of its highest tag."""
MOST_REFUSALS: Final = 10
"""Refused sign-ins of one address that the trail lists in a minute."""
MOST_ADDRESSES: Final = 100
"""Addresses whose refused sign-ins it lists in a minute."""
_MOST_NAME: Final = 255
_log = get_logger(part="admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Somebody who has been let in.

    Args:
        name: of the user; of a token with ``token:`` before it, since both may have one name.
        role: what it may do.
        address: where it asks from.
    """

    name: str
    role: OperatorRole
    address: str

    def require(self, role: OperatorRole) -> None:
        """Let only who has *role* go on.

        Raises:
            Problem: 403.
        """
        if not self.role.includes(role):
            raise Problem(
                HTTPStatus.FORBIDDEN, f"{self.name} is {_with_article(self.role)}, that takes {_with_article(role)}"
            )


def _with_article(role: OperatorRole) -> str:
    return f"{'an' if role is OperatorRole.OPERATOR else 'a'} {role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """How somebody came in, to be looked at again with each request of a session.

    Args:
        identity: as it was then.
        token: that was shown; ``None`` for a user with a password.
        stored: the hash of that password: another password ends the sessions of the old one.
    """

    identity: Identity
    token: Token | None = None
    stored: str | None = field(default=None, repr=False)


class Gate:
    """Lets people in.

    Args:
        accounts: users with passwords.
        operators: tokens.
    """

    def __init__(self, accounts: Accounts, operators: OperatorLog) -> None:
        self._accounts = accounts
        self._operators = operators
        self._refusals = _Refusals(operators)

    async def identify(self, request: Request) -> Identity:
        """Who asks.

        Raises:
            Problem: 401.
            LogUnavailable: the database does not say.
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

    async def by_token(self, secret: str, address: str) -> Badge:
        """Whoever has that token.

        Raises:
            Problem: 401.
            LogUnavailable: the database does not say.
        """
        token = await asyncio.to_thread(self._operators.find_token, secret)
        if token is None:
            problem = Problem(HTTPStatus.UNAUTHORIZED, "no such token, or it has expired", _CHALLENGE)
            await self._refusals.add("unknown", address, "token", problem)
            raise problem
        return Badge(identity=_holder(token, address), token=token)

    async def by_password(self, user: bytes, password: bytes, address: str) -> Badge:
        """Whoever has that password. Wrong ones have to wait, as at the port for clients.

        Raises:
            Problem: 401; 403 where the user is no operator of any kind.
            LogUnavailable: the database does not say.
        """
        try:
            account = await self._accounts.authenticate(user, password, loopback=_is_loopback(address), peer=address)
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
        return Badge(identity=identity, stored=self._stored(account.name))

    async def again(self, badge: Badge, address: str) -> Identity:
        """Who that is now, and what it may do now.

        Args:
            badge: from when it came in.
            address: where it asks from now.

        Raises:
            Problem: 401, it is nobody any more.
            LogUnavailable: the database does not say.
        """
        name = badge.identity.name
        if _is_loopback(address) == _is_loopback(badge.identity.address):
            if badge.token is not None:
                for token in await asyncio.to_thread(self._operators.tokens):
                    same = (token.name, token.made_at) == (badge.token.name, badge.token.made_at)
                    if same and (token.expires_at is None or token.expires_at > time.time()):
                        return _holder(token, address)
            else:
                await asyncio.shield(self._accounts.refresh())
                found = self._accounts.users.users.get(name)
                role = None if found is None else _role(found.tags)
                if role is not None and badge.stored == self._stored(name):
                    return Identity(name=name, role=role, address=address)
        raise Problem(HTTPStatus.UNAUTHORIZED, f"{name} may not come in any more")

    def _stored(self, name: str) -> str | None:
        found = self._accounts.users.users.get(name)
        return None if found is None else found.password_hash


class _Refusals:
    """Writes refused sign-ins to the trail. Who tries many cannot fill it: those beyond the limits are counted.

    Args:
        operators: has the trail.
    """

    def __init__(self, operators: OperatorLog) -> None:
        self._operators = operators
        self._minute = 0
        self._listed: Counter[str] = Counter()
        self._left_out = 0

    async def add(self, name: str, address: str, what: str, problem: Problem) -> None:
        """Somebody was refused; a trail that is out of reach does not change the answer.

        Args:
            name: as whom.
            address: from where.
            what: was shown: a password or a token.
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
            _log.warning("a refused sign-in could not be written down", address=address, reason=str(error))

    def _write(self, name: str, address: str, what: str, detail: str, problem: Problem) -> None:
        number = self._operators.begin(
            actor=name, role="none", address=address, action="sign-in", subject=what, reason="", detail=detail
        )
        self._operators.finish(number, f"{problem.status.value}: {problem.detail}")


def _holder(token: Token, address: str) -> Identity:
    return Identity(name=f"token:{token.name}", role=token.role, address=address)


def _role(tags: frozenset[str]) -> OperatorRole | None:
    return next((role for tag, role in _LETS_IN.items() if tag in tags), None)


def _basic(credentials: str) -> tuple[bytes, bytes]:
    try:
        user, colon, password = b64decode(credentials, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        user, colon, password = b"", b"", b""
    if not colon:
        raise Problem(HTTPStatus.UNAUTHORIZED, "basic credentials are user:password in base64", _CHALLENGE)
    return user, password


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
