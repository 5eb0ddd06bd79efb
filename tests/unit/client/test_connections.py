"""The errors of the helpers when a connection cannot be opened."""

import aiormq
import pika.exceptions
import pytest

from dtx.client.errors import XAER_RMFAIL
from dtx.client.tm.asynchronous import AsyncDtxResource
from dtx.client.tm.resources import DtxResource
from dtx.client.xa_switch import switch
from dtx.client.xa_switch.switch import SwitchLink

WORDS = "ConnectionClosedByBroker: (403) 'ACCESS_REFUSED'"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (pika.exceptions.ProbableAuthenticationError(WORDS), "refused the login"),
        (pika.exceptions.AuthenticationError(WORDS), "refused the login"),
        (pika.exceptions.AMQPConnectionError(WORDS), "is out of reach"),
        (ConnectionRefusedError(WORDS), "is out of reach"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_refused_login_is_not_called_out_of_reach(
    error: Exception, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> pika.BlockingConnection:
        raise error

    with pytest.raises(XAER_RMFAIL) as raised:
        DtxResource("queues", connect).open()
    assert str(raised.value).endswith(f"queues {what}: {WORDS}")
    monkeypatch.setattr(switch, "BlockingConnection", connect)
    with pytest.raises(XAER_RMFAIL) as raised:
        SwitchLink(pika.ConnectionParameters("there", 5673), None).connection()
    assert str(raised.value).endswith(f"there:5673 {what}: {WORDS}")


async def test_aio_pika_is_understood_alike() -> None:
    async def connect() -> None:
        raise aiormq.exceptions.AuthenticationError(WORDS)

    with pytest.raises(XAER_RMFAIL, match="queues refused the login: "):
        await AsyncDtxResource("queues", connect).open()
