"""What the responses of SASL say: PLAIN (RFC 4616), ANONYMOUS (RFC 4505), EXTERNAL (RFC 4422, appendix A)."""

from dataclasses import dataclass
from typing import Final

from dtx.wire.amqp09 import handshake
from dtx.wire.amqp09.handshake import Credentials

PLAIN: Final = "PLAIN"
ANONYMOUS: Final = "ANONYMOUS"
EXTERNAL: Final = "EXTERNAL"


@dataclass(frozen=True, slots=True)
class Anonymous:
    """Nobody in particular."""


@dataclass(frozen=True, slots=True)
class External:
    """Whoever the certificate names.

    Args:
        user: whom the client wants to act as; ``None``: the one that the certificate names.
    """

    user: bytes | None


Login = Credentials | Anonymous | External


def read_login(mechanism: str, response: bytes) -> Login | None:
    """Who wants to come in.

    Args:
        mechanism: one of the three.
        response: of the client.

    Returns:
        ``None`` when the response is malformed or names nobody, or for another mechanism: the login is refused.
    """
    match mechanism:
        case "PLAIN":
            return handshake.credentials(handshake.PLAIN, response)
        case "ANONYMOUS":
            return Anonymous()
        case "EXTERNAL":
            return External(response or None)
        case _:
            return None
