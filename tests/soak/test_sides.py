"""The clients of the soak do in a branch what they say that they do in a branch."""

import pytest

from tests.soak.money import Coin
from tests.soak.sides import BROKEN, QueueSide
from tests.support.client import connected
from tests.support.service import DtxService
from tests.support.soak import declare

_TILL = "till-of-sides"


@pytest.mark.parametrize("work", ["put", "take"])
def test_work_whose_connection_has_died_is_not_done_on_another_one(postgres_url: str, work: str) -> None:
    """It would belong to no branch: a coin would move though nobody had decided that."""
    with DtxService(broker=None, database=postgres_url) as service:
        declare(service.url(), _TILL)
        with connected(service.url()) as connection:
            connection.channel().basic_publish("", _TILL, Coin(id="there", amount=1).body)
        side = QueueSide(service.url())
        side.start("transfer")
        side.connection.close()
        with pytest.raises(BROKEN):
            _do(side, work)
        side.start("another")  # the next branch has a connection of its own
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


def _do(side: QueueSide, work: str) -> None:
    if work == "put":
        side.put(_TILL, Coin(id="put", amount=2))
    else:
        side.take(_TILL)
