"""Who asks: a token, or a user with a password; and what that permits."""

import asyncio
import binascii
from base64 import b64decode
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final

from fastapi import Request

from dtx.admin.problems import Problem
from dtx.log.operator_tables import Role
from dtx.log.operators import OperatorLog
from dtx.store.postgres.accounts import Accounts, LoginRefused

_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="dtx", charset="UTF-8"'}
_BY_TAG: Final = (
    ("administrator", Role.COORDINATOR),
    ("operator", Role.OPERATOR),
    ("monitoring", Role.VIEWER),
)
"""The role of a user is that of its highest tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Somebody who has been let in.

    Args:
        name: of the user; of a token with ``token:`` before it, since both may have one name.
        role: what it may do.
        address: where it asks from.
    """

    name: str
    role: Role
    address: str

    def require(self, role: Role) -> None:
        """Let only who has *role* go on.

        Raises:
            Problem: 403.
        """
        if not self.role.includes(role):
            raise Problem(
                HTTPStatus.FORBIDDEN, f"{self.name} is {_with_article(self.role)}, that takes {_with_article(role)}"
            )


def _with_article(role: Role) -> str:
    return f"{'an' if role is Role.OPERATOR else 'a'} {role}"


class Gate:
    """Lets people in.

    Args:
        accounts: users with passwords.
        operators: tokens.
    """

    def __init__(self, accounts: Accounts, operators: OperatorLog) -> None:
        self._accounts = accounts
        self._operators = operators

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
                token = await asyncio.to_thread(self._operators.find_token, credentials.strip())
                if token is not None:
                    return Identity(name=f"token:{token.name}", role=token.role, address=address)
                raise Problem(HTTPStatus.UNAUTHORIZED, "no such token, or it has expired", _CHALLENGE)
            case "basic":
                return await self._log_in(credentials.strip(), address)
            case _:
                raise Problem(HTTPStatus.UNAUTHORIZED, "a token or a user's password is needed", _CHALLENGE)

    async def _log_in(self, credentials: str, address: str) -> Identity:
        try:
            user, colon, password = b64decode(credentials, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            user, colon, password = b"", b"", b""
        if not colon:
            raise Problem(HTTPStatus.UNAUTHORIZED, "basic credentials are user:password in base64", _CHALLENGE)
        try:
            account = await self._accounts.authenticate(user, password, loopback=_is_loopback(address), peer=address)
        except LoginRefused as error:
            raise Problem(HTTPStatus.UNAUTHORIZED, str(error), _CHALLENGE) from None
        for tag, role in _BY_TAG:
            if tag in account.tags:
                return Identity(name=account.name, role=role, address=address)
        raise Problem(HTTPStatus.FORBIDDEN, f"user {account.name!r} has none of the tags {', '.join(dict(_BY_TAG))}")


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
