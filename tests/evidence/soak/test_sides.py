"""The clients of the soak work only in a branch."""

import pika
import pytest

from dtx.client import XAER_RMFAIL
from tests.evidence.soak.money import Coin, Seen
from tests.evidence.soak.sides import BROKEN, QueueSide
from tests.support.client import connected
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.service import DtxService
from tests.support.soak import declare

_TILL = "till-of-sides"


@pytest.mark.parametrize("work", ["put", "take"])
def test_work_of_a_dead_connection_is_not_repeated_on_another(postgres_url: str, work: str) -> None:
    """Otherwise a coin would move outside of a branch, without a decision."""
    with DtxService(broker=None, database=postgres_url) as service:
        declare(service.url(), _TILL)
        with connected(service.url()) as connection:
            connection.channel().basic_publish("", _TILL, Coin(id="there", amount=1).body)
        side = QueueSide(service.url())
        side.start("transfer")
        side.connection.close()
        with pytest.raises(BROKEN):
            _do(side, work)
        side.start("another")  # the next branch has a new connection
        side.take(_TILL)
        side.end("another")
        side.roll_back_unprepared("another")
        side.close()
        with connected(service.url()) as connection:
            method, _, body = connection.channel().basic_get(_TILL)
        assert method is not None
        assert body is not None
        assert method.message_count == 0
        assert Coin.of(body).id == "there"


def test_a_coin_of_a_disconnected_client_may_be_spent_already(postgres_url: str) -> None:
    """So a client must not report it as a repeat before dtx has voted for the branch, and dtx refuses this branch."""
    persistent = pika.BasicProperties(delivery_mode=2)
    with (
        DtxService(broker=None, database=postgres_url) as service,
        Proxy(service.host, service.port) as proxy,
    ):
        declare(service.url(), _TILL)
        with connected(service.url()) as connection:
            for name in ("first", "second"):
                connection.channel().basic_publish("", _TILL, Coin(id=name, amount=1).body, persistent)
        cut_off = QueueSide(service.url().replace(str(service.port), str(proxy.port)), subscribes=_TILL)
        cut_off.start("before")
        assert cut_off.take(_TILL) is not None  # the second one is prefetched
        cut_off.end("before")
        cut_off.prepare("before")
        cut_off.commit("before")
        cut_off.start("too late")
        proxy.stall()
        other = QueueSide(service.url())
        other.start("other")
        got: list[Seen] = []

        def has_taken() -> bool:
            got.extend(filter(None, [other.take(_TILL)]))
            return bool(got)

        wait_until(has_taken, what="the end of the client's connection")
        other.end("other")
        other.prepare("other")
        other.commit("other")
        seen = cut_off.take(_TILL)
        assert seen is not None
        assert [seen.coin.id] == [each.coin.id for each in got] == ["second"]
        proxy.resume()
        with pytest.raises(XAER_RMFAIL):
            cut_off.end("too late")
        cut_off.close()
        other.close()


def _do(side: QueueSide, work: str) -> None:
    if work == "put":
        side.put(_TILL, Coin(id="put", amount=2))
    else:
        side.take(_TILL)
