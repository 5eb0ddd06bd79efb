"""Messages between members, and the proofs of their shared secret. This module has no I/O.

A connection starts with the client's header :attr:`Protocol.DTX_MEMBER`. Then both directions have messages: a length
of four bytes (big-endian), and a JSON object. The first three are the handshake:

1. server: ``{"name": ..., "nonce": ...}``
2. client: ``{"name": ..., "nonce": ..., "proofs": [...]}``, one proof for each secret that the client has
3. server: ``{"proof": ...}``, for the secret that both have

A proof is an HMAC-SHA256 over its side, both nonces and both names. So it is of no use in another connection, or for
the other side. While the secret is changed, members have the old one, the new one or both, in any order.
"""

import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MAX_MESSAGE: Final = 64 << 10
"""Bytes of the longest message, without its length."""
MAX_GREETING: Final = 4 << 10
"""Bytes of the longest message of a handshake."""
_MAX_PROOFS: Final = 4
_LENGTH: Final = 4
CLIENT: Final = "client"
SERVER: Final = "server"


class MalformedMessage(Exception):
    """A message breaks the protocol."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message with its length. Raises :exc:`MalformedMessage`: it is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE:
        raise MalformedMessage(f"a message has {len(body)} bytes, more than {MAX_MESSAGE}")
    return len(body).to_bytes(_LENGTH, "big") + body


class MessageSplitter:
    """Cuts a stream of bytes into messages.

    Attributes:
        limit: bytes of the longest message.
    """

    def __init__(self) -> None:
        self.limit = MAX_GREETING
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that were read."""
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """The next message; ``None`` if it is incomplete.

        Raises:
            MalformedMessage: it is too long, or not a JSON object.
        """
        size = int.from_bytes(self._buffer[:_LENGTH], "big")
        if size > self.limit:
            raise MalformedMessage(f"a message has {size} bytes, more than {self.limit}")
        end = _LENGTH + size
        if len(self._buffer) < end:
            return None
        body = self._buffer[_LENGTH:end]
        del self._buffer[:end]
        try:
            message = json.loads(body.decode())
        except (ValueError, RecursionError):
            raise MalformedMessage("a message is not JSON") from None
        if not isinstance(message, dict):
            raise MalformedMessage("a message is not a JSON object")
        return message


def number_of(message: Mapping[str, Any]) -> int:
    """The number of a request or an answer. Raises :exc:`MalformedMessage`: it has none."""
    number = message.get("id")
    if type(number) is not int:
        raise MalformedMessage("a message has no id")
    return number


class Greeting(NamedTuple):
    """The name of a member, and a random text for one connection."""

    name: str
    nonce: str


def new_greeting(name: str) -> Greeting:
    """A greeting with a new nonce."""
    return Greeting(name, secrets.token_hex(32))


def read_greeting(message: Mapping[str, Any]) -> Greeting:
    """The greeting of a peer. Raises :exc:`MalformedMessage`: there is none."""
    name, nonce = message.get("name"), message.get("nonce")
    if not isinstance(name, str) or not isinstance(nonce, str):
        raise MalformedMessage("a greeting has no name or no nonce")
    return Greeting(name, nonce)


def proof(secret: bytes, side: str, verifier: Greeting, maker: Greeting) -> str:
    """The proof that a member knows *secret*.

    Args:
        secret: shared by all members.
        side: of the maker, :data:`CLIENT` or :data:`SERVER`.
        verifier: the greeting of the member that verifies the proof.
        maker: the greeting of the member that makes it.
    """
    return hmac.digest(secret, json.dumps([side, *verifier, *maker]).encode(), "sha256").hex()


def proven(valid: Iterable[bytes], given: object, side: str, verifier: Greeting, maker: Greeting) -> bytes | None:
    """The one of the *valid* secrets that one of the *given* proofs is for; ``None`` if there is none."""
    proofs = [ascii(each) for each in given[:_MAX_PROOFS]] if isinstance(given, list) else []
    for secret in valid:
        wanted = ascii(proof(secret, side, verifier, maker))
        if any(hmac.compare_digest(wanted, each) for each in proofs):
            return secret
    return None
